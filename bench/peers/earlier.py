"""Other servers' rows of the end-to-end table: measured earlier, on the same kind of machine and the same workload.

Isolated runs (less than half a core of other work) on two cores with AVX-512: a Llama of 124.7 million parameters in
bf16, two threads, prompts of 128 to 384 and outputs of 32 to 96 tokens, Poisson arrivals. Not measured by this script.
"""

from __future__ import annotations

from dataclasses import dataclass

NOTE = "measured earlier on the same kind of machine, with nothing else running"

Percentiles = tuple[float, float, float]  # P50, P90, P99 in ms


@dataclass(frozen=True, slots=True)
class PeerRow:
    server: str
    asked_per_s: float
    served_per_s: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles


VLLM = "vLLM 0.32, colocated, both cores"
VLLM_1P1D = "vLLM 0.32, 1P1D over NIXL (poll patched to 1 ms)"
OPENVINO = "OpenVINO GenAI, in process"
LLAMA_SERVER = "llama-server"

PEERS = (
    PeerRow(VLLM, 1, 1.07, (114, 173, 260), (16, 21, 24)),
    PeerRow(VLLM, 2, 1.95, (110, 177, 368), (18, 23, 31)),
    PeerRow(VLLM, 4, 3.79, (256, 460, 691), (62, 109, 121)),
    PeerRow(VLLM, 8, 5.71, (1463, 2626, 3363), (143, 157, 170)),
    PeerRow(OPENVINO, 4, 4.06, (130, 262, 413), (32, 45, 49)),
    PeerRow(OPENVINO, 8, 6.14, (638, 1295, 1710), (161, 205, 223)),
    PeerRow(LLAMA_SERVER, 2, 2.07, (380, 655, 813), (137, 150, 163)),
    PeerRow(VLLM_1P1D, 1, 1.01, (3584, 5430, 5741), (23, 39, 54)),
    PeerRow(VLLM_1P1D, 2, 1.58, (10468, 18662, 20849), (29, 35, 36)),
)
