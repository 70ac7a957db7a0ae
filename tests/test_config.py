"""Settings: from where, in which order, and what a resumed run may change."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from thinwire import cli
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.launch.settings import resolve
from thinwire.run.records import RunFolder


def test_a_file_is_read_and_options_win_over_it(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('task = "synthetic"\nbatch-size = 8\nlr = 0.5\n')
    config = resolve(file, {"lr": 0.25})
    assert (config.task, config.batch_size, config.lr, config.strategy) == ("synthetic", 8, 0.25, "data_parallel")


def test_toml_out_is_toml_in() -> None:
    config = RunConfig(task='p.m:f(x="é\\n")', out=Path("a b"), lr=1e-5, autocast=True, ranks=3)
    assert RunConfig(**tomllib.loads(config.to_toml())) == config


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    RunFolder(tmp_path).save_config(RunConfig(task="synthetic", ranks=2, epochs=3, lr=0.5, out=tmp_path))
    return tmp_path


def test_resuming_needs_only_the_folder(saved: Path) -> None:
    config = resolve(None, {"resume": True, "out": saved})
    assert (config.task, config.ranks, config.epochs, config.resume) == ("synthetic", 2, 3, True)


def test_resuming_may_go_on_for_longer(saved: Path) -> None:
    assert resolve(None, {"resume": True, "out": saved, "epochs": 9, "lr": 0.5}).epochs == 9


@pytest.mark.parametrize(("name", "value"), [("lr", 0.1), ("ranks", 4), ("task", "digits"), ("seed", 1)])
def test_resuming_may_not_change_the_numbers(saved: Path, name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"has {name}=.*leave out --{name} to resume it"):
        resolve(None, {"resume": True, "out": saved, name: value})


def test_a_folder_that_moved_can_be_resumed_where_it_is(saved: Path, tmp_path: Path) -> None:
    moved = tmp_path.parent / (tmp_path.name + "-moved")
    saved.rename(moved)
    assert resolve(None, {"resume": True, "out": moved}).out == moved


@pytest.mark.parametrize("made", [False, True])
def test_resuming_starts_a_run_where_there_is_none_yet(
    tmp_path: Path, made: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is queued again is the same command."""
    out = tmp_path / "run"
    if made:
        out.mkdir()
    asked = {"resume": True, "out": out, "task": "synthetic", "epochs": 2}
    config = resolve(None, asked)
    assert (config.resume, config.task, config.out) == (False, "synthetic", out)
    assert capsys.readouterr().err == f"no run in {out} yet: starting one\n"
    RunFolder(out).save_config(config)
    assert resolve(None, asked).resume
    assert capsys.readouterr().err == ""


def test_only_one_of_many_ranks_says_that_a_run_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    assert not resolve(None, {"resume": True, "out": tmp_path / "run", "task": "synthetic"}).resume
    assert capsys.readouterr().err == ""


def test_resuming_where_other_things_are_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").touch()
    with pytest.raises(
        UsageError, match=r"other holds no run .no config.toml.; check --out, or give another --out for a new"
    ):
        resolve(None, {"resume": True, "out": tmp_path / "other", "task": "synthetic"})
    saved = tmp_path / "first"
    RunFolder(saved).save_config(RunConfig(out=saved))
    with pytest.raises(
        UsageError, match=r"one-first holds no run .*did you mean .*/first\?., or add the settings of a new"
    ):
        resolve(None, {"resume": True, "out": tmp_path / "one-first"})


def test_auto_starts_a_run_with_the_defaults_and_beside_other_files(tmp_path: Path) -> None:
    """What a job writes to its folder before it starts must not stop it; one command serves all starts."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "job.log").touch()
    asked = {"resume": "auto", "out": out}
    config = resolve(None, asked)
    assert (config.resume, config.task) == (False, "digits")
    assert RunFolder.new(config).path == out
    RunFolder(out).save_config(config)
    assert resolve(None, asked).resume is True
    with pytest.raises(UsageError, match="--resume needs --out"):
        resolve(None, {"resume": "auto"})
    (tmp_path / "remains").mkdir()
    (tmp_path / "remains" / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match=r"holds metrics.jsonl of a run without config.toml; give another --out"):
        RunFolder.new(resolve(None, {"resume": "auto", "out": tmp_path / "remains"}))


@pytest.mark.parametrize(
    ("words", "resume", "file"),
    [
        (["--resume"], True, None),
        (["--resume=auto"], "auto", None),
        (["--resume", "auto"], "auto", None),
        (["--resume", "run.toml"], True, Path("run.toml")),
        (["run.toml", "--resume", "--steps", "3"], True, Path("run.toml")),
        (["--no-resume"], False, None),
    ],
)
def test_resume_on_the_command_line(
    monkeypatch: pytest.MonkeyPatch, words: list[str], resume: object, file: Path | None
) -> None:
    seen: list[tuple[Path | None, dict[str, object]]] = []
    monkeypatch.setattr("thinwire.launch.settings.resolve", lambda file, asked: seen.append((file, asked)))
    monkeypatch.setattr("thinwire.launch.launcher.launch", lambda config: None)
    monkeypatch.setattr("sys.argv", ["thinwire", "train", *words])
    with suppress(SystemExit):
        cli.main()
    assert (seen[0][0], seen[0][1]["resume"]) == (file, resume)
