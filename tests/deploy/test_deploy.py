"""A cluster on real Ray: it serves, what is killed comes back and serves again, and `down` leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from openai import OpenAI

from cluster.deploy.own_ray import idle_agent
from kvrelay.client.client import Client
from kvrelay.client.types import KvrelayError
from kvrelay.demo_model import make_demo_model
from tests.adapters import make_adapter
from tests.deploy.running import COMMAND, Running, environment, gone, kvrelay, title, until
from tests.zoo import make_tiny_model
from worker.wire.tls import is_loopback

pytestmark = pytest.mark.alone

READY_TIMEOUT_S = 120.0
APPLIED = """model: {model}
name: test
liveness_timeout_s: 4
router: {{port: 0, max_calls: "${{CALLS}}", slo_ttft_ms: 5000}}
pools:
- {{role: prefill, kv_memory: 32MiB}}
- {{role: decode, kv_memory: 32MiB, replicas: 3, max_batch_size: 16}}
"""
SECRET = "that-all-processes-of-the-cluster-share"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state_dir = tmp_path_factory.mktemp("state")
    model = make_demo_model(tmp_path_factory.mktemp("models") / "tiny")
    flags = ["--model", str(model), "--name", "test", "--port", "0", "--kv-memory", "32MiB", "--decode", "2"]
    flags += ["--liveness-timeout-s", "4"]
    began = kvrelay(state_dir, "up", *flags, "--detach", "--json", KVRELAY_SECRET=SECRET)
    assert began.returncode == 0, began.stderr
    running = Running(state_dir, json.loads(began.stdout))
    processes = running.processes()
    try:
        yield running
    finally:
        ended = kvrelay(state_dir, "down")
        assert ended.returncode == 0, ended.stderr
        assert not gone(processes)


@pytest.fixture
def client(cluster: Running) -> Iterator[Client]:
    with Client(cluster.endpoint, token=cluster.token) as client:
        client.wait_ready(READY_TIMEOUT_S)
        yield client


def test_up_says_where_it_serves_and_what_runs(cluster: Running) -> None:
    assert cluster.summary["served_model_name"] == "tiny"
    assert [member["name"] for member in cluster.summary["members"]] == [
        "router-0",
        "prefill-0",
        "decode-0",
        "decode-1",
    ]


def test_a_request_goes_through_both_pools(client: Client) -> None:
    answer = client.generate("a prompt that fills more than one page of tokens, surely", max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids) == 8
    assert answer.receipt is not None
    assert answer.receipt.checksums_ok
    assert answer.receipt.pages > 0


def test_openais_client_finds_the_same_model_over_http(cluster: Running) -> None:
    [base_url] = cluster.summary["http"]
    token = kvrelay(cluster.state_dir, "token", "--endpoint", cluster.endpoint).stdout.strip()
    with OpenAI(base_url=f"{base_url}/v1", api_key=token, max_retries=0) as openai:
        messages: Any = [{"role": "user", "content": "Hello"}]
        asked: Any = {"model": "tiny", "messages": messages, "max_tokens": 8, "seed": 1}
        whole = openai.chat.completions.create(**asked).choices[0].message.content
        parts = [part.choices[0].delta.content or "" for part in openai.chat.completions.create(**asked, stream=True)]
        assert whole
        assert "".join(parts) == whole


def test_a_talk_goes_on_from_what_was_said(cluster: Running) -> None:
    talk = subprocess.run(
        [*COMMAND, "chat", "--max-tokens", "8", "--temperature", "0"],
        env=environment(cluster.state_dir),
        input="A first question that fills a page of tokens or two, surely, and so is found in the cache.\nAnd now?\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert talk.returncode == 0, talk.stderr
    figures = re.findall(r"prompt (\d+) tokens, (\d+) of them cached", talk.stderr)
    assert len(figures) == 2
    assert int(figures[1][0]) > int(figures[0][0]) > 0
    assert int(figures[1][1]) > 0


def test_status_shows_every_worker(cluster: Running, client: Client) -> None:
    workers = cluster.status()["workers"]
    assert {(worker["name"], worker["state"]) for worker in workers} == {
        ("prefill-0", "ready"),
        ("decode-0", "ready"),
        ("decode-1", "ready"),
    }
    table = kvrelay(cluster.state_dir, "status")
    assert table.returncode == 0
    assert "decode-1" in table.stdout


def test_nothing_of_a_loopback_cluster_can_be_reached_from_elsewhere(cluster: Running, client: Client) -> None:
    client.generate("open a pair", max_tokens=2, ignore_eos=True)
    reachable = {
        f"{process.name()} ({process.pid}) at {end.laddr.ip}:{end.laddr.port}"
        for process in cluster.processes()
        for end in process.net_connections("inet")
        if end.status == psutil.CONN_LISTEN and not is_loopback(end.laddr.ip.removeprefix("::ffff:"))
    }
    assert not reachable


def test_the_state_file_is_for_its_owner_only(cluster: Running) -> None:
    path = cluster.state_dir / "kvrelay" / "clusters" / "test.json"
    assert path.stat().st_mode & 0o777 == 0o600


def test_nobody_listens_but_on_loopback_and_none_of_ours_without_asking_who_calls(cluster: Running) -> None:
    listening = [c for p in cluster.processes() for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert {connection.laddr.ip.removeprefix("::ffff:") for connection in listening} == {"127.0.0.1"}
    told = {}
    for member in cluster.summary["members"]:
        method = "/kvrelay.v1.Generate/GetModelInfo" if member["role"] == "router" else "/kvrelay.v1.Worker/Connect"
        with grpc.insecure_channel(member["address"]) as channel:
            call = channel.stream_stream(method)(iter([b""]), timeout=30)
            told[member["name"]] = call.code()
    assert told == dict.fromkeys(told, grpc.StatusCode.UNAUTHENTICATED)


def test_secrets_are_in_no_command_line_environment_log_or_file_of_rays(cluster: Running) -> None:
    began_by_us = cluster.daemon.children(recursive=True)
    (folder,) = {Path(p.environ()["RAY_AUTH_TOKEN_PATH"]).parent for p in began_by_us if _has_token(p)}
    assert folder.stat().st_mode & 0o777 == 0o700  # Ray opens what is below to everybody
    token = folder / "token"
    assert token.stat().st_mode & 0o777 == 0o600
    secrets = [SECRET.encode(), cluster.state["token"].encode(), token.read_bytes()]
    places = [f"/proc/{p.pid}/{what}" for p in began_by_us for what in ("cmdline", "environ")]
    logs = Path(cluster.summary["logs"])
    places += [str(path) for root in (folder / "r", logs) for path in root.rglob("*") if path.is_file()]
    assert {"controller.log", "router-0.log", "decode-1.log"} <= {Path(place).name for place in places}
    assert [place for place in places if any(secret in _bytes(place) for secret in secrets)] == []


def _has_token(process: psutil.Process) -> bool:
    try:
        return "RAY_AUTH_TOKEN_PATH" in process.environ()
    except psutil.Error:
        return False


def _bytes(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:  # a process, or its file, that has gone
        return b""


def test_a_name_that_is_taken_is_refused(cluster: Running, tmp_path: Path) -> None:
    model = cluster.summary["model"]
    again = kvrelay(cluster.state_dir, "up", "--model", model, "--name", "test", "--port", "0")
    assert again.returncode == 1
    assert again.stderr.startswith("error: a cluster named test runs already")


def test_a_pool_grows_and_shrinks_while_streams_run(cluster: Running, client: Client) -> None:
    """A worker comes, another is taken out, and its name and place are taken again."""
    before, is_over = client.status().counters, threading.Event()

    def ask(index: int) -> set[int]:
        lengths = set()
        while not is_over.is_set():
            lengths.add(len(client.generate(f"prompt {index}", max_tokens=200, ignore_eos=True).token_ids))
        return lengths

    def ready() -> list[str]:
        workers = client.status().workers
        assert {each.state for each in workers} == {"ready"}
        return [each.name for each in workers if each.role == "decode"]

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, index) for index in range(3)]
        try:
            scaled = kvrelay(cluster.state_dir, "scale", "decode", "3", "--json")
            assert (scaled.returncode, json.loads(scaled.stdout)["pending"]) == (0, []), scaled.stderr
            assert ready() == ["decode-0", "decode-1", "decode-2"]
            removed = kvrelay(cluster.state_dir, "drain", "decode-0", "--remove")
            assert removed.returncode == 0, removed.stderr
            assert ready() == ["decode-1", "decode-2"]
            until(lambda: not client.scale("decode", 1), "decode-2 has left")
            assert ready() == ["decode-1"]
            until(lambda: not client.scale("decode", 2), "decode-0 is there again")
            assert ready() == ["decode-0", "decode-1"]
        finally:
            is_over.set()
        assert [each.result() for each in asking] == [{200}] * 3
    after = client.status().counters
    assert after["moved"] > before.get("moved", 0)
    for name in ("retries", "failed", "workers_lost"):
        assert after.get(name, 0) == before.get(name, 0), name
    for scaling, why in [
        (("decode", 0), "decode-0 and decode-1 are the only workers for decode that take requests"),
        (("chat", 1), "there is no pool 'chat'; there are prefill, decode"),
        (("decode", 5000), "replicas is 5000; give 4096 at most"),
    ]:
        with pytest.raises(KvrelayError, match=why):
            client.scale(*scaling)


def test_another_spec_is_applied_while_streams_run(cluster: Running, client: Client, tmp_path: Path) -> None:
    """Limits and targets change at once, a pool grows, and every worker of it is replaced for a knob."""

    def answer(index: int) -> tuple[int, ...]:
        return tuple(client.generate(f"prompt {index}", max_tokens=200, ignore_eos=True, temperature=0.0).token_ids)

    expected = [answer(index) for index in range(3)]
    before, is_over = client.status().counters, threading.Event()
    path = tmp_path / "spec.yaml"
    path.write_text(APPLIED.format(model=cluster.summary["model"]))

    def ask(index: int) -> bool:
        is_right = True
        while not is_over.is_set():
            is_right &= answer(index) == expected[index]
        return is_right

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, index) for index in range(3)]
        try:
            done = kvrelay(cluster.state_dir, "apply", str(path), "--yes", "--json", CALLS="99")
            assert done.returncode == 0, done.stderr
        finally:
            is_over.set()
        assert [each.result() for each in asking] == [True] * 3
    assert {each["key"]: each["how"] for each in json.loads(done.stdout)["changes"]} == {
        "router.max_calls": "now",
        "router.slo_ttft_ms": "now",
        "pools[1].replicas": "now",
        "pools[1].max_batch_size": "rolling",
    }
    after = client.status()
    assert after.limits["slo_ttft_ms"] == "5000.0"
    decoding = {each.name: each.limits["max_batch_size"] for each in after.workers if each.role == "decode"}
    assert decoding == dict.fromkeys(("decode-0", "decode-1", "decode-2"), "16")
    for name in ("retries", "failed", "workers_lost"):
        assert after.counters.get(name, 0) == before.get(name, 0), name
    known = {value.key: (value.value, value.source) for value in client.spec().values}
    assert known["router.max_calls"] == (99, f"{path}:4 ${{CALLS}}")
    again = kvrelay(cluster.state_dir, "apply", str(path), "--yes", CALLS="99")
    assert (again.returncode, again.stderr) == (0, "nothing to do: the cluster runs with it\n")
    assert kvrelay(cluster.state_dir, "apply", str(path), "--yes", "--page-size", "8", CALLS="99").returncode == 2
    until(lambda: not client.scale("decode", 2), "decode-2 has left")


def test_a_model_comes_and_goes_while_others_serve(cluster: Running, client: Client, tmp_path: Path) -> None:
    """Its workers are started beside the others, and end when its last request has; no request fails but those that
    name it afterwards."""
    other = make_tiny_model("qwen3", tmp_path / "qwen3")
    own, both = tmp_path / "own.yaml", tmp_path / "both.yaml"
    own.write_text(APPLIED.format(model=cluster.summary["model"]).replace("replicas: 3", "replicas: 2"))
    beside = "- {role: mixed, name: other, model: qwen, kv_memory: 32MiB}\n"
    both.write_text(own.read_text() + beside + f"models: [{{name: qwen, model: {other}, dtype: float32}}]\n")

    def answer(model: str, tokens: int = 8) -> tuple[int, ...]:
        asked = client.generate([9, 8, 7], model=model, max_tokens=tokens, ignore_eos=True, temperature=0.0)
        return tuple(asked.token_ids)

    def apply(spec: Path) -> None:
        done = kvrelay(cluster.state_dir, "apply", str(spec), "--yes", CALLS="99")
        assert done.returncode == 0, done.stderr

    is_over, expected = threading.Event(), answer("tiny")

    def keep_asking() -> bool:
        is_right = True
        while not is_over.is_set():
            is_right &= answer("tiny") == expected
        return is_right

    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(keep_asking)
        try:
            apply(both)
            assert list(client.status().models) == ["tiny", "qwen"]
            assert answer("qwen") != expected
            running = pool.submit(answer, "qwen", 900)
            until(
                lambda: any(each.name == "other-0" and each.num_running for each in client.status().workers), "it runs"
            )
            apply(own)
            assert len(running.result()) == 900
        finally:
            is_over.set()
        assert asking.result()
    with pytest.raises(KvrelayError, match="NOT_FOUND: model is 'qwen'; this router serves 'tiny'"):
        answer("qwen")
    assert {each.name for each in client.status().workers} == {"prefill-0", "decode-0", "decode-1"}


def test_an_adapter_comes_and_goes_while_it_serves(cluster: Running, client: Client, tmp_path: Path) -> None:
    model = Path(cluster.summary["model"])
    kept, other = (make_adapter(model, "everywhere", tmp_path / name, i) for i, name in enumerate(("kept", "other")))
    wrong = make_adapter(make_tiny_model("gpt2", tmp_path / "gpt2"), {"target_modules": ["c_attn"]}, tmp_path / "wrong")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return kvrelay(cluster.state_dir, "adapter", *arguments)

    def answer(adapter: str = "") -> tuple[int, ...]:
        asked = client.generate("Hello", max_tokens=8, temperature=0.0, ignore_eos=True, adapter=adapter)
        return tuple(asked.token_ids)

    assert [command("add", name, str(path)).returncode for name, path in (("kept", kept), ("other", other))] == [0, 0]
    refused = command("add", "wrong", str(wrong))
    assert refused.returncode == 2
    assert "changes transformer.h.0.attn.c_attn, which the model does not have" in refused.stderr
    again = command("add", "kept", str(other))
    assert again.returncode == 2
    assert again.stderr == f"error: adapter 'kept' is {kept} already; remove it first, or take another name\n"
    assert [each["name"] for each in json.loads(command("list", "--json").stdout)["adapters"]] == ["kept", "other"]
    answers = [answer(), answer(adapter="kept"), answer(adapter="other")]
    assert len(set(answers)) == 3
    [base_url] = cluster.summary["http"]
    with OpenAI(base_url=f"{base_url}/v1", api_key=cluster.token, max_retries=0) as openai:
        assert [model.id for model in openai.models.list()] == ["tiny", "kept", "other"]
        extra = {"ignore_eos": True, "return_token_ids": True}
        told = openai.completions.create(model="other", prompt="Hello", max_tokens=8, temperature=0.0, extra_body=extra)
        assert (told.model, tuple(told.choices[0].token_ids)) == ("other", answers[2])  # type: ignore[attr-defined]
    assert command("remove", "other").returncode == 0
    with pytest.raises(KvrelayError, match="NOT_FOUND: adapter is 'other'; there are kept"):
        answer(adapter="other")
    known = {value.key: (value.value, value.source) for value in client.spec().values}
    assert known["router.adapters"] == ({"kept": str(kept)}, "kvrelay adapter")


def test_a_killed_decode_worker_costs_no_token_and_comes_back(cluster: Running, client: Client) -> None:
    expected = [client.generate(f"prompt {i}", max_tokens=200, ignore_eos=True, temperature=0.0) for i in range(4)]
    victims = cluster.actors("DecodeActor")
    begun = threading.Barrier(5)

    def stream(i: int) -> tuple[int, ...]:
        with client.stream(f"prompt {i}", max_tokens=200, ignore_eos=True, temperature=0.0) as answer:
            for n, _ in enumerate(answer):
                if n == 3:
                    begun.wait(timeout=60)
            return tuple(answer.completion().token_ids)

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(stream, i) for i in range(4)]
        begun.wait(timeout=60)
        os.kill(min(victims), signal.SIGKILL)
        assert [future.result(timeout=120) for future in running] == [tuple(e.token_ids) for e in expected]
    until(lambda: len(cluster.actors("DecodeActor") - {min(victims)}) == 2, "Ray starts the decode worker again")
    until(lambda: all(w["state"] == "ready" for w in cluster.status()["workers"]), "the router reaches it")


def test_requests_wait_for_a_killed_prefill_worker_to_come_back(cluster: Running, client: Client) -> None:
    (victim,) = cluster.actors("PrefillActor")
    os.kill(victim, signal.SIGKILL)
    assert len(client.generate("again", max_tokens=4, ignore_eos=True).token_ids) == 4
    client.wait_ready(READY_TIMEOUT_S)
    assert cluster.actors("PrefillActor").isdisjoint({victim})


def test_a_killed_controller_costs_no_stream_and_finds_all_again(cluster: Running, client: Client) -> None:
    before = _losses(client)
    (victim,), (prefill,) = cluster.actors("Controller"), cluster.actors("PrefillActor")
    begun, enough = threading.Event(), threading.Event()

    def stream() -> list[int]:
        tokens: list[int] = []
        with client.stream("a long answer", max_tokens=6000, ignore_eos=True, temperature=0.0) as answer:
            for delta in answer:
                tokens += delta.token_ids
                begun.set()
                if enough.is_set():
                    break
        return tokens

    with ThreadPoolExecutor(1) as threads:
        streaming = threads.submit(stream)
        try:
            assert begun.wait(timeout=60)
            os.kill(victim, signal.SIGKILL)
            until(lambda: bool(cluster.actors("Controller") - {victim}), "Ray starts the controller again")
            os.kill(prefill, signal.SIGKILL)  # only the new controller can tell the router where the next one is
            until(lambda: bool(cluster.actors("PrefillActor") - {prefill}), "Ray starts the prefill worker again")
            client.wait_ready(READY_TIMEOUT_S)
        finally:
            enough.set()
        tokens = streaming.result(timeout=60)
    assert _losses(client) == before
    again = client.generate("a long answer", max_tokens=len(tokens), ignore_eos=True, temperature=0.0)
    assert tokens == list(again.token_ids)


def _losses(client: Client) -> dict[str, int]:
    """How often the router has lost each decode worker."""
    return {worker.name: worker.losses for worker in client.status().workers if worker.role == "decode"}


def test_stopped_processes_are_killed_and_come_back(cluster: Running, client: Client) -> None:
    """A stopped process ends for nothing but a SIGKILL. The controller goes first, with a worker and the router: a
    member that is left ends it, and only the next one can notice the others."""
    victims = [*cluster.actors("Controller"), *cluster.actors("RouterActor"), min(cluster.actors("DecodeActor"))]
    for victim in victims:
        os.kill(victim, signal.SIGSTOP)
    until(lambda: not any(psutil.pid_exists(victim) for victim in victims), "they are killed")
    with Client(cluster.endpoint, token=cluster.token) as again:
        again.wait_ready(READY_TIMEOUT_S)
        until(lambda: all(w.state == "ready" for w in again.status().workers), "the router reaches all again")
    assert len(cluster.actors("DecodeActor")) == 2


def test_a_killed_router_comes_back_at_its_address(cluster: Running, client: Client) -> None:
    (victim,), cluster_id, limits = cluster.actors("RouterActor"), client.status().cluster_id, client.status().limits
    assert re.fullmatch(r"[a-z0-9-]+-[0-9a-f]{8}", cluster_id)
    os.kill(victim, signal.SIGKILL)
    until(lambda: bool(cluster.actors("RouterActor") - {victim}), "Ray starts the router again")
    with Client(cluster.endpoint, token=cluster.token) as again:
        again.wait_ready(READY_TIMEOUT_S)
        assert len(again.generate("hello", max_tokens=4, ignore_eos=True).token_ids) == 4
        assert (again.status().cluster_id, again.status().limits) == (cluster_id, limits), "as it was told last"
    [base_url] = cluster.summary["http"]
    with OpenAI(base_url=f"{base_url}/v1", api_key=cluster.token, max_retries=0) as openai:
        assert [model.id for model in openai.models.list()] == ["tiny", "kept"]


def test_workers_are_forked_of_one_process_and_come_back_without_it(cluster: Running, client: Client) -> None:
    """After the others: who is forked of a process that is gone is nobody's child here."""
    (victim,) = cluster.actors("PrefillActor")
    server = psutil.Process(victim).parent()
    assert server is not None
    assert "cluster.deploy.forks.server" in server.cmdline()
    server.kill()
    os.kill(victim, signal.SIGKILL)
    assert len(client.generate("again", max_tokens=4, ignore_eos=True).token_ids) == 4
    (successor,) = cluster.actors("PrefillActor")
    assert psutil.Process(successor).ppid() != server.pid


def test_nothing_runs_that_serves_a_dashboard(cluster: Running) -> None:
    for helper in ("DashboardAgent", "RuntimeEnvAgent", "monitor.py", "dashboard.py"):
        assert not cluster.actors(helper)
    (raylet,) = (process for process in cluster.processes() if process.name() == "raylet")
    assert sum(idle_agent.__file__ in title(child) for child in raylet.children()) == 2, "what it has instead"


def test_a_stopped_gcs_stops_no_request_and_no_down(cluster: Running, client: Client) -> None:
    """The last one: the cluster is ended so, and nothing may be left of it."""
    (gcs,) = (process for process in cluster.processes() if process.name() == "gcs_server")
    gcs.send_signal(signal.SIGSTOP)
    assert len(client.generate("hello", max_tokens=4, ignore_eos=True).token_ids) == 4
