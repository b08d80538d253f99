"""`kvrelay plan` end to end: what is asked wrongly or cannot be is one sentence, exit code 2; the rest is answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli.planning import plan as command
from kvrelay.plan.catalogs import catalogs
from kvrelay.plan.planning import machines_of
from kvrelay.plan.reading import build_request
from placement.catalogs.base import PlanError
from placement.mixes.designs import all_designs
from placement.mixes.machines import short_name
from placement.named_files import CONFIGS
from placement.plan import Goodput
from tests.kvrelay.plan.plan_fixture import PLAN

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).parent / "data"
GPUS = ("--hardware", "h100-sxm", "--num-gpus", "8")
MODEL = ("--model", "llama-3.1-8b")
LENGTHS = ("--random-input-len", "512", "--random-output-len", "64")
TARGETS = ("--ttft", "1s", "--tpot", "50ms", "--processes", "0")  # none besides this one
CLASSES = ("--class", "chat:1:1s:50ms:0.9", "--class", "jobs:1:9s:")
DEADLINE_S = 240


def run(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "120"})


def refused(*args: str) -> str:
    """The one sentence that is told; nothing else is printed."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert "Traceback" not in line
    return line.removeprefix("error: ")


def trace_of(tmp_path: Path, *rows: str, header: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> tuple[str, str]:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join((header, *rows)) + "\n")
    return "--trace", str(path)


# Asked wrongly


def test_a_model_that_does_not_fit() -> None:
    told = refused("--model", "bloom-176b", "--hardware", "h100-sxm", "--num-gpus", "2", *LENGTHS, *TARGETS)
    assert "bloom-176b" in told
    assert "does not fit" in told
    assert "; give " in told


@pytest.mark.parametrize(
    ("model", "hardware", "asked", "told"),
    [
        ("llama-3.1-70b", "h100-sxm", "--num-gpus 1", "on 1 GPU of 80 GB each (TP 1); give num_gpus 2 or more"),
        ("llama-3.1-70b", "h100-sxm", "--budget 3", "on 1 GPU of 80 GB each (TP 1); give budget 5.9 or more"),
        ("llama-3.1-70b", "h100-sxm", "--rate 1 --tensor-parallel 1", "(TP 1); give tensor_parallel 2 or more"),
        (
            "llama-3.1-70b",
            "l40s",
            "--rate 1 --tensor-parallel 2",
            "48 GB each (TP 2); give tensor_parallel 4 or more",
        ),
        ("opt-175b", "h100-sxm", "--num-gpus 4 --max-pp 2", "(TP 1 x PP 2); give max_pp 6 and num_gpus 6 or more"),
        (
            "opt-175b",
            "h100-sxm,a100-80g-sxm",
            "--budget 100 --tensor-parallel 1",
            "(TP 1); give one kind of hardware, for which max_pp may be 6 or more",
        ),
        (
            "llama-3.1-70b",
            "h100-sxm,a100-80g-sxm",
            "--budget 100 --tensor-parallel 1",
            "(TP 1); give TP 2 or more",
        ),
        (
            "deepseek-v3",
            "h200-sxm",
            "--rate 5 --max-pp 4",
            "on 8 GPUs of 141 GB each (TP 8), and its 61 layers divide into no 2 to 16 equal stages; give a smaller "
            "model, or a GPU with more memory",
        ),
    ],
)
def test_a_model_that_needs_other_degrees_names_what_to_give(model: str, hardware: str, asked: str, told: str) -> None:
    """Of the largest worker that may be, and by flags that there are."""
    assert refused("--model", model, "--hardware", hardware, *asked.split(), *LENGTHS, *TARGETS).endswith(told)


def test_a_rate_that_no_cluster_serves() -> None:
    told = refused(*MODEL, "--hardware", "h100-sxm", "--rate", "1e7", *LENGTHS, *TARGETS)
    assert told.startswith("rate is 1e+07 requests/s, which takes ")
    assert told.endswith("a plan has 1,024 at most; divide the rate over several clusters")


@pytest.mark.parametrize(("flag", "target"), [("--ttft", "TTFT"), ("--tpot", "TPOT")])
def test_a_target_that_an_idle_gpu_misses(flag: str, target: str) -> None:
    told = refused(*MODEL, *GPUS, *LENGTHS, flag, "0.1ms", "--processes", "0")
    assert target in told
    assert "0.1 ms" in told
    assert "takes" in told


def test_a_tensor_parallel_degree_that_does_not_divide_the_heads() -> None:
    told = refused(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--tensor-parallel", "6")
    assert told == "TP 6 does not divide the 32 heads of llama-3.1-8b; give TP 1, 2, 4 or 8"


def test_a_tensor_parallel_degree_of_a_model_that_is_not_cut(tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / "models" / "llama-3.1-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "glm4"}))
    told = refused("--model", str(tmp_path), *GPUS, *LENGTHS, *TARGETS, "--tensor-parallel", "2")
    why = "has no tensor-parallel plan in transformers that is known to be served, and TP is 2; give TP 1"
    assert told == f"{tmp_path.name} (glm4) {why}"


def test_a_plan_says_why_a_model_is_not_cut(planned: list[Any], tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs" / "models" / "llama-3.1-8b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "phi3"}))
    found = json.loads(run("--model", str(tmp_path), *GPUS, *LENGTHS, *TARGETS, "--json").stdout)
    assert found["refused"]["TP 2"].startswith(f"{tmp_path.name} (phi3) has no tensor-parallel plan in transformers")
    assert found["refused"].keys() - PLAN.refused.keys() == {"TP 2"}
    whole = json.loads(run(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--json").stdout)
    assert whole["refused"] == PLAN.refused


def test_a_tensor_parallel_degree_of_more_gpus_than_there_are() -> None:
    asked = (*MODEL, "--hardware", "h100-sxm", *LENGTHS, *TARGETS, "--tensor-parallel", "4")
    mend = "or tensor_parallel 2 or less"
    assert refused(*asked, "--num-gpus", "2") == (
        f"tensor_parallel is 4, GPUs of one worker, and num_gpus is 2; give num_gpus 4 or more, {mend}"
    )
    told = refused(*asked, "--budget", "6")
    assert "and budget is 6 USD an hour, which pays for 2; give budget " in told
    assert told.endswith(mend)


def test_fewer_gpus_than_a_machine_of_each_kind_has() -> None:
    kinds = (*MODEL, "--hardware", "h100-sxm,l40s", "--num-gpus", "4")
    assert refused(*kinds, *LENGTHS, *TARGETS) == (
        "num_gpus is 4, and a machine of NVIDIA H100 SXM 80 GB takes 8; give 8 for one pool or 16 for two pools, or "
        "machines of fewer GPUs (tensor_parallel)"
    )


def test_a_trace_with_an_empty_prompt(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:15:46.68,374,44", "2023-11-16 18:15:50.00,0,12")
    told = refused(*MODEL, *GPUS, *TARGETS, *trace_of(tmp_path, *rows))
    assert told.endswith("trace.csv:3: ContextTokens is 0; give 1 or more, or take the line out")


def test_a_trace_whose_times_run_backwards(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:15:46.68,374,44", "2023-11-16 18:15:40.00,80,12")
    told = refused(*MODEL, *GPUS, *TARGETS, *trace_of(tmp_path, *rows))
    assert told.endswith("trace.csv:3: TIMESTAMP is 6.68 s before the line above; sort the trace by time")


def test_a_trace_without_a_column(tmp_path: Path) -> None:
    told = refused(*MODEL, *GPUS, *TARGETS, *trace_of(tmp_path, "1,2", header="TIMESTAMP,GeneratedTokens"))
    assert "trace.csv:1: no column" in told
    assert "ContextTokens" in told


def test_a_trace_with_a_gap(tmp_path: Path) -> None:
    rows = ("2023-11-16 18:15:46.68,374,44", "2023-11-16 18:15:50.00,,12")
    told = refused(*MODEL, *GPUS, *TARGETS, *trace_of(tmp_path, *rows))
    assert "trace.csv:3: ContextTokens is missing; give " in told


def test_requests_that_the_model_has_no_positions_for(tmp_path: Path) -> None:
    """A worker refuses them, whatever room its pages have."""
    model = ("--model", "llama-2-7b", *GPUS, *TARGETS)
    assert refused(*model, "--random-input-len", "20000", "--random-output-len", "64") == (
        "random lengths of 20000 and 64 tokens: 100.00% of the requests are longer than the 4,096 positions of "
        "llama-2-7b, up to 20,064 tokens, and would be refused; give prompts of 4,032 tokens at most "
        "(--max-input-len 4032 cuts those of a trace), or another model"
    )
    rows = ["2023-11-16 18:15:46.68,374,44"] * 17 + ["2023-11-16 18:15:46.68,4090,44"] * 3
    trace = trace_of(tmp_path, *rows)
    assert "trace.csv: 15.00% of the requests are longer than the 4,096 positions" in refused(*model, *trace)
    assert "15.00%" in refused("--model", "llama-2-7b", *GPUS, *CLASSES, *trace, "--attainment", "0.8")


def test_a_few_requests_that_the_model_has_no_positions_for_are_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrelay.plan.planning.planner.plan", lambda *_, **__: PLAN)
    rows = ["2023-11-16 18:15:46.68,374,44"] * 18 + ["2023-11-16 18:15:46.68,4090,44"] * 2
    model, trace = ("--model", "llama-2-7b", *GPUS, *TARGETS), trace_of(tmp_path, *rows)
    result = run(*model, *trace, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)["advice"]
    assert told[0] == PLAN.advice[0]
    assert told[1].startswith("10.00% of the requests are longer than the 4,096 positions of llama-2-7b, up to 4,134")
    cut = run(*model, *trace, "--max-input-len", "4052", "--json")
    assert json.loads(cut.stdout)["advice"] == list(PLAN.advice)


def test_a_trace_that_is_not_there() -> None:
    told = refused(*MODEL, *GPUS, *TARGETS, "--trace", "nowhere.csv")
    assert told == "trace nowhere.csv cannot be read: No such file or directory; give a file"


def test_a_hardware_file_with_a_figure_missing() -> None:
    told = refused(*MODEL, "--hardware", str(DATA / "no-memory.yaml"), "--num-gpus", "8", *LENGTHS, *TARGETS)
    assert told.endswith("no-memory.yaml: memory_bytes is missing; give it a value")


def test_hardware_and_models_that_nobody_knows() -> None:
    assert "hardware is 'b9000', which is no file; give one, or a name of " in refused(
        *MODEL, "--hardware", "b9000", "--num-gpus", "8", *LENGTHS, *TARGETS
    )
    assert "model is 'nemo', which is no directory and no config.json; give one" in refused(
        "--model", "nemo", *GPUS, *LENGTHS, *TARGETS
    )


def test_flags_that_contradict() -> None:
    told = refused(*MODEL, *GPUS, "--rate", "3", *LENGTHS, *TARGETS)
    assert told == "--num-gpus 8 and --rate 3 do not go together; give one of them"


def test_a_budget_that_buys_nothing() -> None:
    told = refused(*MODEL, "--hardware", "h100-sxm", "--budget", "0.5", *LENGTHS, *TARGETS)
    assert "budget is 0.5 USD an hour" in told
    assert told.endswith("give more")


def test_an_unknown_key_in_a_request(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("model: llama-3.1-8b\nhardwear: h100-sxm\nnum_gpus: 8\n")
    told = refused(str(path), *LENGTHS, *TARGETS)
    assert f"{path}: hardwear is not a known key; did you mean hardware?" in told


@pytest.mark.parametrize("flag", ["--profile", "--margin"])
def test_a_file_that_is_not_what_it_should_be(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "some.json"
    path.write_text("[1, 2]")
    base = (*MODEL, *GPUS) if flag == "--margin" else ("--num-gpus", "2")
    told = refused(*base, *LENGTHS, *TARGETS, flag, str(path))
    assert "some.json" in told


def test_requests_longer_than_any_worker_holds() -> None:
    told = refused(*MODEL, *GPUS, "--random-input-len", "9000000", "--random-output-len", "2", *TARGETS)
    assert "tokens" in told


@pytest.mark.parametrize("flags", [("--hardware", "h100-sxm,l40s"), ("--hardware", "h100-sxm", "--no-colocated")])
def test_requests_that_end_with_their_first_token(flags: tuple[str, ...]) -> None:
    """Nobody is to decode them, which pools of two kinds are for."""
    one_token = ("--random-input-len", "512", "--random-output-len", "1")
    told = refused(*MODEL, "--num-gpus", "8", *flags, *one_token, *TARGETS)
    assert "every output is 1 token, which prefill makes, so there is nothing to decode: that is planned of" in told
    assert told.endswith("; give one kind, and leave colocated on")


def test_more_gpus_than_one_router_can_know_workers() -> None:
    told = refused(*MODEL, "--hardware", "h100-sxm", "--num-gpus", "1000000", *LENGTHS, *TARGETS)
    assert told.startswith("num_gpus is 1,000,000, which is for 1,000,000 workers of llama-3.1-8b on NVIDIA H100")
    assert "a plan has 1,024 at most; plan for fewer GPUs" in told
    told = refused(*MODEL, "--hardware", "h100-sxm", "--budget", "1e7", *LENGTHS, *TARGETS)
    assert told.startswith("budget is 10,000,000.0 USD an hour, which is for 3,389,831 workers")


@pytest.mark.parametrize(("flag", "asked"), [("--num-gpus", "num_gpus is 1,000,000"), ("--rate", "rate is 1e+06")])
def test_more_mixed_machines_than_one_router_can_know(flag: str, asked: str) -> None:
    told = refused(*MODEL, "--hardware", "h100-sxm,a100-80g-sxm", flag, "1000000", *LENGTHS, *TARGETS)
    assert told.startswith(asked)
    assert "a plan has 1,024 at most" in told


def test_a_folder_that_cannot_be_is_told_before_the_search(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("placement.search.planner.plan", lambda *_, **__: pytest.fail("searched in vain"))
    (tmp_path / "file").write_text("")
    told = refused(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--out", str(tmp_path / "file" / "plan"))
    assert told.startswith(f"--out is {tmp_path / 'file' / 'plan'}, and {tmp_path / 'file'} is no folder")


def test_the_same_machine_twice_and_bursts_without_measure() -> None:
    told = refused(*MODEL, "--hardware", "h100-sxm,h100-sxm", "--num-gpus", "8", *LENGTHS, *TARGETS)
    assert "--hardware" in told
    assert "h100-sxm is there twice; give each kind of machine once" in told
    told = refused(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--burstiness", "1e-9")
    assert told.startswith("--burstiness is 1e-09; give a number of 0.001 or more")


def test_json_tells_the_error_too() -> None:
    result = run(*MODEL, *GPUS, *LENGTHS, "--ttft", "soon", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"].startswith("--ttft is 'soon'; give a time above 0")


def test_the_command_itself_prints_one_line_and_no_stack(tmp_path: Path) -> None:
    """As a shell sees it."""
    call = [sys.executable, "-m", "kvrelay.cli.main", "plan", *MODEL, *GPUS, *TARGETS]
    done = subprocess.run(
        [*call, *trace_of(tmp_path, "2023-11-16 18:15:46.68,0,5")],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "trace.csv:2" in done.stderr


# Answered


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The search answers at once with a plan made by hand; what it was asked is kept."""
    asked: list[Any] = []

    def plan(
        ask: Any,
        catalog: Any,
        workload: Any,
        *,
        on_progress: Callable[[str, int, int], None] | None,
        on_first: Callable[[Goodput], None] | None,
    ) -> Any:
        asked.append((ask, catalog, workload))
        if on_progress is not None:
            on_progress("whole clusters", 1, 2)
        if on_first is not None:
            on_first(PLAN.chosen)
        return PLAN

    monkeypatch.setattr("placement.search.planner.plan", plan)
    return asked


def test_what_is_asked_reaches_the_planner(planned: list[Any]) -> None:
    flags = ("--attainment", "0.8", "--seed", "5", "--burstiness", "0.5", "--max-pp", "2", "--no-colocated")
    assert run(*MODEL, *GPUS, *LENGTHS, "--ttft", "200", "--tpot", "0.02s", *flags).exit_code == 0
    ((ask, catalog, workload),) = planned
    assert (ask.slo.ttft_s, ask.slo.tpot_s, ask.slo.attainment) == (0.2, 0.02, 0.8)
    assert (ask.num_gpus, ask.rate, ask.seed, ask.burstiness) == (8, None, 5, 0.5)
    assert (ask.max_pp, ask.colocated, ask.objective) == (2, False, "goodput")
    assert catalog.model == "llama-3.1-8b"
    assert set(workload.prompt_len.tolist()) == {512}


def test_the_answer_is_on_stdout_and_json_is_one_object(planned: list[Any]) -> None:
    shown = run(*MODEL, *GPUS, *LENGTHS, *TARGETS)
    assert "2 x prefill TP 2 + 1 x decode TP 4" in shown.stdout
    assert shown.stderr.startswith("a first answer, coarse: 2 x prefill TP 2 + 1 x decode TP 4, on eight GPUs, up to ")
    assert run(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--no-progress").stderr == ""
    found = json.loads(run(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--json").stdout)
    assert found["answer"]["placement"] == "2 x prefill TP 2 + 1 x decode TP 4"
    assert found["asked"]["num_gpus"] == 8
    assert found["asked"]["ttft"] == 1.0


def test_out_says_what_it_wrote(planned: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.plan.plots.figures.figures", lambda plan, width: {})
    result = run(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--out", str(tmp_path / "new" / "plan"))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "new" / "plan").iterdir()} == {"cluster.yaml", "plan.json", "report.html"}
    assert "written: " in result.stdout


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_a_plan_that_cannot_be_written_is_told_all_the_same(
    planned: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    monkeypatch.setattr("kvrelay.plan.plots.figures.figures", lambda plan, width: {})
    (tmp_path / "out" / "plan.json").mkdir(parents=True)
    result = run(*MODEL, *GPUS, *LENGTHS, *TARGETS, *flags, "--no-progress", "--out", str(tmp_path / "out"))
    why = f"--out is {tmp_path / 'out'}, where plan.json cannot be written (Is a directory); give another"
    assert result.exit_code == 2
    assert result.stderr == f"error: {why}\n"
    if flags:
        found = json.loads(result.stdout)
        assert found["answer"]["placement"] == "2 x prefill TP 2 + 1 x decode TP 4"
        assert found["error"] == {"message": why}
    else:
        assert "The plan" in result.stdout
        assert "written: " not in result.stdout


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def plan(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("placement.search.planner.plan", plan)
    result = run(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--out", str(tmp_path / "plan"))
    assert result.exit_code == 130
    assert result.stderr == "error: interrupted; nothing was written\n"
    assert not (tmp_path / "plan").exists()


def test_a_margin_widens_what_the_catalog_states(planned: list[Any], tmp_path: Path) -> None:
    row = {"rate": 1.0, "num_requests": 100, "ttft": 0.9, "tpot": 0.1, "attainment": -0.02}
    path = tmp_path / "margin.json"
    path.write_text(json.dumps({"format": "kvrelay-margin", "version": 1, "runs": [row]}))
    assert run(*MODEL, *GPUS, *LENGTHS, *TARGETS, "--margin", str(path)).exit_code == 0
    ((_, catalog, _),) = planned
    assert catalog.offer(catalog.degrees(1)[0]).error == 0.9


def test_several_kinds_of_hardware_are_provisioned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each as a machine with its own letter, and once more under each power cap of its file; by the live rules."""
    asked: list[Any] = []

    def provision(ask: Any, machines: Any, workload: Any, *, options: Any, on_progress: Any) -> Any:
        asked.append((ask, machines, options))
        return PLAN

    monkeypatch.setattr("kvrelay.plan.planning.provision", provision)
    kinds = ("--hardware", "a100-80g-sxm,h100-sxm", "--rate", "20")
    assert run("--model", "llama-2-70b", *kinds, *LENGTHS, *TARGETS).exit_code == 0
    ((ask, machines, options),) = asked
    assert [machine.short for machine in machines] == ["A", "H", "Hcap"]
    assert [machine.gpus for machine in machines] == [8, 8, 8]
    assert (ask.rate, ask.objective, options.rules) == (20.0, "cost", "live")
    hint = "--tensor-parallel 2 makes smaller ones, which may be cheaper"
    assert hint in " ".join(run("--model", "llama-2-70b", *kinds, *LENGTHS, *TARGETS).stdout.split())
    assert "makes smaller ones" not in run(*MODEL, *kinds, *LENGTHS, *TARGETS, "--tensor-parallel", "2").stdout


@pytest.mark.parametrize(
    ("name", "among", "short"),
    [
        ("NVIDIA H100 SXM 80 GB", ["NVIDIA H100 SXM 80 GB", "NVIDIA A100 SXM 80 GB"], "H"),
        ("NVIDIA H100 SXM 80 GB", ["NVIDIA H100 SXM 80 GB", "NVIDIA H200 SXM 141 GB"], "H100"),
        ("NVIDIA H100 SXM 80 GB", ["NVIDIA H100 SXM 80 GB", "NVIDIA H100 NVL 94 GB"], "H100SXM"),
        ("NVIDIA A100 SXM 40 GB", ["NVIDIA A100 SXM 40 GB", "NVIDIA A100 SXM 80 GB"], "A100SXM40"),
        ("NVIDIA L40 48 GB", ["NVIDIA L40 48 GB", "NVIDIA L40S 48 GB"], "L40"),
        ("NVIDIA L40S 48 GB", ["NVIDIA L40S 48 GB"], "L"),
        ("some machine", ["some machine"], "S"),
    ],
)
def test_machines_have_letters_that_tell_them_apart(name: str, among: list[str], short: str) -> None:
    assert short_name(name, among) == short


def test_gpus_of_one_family_are_mixed(tmp_path: Path) -> None:
    def designs(*kinds: str) -> list[str]:
        size = {"num_gpus": 8, "tensor_parallel": 1, "random_input_len": 64, "random_output_len": 8, "ttft": "1s"}
        request = build_request(None, {"model": "llama-3.1-8b", "hardware": list(kinds), **size})
        return [design.name for design in all_designs(machines_of(request, catalogs(request))) if design.is_baseline]

    assert designs("h100-sxm", "h100-nvl") == ["Baseline-H100-SXM", "Baseline-H100-NVL"]
    assert designs("a100-40g-sxm", "a100-80g-sxm") == ["Baseline-A100-SXM-40", "Baseline-A100-SXM-80"]
    assert designs("a100-80g-sxm", "h100-sxm") == ["Baseline-A100", "Baseline-H100"]
    (tmp_path / "own.yaml").write_text((CONFIGS / "hardware" / "l40.yaml").read_text())
    with pytest.raises(PlanError, match=r"^name is NVIDIA L40 48 GB in two hardware files; give each its own$"):
        designs("l40", str(tmp_path / "own.yaml"))
