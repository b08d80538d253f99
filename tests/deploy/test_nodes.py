"""Who is to run where `up` does runs there, in a Ray of several nodes: two on this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.deploy.running import environment

PROGRAM = """
import logging
import ray
from ray.cluster_utils import Cluster
from cluster.deploy.launch import here

class Where:
    def node(self):
        return ray.get_runtime_context().get_node_id()

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
try:
    cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, logging_level=logging.CRITICAL)
    actors = [ray.remote(Where).options(num_cpus=0, **here()).remote() for _ in range(8)]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=60)
    print("elsewhere:", sum(node != ray.get_runtime_context().get_node_id() for node in nodes))
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def test_an_actor_that_asks_for_nothing_starts_where_up_runs(tmp_path: Path) -> None:
    """Also on a head without CPUs, as KubeRay's. A router that starts on another node cannot listen on its address."""
    variables = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment(tmp_path) | variables, capture_output=True, text=True, timeout=120)
    assert "elsewhere: 0" in done.stdout, done.stdout + done.stderr
