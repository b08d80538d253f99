"""The files of docs/deploy.md name what there is: specs that parse, ports, paths, flags, versions and times."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from cluster.spec.load import parse_spec
from cluster.spec.model import USUAL_HTTP_PORT, ClusterSpec, RouterSpec
from kvrelay.cli import main
from kvrelay.cli.console import USAGE

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
DOCKERFILE = (CONFIGS / "docker" / "Dockerfile").read_text()
UNIT = (CONFIGS / "systemd" / "kvrelay.service").read_text()
KUBERAY = list(yaml.safe_load_all((CONFIGS / "kuberay" / "kvrelay.yaml").read_text()))
GRACE_S = 90
HTTP_PORT, GRPC_PORT = USUAL_HTTP_PORT, RouterSpec().port


def of_kind(kind: str, name: str = "kvrelay") -> Mapping[str, Any]:
    (found,) = (each for each in KUBERAY if each["kind"] == kind and each["metadata"]["name"] == name)
    return dict(found)


def compose() -> Mapping[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CONFIGS / "docker" / "compose.yaml").read_text())
    return dict(loaded["services"]["kvrelay"])


def specs() -> Iterator[ClusterSpec]:
    yield parse_spec(yaml.safe_load((CONFIGS / "docker" / "cluster.yaml").read_text()))
    yield parse_spec(yaml.safe_load(of_kind("ConfigMap")["data"]["cluster.yaml"]))


def groups() -> dict[str, Mapping[str, Any]]:
    return {group["groupName"]: group for group in of_kind("RayCluster")["spec"]["workerGroupSpecs"]}


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.removeprefix(f"{name} ").strip() for line in joined.splitlines() if line.startswith(f"{name} ")]


def test_specs_listen_where_the_files_say() -> None:
    for spec in specs():
        assert (spec.router.host, spec.router.port, spec.router.http_port) == ("0.0.0.0", GRPC_PORT, HTTP_PORT)
        assert spec.router.auth
    assert instructions("EXPOSE") == [f"{HTTP_PORT} {GRPC_PORT}"]
    assert compose()["ports"] == [f"127.0.0.1:{port}:{port}" for port in (HTTP_PORT, GRPC_PORT)]
    assert f":{HTTP_PORT}/ready" in instructions("HEALTHCHECK")[0]
    assert {port["port"] for port in of_kind("Service")["spec"]["ports"]} == {HTTP_PORT, GRPC_PORT}


def test_the_image_has_every_package_of_the_wheel_and_only_what_is_there() -> None:
    copied = {word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]}
    assert {path for path in copied if not (ROOT / path).exists()} == set()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "bench"}
    assert packages | {"configs", "proto", "pyproject.toml", "README.md", "LICENSE"} <= copied
    ignored = (CONFIGS / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for path in copied:
        assert any(Path(path).match(pattern) or path.startswith(f"{pattern}/") for pattern in kept), path


def test_the_gpu_image_wants_what_the_extra_wants() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert {line.partition(">")[0] for line in extras} == {"accelerate", "flashinfer-python", "torch"}
    for extra in extras:
        assert extra.startswith("torch") or f"'{extra}'" in DOCKERFILE, "torch itself is in the package's own list"


def test_image_service_and_compose_run_as_nobody_else() -> None:
    assert instructions("USER") == ["10001"]
    assert "--uid 10001" in DOCKERFILE
    for pod in (of_kind("RayCluster")["spec"]["headGroupSpec"], *groups().values()):
        security = pod["template"]["spec"]["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001)
    assert "\nUser=kvrelay\n" in UNIT


def test_commands_and_their_paths_exist() -> None:
    main._register()
    group: Any = typer.main.get_command(main.app)
    calls = [shlex.split(line.partition("=")[2])[1:] for line in UNIT.splitlines() if line.startswith("ExecStart=")]
    calls.append(json.loads(instructions("CMD")[-1]))
    script = of_kind("RayCluster")["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["args"][0]
    calls.append(shlex.split(re.search(r"exec kvrelay (.*)", script)[1]))  # type: ignore[index]
    for name, *arguments in calls:
        flags = {flag for parameter in group.commands[name].params for flag in parameter.opts}
        assert {word for word in arguments if word.startswith("-")} <= flags
        assert "/etc/kvrelay/cluster.yaml" in arguments
    assert "COPY configs/docker/cluster.yaml /etc/kvrelay/cluster.yaml" in DOCKERFILE
    assert json.loads(instructions("ENTRYPOINT")[0])[-1] == "kvrelay"


def test_whoever_ends_it_waits_longer_than_it_drains() -> None:
    assert max(spec.router.drain_s for spec in specs()) < GRACE_S / 2
    assert compose()["stop_grace_period"] == f"{GRACE_S}s"
    assert f"\nTimeoutStopSec={GRACE_S}\n" in UNIT
    for pod in (of_kind("RayCluster")["spec"]["headGroupSpec"], *groups().values()):
        assert pod["template"]["spec"]["terminationGracePeriodSeconds"] == GRACE_S


def test_a_wrong_file_is_not_started_again() -> None:
    assert f"\nRestartPreventExitStatus={USAGE}\n" in UNIT


def test_in_kubernetes_every_role_finds_pods_with_room_for_it() -> None:
    spec = parse_spec(yaml.safe_load(of_kind("ConfigMap")["data"]["cluster.yaml"]))
    announced = {name: json.loads(json.loads(group["rayStartParams"]["resources"])) for name, group in groups().items()}
    assert list(spec.router.resources) == list(announced["router"])
    for pool in spec.pools:
        group = groups()[pool.role]
        assert announced[pool.role] == pool.resources
        assert group["replicas"] == pool.replicas
        cpu = group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"]
        assert cpu == group["rayStartParams"]["num-cpus"] == str(int(pool.num_cpus or 0)) == str(pool.threads)
    versions = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={of_kind('RayCluster')['spec']['rayVersion']}\n" in versions


def test_the_service_reaches_ready_routers_only() -> None:
    labels = groups()["router"]["template"]["metadata"]["labels"]
    for selector in (
        of_kind("Service")["spec"]["selector"],
        of_kind("NetworkPolicy", "kvrelay-clients")["spec"]["podSelector"]["matchLabels"],
        yaml.safe_load((CONFIGS / "kuberay" / "pod-monitor.yaml").read_text())["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    probe = groups()["router"]["template"]["spec"]["containers"][0]["readinessProbe"]["httpGet"]
    assert probe == {"path": "/ready", "port": "http"}
