"""What a benchmark leaves: its result as one object, and the file that `--save-result` writes."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from kvrelay.bench.machine import about
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.workload import WorkloadError


def settings_object(workload: WorkloadOptions, playing: PlayOptions) -> dict[str, Any]:
    trace = None if workload.trace is None else str(workload.trace)
    rate = workload.request_rate if math.isfinite(workload.request_rate) else "inf"
    return asdict(workload) | asdict(playing) | {"trace": trace, "request_rate": rate}


def make_directory(path: Path) -> None:
    """Before the run, so that its result has a place."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise WorkloadError(
            f"--result-dir is {path}, where nothing can be written ({error.strerror}); give another"
        ) from None


def save(directory: Path, result: dict[str, Any], outcomes: Sequence[Outcome]) -> Path:
    """Named as `vllm bench serve` names its results; every request is in it, with the times of its tokens."""
    when = datetime.now()
    result = about() | result
    model = str(result["model"]).rsplit("/", 1)[-1] or "model"
    path = directory / f"{result['settings']['request_rate']}qps-{model}-{when:%Y%m%d-%H%M%S}.json"
    requests = [
        {
            "request_id": outcome.request_id,
            "due_s": outcome.due_s,
            "ended_s": outcome.ended_s,
            "input_len": outcome.input_len,
            "output_len": outcome.output_len,
            "token_times_s": outcome.token_times_s,
            "code": outcome.code,
            "message": outcome.message,
            "phases_s": dict(outcome.timeline.phases_s) if outcome.timeline else None,
        }
        for outcome in outcomes
    ]
    path.write_text(json.dumps(result | {"date": when.isoformat(timespec="seconds"), "requests_detail": requests}))
    return path


def save_series(directory: Path, result: dict[str, Any]) -> Path:
    """Of kvrelay.bench.series.comparing."""
    model = str(result["sides"][0]["model"]).rsplit("/", 1)[-1] or "model"
    path = directory / f"series-{model}-{datetime.now():%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(result))
    return path
