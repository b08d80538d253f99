"""What changes between two specs, and how each key says that it can."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.deploy.changes.running_spec import Planned, RunningSpec
from cluster.spec.compare import PARTS, live_knobs
from cluster.spec.errors import SpecError
from cluster.spec.knobs import Spec, change_of
from cluster.spec.load import parse_spec
from cluster.spec.model import ClusterSpec, RouterSpec, TransferSpec
from cluster.spec.pool import PoolSpec
from cluster.spec.resolve import AUTO_KV_SHARE, Machine, plan_of, resolve
from engine.knobs import knobs_of
from worker.roles import ROLES

pytestmark = pytest.mark.unit

MACHINE = Machine(cores=(0, 1, 2, 3), memory_bytes=8 << 30)
POOLS: list[dict[str, Any]] = [{"role": "prefill"}, {"role": "decode"}]


def data(pools: Any = None, **keys: Any) -> dict[str, Any]:
    return {"model": "m", "pools": pools or POOLS, **keys}


def running(written: dict[str, Any]) -> RunningSpec:
    spec = parse_spec(written)
    return RunningSpec.of(spec, resolve(spec, MACHINE), {}, MACHINE, "127.0.0.1")


def planned(wanted: dict[str, Any], before: dict[str, Any] | None = None) -> Planned:
    return running(before or data()).plan_for(wanted, {})


def told(plan: Planned) -> list[tuple[str, Any, Any, str]]:
    return [(each.key, each.before, each.after, each.change.how) for each in plan.changes]


def test_models_stay_at_the_commit_at_which_they_are_had_until_others_are_written() -> None:
    """Or what is applied again would change the model, and a worker more would have another than the first."""
    at = "@" + "1" * 40
    pools: list[dict[str, Any]] = [
        {"role": "prefill"},
        {"role": "decode", "speculative_model": "org/small", "num_speculative_tokens": 2},
    ]
    beside = {"role": "mixed", "model": "b"}
    written = data([*pools, beside], models=[{"name": "b", "model": "org/b"}])
    known = running(written)
    drafting = known.resolved.pools[1].model_copy(update={"speculative_model": f"org/small{at}"})
    known.resolved = known.resolved.with_paths(lambda model: model + at).model_copy(
        update={"pools": (known.resolved.pools[0], drafting, known.resolved.pools[2])}
    )
    again = known.plan_for(written, {})
    assert not again.changes
    assert (again.resolved.model, again.resolved.model_name) == (f"m{at}", "m")
    assert again.resolved.models[0].model == f"org/b{at}"
    assert plan_of(again.resolved, "decode-0").engine["speculative_model"] == f"org/small{at}"
    other = {**written, "pools": [pools[0], {**pools[1], "speculative_model": "org/other"}, beside]}
    assert plan_of(known.plan_for(other, {}).resolved, "decode-0").engine["speculative_model"] == "org/other"


def test_adapters_come_and_go_and_nothing_else_changes() -> None:
    known = running(data(router={"adapters": {"a": "/a"}, "max_calls": 7}))
    known.resize("decode", 3, "kvrelay scale")
    known.take_now(known.plan_adapters({"b": "/b"}, []))
    known.take_now(known.plan_adapters({"b": "/b"}, ["a"]))
    rows = {row.key: row for row in known.rows}
    assert rows["router.adapters"].value == {"b": "/b"}
    assert rows["router.adapters"].source == "kvrelay adapter"
    assert (rows["router.max_calls"].value, rows["pools[1].replicas"].value) == (7, 3)
    assert not known.is_rolling
    for add, remove, why in (
        ({}, ["a"], "there is no adapter 'a'; there are b"),
        ({"b": "/c"}, [], "adapter 'b' is /b already; remove it first, or take another name"),
        ({"m": "/c"}, [], "router.adapters has 'm', which is a model's own name; take another"),
        ({"a b": "/c"}, [], "is no adapter's name"),
    ):
        with pytest.raises(SpecError, match=why):
            known.plan_adapters(add, remove)
    known.take_now(known.plan_adapters({"b": "/c"}, ["b"]))
    assert known.resolved.router.adapters == {"b": "/c"}  # type: ignore[attr-defined]


def test_adapters_may_be_written_as_vllms_flag_has_them() -> None:
    spec = parse_spec(data(router={"adapters": "a=/a b=./b"}))
    assert spec.router.adapters == {"a": "/a", "b": "./b"}  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="does not say which; give NAME=DIRECTORY"):
        parse_spec(data(router={"adapters": "a"}))


@pytest.mark.parametrize("part", [ClusterSpec, RouterSpec, TransferSpec, PoolSpec])
def test_every_key_says_how_it_changes(part: type[Spec]) -> None:
    for key in part.model_fields:
        if key not in PARTS:
            change = change_of(part, key)
            assert change.how in ("now", "rolling", "fixed")
            assert bool(change.why_fixed) == (change.how == "fixed")


def test_only_knobs_that_a_worker_takes_live_say_that_they_change_now() -> None:
    """Worker.take_knobs; the rest of a pool's keys wants a new process."""
    now = {key for key in PoolSpec.model_fields if change_of(PoolSpec, key).how == "now"}
    assert now == {"replicas", "chunk_tokens", "name"}, "another name is another pool"
    pools = {role: parse_spec(data([{"role": role}, {"role": "mixed", "name": "x"}])).pools[0] for role in ROLES}
    for role, pool in pools.items():
        assert live_knobs(pool).keys() == now & knobs_of(ROLES[role].load_options()).keys()


def test_the_same_spec_changes_nothing_however_it_is_written() -> None:
    assert not planned(data()).changes
    auto = resolve(parse_spec(data()), MACHINE).pools[0]
    written = [{"role": "prefill", "threads": auto.threads, "kv_memory": auto.kv_memory}, {"role": "decode"}]
    assert not planned(data(written)).changes
    assert not planned(data(), before=data(written)).changes


def test_changes_come_in_the_three_groups() -> None:
    pools = [{"role": "prefill", "max_batch_tokens": 64, "replicas": 3}, {"role": "decode", "kv_memory": "1MiB"}]
    plan = planned(data(pools, router={"max_calls": 7, "port": 7}, page_size=8, transfer={"checksums": False}))
    assert told(plan) == [
        ("page_size", None, 8, "fixed"),
        ("router.port", 50051, 7, "fixed"),
        ("router.max_calls", 4096, 7, "now"),
        ("transfer.checksums", True, False, "rolling"),
        ("pools[0].replicas", 1, 3, "now"),
        ("pools[0].max_batch_tokens", 512, 64, "rolling"),
        ("pools[1].kv_memory", int((8 << 30) * AUTO_KV_SHARE) // 2, 1 << 20, "rolling"),
    ]
    assert plan.why_not.splitlines()[0] == (
        "page_size is null, and 8 cannot replace it while the cluster runs: KV is handed over as it is, so that all "
        "workers must have the same; leave it, or start another cluster by `kvrelay up`"
    )
    assert len(plan.why_not.splitlines()) == 2


def test_pools_come_and_go_by_their_names() -> None:
    both = data([{"role": "mixed", "replicas": 2}])
    assert told(planned(both)) == [
        ("pools[0]", None, "mixed: 2 mixed", "now"),
        ("pools[0]", "prefill: 1 prefill", None, "now"),
        ("pools[1]", "decode: 1 decode", None, "now"),
    ]
    named = data([{"role": "prefill", "name": "a"}, {"role": "decode"}])
    turned = data([{"role": "mixed", "name": "a"}, {"role": "decode"}])
    assert told(planned(turned, before=named)) == [("pools[0].role", "prefill", "mixed", "rolling")]


def test_what_auto_came_to_stays_when_a_pool_grows() -> None:
    before = running(data())
    plan = before.plan_for(data([{"role": "prefill"}, {"role": "decode", "replicas": 3}]), {})
    assert told(plan) == [("pools[1].replicas", 1, 3, "now")]
    before.take(plan, None)
    assert plan_of(before.resolved, "decode-0").cpus == (2, 3), "who was there keeps its cores"
    assert plan_of(before.resolved, "decode-2").cpus == ()


def test_cores_that_auto_came_to_are_let_go_with_the_threads_that_they_were_for() -> None:
    before = running(data())
    plan = before.plan_for(data([{"role": "prefill", "threads": 4}, {"role": "decode"}]), {})
    assert told(plan) == [("pools[0].threads", 2, 4, "rolling"), ("pools[0].cpus", (0, 1), None, "rolling")]
    before.take(plan, None)
    assert plan_of(before.resolved, "prefill-0").cpus == (), "four threads would share two cores"
    assert plan_of(before.resolved, "decode-0").cpus == (2, 3)
    pinned = [{"role": "prefill", "threads": 1, "cpus": [0]}, {"role": "decode"}]
    assert plan_of(before.plan_for(data(pinned), {}).resolved, "prefill-0").cpus == (0,)


def test_a_tokens_file_gives_way_to_another_one_only() -> None:
    first, second = ({"tokens_file": f"/{name}"} for name in "ab")
    assert [each.change.how for each in planned(data(router=second), data(router=first)).changes] == ["now"]
    for old, new in ((first, {}), ({}, first)):
        assert "who calls now shows a token" in planned(data(router=new), data(router=old)).why_not


@pytest.mark.parametrize(
    ("before", "after", "how"),
    [
        (["shared_memory", "tcp"], ["tcp"], "rolling"),
        (["shared_memory"], ["shared_memory", "tcp"], "rolling"),
        (["shared_memory"], ["tcp"], "fixed"),
        (["shared_memory", "tcp"], ["shared_memory", "process_group"], "fixed"),
    ],
)
def test_workers_old_and_new_can_hand_over_to_each_other(before: list[str], after: list[str], how: str) -> None:
    plan = planned(data(transfer={"transports": after}), data(transfer={"transports": before}))
    assert [each.change.how for each in plan.changes] == [how]


def test_a_worker_is_to_be_replaced_for_what_it_was_started_with_and_for_nothing_else() -> None:
    one = running(data([{"role": "mixed"}, {"role": "decode"}]))
    first = {label: one.made_by(label) for label in ("mixed", "decode")}
    now = data([{"role": "mixed", "chunk_tokens": 7, "replicas": 2}, {"role": "decode"}], router={"slo_ttft_ms": 5})
    one.take(one.plan_for(now, {}), None)
    assert {label: one.made_by(label) for label in first} == first
    assert one.live_knobs("mixed") == {"chunk_tokens": 7}
    one.take(one.plan_for(data([{"role": "mixed"}, {"role": "decode", "watermark": 0.5}]), {}), None)
    assert one.made_by("mixed") == first["mixed"]
    assert one.made_by("decode") != first["decode"]
    one.roll(["mixed"], 0)
    assert one.made_by("mixed") != first["mixed"]
    assert one.made_by("gone") == ""


def test_the_next_controller_knows_what_the_last_one_knew() -> None:
    last = running(data())
    last.take(
        last.plan_for(data([{"role": "prefill", "threads": 2}, {"role": "decode", "replicas": 2}]), {"a": "b"}), 0
    )
    last.resize("decode", 5, "kvrelay scale")
    last.roll(["decode"], 1)
    following = running(data())
    following.restore(last.saved)
    assert following.saved == last.saved
    assert following == last
    assert {row.key: row[1:] for row in following.rows}["pools[1].replicas"] == (5, "kvrelay scale")


def test_a_pool_that_was_scaled_is_brought_to_what_is_written_but_not_where_a_replanner_scales() -> None:
    for replan, changes in (("off", [("pools[1].replicas", 5, 1, "now")]), ("act", [])):
        keys: dict[str, Any] = {"replan": replan, "router": {"slo_ttft_ms": 5}}
        scaled = running(data(**keys))
        scaled.resize("decode", 5, "kvrelay scale")
        assert told(scaled.plan_for(data(**keys), {})) == changes
        assert told(scaled.plan_for(data([{"role": "prefill"}, {"role": "decode", "replicas": 2}], **keys), {})) == [
            ("pools[1].replicas", 5, 2, "now")
        ]


def test_a_spec_that_is_wrong_is_refused_whole() -> None:
    one = running(data())
    with pytest.raises(SpecError, match=r"pools\[0\].thread is not a known key"):
        one.plan_for(data([{"role": "prefill", "thread": 1}, {"role": "decode"}]), {})
    assert one.number == 0


def test_why_a_url_cannot_be_changed_is_said_without_its_password() -> None:
    wanted = data(router={"usage_db": "postgresql://me:hush@host/usage"})
    plan = planned(wanted, data(router={"usage_db": "postgresql://me:hush@other/usage?sslpassword=hush"}))
    assert "'postgresql://me:***@other/usage?sslpassword=***'" in plan.why_not
    assert "hush" not in plan.why_not + repr([change.shown({}, {}) for change in plan.changes])
