"""The GPU check's own promises, on parts of a few lines each: cut, gone on with, without git, in the folder given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import common
from bench.gpu.check import __main__ as check
from bench.gpu.check.figures import figures
from bench.gpu.check.parts import CONTRACT, CONTRACT_ON_CPU, IN_OTHER_PARTS, Part, parts_of
from bench.gpu.check.run import LOG, STATE

ROOT = Path(__file__).resolve().parents[2]
MakeParts = Callable[..., tuple[Part, ...]]


def part(name: str, code: str, *, takes_s: float = 0.0, limit_s: float = 60.0, asked: bool = True) -> Part:
    return Part(name=name, command=("-c", code), takes_s=takes_s, limit_s=limit_s, is_asked_for=asked)


def these(*parts: Part) -> MakeParts:
    return lambda **_: parts


def state(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / STATE).read_text())
    return found


def hows(out: Path) -> dict[str, str]:
    return {name: went["how"] for name, went in state(out)["went"].items()}


def run(out: Path, parts: MakeParts, *more: str) -> int:
    return check.main(["--rehearse", "--out", str(out), *more], parts)


def counted(path: Path) -> str:
    """A part that says how often it ran."""
    return f"open({str(path)!r}, 'a').write('x')"


def test_all_good_is_0_and_the_results_are_in_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    assert (
        run(
            out, these(part("one", "print('said by one')"), part("two", "import os; os.environ['KVRELAY_TEST_DEVICE']"))
        )
        == 0
    )
    assert hows(out) == {"one": "good", "two": "good"}
    assert "said by one" in (out / LOG).read_text()
    assert sorted(path.name for path in out.iterdir()) == [LOG, STATE]


def test_one_bad_part_is_1_and_stops_no_other(tmp_path: Path) -> None:
    parts = these(
        part("bad", "raise SystemExit('WRONG: it is')"),
        part("late", "import time; time.sleep(60)", limit_s=1.0),
        part("good", ""),
    )
    assert run(tmp_path, parts) == 1
    found = hows(tmp_path)
    assert found == {"bad": "WRONG or failed, exit code 1", "late": "ended after its 1 s", "good": "good"}
    said = (tmp_path / LOG).read_text()
    assert "WRONG: it is" in said
    assert "Fatal Python error: Aborted" in said, "where a part stood that was ended"


def test_what_does_not_fit_the_budget_is_not_begun(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    assert run(tmp_path, these(part("short", ""), part("long", counted(ran), takes_s=40.0)), "--budget", "20") == 1
    assert re.fullmatch(r"not begun: it takes about 40 s, and \d+ s were left", hows(tmp_path)["long"])
    assert not ran.exists()
    assert run(tmp_path, these(part("short", ""), part("long", counted(ran), takes_s=40.0)), "--resume") == 0


def test_a_part_ends_with_the_budget(tmp_path: Path) -> None:
    assert run(tmp_path, these(part("one", "import time; time.sleep(60)")), "--budget", "1") == 1
    assert hows(tmp_path) == {"one": "ended after the budget's last 1 s"}


def test_resumed_runs_again_only_what_was_not_good(tmp_path: Path) -> None:
    ran, fixed = tmp_path / "ran", tmp_path / "fixed"
    parts = these(part("one", counted(ran)), part("two", f"import os; assert os.path.exists({str(fixed)!r})"))
    assert run(tmp_path, parts) == 1
    fixed.touch()
    assert run(tmp_path, parts, "--resume") == 0
    assert ran.read_text() == "x"
    assert run(tmp_path, parts) == 0
    assert ran.read_text() == "xx", "without --resume all of it runs"


def test_resumed_from_another_folder_takes_its_results_along(tmp_path: Path) -> None:
    earlier, out, ran = tmp_path / "earlier", tmp_path / "out", tmp_path / "ran"
    parts = these(part("one", counted(ran)), part("two", ""))
    assert run(earlier, parts, "--parts", "one") == 0
    (earlier / "gpu_engine.json").write_text(json.dumps({"summary": [{"what": "a", "found": "b", "wanted": "c"}]}))
    assert run(out, parts, "--resume", str(earlier)) == 0
    assert ran.read_text() == "x"
    assert list(figures(out)) == [("a", "b", "c")]
    assert hows(out) == {"one": "good", "two": "good"}


def test_what_was_taken_over_is_kept_though_nothing_more_ran(tmp_path: Path) -> None:
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    parts = these(part("one", ""), part("two", "", takes_s=40.0))
    assert run(earlier, parts, "--budget", "20") == 1
    assert run(out, parts, "--parts", "one", "--resume", str(earlier)) == 0
    assert hows(out)["one"] == "good"


def test_figures_of_an_earlier_run_are_gone(tmp_path: Path) -> None:
    (tmp_path / "gpu_engine.json").write_text("{}")
    assert run(tmp_path, these(part("one", ""))) == 0
    assert not (tmp_path / "gpu_engine.json").exists()


def test_a_rehearsal_is_not_gone_on_with_as_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, these(part("one", ""))) == 0
    assert check.main(["--out", str(tmp_path), "--resume"], these(part("one", ""))) == 2
    assert "has is_rehearsal True, and this run has False" in capsys.readouterr().err


def test_an_unknown_part_is_one_sentence_and_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", these(part("one", ""), part("two", "")), "--parts", "one,three") == 2
    assert capsys.readouterr().err == "--parts: there is no part 'three'; give some of one, two\n"
    assert not (tmp_path / "out").exists()


def test_a_part_that_is_not_asked_for_runs_when_it_is_named(tmp_path: Path) -> None:
    parts = these(part("one", ""), part("extra", "", asked=False))
    assert run(tmp_path, parts) == 0
    assert hows(tmp_path) == {"one": "good"}
    assert run(tmp_path, parts, "--parts", "extra") == 0
    assert hows(tmp_path) == {"extra": "good"}


def started(out: Path, code: str) -> subprocess.Popen[bytes]:
    """The check in a process of its own, with the part `one`, which is good, and `two`, which is `code`."""
    program = (
        "import sys; from bench.gpu.check import __main__ as check; from bench.gpu.check.parts import Part\n"
        "make = lambda **_: tuple(Part(name=n, command=('-c', c), takes_s=0, limit_s=60)"
        f" for n, c in (('one', ''), ('two', {code!r})))\n"
        f"sys.exit(check.main(['--rehearse', '--resume', '--out', {str(out)!r}], make))"
    )
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to that in time"
        time.sleep(0.02)


def test_killed_in_the_middle_of_a_part_it_is_gone_on_with(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    sleeps = (
        f"import os, time; print('half', flush=True); open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    out = tmp_path / "out"
    first = started(out, sleeps)
    until(lambda: pid.exists() and bool(pid.read_text()))
    first.send_signal(signal.SIGKILL)
    first.wait()
    until(lambda: not psutil.pid_exists(int(pid.read_text())))
    assert hows(out) == {"one": "good", "two": "begun"}
    assert "half" in (out / LOG).read_text()
    again = started(out, "")
    assert again.wait(60) == 0
    assert hows(out) == {"one": "good", "two": "good"}


@pytest.mark.parametrize("path", [None, ""])
def test_without_git_or_history_the_commit_is_not_known(
    path: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "REPO", tmp_path)
    if path is not None:
        monkeypatch.setenv("PATH", path)  # nor a program git
    assert run(tmp_path / "out", these(part("one", ""))) == 0
    assert state(tmp_path / "out")["commit"] is None
    assert common.about()["has_uncommitted_changes"] is None


# The parts themselves


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_part_names_a_program_or_tests_that_exist(rehearse: bool) -> None:
    for each in parts_of(rehearse=rehearse, model="1b", out=Path("o")):
        assert each.takes_s < each.limit_s
        module, files = each.command[1], [word for word in each.command if word.startswith("tests/")]
        if module != "pytest":
            assert find_spec(module), module
        for file in files:
            assert (ROOT / file).exists(), file


def test_the_tests_that_are_left_out_exist() -> None:
    """pytest says nothing of a name to deselect that it does not know."""
    source = (ROOT / "tests" / "gpu" / "test_transports.py").read_text()
    assert all(f"def {name}(" in source for name in IN_OTHER_PARTS)


def test_every_file_of_gpu_tests_is_in_a_part_but_the_one_that_a_part_does_longer() -> None:
    named = {word for each in parts_of(rehearse=False, model=None, out=Path("o")) for word in each.command}
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files - named == {"tests/gpu/test_cluster.py"}
    assert CONTRACT in named
    assert not named & set(CONTRACT_ON_CPU)


def test_the_page_has_every_part_and_what_it_takes() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| (\w+) \| (\d+) \|", page, flags=re.MULTILINE)
    assert rows == [(each.name, f"{each.takes_s:g}") for each in parts_of(rehearse=False, model=None, out=Path("o"))]


def test_what_is_asked_for_fits_one_budget() -> None:
    asked = [each for each in parts_of(rehearse=False, model=None, out=Path("o")) if each.is_asked_for]
    assert sum(each.takes_s for each in asked) < check.BUDGET_S
    assert asked[0].name == "environment"


def test_the_script_passes_on_what_it_is_given() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "bench" / "gpu_check.sh"), "--parts", "nothing"],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("--parts: there is no part 'nothing'; give some of environment, kernels, tokens,")


@pytest.mark.parametrize("plugin", ["asyncio", "timeout"])
def test_tests_are_found_where_a_plugin_is_missing(plugin: str) -> None:
    """--strict-config would stop at its options, and a part of tests would run none."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        f"no:{plugin}",
        "--collect-only",
        "tests/bench/test_names.py",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
