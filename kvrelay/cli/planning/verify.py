"""`kvrelay verify`: plays a plan's workload against a live cluster and shows predicted against measured.

Tables go to stdout and the bar to stderr; with --json stdout is one object. See placement/checks/verification.py.
Exit codes: 0 done, however far off the prediction was; 1 the cluster cannot be reached, or a request failed; 2 wrong
usage, or the cluster is not the one that is predicted; 130 interrupted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.calibrate import verifying
from kvrelay.calibrate.tables import verification_tables
from kvrelay.cli.connection import Router, refusals
from kvrelay.cli.console import USAGE, CliError, JsonOption, NoProgressOption, exit_codes, print_json
from kvrelay.cli.groups import Flags, grouped
from kvrelay.cli.planning.targets import Targets
from kvrelay.cli.planning.written import check_writable
from kvrelay.cli.progress import answered_progress, progress
from placement.catalogs.base import PlanError
from placement.checks.margin import Margin, load_margin, save_margin
from placement.checks.repeats import repeats_of
from placement.checks.verification import Verification
from placement.latency.base import LatencyError
from placement.plan import Slo, to_json
from placement.simulator.cluster import SetupError
from placement.workload.traces import WorkloadError

ASKED_WRONGLY = (PlanError, LatencyError, SetupError, WorkloadError)
NUM_PROMPTS, NUM_WARMUPS = 200, 6
RANDOM_OUTPUT_LEN = 128  # as of kvrelay bench

HELP = """Play a plan's workload against a live cluster: predicted against measured.

The very same requests, of the same lengths at the same times, are simulated and sent. For every percentile, the share
within the targets and each phase of a request it prints what was predicted, with its interval, what was measured, and
by how much it was off. With --repeats it plays the case several times, and tells what repeats (bias, which a better
profile mends) from what does not (noise between runs). The error is kept in margin.json beside the plan: kvrelay plan
--margin FILE goes by it.

Give a plan (plan.json that kvrelay plan --out wrote), or a profile (of kvrelay calibrate) and a workload.

Examples:

  kvrelay verify plan/plan.json --endpoint 127.0.0.1:50051

  kvrelay verify --profile profile.json --trace configs/workloads/azure-conv-2023.csv --trace-scale 0.25
  --request-rate 2 --ttft 500 --tpot 50
"""


WORKLOAD = Flags(
    *("num_prompts", "request_rate", "burstiness", "trace", "trace_scale", "max_input_len", "max_output_len"),
    *("random_input_len", "random_output_len", "random_range_ratio", "seed"),
    of=WorkloadOptions,
    defaults={"num_prompts": NUM_PROMPTS},
    help={
        "request_rate": "Requests per second. Default: the plan's.",
        "trace": "With --profile: Azure CSV, any CSV with lengths, or Mooncake JSONL.",
        "seed": "Of lengths and arrivals. Default: the plan's, or 0.",
    },
)


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(verify))


def verify(
    router: Router,
    changed: Annotated[dict[str, Any], WORKLOAD],
    targets: Targets,
    plan: Annotated[Path | None, typer.Argument(help="plan.json of kvrelay plan --out.")] = None,
    profile: Annotated[Path | None, typer.Option(help="What kvrelay calibrate measured, instead of a plan.")] = None,
    margin: Annotated[Path | None, typer.Option(help="Where the error is kept. Default: margin.json.")] = None,
    repeats: Annotated[int, typer.Option(help="Play it so many times: what repeats is bias, the rest noise.")] = 1,
    no_progress: NoProgressOption = False,
    as_json: JsonOption = False,
) -> None:
    ended = exit_codes(as_json, wrong=ASKED_WRONGLY, interrupted="interrupted; nothing was written")
    with ended, refusals(as_json):
        claim = _claim_of(plan, profile, changed, targets.given_s())
        path = margin or (plan or profile or Path()).with_name("margin.json")
        check_writable("--margin", path)
        kept = load_margin(path) if path.exists() else Margin()
        found = _verified(claim, router, _at_least_1(repeats), show=not no_progress)
        failed = sum(each.failed for each in found)
        if not failed:
            for each in found:
                kept = kept.with_run(verifying.margin_run(claim, each))
            _save(kept, path)
    if as_json:
        margin_of = {"file": str(path), "error": kept.error, "runs": len(kept.runs)}
        print_json(found[0].to_json() | _repeats_object(found) | {"margin": margin_of})
    else:
        _show(found, kept, path)
    if failed:
        raise typer.Exit(1)


def _at_least_1(repeats: int) -> int:
    if repeats < 1:
        raise PlanError(f"--repeats is {repeats}; give 1 or more")
    return repeats


def _repeats_object(found: Sequence[Verification]) -> dict[str, Any]:
    if len(found) < 2:
        return {}
    split = [to_json(each) | {"repeats": each.repeats} for each in repeats_of(found)]
    return {"repeats": split, "runs": [each.to_json() for each in found]}


def _claim_of(
    plan: Path | None, profile: Path | None, changed: dict[str, Any], targets_s: dict[str, float]
) -> verifying.Claim:
    if plan is not None and profile is not None:
        raise PlanError(f"{plan} and --profile {profile} do not go together; give one of them")
    if plan is not None:
        if "trace" in changed or "random_input_len" in changed:
            raise PlanError("--trace and --random-input-len go with --profile; a plan says its own workload")
        return verifying.of_plan(plan, changed, targets_s)
    if profile is None:
        raise PlanError("nothing says what was predicted; give a plan.json, or --profile FILE and a workload")
    if "request_rate" not in changed:
        raise PlanError("--profile needs --request-rate, in requests per second")
    if "trace" not in changed and "random_input_len" not in changed:
        raise PlanError("--profile needs a workload; give --trace FILE, or --random-input-len and --random-output-len")
    workload = WorkloadOptions(**{"random_output_len": RANDOM_OUTPUT_LEN} | changed)
    return verifying.of_profile(profile, workload, Slo(**targets_s))


def _verified(claim: verifying.Claim, router: Router, repeats: int, *, show: bool) -> list[Verification]:
    found: list[Verification] = []
    with progress(show=show) as on_progress:
        asyncio.run(_check_alike(claim, router))
        on_progress("simulated", 0, 1)
        prediction = verifying.foretell(claim)
        on_progress("simulated", 1, 1)
        watch = partial(answered_progress, on_progress=on_progress)
        while len(found) < repeats:
            playing = PlayOptions(num_warmups=NUM_WARMUPS, prompt_seed=secrets.randbits(32))
            played = verifying.play(router.endpoint, claim.workload, playing, access=router.access(), watch=watch)
            found.append(verifying.judge(claim, prediction, asyncio.run(played)))
    return found


async def _check_alike(claim: verifying.Claim, router: Router) -> None:
    async with router.async_client() as client:
        verifying.check_alike(claim, await client.status(), await client.model_info())


def _save(kept: Margin, path: Path) -> None:
    try:
        save_margin(kept, path)
    except OSError as error:
        sentence = f"--margin is {path}, which cannot be written ({error.strerror}); give another"
        raise CliError(sentence, USAGE) from None


def _show(found: Sequence[Verification], kept: Margin, path: Path) -> None:
    console = Console()
    first, failed = found[0], sum(each.failed for each in found)
    for table in verification_tables(first):
        console.print(table)
    if failed:
        print(
            f"{failed} of {len(found) * first.num_requests} requests failed and count as infinitely late; {path} is as "
            "it was"
        )
        return
    for each in repeats_of(found) if len(found) > 1 else ():
        print(each.words)
    print(f"kept in {path}: the next plan's times may be wrong by {kept.error:.1%} (kvrelay plan --margin {path})")
    if first.is_past_knee:
        print("this run was past the knee, where times grow without end: it is kept, but does not count")
