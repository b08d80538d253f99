"""Checkpoints that bring quantised weights, made by the formats' own libraries, are served as their weights in full."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Gemma3Config, LlamaConfig, LlamaForCausalLM

from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.options import EngineOptions
from engine.types import Chunk
from engine.weights.quantised import check_read
from kvrelay.demo_model import train_tokenizer
from tests.zoo import ZOO, make_tiny_model

GROUP = 32
W4 = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP)
W8 = QuantizationArgs(num_bits=8, type="int", strategy="group", group_size=GROUP)
KINDS = {
    "W8A8": ({"Linear": QuantizationArgs(num_bits=8, type="int", strategy="channel")}, "int-quantized"),
    "W4A16": ({"Linear": W4}, "pack-quantized"),
    "FP8": ({"Linear": QuantizationArgs(num_bits=8, type="float", strategy="channel")}, "float-quantized"),
    "W8 and W4": ({"re:.*mlp.*proj": W8, "re:.*attn.*proj": W4}, "pack-quantized"),
}
TOKENS = list(range(5, 45))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def quantised(model: Path, kind: str, directory: Path) -> tuple[Path, torch.Tensor]:
    """The checkpoint, and the logits of its weights, by the library's own arithmetic."""
    groups, layout = KINDS[kind]
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = QuantizationConfig(
        config_groups={
            target: QuantizationScheme(targets=[target], weights=args, format=layout) for target, args in groups.items()
        },
        ignore=["lm_head"],
        format=layout,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    apply_quantization_config(made, config)
    for module in made.modules():
        if hasattr(module, "weight_scale"):
            args = module.quantization_scheme.weights
            each = module.weight.detach().float().view(module.weight.shape[0], -1, GROUP).abs().amax(-1)
            most = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1) - 1
            scales = each if args.group_size else each.amax(-1, keepdim=True)
            module.weight_scale.data = (scales / most).to(module.weight_scale.dtype)
    compressor = ModelCompressor.from_pretrained_model(made, layout)
    compressor.compress_model(made)
    made.save_pretrained(directory)
    compressor.update_config(directory)
    compressor.decompress_model(made)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory)
    with torch.inference_mode():
        return directory, made(torch.tensor([TOKENS])).logits[0]


def logits(directory: Path, dtype: str = "float32", **options: object) -> torch.Tensor:
    engine = Engine.load(EngineOptions(model=str(directory), dtype=dtype, num_pages=16, threads=1, **options))  # type: ignore[arg-type]
    with torch.inference_mode():
        chunk = Chunk(request_id="r", token_ids=TOKENS, start=0, block_table=range(16))
        return engine.model.forward(engine.pages, [chunk])[: len(TOKENS)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_compressed_tensors_is_served_as_its_library_reads_it(
    kind: str, model: Path, tmp_path: Path
) -> None:
    directory, wanted = quantised(model, kind, tmp_path)
    check_differs_by_rounding_alone(wanted, directory, model)
    if kind == "W8A8":
        again = logits(directory, "bfloat16", quantization="int8").float()
        assert float((again - wanted).norm() / wanted.norm()) < 0.05


def test_int8_of_a_model_with_experts_is_refused_by_its_format(tmp_path: Path) -> None:
    model = make_tiny_model("mixtral", tmp_path / "model")
    directory, _ = quantised(model, "W8A8", tmp_path / "made")
    with pytest.raises(UnsupportedModel, match=r"format of quantization_config is int-quantized, which .*; give one"):
        logits(directory)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_checkpoint_of_bitsandbytes(bits: int, model: Path, tmp_path: Path) -> None:
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(model, quantization_config=config).save_pretrained(tmp_path)
    check_is_read_as_by_its_library(model, tmp_path)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_checkpoint_of_gptqmodel(method: str, tmp_path: Path) -> None:
    """Run by `python -m bench.formats`, in an environment that has the library."""
    gptqmodel = pytest.importorskip("gptqmodel")
    kinds = pytest.importorskip("gptqmodel.quantization.config")
    model, made = wider_model(tmp_path / "model"), tmp_path / "made"
    how = gptqmodel.QuantizeConfig(
        bits=4,
        group_size=GROUP,
        method=kinds.METHOD(method),
        format=kinds.FORMAT("gemm" if method == "awq" else "gptq"),
    )
    quantised = gptqmodel.GPTQModel.load(str(model), how, device="cpu")
    quantised.quantize(["a text by which it is seen what matters, over and over " * 20] * 16, batch_size=1)
    quantised.save(str(made))
    check_is_read_as_by_its_library(model, made)


@pytest.mark.parametrize(("method", "key"), [("gptq", "modules_in_block_to_quantize"), ("awq", "modules_to_not_conv")])
def test_a_layer_in_full_width_that_was_wanted_quantised_is_told_with_the_key_that_says_so(
    method: str, key: str, model: Path
) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded.model.layers[0].mlp.down_proj = torch.nn.Module()
    loaded.model.layers[0].mlp.down_proj.register_buffer("qweight", torch.zeros(4, 4))
    why = rf"has model\.layers\.0\.mlp\.down_proj\.weight in full width, of which .*; give there {key}"
    with pytest.raises(UnsupportedModel, match=why):
        check_read(str(model), loaded, ["model.layers.0.mlp.down_proj.weight"], method)


def wider_model(directory: Path) -> Path:
    """GPTQModel's layers are no narrower than 128."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=2, **sizes)).save_pretrained(directory)
    train_tokenizer(512).save_pretrained(directory)
    return directory


def check_is_read_as_by_its_library(model: Path, made: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, made)
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(made, device_map="cpu", dtype=torch.float32)
        if theirs.quantization_method == "bitsandbytes":  # of 8 bits, or of 4 on some CPUs, it rounds what goes in, too
            theirs = theirs.dequantize()
        wanted = theirs(torch.tensor([TOKENS])).logits[0].float()
    check_differs_by_rounding_alone(wanted, made, model)


def check_differs_by_rounding_alone(wanted: torch.Tensor, made: Path, model: Path) -> None:
    error, distance = (float((logits(each) - wanted).norm() / wanted.norm()) for each in (made, model))
    assert error < 0.001 < distance, "of rounding alone; the weights before they were quantised are further off"


@pytest.mark.parametrize("block", [32, 24], ids=["whole blocks", "blocks that are cut off"])
def test_fine_grained_fp8_is_read_by_blocks_of_the_size_that_its_config_says(
    block: int, model: Path, tmp_path: Path
) -> None:
    """transformers takes a block for as large as the weight divided by the number of scales."""
    weights, widened = load_file(model / "model.safetensors"), dict[str, torch.Tensor]()
    packed = dict(weights)
    for name, weight in weights.items():
        if "_proj" in name:
            rows, columns = weight.shape
            scales = torch.zeros(-(-rows // block), -(-columns // block))
            for i, part in enumerate(weight.split(block)):
                for j, each in enumerate(part.split(block, dim=1)):
                    scales[i, j] = each.abs().max() / 448
            spread = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:rows, :columns]
            packed[name] = (weight / spread).to(torch.float8_e4m3fn)
            packed[f"{name}_scale_inv"], widened[name] = scales, packed[name].float() * spread
    directories = []
    for kind, tensors in (("packed", packed), ("widened", weights | widened)):
        directories.append(shutil.copytree(model, tmp_path / kind))
        save_file(tensors, directories[-1] / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": ["lm_head"],
    }
    (directories[0] / "config.json").write_text(json.dumps(config))
    check_differs_by_rounding_alone(logits(directories[1]), directories[0], model)


def edited(model: Path, directory: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]]) -> Path:
    """A copy, with what `change` has in the place of each weight."""
    shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    changed = {key: tensor for name, weight in weights.items() for key, tensor in change(name, weight).items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def in_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().max() / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def in_int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1) / 127
    return {name: (weight / scale[:, None]).round().to(torch.int8), name.replace("weight", "SCB"): scale}


def packed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name.replace("weight", "qweight"): torch.zeros(weight.shape[1] // 8, weight.shape[0], dtype=torch.int32)}


def in_mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """As gpt-oss has it: 16 bytes for 32 numbers, and an exponent."""
    if name.endswith("_bias"):
        return {name: weight}
    shape = (*weight.shape[:-2], weight.shape[-1], weight.shape[-2] // 32)
    made = {"blocks": torch.zeros(*shape, 16, dtype=torch.uint8), "scales": torch.zeros(shape, dtype=torch.uint8)}
    return {f"{name}_{part}": tensor for part, tensor in made.items()}


@pytest.mark.parametrize(
    ("kind", "part", "change", "first"),
    [
        ("llama", "down_proj", in_fp8, "model.layers.0.mlp.down_proj.weight_scale"),
        ("llama", "down_proj", in_int8, "model.layers.0.mlp.down_proj.SCB"),
        ("llama", "down_proj", packed, "model.layers.0.mlp.down_proj.qweight"),
        ("gpt_oss", ".down_proj", in_mxfp4, "model.layers.0.mlp.experts.down_proj_scales"),
        ("mixtral", ".w1.", in_fp8, "model.layers.0.mlp.experts.0.w1.weight_scale"),
    ],
)
def test_one_whose_config_says_nothing_of_it_is_refused(
    kind: str, part: str, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], first: str, tmp_path: Path
) -> None:
    model = make_tiny_model(kind, tmp_path / "model")
    directory = edited(model, tmp_path / "changed", lambda name, w: change(name, w) if part in name else {name: w})
    with pytest.raises(UnsupportedModel, match=rf"has {first}, of .*, of which quantization_config in config\.json"):
        logits(directory)


def test_scales_that_a_method_does_not_read_are_told_with_its_name(model: Path, tmp_path: Path) -> None:
    """AutoFP8's, say, which calls itself fp8 and its scales otherwise."""
    directory = edited(model, tmp_path / "made", lambda name, w: in_fp8(name, w) if "down_proj" in name else {name: w})
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    (directory / "config.json").write_text(json.dumps(config))
    why = r"weight_scale, of a quantised weight, which transformers does not read where quant_method .* is fp8; give"
    with pytest.raises(UnsupportedModel, match=why):
        logits(directory)


@pytest.mark.parametrize(
    ("kind", "part", "dtype", "first"),
    [
        ("llama", "down_proj", torch.int8, "model.layers.0.mlp.down_proj.weight"),
        ("mixtral", ".w1.", torch.uint8, "model.layers.0.block_sparse_moe.experts.0.w1.weight"),
        ("gpt_oss", ".down_proj", torch.int32, "model.layers.0.mlp.experts.down_proj"),
    ],
)
def test_whole_numbers_without_a_scale_are_no_weights(
    kind: str, part: str, dtype: torch.dtype, first: str, tmp_path: Path
) -> None:
    model = make_tiny_model(kind, tmp_path / "model")
    directory = edited(
        model,
        tmp_path / "changed",
        lambda name, w: {name: (w * 100).to(dtype) if part in name else w, f"{name}.position_ids": torch.arange(2)},
    )
    with pytest.raises(UnsupportedModel, match=rf"has {first} in whole numbers, of a quantised weight, of which"):
        logits(directory)


def test_scales_of_keys_and_of_layers_that_are_left_out_are_passed_over(model: Path, tmp_path: Path) -> None:
    def change(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = ("k_scale", "input_scale") if "k_proj" in name else ()
        also = {name.replace("weight", scale): torch.ones(()) for scale in scales}
        left_out = name.replace("layers.0", "layers.7")
        return {name: weight, **also} | (in_fp8(left_out, weight) if left_out != name else {})

    assert torch.equal(logits(edited(model, tmp_path / "changed", change)), logits(model))


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (
            {"quant_method": "higgs", "bits": 4},
            "is quantised by higgs, which .* or by one of awq, bitsandbytes, compressed-tensors, fp8, gptq, mxfp4$",
        ),
        ({"bits": 4}, r"quantization_config in config\.json of model .* names no quant_method; give one of awq, "),
        ("none", r"quantization_config in config\.json of model .* is 'none'; it is an object, and a model that"),
        ([], r"quantization_config in config\.json of model .* is \[\]; it is an object, and a model that"),
    ],
)
def test_one_that_cannot_be_had_in_full_is_refused(told: object, why: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": told}))
    with pytest.raises(UnsupportedModel, match=why):
        logits(tmp_path)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"quant_method": "higgs", "bits": 4}, "is quantised by higgs, which cannot be loaded in full width; give one"),
        ("none", r"quantization_config in config\.json of model .* is 'none'; it is an object, and a model that"),
    ],
)
def test_one_that_the_config_of_the_text_tells_of_is_looked_at(told: object, why: str, tmp_path: Path) -> None:
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=ZOO["gemma3_text"]().to_dict(), vision_config=vision).to_dict()
    config["text_config"]["quantization_config"] = told
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=why):
        logits(tmp_path)
