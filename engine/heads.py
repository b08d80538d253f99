"""MedusaHeads guesses the tokens that follow by heads that a model was given (Medusa: Cai et al., arXiv 2401.10774), in
place of a draft model: from what the step before left of a request's last row.

    hidden state of a row, position t --> head i: residual blocks, a head of its own --> a guess at token t + 1 + i

It reads the files of the paper's code: `config.json` with `medusa_num_heads` and `medusa_num_layers`, and
`medusa_lm_head.safetensors` (or `model.safetensors`) with `I.J.linear.weight`, `I.J.linear.bias` for block J of head I,
and `I.L.weight` behind them. Guesses are drawn as the target's tokens are, by the same SampleSpecs, so that they agree
at any temperature where the heads do. Of a request from elsewhere nothing is known before its first step here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.nn.functional import linear, silu

from engine.drafting import Guesser
from engine.loading.load import LoadedModel
from engine.pending import WantedRows
from engine.sampling.host import sampled_tokens
from engine.types import Chunk, Step
from engine.weights.files import CONFIG

FILES = ("medusa_lm_head.safetensors", "model.safetensors")


@dataclass(frozen=True, slots=True)
class Head:
    blocks: tuple[tuple[torch.Tensor, torch.Tensor], ...]  # weight [hidden, hidden], bias [hidden]
    vocab: torch.Tensor  # [vocab, hidden]

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        for weight, bias in self.blocks:
            hidden_BH = hidden_BH + silu(linear(hidden_BH, weight, bias))
        return linear(hidden_BH, self.vocab)


def has_heads(directory: str) -> bool:
    """Whether that is a directory of heads, and no model."""
    path = Path(directory).expanduser() / CONFIG
    return path.is_file() and "medusa_num_heads" in _config(path)


def _config(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def read_heads(directory: str, hidden: int, vocab: int, dtype: torch.dtype, device: torch.device) -> tuple[Head, ...]:
    """Raises ValueError where they are not whole, or not of such a model."""
    folder = Path(directory).expanduser()
    config = _config(folder / CONFIG)
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise ValueError(f"speculative_model is {directory!r}, which has heads and no {' or '.join(FILES)}; give both")
    layers = int(config.get("medusa_num_layers", 1))
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            return tuple(_head(file, i, layers, hidden, vocab, dtype) for i in range(int(config["medusa_num_heads"])))
    except Exception as error:
        raise ValueError(f"speculative_model is {directory!r}, and its heads cannot be read: {error}") from None


def _head(file: Any, number: int, layers: int, hidden: int, vocab: int, dtype: torch.dtype) -> Head:
    def read(name: str, *shape: int) -> torch.Tensor:
        tensor: torch.Tensor = file.get_tensor(f"{number}.{name}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{number}.{name} is {list(tensor.shape)}, and the model wants {list(shape)}")
        return tensor.to(dtype)

    blocks = tuple(
        (read(f"{j}.linear.weight", hidden, hidden), read(f"{j}.linear.bias", hidden)) for j in range(layers)
    )
    return Head(blocks, read(f"{layers}.weight", vocab, hidden))


@dataclass(slots=True)
class _Seen:
    """Rows of one request in the last step, of positions from `first` on."""

    first: int
    rows_TH: torch.Tensor


class MedusaHeads(Guesser):
    NAME = "the heads"

    def __init__(self, heads: Sequence[Head]) -> None:
        super().__init__()
        self.most = len(heads)
        self._heads = heads
        self._rows_TH: torch.Tensor | None = None  # those of the step under way whose logits are wanted
        self._seen: dict[str, _Seen] = {}

    @classmethod
    def of(cls, directory: str, loaded: LoadedModel) -> MedusaHeads:
        """Those of a model that is loaded, which is watched from now on. Raises ValueError."""
        if loaded.model.device.type != "cpu":
            raise ValueError(
                f"speculative_model is {directory!r}, whose heads run on CPUs only; give a draft model on a GPU"
            )
        module = loaded.model.module
        output = module.get_output_embeddings()
        hidden = module.config.get_text_config().hidden_size
        dtype = getattr(torch, loaded.info.dtype)
        made = cls(read_heads(directory, hidden, loaded.info.vocab_size, dtype, loaded.model.device))
        output.register_forward_pre_hook(made._see)
        return made

    def _see(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._rows_TH = inputs[0].reshape(-1, inputs[0].shape[-1]).clone()  # kernels use their buffers again

    def _guess(self, asked: Sequence[Chunk]) -> None:
        known = []
        for chunk in asked:
            assert chunk.draft is not None
            chunk.draft.guesses, chunk.draft.num_read = [], 0
            if (row_H := self._row_before(chunk)) is not None:
                known.append((chunk, chunk.draft, row_H))
                chunk.draft.num_read = 1
        most = max((min(draft.num_wanted, len(self._heads)) for _, draft, _ in known), default=0)
        for depth in range(most):
            began_s = time.perf_counter()
            going = [each for each in known if len(each[1].guesses) == depth < each[1].num_wanted]
            if not going:
                break
            logits_BV = self._heads[depth].logits(torch.stack([row_H for _, _, row_H in going])).float().cpu()
            specs = [draft.spec(chunk.start + 1 + depth, draft.guesses) for chunk, draft, _ in going]
            drawn = sampled_tokens(logits_BV, [chunk.request_id for chunk, _, _ in going], specs)
            for (_, draft, _), token in zip(going, drawn, strict=True):
                if not token.error:
                    draft.guesses.append(token.token_id)
            self._note_pass(began_s)

    def _row_before(self, chunk: Chunk) -> torch.Tensor | None:
        """Of the token before the chunk's: which drew that."""
        seen = self._seen.get(chunk.request_id)
        if seen is None or not 0 <= (at := chunk.start - 1 - seen.first) < len(seen.rows_TH):
            return None
        return seen.rows_TH[at]

    def end(self, step: Step) -> None:
        """That step was run: keep what its rows were."""
        rows_TH, self._rows_TH, self._seen = self._rows_TH, None, {}
        if rows_TH is None:
            return
        wanted, first = WantedRows.of(step.chunks).rows, 0
        if len(rows_TH) != len(wanted):  # an architecture that makes logits of every row
            rows_TH = rows_TH[wanted]
        for chunk in step.chunks:
            count = len(chunk.scores) + (chunk.sample is not None)
            if chunk.sample is not None and len(chunk.scores) in (0, len(chunk.token_ids) - 1):
                begin = chunk.start + len(chunk.token_ids) - count
                self._seen[chunk.request_id] = _Seen(begin, rows_TH[first : first + count])
            first += count
