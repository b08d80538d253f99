"""replay feeds what a live policy was told (worker/recording.py) to a fresh one, and compares every decision.

The policies are the ones that the simulator drives. They know no clock but the times they are given, so a recorded run
gives the same decisions again, exactly; where it does not, the first difference is told with the calls before it.

    python -m placement.checks.replay FILE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from cluster.router.accounts import Past, PeerTrouble, Report, RequestShape, WorkerView
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from engine.pages.news import PageNews
from engine.pages.pool import PagePool
from mixed_worker.options import MixedOptions
from mixed_worker.policy import MixedPolicy
from prefill_worker.options import PrefillOptions
from prefill_worker.policy import PrefillPolicy
from worker.plain import plain
from worker.steps.costs import StepCosts

POLICIES = {
    "RouterPolicy": RouterOptions,
    "PrefillPolicy": PrefillOptions,
    "DecodePolicy": DecodeOptions,
    "MixedPolicy": MixedOptions,
}
TOLD = {
    kind.__name__: kind
    for kind in (PageNews, Past, PeerTrouble, Report, RequestShape, RouterOptions, StepCosts, WorkerView)
}  # passed to a policy
CONTEXT = 4  # calls told before a difference


class RecordingError(ValueError):
    """A file that is no recording: one sentence naming the file, the line and the mend."""


@dataclass(frozen=True, slots=True)
class Call:
    at_s: float  # on the monotonic clock of the machine that recorded
    method: str
    args: Sequence[Any]
    more: Mapping[str, Any]
    result: Any  # plain

    def __str__(self) -> str:
        given = [_short(arg) for arg in self.args] + [f"{key}={_short(arg)}" for key, arg in self.more.items()]
        return f"{self.method}({', '.join(given)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    policy: str
    name: str
    limits: Mapping[str, Any]
    num_pages: int
    page_size: int
    num_stages: int
    at_rest: Any  # plain: see PagePool
    calls: Sequence[Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """`at`: the number of the call, from 0."""

    at: int
    call: Call
    replayed: Any  # plain, or the sentence of an assertion
    before: Sequence[Call]

    def __str__(self) -> str:
        lines = [f"call {self.at}, {self.call}", f"  recorded {_short(self.call.result)}"]
        lines.append(f"  replayed {_short(self.replayed)}")
        lines += [f"  after    {call} -> {_short(call.result)}" for call in self.before]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """`decisions`: calls that returned something, up to the difference."""

    calls: int
    decisions: int
    difference: Difference | None


def read_recording(path: Path) -> Recording:
    """Raises RecordingError. A last line that was cut off, as a worker's death leaves it, is left out."""
    calls: list[Call] = []
    number = 1
    try:
        lines = path.read_text().split("\n")
        header = json.loads(lines[0])
        known = {"policy": header["policy"], "name": header["name"], "limits": header["limits"]}
        POLICIES[header["policy"]](**header["limits"])
        for line in lines[1:-1]:
            number += 1
            calls.append(Call(*json.loads(line)))
    except (ValueError, TypeError, KeyError) as error:
        what = f"{path}:{number} is no recorded call"
        raise RecordingError(f"{what}; give a file that the `record` option of a worker or router made") from error
    return Recording(
        **known,
        num_pages=header.get("num_pages", 0),
        page_size=header.get("page_size", 0),
        num_stages=header.get("num_stages", 1),
        at_rest=header.get("at_rest"),
        calls=calls,
    )


def fresh_policy(recording: Recording) -> RouterPolicy | PrefillPolicy | DecodePolicy | MixedPolicy:
    """The policy as it was when the recording began."""
    if recording.policy == "RouterPolicy":
        return RouterPolicy(RouterOptions(**recording.limits))
    pool = PagePool(recording.num_pages, recording.page_size)
    if recording.at_rest is not None:
        pool.rest(*_restored(recording.at_rest, ()))
    if recording.policy == "PrefillPolicy":
        return PrefillPolicy(pool, PrefillOptions(**recording.limits))
    if recording.policy == "MixedPolicy":
        mixed = MixedOptions(**recording.limits)
        return MixedPolicy(pool, mixed, name=recording.name, num_stages=recording.num_stages)
    decode = DecodeOptions(**recording.limits)
    return DecodePolicy(pool, decode, name=recording.name, num_stages=recording.num_stages)


def replay(recording: Recording, **changed: Any) -> Replayed:
    """`changed`: options that the fresh policy has otherwise than the recorded one, to see what they would change."""
    policy = fresh_policy(replace(recording, limits={**recording.limits, **changed}))
    results: list[Any] = []  # of all calls, for those that come back as arguments
    decisions = 0
    for number, call in enumerate(recording.calls):
        args = [_restored(arg, results) for arg in call.args]
        more = {key: _restored(arg, results) for key, arg in call.more.items()}
        try:
            result = attrgetter(call.method)(policy)(*args, **more)
            replayed = plain(result)
        except (AssertionError, KeyError) as error:  # it was told what cannot be, after another decision
            result, replayed = None, f"{type(error).__name__}: {error}"
        if replayed != call.result:
            before = recording.calls[max(0, number - CONTEXT) : number]
            difference = Difference(at=number, call=call, replayed=replayed, before=before)
            return Replayed(calls=number, decisions=decisions, difference=difference)
        results.append(result)
        decisions += result is not None
    policy.check_invariants()
    return Replayed(calls=len(results), decisions=decisions, difference=None)


def _restored(value: Any, results: Sequence[Any]) -> Any:
    if isinstance(value, list):
        return [_restored(each, results) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "result":
        return results[content]
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "set":
        return frozenset(content)
    return TOLD[kind](**{key: _restored(each, results) for key, each in content.items()})


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def main(paths: Sequence[str]) -> int:
    if not paths:
        print("usage: python -m placement.checks.replay FILE...", file=sys.stderr)
        return 2
    code = 0
    for path in paths:
        try:
            recording = read_recording(Path(path))
        except (OSError, RecordingError) as error:
            print(error, file=sys.stderr)
            return 2
        replayed = replay(recording)
        same = f"{replayed.decisions} decisions in {replayed.calls} calls are the same again"
        print(f"{recording.name}: {same if replayed.difference is None else f'differs at {replayed.difference}'}")
        code |= replayed.difference is not None
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
