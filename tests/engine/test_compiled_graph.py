"""torch.compile sees one graph of a served model: paged attention is one operator, its metadata no break."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.attention import hooks, op
from engine.attention.base import build_meta
from engine.attention.forward_pass import ForwardPass
from engine.attention.torch_backend import TorchBackend
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory
from engine.types import Chunk
from engine.weights import config as config_of
from engine.weights import loader
from tests.engine.test_engine import save

CHUNKS = (
    [Chunk(request_id="a", token_ids=range(3, 12), start=0, block_table=[4, 1])],
    [
        Chunk(request_id="a", token_ids=[5], start=9, block_table=[4, 1]),
        Chunk(request_id="b", token_ids=range(20, 33), start=0, block_table=[7]),
    ],
)


@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen3Config"])
def test_one_graph_no_breaks_and_the_same_logits(tmp_path: Path, config: str) -> None:
    directory = save(tmp_path, config)
    model = loader.load_model(directory, config_of.load_config(directory), torch.float32, torch.device("cpu"))
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        probe = loader.probe_model(model, 256)
        loader.set_attention(model, hooks.SERVE)
        layers = probe.shapes
        torch._dynamo.reset()
        compiled = torch.compile(loader.run_packed, backend=count, dynamic=True, fullgraph=True)
        by_way = []
        for run in (loader.run_packed, compiled):
            memory = KvMemory(KvLayout(16, "float32", layers, 10))
            logits = []
            for chunks in CHUNKS:
                state = ForwardPass(build_meta(chunks, 16), memory, TorchBackend(), probe, None)
                with op.running(state):
                    logits.append(run(model, state.meta.token_ids, state.meta.positions, None, state))
            by_way.append(torch.cat(logits))
    torch.testing.assert_close(*by_way)
    calls = [node for node in graphs[0].graph.nodes if "paged_attention" in str(node.target)]
    assert len(calls) == len(layers)
