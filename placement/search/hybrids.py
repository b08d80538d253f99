"""Hybrids are clusters of two pools of which one or both read prompts and write answers: what a pure placement becomes
when its workers may help each other. And what any two pools become with a worker moved from one to the other.
"""

from __future__ import annotations

from dataclasses import replace

from placement.plan import Candidate

CHUNKS_BESIDE = (128, 256, 512)  # tokens, of mixed workers that are there for answers first


def hybrids_of(candidate: Candidate) -> list[Candidate]:
    """Of two pools those in which one or both do both, of a colocated one that in which some only read prompts. Prompts
    are read in whole steps, and beside answers in chunks that keep a step short."""
    if candidate.kind == "one pool":
        (pool,) = candidate.pools
        readers = max(1, pool.replicas // 4)
        if pool.replicas < 2 or pool.role != "mixed":
            return []
        reading = replace(pool, role="prefill", replicas=readers, chunk_tokens=0)
        return [replace(candidate, pools=(reading, replace(pool, replicas=pool.replicas - readers)))]
    prefill, decode = candidate.pools
    whole = prefill.max_batch_tokens
    both = replace(prefill, role="mixed", chunk_tokens=whole)
    sizes = [size for size in CHUNKS_BESIDE if size < whole]
    writers = [replace(decode, role="mixed", chunk_tokens=size, pack_tokens=prefill.pack_tokens) for size in sizes]
    pairs = [(both, writer) for writer in writers] + [(prefill, writer) for writer in writers[-1:]]
    return [replace(candidate, pools=pair) for pair in pairs]


def shifts_of(candidate: Candidate, num_gpus: int) -> list[Candidate]:
    """With a worker more in one pool of two, either way."""
    if len(candidate.pools) != 2:
        return []
    return [each for to in (0, 1) if (each := shifted(candidate, to, num_gpus)) is not None]


def shifted(candidate: Candidate, to: int, num_gpus: int) -> Candidate | None:
    """With a worker more in that pool of two, or as many more as there are GPUs for then, and as many less in the other
    as that takes; None where none would be left there."""
    pools, source = list(candidate.pools), 1 - to
    pools[to] = replace(pools[to], replicas=pools[to].replicas + 1)
    while pools[source].replicas > 0 and sum(pool.gpus for pool in pools) > num_gpus:
        pools[source] = replace(pools[source], replicas=pools[source].replicas - 1)
    left = num_gpus - sum(pool.gpus for pool in pools)
    if not pools[source].replicas or left < 0:
        return None
    pools[to] = replace(pools[to], replicas=pools[to].replicas + left // pools[to].degrees.gpus)
    return replace(candidate, pools=tuple(pools))
