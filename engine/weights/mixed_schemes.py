"""Checkpoints of compressed-tensors whose layers are quantised in several ways, each group of them by a scheme.

transformers reads every layer, experts apart, by the first group's scheme: what has 4 bits is unpacked as if it had 8,
and where shapes happen to fit nothing fails. Here each is read by the scheme that compressed-tensors itself gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel


@contextmanager
def each_by_its_own() -> Iterator[None]:
    """While a model is loaded."""
    from transformers.integrations import compressed_tensors

    op: Any = getattr(compressed_tensors, "CompressedTensorsDequantize", None)
    if op is None or not hasattr(compressed_tensors, "get_dense_scheme"):  # another version's, which goes by layers
        yield
        return
    own = op.convert

    def by_its_scheme(self: Any, input_dict: dict[str, Any], *args: Any, **more: Any) -> Any:
        if self.scheme is None and "weight_scale" in input_dict:  # of experts the names are longer
            config = self.hf_quantizer.compressor.quantization_config
            self = op(self.hf_quantizer, _scheme_of(more["full_layer_name"], more["model"], config))
        return own(self, input_dict, *args, **more)

    op.convert = by_its_scheme
    try:
        yield
    finally:
        op.convert = own


def _scheme_of(weight: str, model: PreTrainedModel, config: Any) -> Any:
    """None: no group has this weight's layer."""
    from compressed_tensors.utils.match import match_targets

    name = weight.rpartition(".")[0]
    schemes = {target: group for group in config.config_groups.values() for target in group.targets}
    return next((schemes[target] for target in match_targets(name, model.get_submodule(name), schemes)), None)
