"""A plan request says the same by file and by flags, and every mistake in it is one sentence: key, value, mend."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from typer.testing import CliRunner

from kvrelay.cli.planning import plan as command
from kvrelay.plan.command import command_of
from kvrelay.plan.durations import parse_duration
from kvrelay.plan.planning import asked
from kvrelay.plan.reading import build_request, parse_class, request_of
from kvrelay.plan.request import PlanRequest
from placement.catalogs.base import PlanError

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "hardware": "h100-sxm",
    "num_gpus": 8,
    "random_input_len": 512,
    "random_output_len": 64,
    "ttft": "250ms",
}


def sentence(**changes: Any) -> str:
    flags = {key: value for key, value in (GOOD | changes).items() if value is not None}
    with pytest.raises(PlanError) as caught:
        build_request(None, flags)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("written", "seconds"), [("250ms", 0.25), ("0.25s", 0.25), ("250", 0.25), (250, 0.25), (1.5, 0.0015), ("2 S", 2.0)]
)
def test_a_duration_without_a_unit_is_milliseconds(written: object, seconds: float) -> None:
    assert parse_duration(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "fast", "-5ms", "0", "5m", "1e9h", "nan"])
def test_what_is_no_duration_is_refused(written: str) -> None:
    assert sentence(ttft=written).startswith(f"--ttft is {written!r}; give a time above 0 such as 250ms")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_gpus": None}, "nothing says how much; give one of --num-gpus, --rate or --budget"),
        ({"rate": 3.0}, "--num-gpus 8 and --rate 3 do not go together; give one of them"),
        ({"budget": 3.0}, "--num-gpus 8 and --budget 3 do not go together; give one of them"),
        ({"num_gpus": 0}, "--num-gpus is 0; give a number of 1 or more"),
        ({"num_gpus": None, "rate": -1.0}, "--rate is -1.0; give a number above 0.0"),
        ({"ttft": None}, "no target is given; give --ttft, --tpot or both, or --class with targets"),
        ({"trace": "t.csv"}, "--random-input-len does not go with --trace; give one of the two"),
        (
            {"random_output_len": None},
            "no requests are given; give --trace, or --random-input-len and --random-output-len",
        ),
        ({"trace_scale": 0.5}, "--trace-scale is of a trace and there is none; give --trace, or take it out"),
        ({"model": None}, "--model is missing; give a model directory, or a name of configs/models"),
        ({"hardware": None}, "--hardware is missing; give a file, or a name of configs/hardware"),
        ({"model": ""}, "--model is ''; give text"),
        ({"margin": ["a"]}, "--margin is ['a']; give the path of a file"),
        ({"hardware": ","}, "--hardware is ','; give one or more"),
        ({"attainment": 1.0}, "--attainment is 1.0; give a number below 1.0"),
        ({"objective": "speed"}, "--objective is 'speed'; give 'goodput', 'cost' or 'power'"),
        (
            {"num_gpus": None, "rate": 3.0, "objective": "goodput"},
            "--objective is goodput, but --rate fixes it; give --objective cost or power",
        ),
        ({"latency": "profile"}, "--latency is profile and there is none; give --profile"),
        (
            {"classes": [{"name": "a", "ttft": "1s"}]},
            "--ttft does not go with --class; give each class its own targets",
        ),
        (
            {"ttft": None, "classes": [{"name": "a", "ttft": "1s"}, {"name": "a", "ttft": "2s"}]},
            "--class has the name a twice; give each class its own",
        ),
        (
            {"acceptance_rate": 0.5},
            "--acceptance-rate is 0.5 and nothing is guessed; give --num-speculative-tokens, too",
        ),
        (
            {"num_speculative_tokens": 4},
            "--num-speculative-tokens is 4, and how often a guess is right is not said; give --acceptance-rate, from 0 "
            "to 1",
        ),
        (
            {"num_speculative_tokens": 4, "acceptance_rate": 1.5},
            "--acceptance-rate is 1.5; give a number of 1.0 or less",
        ),
        ({"num_speculative_tokens": 17}, "--num-speculative-tokens is 17; give a number of 16 or less"),
        (
            {"num_speculative_tokens": 4, "acceptance_rate": 0.5, "hardware": ["h100-sxm", "l40s"]},
            "--num-speculative-tokens is 4, which is for one kind of machine, by a roofline or a profile; take it out",
        ),
        (
            {"kv_dtype": "int8", "latency": "profile", "profile": "p.json", "hardware": None},
            "--kv-dtype is int8, and a profile is of workers as they were measured; take it out",
        ),
        ({"burstiness": 0.0}, "--burstiness is 0.0; give a number of 0.001 or more"),
        ({"max_pp": 0}, "--max-pp is 0; give a number of 1 or more"),
        (
            {"what_if": True, "hardware": ["h100-sxm", "l40s"]},
            "--what-if is of one kind of machine and --hardware is h100-sxm, l40s; give one of them",
        ),
        (
            {"max_pp": 2, "hardware": ["h100-sxm", "l40s"]},
            "--max-pp is of one kind of machine and --hardware is h100-sxm, l40s; give one of them",
        ),
        (
            {"algorithm": "low", "hardware": ["h100-sxm", "l40s"]},
            "--algorithm is of one kind of machine and --hardware is h100-sxm, l40s; give one of them",
        ),
        ({"hardware": "h100-sxm:8"}, "--hardware is h100-sxm:8 and --num-gpus 8; give one of them"),
        (
            {"hardware": "h100-sxm:8,l40s:2", "num_gpus": None, "rate": 3.0},
            "--hardware is h100-sxm:8, l40s:2 and --rate 3; give one of them",
        ),
        (
            {"hardware": "h100-sxm:8,l40s", "num_gpus": None},
            "--hardware is h100-sxm:8, l40s, and how many there are of l40s is not said; give l40s:8, or --num-gpus",
        ),
        (
            {"hardware": "h100-sxm:x"},
            "--hardware is 'h100-sxm:x'; 'x' is no count of GPUs; give a whole number, such as h100-sxm:8",
        ),
        ({"hardware": "h100-sxm:8,l40s:0"}, "--hardware has 0 of l40s; give 1 or more, or take it out"),
        (
            {"hardware": "l40s:8,l40s:2"},
            "--hardware is 'l40s:8,l40s:2'; l40s is there twice; give each kind of machine once",
        ),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_flag(changes: dict[str, Any], told: str) -> None:
    assert sentence(**changes) == told


@pytest.mark.parametrize("text", ["chat", "chat:1", ":1:250ms:", "chat::250ms:25ms", "a:b:c:d:e:f"])
def test_a_class_that_does_not_parse_is_told(text: str) -> None:
    with pytest.raises(PlanError, match="give NAME:SHARE:TTFT:TPOT"):
        parse_class(text)


def test_hardware_says_how_many_there_are() -> None:
    one = build_request(None, GOOD | {"hardware": "h100-sxm:8", "num_gpus": None})
    assert (one.hardware, one.num_gpus, one.gpus_of) == (("h100-sxm",), 8, {})
    both = build_request(None, GOOD | {"hardware": "h100-sxm:3,l40s:2", "num_gpus": None})
    assert (both.kinds, both.num_gpus, both.gpus_of) == (("h100-sxm", "l40s"), 5, {"h100-sxm": 3, "l40s": 2})
    assert build_request(None, GOOD | {"hardware": "h100-sxm:3,l40s", "num_gpus": 9}).gpus_of == {"h100-sxm": 3}


def test_classes_share_what_there_is() -> None:
    classes = [parse_class("chat:3:250ms:40ms"), parse_class("jobs:1::200:0.8")]
    made = build_request(None, {k: v for k, v in GOOD.items() if k != "ttft"} | {"classes": classes}).request_classes
    assert [one.share for one in made] == [0.75, 0.25]
    assert (made[0].slo.ttft_s, made[0].slo.tpot_s, made[0].slo.attainment) == (0.25, 0.04, 0.9)
    assert (made[1].slo.ttft_s, made[1].slo.tpot_s, made[1].slo.attainment) == (math.inf, 0.2, 0.8)


def test_a_class_without_a_target_is_refused() -> None:
    told = sentence(ttft=None, classes=[{"name": "chat", "share": 1}])
    assert "class chat has no target; give it ttft, tpot or both" in told


def test_an_unknown_key_in_a_file_is_told_with_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: m\nhardware: h\nnum_gpu: 8\nttft: 1s\nrandom_input_len: 1\nrandom_output_len: 1\n")
    with pytest.raises(PlanError) as caught:
        build_request(path, {})
    assert str(caught.value) == f"{path}: num_gpu is not a known key; did you mean num_gpus?"


@pytest.mark.parametrize(
    ("text", "told"), [("- a", "give keys and values"), ("a: [", "is not YAML: line"), ("", "give keys")]
)
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str, told: str) -> None:  # fmt: skip
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=told):
        build_request(path, {})


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot be read: No such file or directory; give a YAML file"):
        build_request(tmp_path / "none.yaml", {})


def test_flags_win_over_the_file_and_one_size_replaces_another() -> None:
    path = ROOT / "configs/plans/llama-8b-chat.yaml"
    assert (build_request(path, {}).rate, build_request(path, {}).wanted) == (60, "cost")
    changed = build_request(path, {"num_gpus": 5, "ttft": "1s", "random_input_len": None})
    assert (changed.num_gpus, changed.rate, changed.ttft) == (5, None, 1.0)
    assert changed.wanted == "goodput"


def test_a_file_s_mistakes_name_the_file_and_a_flag_s_the_flag() -> None:
    path = ROOT / "configs/plans/llama-8b-chat.yaml"
    with pytest.raises(PlanError, match=r"^--attainment is 2"):
        build_request(path, {"attainment": 2})
    with pytest.raises(PlanError, match=r"llama-8b-chat.yaml: trace is there, but|--random-input-len does not go"):
        build_request(path, {"random_input_len": 5})


def test_the_given_requests_can_be_used() -> None:
    paths = sorted((ROOT / "configs/plans").glob("*.yaml"))
    assert len(paths) >= 4
    for path in paths:
        trace = build_request(path, {}).workload.trace
        assert trace is None or trace.exists()


def test_the_command_of_a_request_asks_the_same() -> None:
    """Flags of `command()`, parsed by the command's own options, make the same request."""
    asked: list[PlanRequest] = []

    def stop_there(wanted: PlanRequest, *_: object) -> NoReturn:
        asked.append(wanted)
        raise ZeroDivisionError

    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    for path in sorted((ROOT / "configs/plans").glob("*.yaml")):
        made = build_request(path, {"max_batch_size": 99, "colocated": False, "seed": 7})
        words = shlex.split(command_of(made).replace("\\\n", " "))[2:]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvrelay.plan.planning.make_plan", stop_there)
            CliRunner().invoke(app, ["plan", *words])
        assert asked[-1] == made


def test_the_command_of_a_class_of_share_1_says_its_share() -> None:
    """Which is the default of a file's class, and none of a flag's."""
    written = ["chat:1:250ms:20ms", "jobs:1::200ms:0.8"]
    made = build_request(None, {**GOOD, "ttft": None, "classes": [parse_class(text) for text in written]})
    words = shlex.split(command_of(made).replace("\\\n", " "))
    flags = [words[i + 1] for i, word in enumerate(words) if word == "--class"]
    assert flags == ["chat:1:250ms:20ms", "jobs:1::200ms:0.8"]
    assert build_request(None, {**GOOD, "ttft": None, "classes": [parse_class(flag) for flag in flags]}) == made


def test_what_a_plan_keeps_of_its_request_is_the_request() -> None:
    """Through JSON, as plan.json keeps it."""
    for path in sorted((ROOT / "configs/plans").glob("*.yaml")):
        made = build_request(path, {"seed": 3})
        again = request_of(json.loads(json.dumps(asked(made))))
        assert again.model_dump(exclude={"objective", "classes"}) == made.model_dump(exclude={"objective", "classes"})
        assert (again.wanted, again.request_classes) == (made.wanted, made.request_classes)


def test_asked_that_is_no_request_is_told() -> None:
    with pytest.raises(PlanError, match=r"^asked of the plan is no request \(nothing says how much"):
        request_of({"model": "m", "hardware": ["h"]})


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """YAML would take the last one: a plan for a target that nobody meant."""
    (tmp_path / "plan.yaml").write_text("model: llama-3.1-8b\nttft: 300ms\nttft: 15ms\n")
    with pytest.raises(PlanError, match=r"is not YAML: line 3: ttft is there twice; keep one of them"):
        build_request(tmp_path / "plan.yaml", {})
