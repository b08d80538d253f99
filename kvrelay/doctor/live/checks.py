"""All checks of a cluster that runs: what its router knows, and what probes through its workers measure."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from cluster.spec.assumed import Assumed
from kvrelay.calibrate.probes import Prober
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.live.cluster import cluster, missing
from kvrelay.doctor.live.judging import Terms, judged
from kvrelay.doctor.live.probing import NOT_OURS, ROUNDS, STEPS, pairs_of, probe, prompt_tokens

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
    """`assumed`: by pool or role; `replicas`: by pool, that a spec has. Raises KvrelayError: no router lets us ask."""
    status = await client.status()
    findings = [*cluster(status), *missing(status, replicas or {})]
    pairs = pairs_of(status.workers)
    if not pairs:
        return findings
    model = await client.model_info()
    wanted = next((each.prompt_tokens for each in assumed.values()), PROMPT_TOKENS)
    tokens = prompt_tokens(model, [worker for worker in status.workers if worker.state == "ready"], wanted)
    count = f"{len(pairs)} pair" if len(pairs) == 1 else f"{len(pairs)} pairs"
    tell(
        f"measuring {count} by up to {len(pairs) * (ROUNDS + 1)} requests of {tokens} + {STEPS + 2} tokens, one at a "
        f"time and behind all others, for at most {at_most_s:g} s"
    )
    try:
        samples = await probe(Prober(client, model, secrets.randbits(32)), pairs, tokens, at_most_s, on_progress)
    except KvrelayError as error:
        return [*findings, _not_let(error)]
    workers = {worker.name: worker for worker in status.workers}
    is_busy = status.num_in_flight + status.num_queued > 0
    return [*findings, *judged(samples, pairs, workers, Terms(assumed=assumed, tokens=tokens, is_busy=is_busy))]


def _not_let(error: KvrelayError) -> Finding:
    mend = "show an operator's token (--token-file)"
    return Finding(part="links", name="measuring", verdict="unknown", found=error.message, mend=mend)


def unanswered(endpoint: str, error: KvrelayError) -> Finding:
    """What it is when nothing could be asked."""
    mend = "start the cluster (kvrelay up), or give the --endpoint of a router of it"
    if error.code in NOT_OURS:
        mend = "show a token that the router takes (--token-file)"
    return Finding(part="cluster", name=endpoint, verdict="bad", found=error.message, mend=mend)
