"""What sleeps in the place of Ray's agents ends with who started it, however that ended."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from cluster.deploy.own_ray import idle_agent
from cluster.deploy.own_ray.lean import IDLE_AGENT

pytestmark = pytest.mark.unit

STARTS_ONE = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"


def test_it_ends_when_its_raylet_was_killed() -> None:
    command = [sys.executable, "-c", STARTS_ONE, *IDLE_AGENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as raylet:
        assert raylet.stdout is not None
        agent = psutil.Process(int(raylet.stdout.readline()))
        with pytest.raises(psutil.TimeoutExpired):
            agent.wait(1.5 * idle_agent.LOOK_S)
        raylet.kill()
    agent.wait(10 * idle_agent.LOOK_S)
