"""Hardware files: what they must hold, what of them is refused in one sentence, and that each figure has a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.catalogs.base import PlanError
from placement.latency.hardware import known_hardware, load_hardware, parse_hardware
from placement.named_files import CONFIGS

pytestmark = pytest.mark.unit


def data(name: str = "h100-sxm") -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CONFIGS / "hardware" / f"{name}.yaml").read_text())
    return found


def changed(path: str, value: object) -> dict[str, Any]:
    """The H100's file with one key set, or taken out (None)."""
    given = data()
    *parents, last = path.split(".")
    at = given
    for parent in parents:
        at = at[parent]
    at[last] = value
    if value is None:
        del at[last]
    return given


@pytest.mark.parametrize("name", known_hardware())
def test_each_file_says_where_its_figures_come_from(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.cost().watts_per_gpu > 0
    assert hardware.flops_for("bfloat16") > 0
    text = (CONFIGS / "hardware" / f"{name}.yaml").read_text().splitlines()
    keys = ("memory", "node_link", "cross_link", "usd", "watts")
    for line in (line for line in text if line.startswith(keys)):
        assert "#" in line, f"{name}: {line} has no source"


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("memory_bytes", None, "memory_bytes is missing; give it a value"),
        ("memory_bytes_per_s", -1, "memory_bytes_per_s is -1; give a number above 0"),
        ("memory_bytes", 80, "memory_bytes is 80"),
        ("memory_bytes", True, "give bytes, as 80.0e9, and not GB"),
        (
            "memory_bytes_per_s",
            3350,
            "memory_bytes_per_s is 3350; no machine has that; give bytes, as 80.0e9, and not GB",
        ),
        ("flops", {"bfloat16": 989}, "no machine has that; give FLOP/s, as 989.0e12, and not TFLOP/s"),
        ("memory_bytes_per_s", "fast", "memory_bytes_per_s is 'fast'; give a number"),
        ("memory_byte", 80e9, "memory_byte is not a known key; did you mean memory_bytes"),
        ("efficiency.link", None, "efficiency.link is missing; give it a value"),
        ("efficiency.link.value", 1.5, "efficiency.link.value is 1.5; give a number of 1.0 or less"),
        ("efficiency.link.source", None, "efficiency.link.source is missing; give it a value"),
        ("overhead.hop_s.value", -1e-6, "overhead.hop_s.value is -1e-06; give a number of 0.0 or more"),
        ("flops.bfloat17", 1e12, "'bfloat17' is no dtype; give some of float32"),
        ("flops", {"float8": 1e15}, "give FLOP/s for at least one of bfloat16"),
        ("gpus_per_node", True, "gpus_per_node is True; give a number"),
        ("efficiency.link.value", True, "efficiency.link.value is True; give a number"),
        ("gpus_per_node", 0, "gpus_per_node is 0; give a number of 1 or more"),
        ("error.value", float("nan"), "error.value is nan"),
    ],
)
def test_a_mistake_is_one_sentence_with_file_key_value_and_mend(path: str, value: object, sentence: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_hardware(changed(path, value), "my.yaml")
    assert str(caught.value).startswith("my.yaml: ")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_a_number_is_not_known() -> None:
    with pytest.raises(PlanError, match=r"^hardware: 8 is not a known key"):
        parse_hardware({**data(), 8: 80e9})


def test_what_is_no_hardware_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "torn.yaml").write_text("name: [\n")
    h100 = (CONFIGS / "hardware" / "h100-sxm.yaml").read_text()
    (tmp_path / "base-60.yaml").write_text(h100.replace("usd_per_gpu_hour: 2.95", "usd_per_gpu_hour: 1:30"))
    for given, sentence in (
        ("h300", "hardware is 'h300', which is no file; give one, or a name of a100-40g-sxm"),
        (tmp_path / "list.yaml", "give keys and values such as memory_bytes"),
        (tmp_path / "torn.yaml", "is not YAML: line"),
        (tmp_path / "base-60.yaml", "usd_per_gpu_hour is '1:30'; give a number"),
    ):
        with pytest.raises(PlanError, match=sentence):
            load_hardware(given)


def test_numbers_may_be_written_as_people_write_them(tmp_path: Path) -> None:
    text = (CONFIGS / "hardware" / "h100-sxm.yaml").read_text().replace("3.35e+12", "3.35e12")
    (tmp_path / "mine.yaml").write_text(text)
    assert load_hardware(tmp_path / "mine.yaml").memory_bytes_per_s == 3.35e12


def test_a_dtype_that_it_lacks_is_computed_in_a_wider_one() -> None:
    a100, h100 = load_hardware("a100-80g-sxm"), load_hardware("h100-sxm")
    assert a100.flops_for("float8") == a100.flops["bfloat16"]
    assert h100.flops_for("float8") == 2 * h100.flops["bfloat16"] + 1e12


def test_float32_is_never_computed_in_a_narrower_dtype() -> None:
    given = data()
    assert parse_hardware(given).flops_for("float32") < 0.1 * parse_hardware(given).flops_for("bfloat16")
    del given["flops"]["float32"]
    with pytest.raises(PlanError, match=r"has no FLOP/s for float32; give flops.float32 in its file"):
        parse_hardware(given).flops_for("float32")


def test_only_power_caps_that_the_file_knows_can_be_had() -> None:
    h100 = load_hardware("h100-sxm")
    assert (h100.cap(0.7).prefill_time, h100.cap(0.7).decode_time, h100.cap(1.0).prefill_time) == (1.3, 1.0, 1.0)
    assert h100.cost(0.7).watts_per_gpu == pytest.approx(0.7 * h100.watts_per_gpu)
    with pytest.raises(PlanError, match=r"power cap is 0.5; .* has power_caps for 0.7, so give 1 or add it there"):
        h100.cap(0.5)
    with pytest.raises(PlanError, match=r"power_caps has \[0.7, 0.7\]; give each power once"):
        parse_hardware(changed("power_caps", data()["power_caps"] * 2))
