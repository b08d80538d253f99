"""A load that shifts, simulated: the replanning policy against roles that stay, over time.

    python -m bench.replan [--minutes M] [--window S]

Four H100 serve Llama-3.1-8B, by the live policies and a roofline's times. Azure's conversation comes, then its code,
then conversation; and both in turns, every half minute. Every 30 s the policy of `kvrelay replan` looks at what came in
the last --window seconds, by what it could see of a live cluster: lengths, times, and step costs as workers fit them.
Each half minute is played by itself, from an empty cluster; a worker that changes its role is away for five seconds of
it, and what it had starts again, which in life moves. Printed for each load: the share of requests that met their
targets with roles that stay, in each arrangement that is best for a phase, and with roles that follow by each policy;
what changed, and why.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from bench.common import about, save
from bench.placement_search import trace
from cluster.spec.load import parse_spec
from engine.knobs import as_text
from kvrelay.replan.options import MOST_CHANGES, POLICIES, WINDOW_S
from kvrelay.replan.replanner import HANDOFF_S
from kvrelay.simulate.simulation import source_of
from mixed_worker.options import MixedOptions
from placement.build.from_spec import sim_cluster
from placement.plan import Slo
from placement.replan.arrangements import Arrangement, SetRole
from placement.replan.distserve import Profile
from placement.replan.play import Bounds, weigh, weigh_shifts
from placement.replan.policy import Prices, Terms
from placement.replan.seen import Row, Seen, SeenWorker, workload_of
from placement.simulator.cluster import Loss, SimCluster
from placement.simulator.costs import costs_of
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload
from worker.roles import ROLES

MODEL, HARDWARE = "llama-3.1-8b", "h100-sxm"
SLO = Slo(ttft_s=0.4, tpot_s=0.020)
RATE = 45.0  # requests/s: more than any arrangement takes of both
LOOK_S = 30.0
PRICES = Prices()
BEGIN = (2, 2, 0)  # prefill, decode, mixed
STILL = {"two and two": (2, 2, 0), "best of conversation": (1, 0, 3), "best of code": (3, 1, 0)}


def arrangement_of(counts: Sequence[int]) -> Arrangement:
    roles = [role for role, count in zip(ROLES, counts, strict=True) for _ in range(count)]
    return Arrangement(roles={f"worker-{index}": role for index, role in enumerate(roles)})


def cluster_of(base: SimCluster, arrangement: Arrangement) -> SimCluster:
    """`base` has one worker of each role."""
    kinds = {worker.role: worker for worker in base.workers}
    workers = {name: replace(kinds[role], name=name) for name, role in arrangement.roles.items()}
    for name, tokens in arrangement.chunks.items():
        if isinstance(policy := workers[name].policy, MixedOptions):
            workers[name] = replace(workers[name], policy=replace(policy, chunk_tokens=tokens))
    return replace(base, workers=tuple(workers.values()))


@dataclass
class Cluster:
    """As a replanner sees it, and as it fares."""

    base: SimCluster
    arrangement: Arrangement
    window_s: float
    profile: Profile | None = None
    past: list[tuple[float, Outcome]] = field(default_factory=list)  # when each began
    met: list[float] = field(default_factory=list)
    decided: list[dict[str, Any]] = field(default_factory=list)

    def serve(self, at_s: float, workload: Workload, changed: Sequence[str] = ()) -> None:
        losses = tuple(Loss(worker=name, at_s=0.0, back_s=PRICES.change_s) for name in changed)
        outcome = simulate(replace(cluster_of(self.base, self.arrangement), losses=losses), workload)
        self.past = [(begin_s, each) for begin_s, each in self.past if begin_s >= at_s + LOOK_S - self.window_s]
        self.past.append((at_s, outcome))
        self.met.append(outcome.attainment(SLO.ttft_s, SLO.tpot_s))

    def look(self, at_s: float, policy: str) -> list[str]:
        """Who changes its role."""
        bounds = Bounds(most_changes=MOST_CHANGES)
        if policy == "distserve":
            weighed, self.profile = weigh_shifts(self._seen(at_s), SLO, self.profile, bounds)
        else:
            seen = self._seen(at_s)
            terms = Terms(wanted=SLO.attainment, measured=self.met[-1], seen_s=seen.seen_s, prices=PRICES)
            weighed = weigh(seen, SLO, bounds, terms)
        decision = weighed.decision
        before, changes = self.arrangement, [move for move in decision.moves if isinstance(move, SetRole)]
        chunks = {move.worker: move.chunk_tokens for move in changes if move.chunk_tokens is not None}
        roles = {**before.roles, **{move.worker: move.role for move in changes}}
        self.arrangement = Arrangement(roles=roles, chunks={**before.chunks, **chunks})
        if changes:
            self.decided.append({"at_s": at_s, "changes": list(map(asdict, changes)), "reason": decision.reason})
        return [move.worker for move in changes if before.roles[move.worker] != move.role]

    def _seen(self, at_s: float) -> Seen:
        rows = [
            Row(begin_s + came_s, prompt, output)
            for begin_s, outcome in self.past
            for came_s, prompt, output in zip(
                outcome.workload.arrival_s.tolist(),
                outcome.workload.prompt_len.tolist(),
                outcome.workload.output_len.tolist(),
                strict=True,
            )
        ]
        seen_s = at_s - self.past[0][0]
        return Seen(
            workers=[
                SeenWorker(
                    name=worker.name,
                    role=worker.role,
                    num_pages=worker.num_pages,
                    page_size=worker.page_size,
                    limits=as_text(worker.policy),
                    costs=costs_of(worker),
                )
                for worker in cluster_of(self.base, self.arrangement).workers
            ],
            router=self.base.router,
            workload=workload_of(rows),
            ttft_s=_or_inf([outcome.ttft_s for _, outcome in self.past]),
            tpot_s=_or_inf([outcome.tpot_s for _, outcome in self.past]),
            handoff_s=HANDOFF_S,
            cached_share=0.0,
            rate=len(rows) / seen_s,
            seen_s=seen_s,
        )


def _or_inf(columns: Sequence[Any]) -> Any:
    return np.nan_to_num(np.concatenate(columns), nan=np.inf)


def compared(base: SimCluster, loads: Sequence[Workload], window_s: float) -> dict[str, Any]:
    """Each of `loads` comes for LOOK_S."""
    still = {name: Cluster(base, arrangement_of(counts), window_s) for name, counts in STILL.items()}
    following: dict[str, Cluster] = {policy: Cluster(base, arrangement_of(BEGIN), window_s) for policy in POLICIES}
    changed: dict[str, list[str]] = {policy: [] for policy in POLICIES}
    for index, load in enumerate(loads):
        at_s = index * LOOK_S
        for each in still.values():
            each.serve(at_s, load)
        for policy, each in following.items():
            each.serve(at_s, load, changed[policy])
            changed[policy] = each.look(at_s + LOOK_S, policy)
    over_time: Mapping[str, list[float]] = {name: each.met for name, each in {**still, **following}.items()}
    return {
        "attainment": {name: round(float(np.mean(met)), 4) for name, met in over_time.items()},
        "over_time": {name: [round(share, 3) for share in met] for name, met in over_time.items()},
        "changes": {policy: each.decided for policy, each in following.items()},
        "at_the_end": {policy: str(each.arrangement) for policy, each in following.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.replan", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.0, help="of each phase (default: 8)")
    parser.add_argument("--window", type=float, default=WINDOW_S, help=f"seconds (default: {WINDOW_S:g})")
    args = parser.parse_args()
    spec = parse_spec({"model": MODEL, "pools": [{"role": role, "replicas": 1} for role in ROLES]})
    base = sim_cluster(spec, source_of(spec, hardware=HARDWARE, profile=None, model=MODEL))
    traces = {kind: trace(kind) for kind in ("conv", "code")}
    looks, count = int(args.minutes * 60 / LOOK_S), int(RATE * LOOK_S)
    shift = [*["conv"] * looks, *["code"] * looks, *["conv"] * looks]
    loads = {"shift": shift, "turns": ["conv", "code"] * looks}
    rows = {}
    for name, kinds in loads.items():
        requests = [traces[kind].resampled(count, RATE, seed=i) for i, kind in enumerate(kinds)]
        rows[name] = compared(base, requests, args.window)
        print(name, rows[name]["attainment"], flush=True)
        for policy, decided in rows[name]["changes"].items():
            for each in decided:
                print(f"  {policy}, {each['at_s']:.0f} s: {each['reason']}", flush=True)
    save(
        "replan",
        {
            **about(),
            "rate": RATE,
            "window_s": args.window,
            "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
            "loads": rows,
        },
    )


if __name__ == "__main__":
    main()
