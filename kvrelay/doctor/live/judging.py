"""Judges what was measured: against what the plan went by, and against others of the same kind. Pure.

A figure is good up to a share above what was assumed, doubtful up to another, and bad beyond; where nothing was assumed
only an outlier among its siblings is doubtful. On a cluster that serves others meanwhile nothing measured is bad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cluster.spec.assumed import Assumed
from kvrelay.client.types import WorkerState
from kvrelay.doctor.finding import Finding, Verdict
from kvrelay.doctor.live.probing import Pair, PairSample
from worker.options import pool_of

OUTLIER = 1.5  # times its siblings' middle
LEAST_S = 0.002  # what is longer by less is not told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Times what was assumed: beyond `doubtful`, beyond `bad`."""

    doubtful: float
    bad: float


STEP = Bounds(doubtful=1.25, bad=2.0)
LINK = Bounds(doubtful=2.0, bad=4.0)  # a small part of a request, and of short transfers much is overhead


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """`assumed`: by pool, or by role where a pool is not named. Only what is said of prompts of `tokens` counts."""

    assumed: Mapping[str, Assumed]
    tokens: int
    is_busy: bool = False

    def verdict(
        self, seconds: float, siblings: Sequence[float], worker: WorkerState, key: str, bounds: Bounds
    ) -> tuple[Verdict, str]:
        """And what it was held against, in words. `key`: of Assumed."""
        verdict: Verdict = "unknown"
        words = []
        if (planned := self._planned(worker, key)) is not None:
            verdict = _against(seconds, *planned, bounds)
            verdict = "doubtful" if verdict == "bad" and self.is_busy else verdict
            words.append(f"planned {1e3 * planned[0]:.1f} ms")
        if siblings:
            usual = median(siblings)
            words.append(f"others {1e3 * usual:.1f} ms")
            is_outlier = seconds > OUTLIER * usual and seconds > usual + LEAST_S
            verdict = "doubtful" if is_outlier and verdict != "bad" else "good" if verdict == "unknown" else verdict
        return verdict, ", ".join(words) or "nothing says what it should be: give a planned spec, or --profile"

    def _planned(self, worker: WorkerState, key: str) -> tuple[float, float] | None:
        """Seconds, and the share by which they may be wrong."""
        assumed = self.assumed.get(pool_of(worker.name)) or self.assumed.get(worker.role)
        if assumed is None or assumed.prompt_tokens != self.tokens or getattr(assumed, key) is None:
            return None
        return getattr(assumed, key), assumed.error


def _against(seconds: float, planned_s: float, error: float, bounds: Bounds) -> Verdict:
    times = max(0.0, seconds - LEAST_S) / (planned_s * (1 + error)) if planned_s else 0.0
    return "bad" if times > bounds.bad else "doubtful" if times > bounds.doubtful else "good"


def judged(
    samples: Sequence[PairSample], pairs: Sequence[Pair], workers: Mapping[str, WorkerState], terms: Terms
) -> list[Finding]:
    good = [sample for sample in samples if not sample.error]
    return [
        *_links(samples, pairs, workers, terms),
        *_steps("prefill", good, lambda sample: (sample.pair[0], sample.prefill_s), workers, terms),
        *_steps("decode", good, lambda sample: (sample.pair[1], sample.decode_s), workers, terms),
    ]


# links


def _links(
    samples: Sequence[PairSample], pairs: Sequence[Pair], workers: Mapping[str, WorkerState], terms: Terms
) -> Iterator[Finding]:
    """Of a worker that keeps what it has read there is none, unless even that failed."""
    by_pair: dict[Pair, list[PairSample]] = {pair: [] for pair in pairs if pair[0] != pair[1]}
    for sample in samples:
        if sample.pair in by_pair or sample.error:
            by_pair.setdefault(sample.pair, []).append(sample)
    middle = {pair: median(s.transfer_s for s in had) for pair, had in by_pair.items() if had and not had[0].error}
    for pair, had in by_pair.items():
        if pair in middle:
            others = [seconds for other, seconds in middle.items() if other != pair]
            against = terms.verdict(middle[pair], others, workers[pair[0]], "transfer_s", LINK)
            yield _link(had, middle[pair], *against)
        else:
            yield _unmeasured(pair, had[0] if had else None)


def _unmeasured(pair: Pair, sample: PairSample | None) -> Finding:
    finding = Finding(
        part="links",
        name=_name(pair),
        verdict="unknown",
        found="not measured: the time was over",
        mend="give more --seconds",
    )
    if sample is None:
        return finding
    if sample.has_no_room:
        mend = "look again when there is less to do"
        return replace(finding, found=f"not measured: {sample.error}", mend=mend)
    mend = "read both workers' logs, and see whether they reach each other's addresses"
    return replace(finding, verdict="bad", found=f"a request through it failed: {sample.error}", mend=mend)


def _link(had: Sequence[PairSample], transfer_s: float, verdict: Verdict, against: str) -> Finding:
    sample = had[-1]
    exposed_s = median(each.exposed_s for each in had)
    speed = f"{sample.bytes / transfer_s / 1e9:.2f} GB/s" if transfer_s else "too fast to tell"
    found = f"{speed} by {sample.transport}, {1e3 * exposed_s:.1f} ms after prefill ({sample.bytes / 1e6:.1f} MB)"
    mend = "see which transport it has (transfer.transports), and who else uses its network or memory"
    if any(each.resends for each in had):
        verdict, against = "doubtful", "checksums failed"
        mend = "test both hosts' memory and network: bytes came that were not sent"
    found = f"{found}; {1e3 * transfer_s:.1f} ms, {against}"
    return Finding(
        part="links", name=_name(sample.pair), verdict=verdict, found=found, mend=mend if _asks(verdict) else ""
    )


def _name(pair: Pair) -> str:
    return f"{pair[0]} to {pair[1]}"


# steps


def _steps(
    phase: str,
    samples: Sequence[PairSample],
    measured: Callable[[PairSample], tuple[str, float | None]],
    workers: Mapping[str, WorkerState],
    terms: Terms,
) -> Iterator[Finding]:
    times: dict[str, list[float]] = {}
    for name, seconds in map(measured, samples):
        if seconds is not None:
            times.setdefault(name, []).append(seconds)
    middle = {name: median(had) for name, had in times.items()}
    what = f"{terms.tokens} tokens" if phase == "prefill" else "a step"
    for name, seconds in sorted(middle.items()):
        siblings = [other for each, other in middle.items() if each != name and pool_of(each) == pool_of(name)]
        verdict, against = terms.verdict(seconds, siblings, workers[name], f"{phase}_s", STEP)
        mend = "see who else uses its cores or GPU, its threads and kernels, and whether its clock is throttled"
        yield Finding(
            part=f"{phase} steps",
            name=name,
            verdict=verdict,
            found=f"{what} in {1e3 * seconds:.1f} ms; {against}",
            mend=mend if _asks(verdict) else "",
        )


def _asks(verdict: Verdict) -> bool:
    return verdict in ("bad", "doubtful")
