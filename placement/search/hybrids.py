"""Hybrids are clusters of two pools of which one or both read prompts and write answers: what a pure placement becomes
when its workers may help each other, and what that becomes with a worker moved from one pool to the other.
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
    """With a worker more in one pool of two, or as many more as there are GPUs for then, and as many less in the other
    as that takes."""
    found = []
    for to, source in ((0, 1), (1, 0)):
        pools = list(candidate.pools)
        if len(pools) != 2:
            continue
        pools[to] = replace(pools[to], replicas=pools[to].replicas + 1)
        while pools[source].replicas > 0 and sum(pool.gpus for pool in pools) > num_gpus:
            pools[source] = replace(pools[source], replicas=pools[source].replicas - 1)
        left = num_gpus - sum(pool.gpus for pool in pools)
        pools[to] = replace(pools[to], replicas=pools[to].replicas + left // pools[to].degrees.gpus)
        if pools[source].replicas and left >= 0:
            found.append(replace(candidate, pools=tuple(pools)))
    return found
