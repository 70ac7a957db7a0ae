"""The command line: what it teaches, and what it says to mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from thinwire.cli import main


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["thinwire", *args])
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = 0
    try:
        main()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--strategy", "data_paralel"], "unknown strategy 'data_paralel'; did you mean 'data_parallel'?"),
        (["train", "--task", "digit"], "unknown task 'digit'; did you mean 'digits'?"),
        (
            ["train", "--task", "mine"],
            "unknown task 'mine'; possible: cifar10, digits, mnist, shakespeare, synthetic, or ",
        ),
        (["train", "--task", "work"], "or your own as package.module:function, importable from this folder"),
        (["train", "--task", "resnet18"], "resnet18 is a model, not a task; give it as --model resnet18"),
        (["train", "--strategy", "resnet18"], "resnet18 is a model, not a strategy; give it as --model resnet18"),
        (["train", "--model", "digits"], "digits is a task, not a model; give it as --task digits"),
        (
            ["train", "--strategy", "maxnorm"],
            "maxnorm is a reducer, not a strategy; try data_parallel(reducer=maxnorm)",
        ),
        (["compare", "data_parallel", "maxnorm"], "not a strategy; try data_parallel(reducer=maxnorm)"),
        (["train", "--task", "my-task.x("], "or your own as package.module:function, importable from this folder"),
        (["train", "--model", "resnet"], "unknown model 'resnet'"),
        (["train", "--optimizer", "adam"], "unknown optimizer 'adam'; did you mean 'adamw'?"),
        (["train", "--schedule", "steps"], "unknown schedule 'steps'"),
        (["train", "--ranks", "0"], "--ranks='0' is not possible: should be greater than 0"),
        (["train", "--ranks", "3000"], "--ranks 3000: one machine starts 124 at most; for more"),
        (["train", "--ranks", "3000", "--nodes", "1500"], "--ranks 3000: one machine starts 124 at most"),
        (["compare", "data_parallel", "--ranks", "125"], "--ranks 125: one machine starts 124 at most"),
        (["train", "--lr", "-1"], "--lr='-1' is not possible"),
        (["train", "--epochs", "many"], "--epochs='many' is not possible: should be a valid integer"),
        (["train", "--lr", "nan"], "--lr='nan' is not possible"),
        (["train", "--out", "/dev/null/x"], "/dev/null is not a folder that can be written to"),
        (["train", "--device", "tpu"], "tpu"),
        (["train", "--rank", "4"], "--rank"),
        (["train", "--strategy", "f("], "cannot read 'f('"),
        (["train", "--resume"], "--resume needs --out"),
        (
            ["train", "--resume", "--out", "nowhere"],
            "nowhere holds no run (no config.toml); check --out, or add the sett",
        ),
        (["train", "--resume", "--out", "nowhere", "--epochs", "3"], "nowhere holds no run"),
        (["train", "nothing.toml"], "cannot read nothing.toml"),
        (["train", "digits"], "digits is a task, not a TOML file of settings; give names by their options, as --task"),
        (["train", "--reducer", "maxnorm"], '--reducer goes in brackets: "data_parallel(reducer=…)"'),
        (
            ["train", "--strategy", "local_sgd", "--local-steps", "4"],
            '--local-steps goes in brackets: "ist(local_steps=…)"',
        ),
        (["train", "--world-size", "4"], "Unknown option: --world-size. See thinwire train --help"),
        (["train", "a.toml", "b.toml"], "too many arguments: ['b.toml']. See thinwire train --help"),
        (["lab", "--", "true"], "thinwire: lab needs --link, as --link 100mbit\n"),
        (["lab", "--link"], "thinwire: lab needs --link, as --link 100mbit\n"),
        (["train", "--lr"], "--lr requires an argument. See thinwire train --help"),
        (
            ["compare", "--strategy", "daso"],
            "compare takes strategies without --strategy, as thinwire compare data_par",
        ),
        (["train", "--strategy", "linear"], "linear is a head, not a strategy; try local_parallel(head=linear)"),
        (["report"], "report on what? Give one or more folders"),
        (["report", "nowhere"], "nowhere is not a folder; give one that thinwire compare or thinwire train wrote"),
        (["train", "--strategy", "DiLoCo"], "unknown strategy 'DiLoCo'; did you mean 'diloco'?"),
        (["train", "--strategy", "data-parallel(bucket_mb=5)"], "names have no '-': try data_parallel(bucket_mb=5)"),
        (["compare", "data_parallel,local_sgd"], "'data_parallel,local_sgd' is several; give them one by one"),
        (["train", "--model", "mine:net"], "a model of your own is part of such a task: Task(…, model=make)"),
        (
            ["teach"],
            'Unknown command "teach". Available commands: train, compare, plan, report, replay, doctor, lab, list. See',
        ),
        (["list", "colours"], 'Choose from: "strategies", "reducers",'),
        (["list", "--jsn"], "Did you mean --json? See thinwire list --help"),
    ],
)
def test_a_mistake_is_one_clear_message_and_code_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, monkeypatch, *args)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) <= 2, err
    assert list(tmp_path.iterdir()) == [], "nothing was made"


OWN_TASK = """
import nonexistent

def helper(one): pass
def _hidden(data, seed): pass
def make(data, seed, /, *, width: int = 8): pass
"""


@pytest.mark.parametrize(
    "given",
    ["mine", "mine.py", "./mine.py", "mine.make", "mine(width=3)", "mine:", "mine.py:make", "./mine.py:make(1)"],
)
@pytest.mark.parametrize("folder", [".", "inner"])
def test_a_task_of_ones_own_that_is_written_wrongly_is_named(
    given: str, folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without importing it: that may take long, and fail."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "mine.py").write_text(OWN_TASK)
    if folder != ".":
        given = given.replace("mine", f"{folder}/mine" if ".py" in given else f"{folder}.mine", 1)
    code, _, err = call(capsys, monkeypatch, "train", "--task", given)
    meant = "mine:make" if folder == "." else f"{folder}.mine:make"
    assert code == 2
    assert f"unknown task '{given}'; did you mean '{meant}'? Possible: cifar10, digits," in err
    assert "or your own as package.module:function, importable from this folder" in err


def test_a_function_of_ones_own_that_is_misspelt_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capsys, monkeypatch, "train", "--task", "tests.user_task:nosy")
    assert code == 2
    assert "has no attribute 'nosy'; did you mean 'tests.user_task:noisy'?" in err


def test_a_wrong_setting_in_a_file_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    for text, message in [
        ("epoch = 3", "unknown setting in"),
        ("epochs = 'x'", "epochs='x' is not possible"),
        ("epochs 3", "is not TOML"),
    ]:
        file.write_text(text)
        code, _, err = call(capsys, monkeypatch, "train", str(file))
        assert code == 2
        assert message in err


def test_help_teaches(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capsys, monkeypatch, "--help")
    assert code == 0
    assert "thinwire train --ranks 4" in out
    code, out, _ = call(capsys, monkeypatch, "train", "--help")
    assert code == 0
    for word in ("What to train", "--strategy", "--resume", "--restarts", "torchrun"):
        assert word in out


def test_list_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capsys, monkeypatch, "list", "strategies", "--json")
    assert code == 0
    entry = json.loads(out)["strategies"]["data_parallel"]
    assert entry["about"]
    assert {"name": "reducer", "type": "Reducer", "default": "mean()", "about": "how gradients are averaged"} in entry[
        "options"
    ]


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m thinwire list --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""


def test_list_shows_lists_in_brackets(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """rich would take [data_parallel] for a style, and leave it out."""
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = call(capsys, monkeypatch, "list", "strategies")
    assert "strategies in their order, as [data_parallel, local_sgd(every=4)]" in out


def test_list_and_help_need_no_torch() -> None:
    for args in (["list"], ["list", "--json"], ["train", "--help"], ["--version"]):
        code = (
            "import sys; sys.modules['torch'] = None; sys.argv = ['thinwire', *sys.argv[1:]];"
            "from thinwire.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stderr
