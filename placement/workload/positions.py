"""Holds requests against a model's positions: a worker refuses what is longer, however much room its pages have."""

from __future__ import annotations

from placement.workload.requests import Workload
from placement.workload.traces import WorkloadError

ROUNDING = 1e-9  # of a share: 1 - 0.9 is less than 0.1


def beyond_positions(source: Workload, model: str, positions: int, slack: float) -> str:
    """Which requests are longer, as a sentence; nothing where none are, or the positions (0) are not known. Raises
    WorkloadError where they are more than `slack`, the share that may miss the targets."""
    lengths = source.prompt_len + source.output_len
    over = float((lengths > positions).mean()) if positions else 0.0
    if not over:
        return ""
    told = (
        f"{over:.2%} of the requests are longer than the {positions:,} positions of {model}, up to "
        f"{int(lengths.max()):,} tokens, and would be refused"
    )
    if over <= slack + ROUNDING:
        return told
    raise WorkloadError(f"{source.name}: {told}; {_mend(source, positions)}, or another model")


def _mend(source: Workload, positions: int) -> str:
    most = positions - int(source.output_len.max())
    if most < 1:
        return "give shorter requests (--max-input-len and --max-output-len cut those of a trace)"
    return f"give prompts of {most:,} tokens at most (--max-input-len {most} cuts those of a trace)"
