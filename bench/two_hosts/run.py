"""Two hosts for real: `ray up` with configs/ray/local.yaml, prefill on one, decode on the other, then the cable cut.

    sudo .venv/bin/python bench/two_hosts/run.py          (root; apt install iproute2 openssh-server rsync)

It makes two network namespaces with an sshd each (hosts.sh), has `ray up` copy the checkout there, start Ray and the
cluster, sends requests through both hosts, pulls the decode host's cable under load, puts it back, and takes all of it
down again. Prints what it saw and writes bench/results/two_hosts.json. Exit code 1: something was not as promised.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from kvrelay.client.client import Client
from kvrelay.client.types import KvrelayError
from kvrelay.demo_model import make_demo_model

ROOT = Path(__file__).resolve().parents[2]
HOSTS = Path(__file__).with_name("hosts.sh")
RESULT = ROOT / "bench" / "results" / "two_hosts.json"
HEAD, WORKER = "10.233.0.1", "10.233.0.2"
ENDPOINT = f"{HEAD}:50051"
NUM_REQUESTS = 16
TOKEN = secrets.token_hex(32)
SHORT_CUT_S = 3.0  # Ray does not notice: the same worker is there when the cable is back
LONG_CUT_S = 20.0  # Ray gives the host up after about 10 s; `ray up`'s monitor starts it anew, and Ray its worker
REPLACED_TIMEOUT_S = 180.0


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--keep", action="store_true", help="leave the hosts up, to look around")
    keep = arguments.parse_args().keep
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the finally below
    directory = Path(tempfile.mkdtemp(prefix="kvrelay-hosts-"))
    env = _environment(directory)
    config = _write_config(directory)
    result: dict[str, Any] = {}
    try:
        _hosts("up", directory)
        result["ray_up_s"] = _timed(lambda: _run(["ray", "up", "-y", "--no-config-cache", str(config)], env))
        result |= _try_it(directory)
        _ssh(directory, 1, "kvrelay down two-hosts")
        result["ray_down_s"] = _timed(lambda: _run(["ray", "down", "-y", str(config)], env))
    finally:
        if keep:
            print(f"the hosts stay: {HOSTS} ssh {directory} 1 COMMAND; end them with {HOSTS} down {directory}")
        else:
            _hosts("down", directory)
            shutil.rmtree(directory)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    sys.exit(0 if all(result["promises"].values()) else 1)


# The cluster -----------------------------------------------------------------------------------------------------


def _write_config(directory: Path) -> Path:
    """The shipped file, with this machine's addresses, key and model, and this virtual environment for both hosts."""
    config = yaml.safe_load((ROOT / "configs" / "ray" / "local.yaml").read_text())
    model = make_demo_model(directory / "model")
    token = directory / "auth_token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    config["provider"] |= {"head_ip": HEAD, "worker_ips": [WORKER]}
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(directory / "key")}
    config["file_mounts"] = {"~/kvrelay": str(ROOT), "~/.ray/auth_token": str(token)}
    config["setup_commands"][0] = f"ln -sfn {ROOT / '.venv'} ~/kvrelay/.venv"
    config["head_start_ray_commands"] = [
        command.replace("~/model", str(model)).replace("kvrelay up", f"KVRELAY_TOKEN={TOKEN} kvrelay up")
        for command in config["head_start_ray_commands"]
    ]
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _environment(directory: Path) -> dict[str, str]:
    """Of `ray up` here: its own home, so that nothing of this machine's user is read or written."""
    home = directory / "home"
    home.mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ray = {"RAY_UP_enable_autoscaler_v2": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    return os.environ | ray | {"PATH": path, "HOME": str(home)}


# What is tried ---------------------------------------------------------------------------------------------------


def _try_it(directory: Path) -> dict[str, Any]:
    with Client(ENDPOINT, token=TOKEN) as client:
        client.wait_ready(60)
        addresses = {worker.name: worker.address for worker in client.status().workers}
        served = _serve(client)
        cut = _cut_and_mend(client, directory, SHORT_CUT_S)
        after = _serve(client)
        long_cut = _cut_and_mend(client, directory, LONG_CUT_S)
        long_cut["replaced_after_mend_s"] = _timed(lambda: _wait_replaced(client, addresses["decode-0"]))
        after_long = _serve(client)
    promises = {
        "prefill and decode are on two hosts": addresses["prefill-0"].startswith(f"{HEAD}:")
        and addresses["decode-0"].startswith(f"{WORKER}:"),
        "every handoff has a good receipt": served["good_receipts"] == NUM_REQUESTS,
        "a request under way fails with UNAVAILABLE": cut["stream_code"] == "UNAVAILABLE",
        "within three seconds of the cut": cut["stream_failed_s"] < 3.0,
        "a new request is refused at once": cut["refused_code"] == "UNAVAILABLE" and cut["refused_s"] < 0.5,
        "it serves again when the cable is back": after["good_receipts"] == NUM_REQUESTS,
        "and after a cut that made Ray give the host up": after_long["good_receipts"] == NUM_REQUESTS,
    }
    return {
        "workers": addresses,
        "served": served,
        "cut": cut,
        "served_after_cut": after,
        "long_cut": long_cut,
        "served_after_long_cut": after_long,
        "promises": promises,
    }


def _serve(client: Client) -> dict[str, Any]:
    pages = num_bytes = good = 0
    transports = set()
    began = time.monotonic()
    for i in range(NUM_REQUESTS):
        answer = client.generate(f"request {i}: " + "many words " * 40, max_tokens=16, ignore_eos=True)
        assert answer.receipt is not None
        good += answer.receipt.checksums_ok and len(answer.token_ids) == 16
        pages, num_bytes = pages + answer.receipt.pages, num_bytes + answer.receipt.bytes
        transports.add(answer.receipt.transport)
    return {
        "requests": NUM_REQUESTS,
        "good_receipts": good,
        "pages": pages,
        "bytes": num_bytes,
        "transports": sorted(transports),
        "seconds": round(time.monotonic() - began, 3),
    }


def _cut_and_mend(client: Client, directory: Path, cut_s: float) -> dict[str, Any]:
    stream = client.stream("until the cable goes", max_tokens=4000, ignore_eos=True)
    for n, _ in enumerate(stream):
        if n == 8:
            break
    _hosts("cut", directory, "2")
    cut_at = time.monotonic()
    stream_code, stream_failed_s = _failure(lambda: [None for _ in stream])
    refused_code, refused_s = _failure(lambda: client.generate("is anybody there", max_tokens=4))
    time.sleep(max(0.0, cut_s - (time.monotonic() - cut_at)))
    _hosts("mend", directory, "2")
    back_s = _timed(lambda: client.wait_ready(180))
    return {
        "stream_code": stream_code,
        "stream_failed_s": stream_failed_s,
        "refused_code": refused_code,
        "refused_s": refused_s,
        "cut_for_s": cut_s,
        "serving_after_mend_s": back_s,
    }


def _wait_replaced(client: Client, address: str) -> None:
    """Until another process than the one at `address` decodes. The old one may serve on for a while: it is well, only
    its Ray is not."""
    deadline = time.monotonic() + REPLACED_TIMEOUT_S
    while time.monotonic() < deadline:
        (decode,) = [worker for worker in client.status().workers if worker.name == "decode-0"]
        if decode.address != address and decode.state == "ready":
            return
        time.sleep(0.5)
    raise SystemExit(f"decode-0 was not started anew within {REPLACED_TIMEOUT_S:g} s of the mend")


def _failure(call: Callable[[], object]) -> tuple[str, float]:
    """The code it failed with and the seconds that took; the code is empty if it did not fail."""
    began = time.monotonic()
    try:
        call()
    except KvrelayError as error:
        return error.code, round(time.monotonic() - began, 3)
    return "", round(time.monotonic() - began, 3)


# Commands --------------------------------------------------------------------------------------------------------


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return round(time.monotonic() - began, 3)


def _run(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    print("+", " ".join(command), flush=True)
    subprocess.run(command, env=env, check=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def _hosts(command: str, directory: Path, *arguments: str) -> None:
    _run([str(HOSTS), command, str(directory), *arguments])


def _ssh(directory: Path, host: int, command: str) -> None:
    _hosts("ssh", directory, str(host), f"source ~/.bashrc; {command}")


if __name__ == "__main__":
    main()
