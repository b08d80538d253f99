"""OpenVINO GenAI's continuous batching, in this process: python openvino_pipeline.py MODEL THREADS. See lines.py.

The model is exported once, beside this environment, at full width; it is computed in bf16.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai
from lines import Lines

CHUNK_TOKENS = 512
CACHE_GB = 1


def exported(model: Path) -> Path:
    path = Path(sys.prefix) / "models" / model.name
    if not (path / "openvino_model.xml").exists():
        command = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", str(model)]
        command += ["--task", "text-generation-with-past", "--weight-format", "fp32", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def pipeline(model: Path, threads: int) -> openvino_genai.ContinuousBatchingPipeline:
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.dynamic_split_fuse = True
    scheduling.max_num_batched_tokens = CHUNK_TOKENS
    options = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": str(threads)}
    return openvino_genai.ContinuousBatchingPipeline(str(exported(model)), scheduling, "CPU", options)


def play(
    pipe: openvino_genai.ContinuousBatchingPipeline, requests: list[list[Any]]
) -> tuple[float, list[tuple[list[float], list[int]]]]:
    """When it began; when each token of each request came, and which it was."""
    began_s = time.perf_counter()
    answers: list[tuple[list[float], list[int]]] = [([], []) for _ in requests]
    handles: dict[int, object] = {}
    due = sorted(range(len(requests)), key=lambda i: requests[i][0])
    while due or handles:
        now_s = time.perf_counter() - began_s
        while due and requests[due[0]][0] <= now_s:
            index = due.pop(0)
            _, prompt, max_tokens = requests[index]
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
            handles[index] = pipe.add_request(index, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
        if not handles:
            time.sleep(max(0.0, requests[due[0]][0] - now_s))
            continue
        pipe.step()
        now_s = time.perf_counter()
        for index, handle in list(handles.items()):
            times_s, tokens = answers[index]
            while handle.can_read():
                for output in handle.read().values():
                    tokens += output.generated_ids
            times_s += [now_s] * (len(tokens) - len(times_s))
            if len(tokens) >= requests[index][2]:
                del handles[index]
    return began_s, answers


def main() -> None:
    lines = Lines()
    pipe = pipeline(Path(sys.argv[1]), int(sys.argv[2]))
    play(pipe, [[0.0, [1, 2, 3], 4]])
    lines.ready()
    while (requests := lines.asked()) is not None:
        lines.played(*play(pipe, requests))


if __name__ == "__main__":
    main()
