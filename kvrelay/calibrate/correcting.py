"""corrected_by fits a profile to what its cluster serves by itself: nothing is sent, nobody is disturbed.

    GetLoad, minute by minute -> ServedRuns -> fit_under_load -> the profile, its tables as they were

What lies between clients and the router nobody told: it is as it was when the profile was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cluster.router.live.timeline import PHASES
from kvrelay.calibrate.calibration import CalibrationError, tables_of
from kvrelay.calibrate.contention import ServedRun, fit_under_load
from kvrelay.calibrate.served_steps import courses_of
from kvrelay.client.types import ClusterStatus, EndedRequest, ServedModel
from placement.latency.profile import Profile

RUN_S = 60.0
COMPUTED = PHASES.index("prefill") + 1  # phases until the first token is there


def check_measured(profile: Profile, model: ServedModel, status: ClusterStatus) -> None:
    """Raises CalibrationError: what was served is not of the workers that the profile is of."""
    if len(status.models) > 1:
        raise CalibrationError(
            f"this cluster serves {' and '.join(status.models)}, and a profile is of one model; correct it where that "
            "is served alone"
        )
    if other := why_other_model(profile, model):
        raise CalibrationError(other)
    for role, facts in (("prefill", profile.prefill_pool), ("decode", profile.decode_pool)):
        workers = [worker for worker in status.workers if worker.role == role]
        if len(workers) != facts.count:
            raise CalibrationError(
                f"{profile.name} is of {facts.count} {role} workers, and this cluster has {len(workers)}; "
                "calibrate this one"
            )


def why_other_model(profile: Profile, model: ServedModel) -> str:
    """Empty: the profile is of the model that is served, as far as both tell."""
    known = str(profile.model.get("fingerprint", ""))
    if not known or model.fingerprint in ("", known):
        return ""
    return (
        f"{profile.name} is of {profile.model.get('name')} ({known}), and this cluster serves {model.name} "
        f"({model.fingerprint}); calibrate this one"
    )


def corrected_by(profile: Profile, requests: Iterable[EndedRequest]) -> Profile:
    """Raises CalibrationError where too little was served."""
    if profile.is_mixed:
        raise CalibrationError(f"{profile.name} is of a mixed worker; correct one of a prefill and a decode worker")
    served = [request for request in requests if not request.failed and request.decode_worker]
    oldest = max((_minute(request) for request in served), default=0)
    runs = [_run(oldest - minute, minute, served, profile) for minute in sorted({*map(_minute, served)}, reverse=True)]
    load = fit_under_load(runs, tables_of(profile))
    if load is None:
        raise CalibrationError("too few requests ended lately to say what steps take; correct it after a busy minute")
    return replace(profile, load=load)


def _minute(request: EndedRequest) -> int:
    """Ago."""
    return int(request.age_s // RUN_S)


def _run(number: int, minute: int, served: Sequence[EndedRequest], profile: Profile) -> ServedRun:
    own = [request for request in served if _minute(request) == minute]
    near = [request for request in served if abs(_minute(request) - minute) == 1]
    return ServedRun(
        at_s=RUN_S * number,
        rate=len(own) / RUN_S,
        courses=courses_of(own),
        first_token_s=[each.ttft_s - sum(each.before_first_s[:COMPUTED]) + profile.client_s for each in own],
        rest_s=[0.0] * len(own),
        exposed_s=[each.handoff_s for each in own],
        others=courses_of(near),
    )
