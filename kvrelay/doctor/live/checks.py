"""All checks of a cluster that runs: what its router knows, and what probes through its workers measure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.spec.assumed import Assumed
from kvrelay.calibrate.probes import Prober
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError, WorkerState
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.live.cluster import cluster, missing
from kvrelay.doctor.live.judging import Terms, judged
from kvrelay.doctor.live.probing import NOT_OURS, ROUNDS, STEPS, pairs_of, probe, prompt_tokens
from worker.options import pool_of
from worker.roles import ROLES

PROMPT_TOKENS = 512  # where no plan says otherwise
OnProgress = Callable[[str, int, int], None]
Told = Callable[[str], None]


async def live_checks(
    client: AsyncClient,
    *,
    assumed: Mapping[str, Assumed],
    replicas: Mapping[str, int] | None = None,
    at_most_s: float,
    tell: Told = lambda sentence: None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> list[Finding]:
    """`assumed`: by pool, or by role of the cluster's own model; `replicas`: by pool, that a spec has. Raises
    KvrelayError: no router lets us ask."""
    status = await client.status()
    findings = [*cluster(status), *missing(status, replicas or {})]
    by_model: dict[str, list[WorkerState]] = {}
    for worker in status.workers:
        if worker.state == "ready":
            by_model.setdefault(worker.model, []).append(worker)
    served = {model: workers for model, workers in sorted(by_model.items()) if pairs_of(workers)}
    try:
        for model, workers in served.items():
            named = {pool_of(worker.name) for worker in workers} | (set() if model else {*ROLES})
            known = {name: it for name, it in assumed.items() if name in named}
            measuring = _Measuring(client, workers, known, at_most_s / len(served))
            is_busy = status.num_in_flight + status.num_queued > 0
            findings += await measuring.judged(model, is_busy, tell, on_progress)
    except KvrelayError as error:
        if error.code not in NOT_OURS:
            raise
        findings.append(_not_let(error))
    return findings


@dataclass(frozen=True, slots=True)
class _Measuring:
    """Of one model's workers."""

    client: AsyncClient
    workers: Sequence[WorkerState]
    assumed: Mapping[str, Assumed]
    at_most_s: float

    async def judged(self, name: str, is_busy: bool, tell: Told, on_progress: OnProgress) -> list[Finding]:
        """Raises KvrelayError."""
        pairs, model = pairs_of(self.workers), await self.client.model_info(name)
        wanted = next((each.prompt_tokens for each in self.assumed.values()), PROMPT_TOKENS)
        tokens = prompt_tokens(model, self.workers, wanted)
        tell(
            f"measuring {len(pairs)} pair{'s' * (len(pairs) > 1)}{f' of {name}' if name else ''} by up to "
            f"{len(pairs) * (ROUNDS + 1)} requests of {tokens} + {STEPS + 2} tokens, one at a time and behind all "
            f"others, for at most {self.at_most_s:g} s"
        )
        prober = Prober(self.client, model, secrets.randbits(32))
        samples = await probe(prober, pairs, tokens, self.at_most_s, on_progress)
        terms = Terms(assumed=self.assumed, tokens=tokens, is_busy=is_busy)
        return judged(samples, pairs, {worker.name: worker for worker in self.workers}, terms)


def _not_let(error: KvrelayError) -> Finding:
    mend = "show an operator's token (--token-file)"
    return Finding(part="links", name="measuring", verdict="unknown", found=error.message, mend=mend)


def unanswered(endpoint: str, error: KvrelayError) -> Finding:
    """What it is when nothing could be asked."""
    mend = "start the cluster (kvrelay up), or give the --endpoint of a router of it"
    if error.code in NOT_OURS:
        mend = "show a token that the router takes (--token-file)"
    return Finding(part="cluster", name=endpoint, verdict="bad", found=error.message, mend=mend)
