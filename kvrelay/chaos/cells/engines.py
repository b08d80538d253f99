"""Steps of one worker's engine that hang, fail or bring what is no number, and a prompt that ends every process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvrelay.chaos.cells.cell import PHASES, STREAMS, Cell, in_phase
from kvrelay.chaos.oracle import POISON_ID
from kvrelay.chaos.round import Round

FOREVER = 10**9


async def engine(round_: Round, do: str, role: str, phase: str, times: int, for_s: float = 0.0) -> None:
    """Once, or from then on."""
    at, _ = PHASES[phase]
    victim = round_.rng.choice(round_.cluster.names(role))
    await in_phase(round_, phase, victim, do=do, times=times, for_s=for_s, at=at if times == 1 else "step")
    if round_.missed:
        round_.fault()
    await round_.all_ended()


async def poison(round_: Round) -> None:
    """A prompt that ends the process which computes it, beside others that do not."""
    cluster = round_.cluster
    workers = [*cluster.names("prefill"), *cluster.names("decode")]
    for name in workers:
        await cluster.arm(name, at="token", token=POISON_ID, do="kill", times=FOREVER, stays=True)
    round_.start(STREAMS)
    template = round_.streams[0].template
    bad = replace(template, prompt=[*template.prompt[:8], POISON_ID], tokens=())
    await round_.until_tokens(2)
    stream = round_.start_one(bad)
    stream.allowed = frozenset(("FAILED_PRECONDITION", "UNAVAILABLE"))
    round_.fault()
    await round_.all_ended()
    cluster.disarm()


def _cells(role: str, phase: str, shape: str = "pools") -> list[Cell]:
    act = partial(engine, role=role, phase=phase)
    ways = {
        "fail": ("engine-failed", partial(act, do="fail", times=1), 60),
        "nan": ("engine-failed", partial(act, do="nan", times=1), 60),
        "sticky": ("engine-sticky", partial(act, do="fail", times=FOREVER), 2),
        "hang": ("engine-hung", partial(act, do="hang", times=1, for_s=float(FOREVER)), 1),
    }
    return [
        Cell(name=f"engine/{role}/{do}", bound=bound, act=way, share=share, shape=shape)
        for do, (bound, way, share) in ways.items()
    ]


CELLS = [
    *_cells("prefill", "first chunk"),
    *_cells("decode", "decoding"),
    *_cells("mixed", "decoding", "mixed"),
    Cell(name="poison/prompt", bound="poison", act=poison, share=2),
]
