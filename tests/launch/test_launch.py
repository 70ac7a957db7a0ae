"""Whole runs as a user starts them: real processes, real signals, real exit codes."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.run.test_worker import same_files, timeless
from thinwire.config import RunConfig
from thinwire.errors import RunError
from thinwire.launch import launcher
from thinwire.launch.agent import how_to_go_on
from thinwire.run.records import RunFolder, read_rows

pytestmark = pytest.mark.usefixtures("program_server")

ROOT = Path(__file__).parent.parent.parent
SCRATCH = f"{tempfile.gettempdir()}/tw-{os.getpid()}"  # short: the path of a socket has a limit
FAST = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "TMPDIR": SCRATCH}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.fixture(scope="module", autouse=True)
def scratch() -> Iterator[None]:
    """What killed runs leave in the folder for temporary files goes with it."""
    Path(SCRATCH).mkdir(exist_ok=True)
    yield
    shutil.rmtree(SCRATCH)


def start(
    *args: str, env: dict[str, str] = FAST, program: Sequence[str] = ("-m", "thinwire"),
    python: Sequence[str] = (sys.executable,),
) -> Any:  # fmt: skip
    return subprocess.Popen(
        [*python, *program, *args], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def finish(process: Any, seconds: float = 90) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert session_members(process.pid) == [], "processes of the run are left"
    return process.returncode, out, err


def run_quickly(*args: str, env: dict[str, str] = FAST) -> tuple[int, str, str]:
    """Train, started from a process that has imported torch."""
    command = [*programs.PYTHON, "-m", "thinwire", "train", *args]
    with tempfile.TemporaryFile("w+") as session:
        noted = {**env, programs.NOTE: str(session.fileno())}
        done = subprocess.run(
            command, env=noted, text=True, capture_output=True, timeout=90, check=False, pass_fds=[session.fileno()]
        )
        session.seek(0)
        assert session_members(int(session.read())) == [], "processes of the run are left"
    return done.returncode, done.stdout, done.stderr


def session_members(session: int) -> list[int]:
    """Processes of a session that are alive, waiting a moment for the last of them to end."""
    for _ in range(100):
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[3]) == session and fields[0] not in "ZX":
                found.append(int(stat.parent.name))
        if not found:
            return []
        time.sleep(0.05)
    return found


def run(*args: str, **options: Any) -> tuple[int, str, str]:
    return finish(start(*args, **options))


def noisy(**options: Any) -> str:
    inside = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"tests.user_task:noisy({inside})"


def test_train_prints_a_table_and_leaves_no_process(tmp_path: Path) -> None:
    code, out, err = run("train", "--ranks", "2", "--epochs", "2", "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert os.listdir(SCRATCH) == [], "temporary files were left"
    assert "digits · data_parallel · 2 ranks · accuracy" in out
    assert "all_reduce" in out
    assert "epoch 2/2" in err
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "checkpoints", "config.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "summary.json",
        "timeline.jsonl",
    }  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    code, _, err = run_quickly("--task", noisy(), "--ranks", "2", "--checkpoint-every", "4", "--out", str(out))
    assert code == 0, err
    return out


CASES = [(random.Random(i).randrange(2), random.Random(i + 100).randrange(1, 30)) for i in range(2)]


@pytest.mark.parametrize(("rank", "step"), CASES)
def test_kill_9_and_automatic_restart_end_bit_for_bit_the_same(
    tmp_path: Path, undisturbed: Path, rank: int, step: int
) -> None:
    out = tmp_path / "run"
    task = noisy(fault="kill", rank=rank, step=step, once=str(tmp_path / "killed"))
    code, _, err = run_quickly(
        "--task", task, "--ranks", "2", "--checkpoint-every", "4", "--restarts", "1", "--out", str(out)
    )
    assert code == 0, err
    assert (tmp_path / "killed").exists()
    assert "a rank died; restart 1 of 1" in err
    assert same_files(undisturbed, out)
    assert timeless(undisturbed, "metrics.jsonl") == timeless(out, "metrics.jsonl")
    assert timeless(undisturbed, "ledger.jsonl") == timeless(out, "ledger.jsonl")


def test_kill_9_without_restart_names_the_rank_and_resume_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    out = tmp_path / "run"
    task = noisy(fault="kill", rank=1, step=17, once=str(tmp_path / "killed"))
    begin = time.monotonic()
    code, _, err = run_quickly("--task", task, "--ranks", "2", "--checkpoint-every", "4", "--out", str(out))
    assert code == 1
    assert "rank 1" in err
    assert "SIGKILL" in err
    assert "Traceback" not in err
    assert time.monotonic() - begin < 30
    code, _, err = run_quickly("--out", str(out), "--resume")
    assert code == 0, err
    assert "resuming at step 16" in err
    assert same_files(undisturbed, out)


def test_a_rank_that_is_busy_for_long_is_named_and_changes_nothing(tmp_path: Path, undisturbed: Path) -> None:
    task = noisy(fault="busy", rank=1, step=17, once=str(tmp_path / "busy"))
    code, _, err = run_quickly(
        "--task", task, "--ranks", "2", "--checkpoint-every", "4", "--patience", "9s", "--out", str(tmp_path / "run")
    )
    assert code == 0, err
    late = (
        r"thinwire: rank 1 \(busy: (training, step 17|reading samples)\) has not reached all_reduce of \w+, step 1[67]"
    )
    assert re.search(late + r", for 3 s; waiting up to 9 s\n", err), err
    assert re.search(r"thinwire: going on after \d(\.\d)? s\n", err)
    assert same_files(undisturbed, tmp_path / "run")


def test_a_rank_that_stops_for_longer_than_the_patience_is_named_and_resume_goes_on(
    tmp_path: Path, undisturbed: Path
) -> None:
    out = tmp_path / "run"
    task = noisy(fault="stop", rank=1, step=17, once=str(tmp_path / "stopped"))
    code, _, err = run_quickly(
        "--task", task, "--ranks", "2", "--checkpoint-every", "4", "--patience", "6s", "--out", str(out)
    )
    assert code == 1
    assert "for 2 s; waiting up to 6 s\n" in err
    last = err.strip().splitlines()[-1]
    assert re.search(r"rank 1 \(no sign of life for [\d.]+ s.*\) has not reached .*, for 6 s; patience is over", last)
    assert err.count("patience is over") == 1
    code, _, err = run_quickly("--out", str(out), "--resume", "--patience", "1h")
    assert code == 0, err
    assert "waiting" not in err
    assert same_files(undisturbed, out)


def test_torchruns_own_restarts_resume_too(tmp_path: Path, undisturbed: Path) -> None:
    task = noisy(fault="kill", rank=1, step=17, once=str(tmp_path / "killed"))
    ranks = [*programs.PYTHON, "-m", "thinwire", "train", "--task", task, "--checkpoint-every", "4"]
    code, _, err = run(
        "--standalone", "--max-restarts", "1", "--no-python", *ranks, "--out", str(tmp_path / "run"),
        program=TORCHRUN, env={**FAST, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )  # fmt: skip
    assert code == 0, err
    assert "resuming at step 16" in err
    assert same_files(undisturbed, tmp_path / "run")


def test_what_would_only_happen_again_is_not_restarted(tmp_path: Path) -> None:
    code, _, err = run_quickly("--model", "vgg16", "--restarts", "3", "--out", str(tmp_path / "run"))
    assert code == 2
    assert err == "thinwire: vgg16 halves the image five times and needs 32×32 pixels; this task has 8×8\n"


def test_a_restart_says_why(tmp_path: Path) -> None:
    task = noisy(fault="raise", rank=1, step=5, once=str(tmp_path / "raised"))
    code, _, err = run_quickly("--task", task, "--ranks", "2", "--restarts", "1", "--out", str(tmp_path / "run"))
    assert code == 0, err
    assert "rank 1 failed: ZeroDivisionError: a fault of the user's own; restart 1 of 1" in err


@pytest.mark.parametrize("strategy", ["data_parallel", "diloco(every=4, fragments=2)"])  # one is always on its way
def test_an_error_in_users_code_shows_its_rank_and_traceback(strategy: str, tmp_path: Path) -> None:
    task = noisy(fault="raise", rank=1, step=5)
    code, _, err = run_quickly("--strategy", strategy, "--task", task, "--ranks", "2", "--out", str(tmp_path / "run"))
    assert code == 1
    assert [p for p in os.listdir(SCRATCH) if "errorfile" in p] == [], "temporary files were left"
    assert "rank 1 failed: ZeroDivisionError: a fault of the user's own" in err
    assert "user_task.py" in err
    assert "lost contact" not in err


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("exit", r"rank 0 failed: SystemExit: \n(.*\n)*.*sys\.exit\(\)"),
        ("vanish", r"rank 0 \(process \d+\) ended with code 0 before its"),
    ],
)
def test_a_rank_that_ends_as_if_all_was_well_has_failed(fault: str, says: str, ranks: str, tmp_path: Path) -> None:
    task = noisy(fault=fault, rank=0, step=5)
    code, _, err = run_quickly("--task", task, "--ranks", ranks, "--out", str(tmp_path / "run"))
    assert code == 1
    assert re.search(says, err), err
    assert "lost contact" not in err


def test_a_killed_launcher_leaves_no_rank_behind(tmp_path: Path) -> None:
    before = set(os.listdir(SCRATCH))
    process = start(
        "train", "--task", noisy(fault="slow"), "--ranks", "2", "--epochs", "50", "--out", str(tmp_path / "run")
    )
    for _ in range(600):
        if (tmp_path / "run" / "metrics.jsonl").exists():
            break
        time.sleep(0.05)
    process.kill()
    process.communicate(timeout=30)
    assert session_members(process.pid) == []
    left = set(os.listdir(SCRATCH)) - before
    assert all(name.startswith(f"thinwire-{process.pid}-") for name in left), "a later run knows what to remove"


def test_a_launcher_that_is_killed_while_its_processes_import_leaves_none_behind(tmp_path: Path) -> None:
    process = start("train", "--ranks", "2", "--out", str(tmp_path / "run"))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(6000):
        commands = [Path(f"/proc/{pid}/cmdline") for pid in children.read_text().split()]
        if any(b"forkserver" in command.read_bytes() for command in commands if command.exists()):
            break
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=30)
    assert session_members(process.pid) == []


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_what_is_finished_is_kept(tmp_path: Path, sig: signal.Signals) -> None:
    out = tmp_path / "run"
    process = start("train", "--task", noisy(fault="slow"), "--ranks", "2", "--epochs", "50", "--out", str(out))
    for _ in range(600):
        if read_rows(out / "metrics.jsonl") and any((out / "checkpoints").glob("*/rank-1.json")):
            break
        time.sleep(0.05)
    os.killpg(process.pid, sig)  # as a terminal does
    code, _, err = finish(process, 30)
    assert code == 130
    assert err.splitlines()[-1] == f"thinwire: stopped by {sig.name}; --resume goes on from the last checkpoint"
    assert all(line.startswith(("epoch", "step", "thinwire:")) for line in err.splitlines()), err


def test_a_second_run_in_the_folder_of_one_that_goes_on_is_refused(tmp_path: Path) -> None:
    """As when a queue starts a job again that has not ended."""
    out, task = tmp_path / "run", noisy(fault="slow")
    settings = ("--task", task, "--ranks", "2", "--epochs", "50", "--out", str(out), "--resume=auto")
    first = start("train", *settings, python=programs.PYTHON)
    for _ in range(600):
        if any((out / "checkpoints").glob("*/rank-1.json")):
            break
        time.sleep(0.05)
    code, _, err = run_quickly(*settings)
    assert code == 2
    assert f"another run writes to {out}; wait until it has ended, or end it, or give another --out" in err
    assert first.poll() is None
    first.kill()
    first.communicate(timeout=30)
    steps = [row["step"] for row in read_rows(out / "metrics.jsonl")]
    assert steps == sorted(set(steps)) != [], "as if there had been no other"
    folder = RunFolder(out)
    folder.hold()  # its processes have ended
    folder.release()


def test_runs_that_are_started_at_the_same_time_without_out_get_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = ("train", "--task", "synthetic", "--ranks", "1", "--epochs", "1")
    both = [start(*settings, python=programs.PYTHON) for _ in range(2)]
    for code, _, err in [finish(one) for one in both]:
        assert code == 0, err
    found = {path.parent.name for path in (tmp_path / "runs").glob("*/summary.json")}
    assert found == {"synthetic-data_parallel-1", "synthetic-data_parallel-2"}


@pytest.mark.parametrize("files", [[], ["config.toml"]])
def test_a_folder_that_was_made_for_a_run_is_removed_if_the_run_fails_before_it_has_files(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: RunConfig, lab: object) -> None:
        assert config.out is not None
        assert config.out.is_dir()
        for name in files:
            (config.out / name).touch()
        raise RunError("no ranks")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "start_ranks", fail)
    with pytest.raises(RunError, match="no ranks"):
        launcher.launch(RunConfig(task="synthetic"))
    assert [path.name for path in tmp_path.glob("runs/*/*")] == files
    assert len(list(tmp_path.glob("runs/*"))) == len(files)


def test_a_run_that_saved_nothing_cannot_be_resumed(tmp_path: Path) -> None:
    assert how_to_go_on(None) == how_to_go_on(tmp_path) == "nothing was saved yet; run the command again"
    folder = tmp_path / "checkpoints" / "step-1"
    folder.mkdir(parents=True)
    (folder / "rank-0.json").touch()
    assert how_to_go_on(tmp_path) == "--resume goes on from the last checkpoint"


def test_torchrun_worlds_are_joined(tmp_path: Path) -> None:
    at_port = ("--master-addr", "127.0.0.1", "--master-port", free_port())
    train = ("-m", "thinwire", "train", "--task", "digits", "--epochs", "1", "--resume", "--out", f"{tmp_path}/run")
    code, out, err = run(*at_port, *train, program=TORCHRUN)
    assert code == 0, err
    assert err.count(f"no run in {tmp_path / 'run'} yet: starting one") == 1
    assert "2 ranks" in out
    assert out.count("results in") == 1


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def run_ranks(
    script: Path, num_ranks: int, port: str, *more: dict[str, str], python: Sequence[str] = programs.PYTHON
) -> None:
    """A script on ranks that were started by hand, some with more variables; each must end well."""
    env = {**FAST, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [*more, *[{}] * (num_ranks - len(more))]
    ranks = [
        start(env={**env, "RANK": str(rank), **each[rank]}, program=(str(script),), python=python)
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        code, _, err = finish(rank, 60)
        assert code == 0, err


def test_what_one_launcher_started_on_a_host_is_a_node(tmp_path: Path) -> None:
    script = tmp_path / "nodes.py"
    script.write_text(
        "import thinwire\nwith thinwire.join() as comm:\n    assert comm.nodes == (0, 0, 1), comm.nodes\n"
    )
    two, one = {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    run_ranks(script, 3, free_port(), {**two, "LOCAL_RANK": "0"}, {**two, "LOCAL_RANK": "1"}, one)


def test_a_process_can_join_leave_and_join_again(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(
        "import thinwire as tw, torch\n"
        "for i in range(4):\n"
        "    with tw.join() as comm:\n"
        "        assert comm.sum(torch.ones(1000))[0] == 2\n"
        "import os; os.write(1, f'joined {i + 1} times\\n'.encode())\n"
    )
    port = free_port()
    at_port = ("--master-addr", "127.0.0.1", "--master-port", port)
    code, out, err = run(*at_port, "--no-python", *programs.PYTHON, str(script), program=TORCHRUN)
    assert code == 0, err
    assert out.count("joined 4 times") == 2
    run_ranks(script, 2, port)  # rank 0 has the store this time


def test_processes_that_leave_right_after_their_last_step_end_well(tmp_path: Path) -> None:
    """Gloo's threads once aborted a process that ended while they held a tensor: one in three, on a busy machine."""
    script = tmp_path / "leave.py"
    script.write_text(
        "import thinwire as tw, torch\n"
        "net, x = torch.nn.Linear(500, 500), torch.ones(4, 500)\n"
        "with tw.join() as comm:\n"
        "    trainer = tw.prepare('data_parallel', model=net, optimizer=lambda p: torch.optim.SGD(p, 0.1),\n"
        "                         loss=torch.nn.functional.mse_loss, comm=comm)\n"
        "    for _ in range(3): trainer.step((x, x))\n"
    )
    run_ranks(script, 4, free_port(), python=[sys.executable])


def test_a_rank_that_waits_for_others_says_so(tmp_path: Path) -> None:
    port = free_port()
    env = {**FAST, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = start("train", "--out", str(tmp_path / "run"), env=env, python=programs.PYTHON)
    line = process.stderr.readline()
    process.kill()
    process.communicate()
    assert line == f"rank 0 is waiting at 127.0.0.1:{port} for all 2 ranks\n"


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {**FAST, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, _, err = run("train", "--out", str(tmp_path / "run"), env=env, python=programs.PYTHON)
    assert code == 2
    assert f"127.0.0.1:{port} is in use; set MASTER_PORT" in err
    assert "Traceback" not in err


def test_ranks_and_launcher_listen_on_loopback_alone(tmp_path: Path) -> None:
    task = noisy(fault="listeners", rank=1, step=2)
    env = {name: value for name, value in FAST.items() if name != "OMP_NUM_THREADS"}
    code, _, err = run_quickly("--task", task, "--ranks", "2", "--epochs", "1", "--out", str(tmp_path / "run"), env=env)
    assert code == 0, err
    line = next(line for line in err.splitlines() if line.startswith("LISTENING"))
    addresses = line.split()[1:]
    assert addresses, "there are listeners to look at"
    cores = len(os.sched_getaffinity(0))
    assert f"THREADS {max(1, cores // 2 - 1)}" in err
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(addresses) <= loopback


def test_a_full_disk_is_one_message_and_loses_nothing(tmp_path: Path) -> None:
    """A tmpfs of 1 MB in a namespace of its own: the second checkpoint does not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    script = (
        f"mount -t tmpfs -o size=2500k tmpfs {disk} || exit 99; "
        f"{sys.executable} -m thinwire train --ranks 2 --epochs 3 --out {disk}/run; code=$?; "
        f"find {disk} -name '.*' ! -name .run.lock -o -name '*.new'; ls {disk}/run/checkpoints; exit $code"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        env=FAST, text=True, capture_output=True, timeout=90, check=False,
    )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"mount namespaces are not allowed here: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    assert "No space left on device" in done.stderr
    assert "free some space and --resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.split()[0].startswith("step-"), "no scraps, and a checkpoint is there"


FILL_THE_DISK = """
mount -t tmpfs -o size=16m tmpfs {disk} || exit 99
cd {disk}; mkdir tmp; export TMPDIR={disk}/tmp
{python} -m thinwire train --task "tests.user_task:noisy(fault=slow)" --ranks 2 --epochs 50 --checkpoint-every 5 \\
    --restarts 2 --out {disk}/run & run=$!
until ls run/checkpoints/*/rank-1.json || ! kill -0 $run; do sleep 0.1; done > /dev/null 2>&1
while kill -0 $run; do  # it stays full, also once what could not be written is removed
    for size in 4096 512; do dd if=/dev/zero bs=$size >> filler; done; sleep 0.01
done 2> /dev/null
wait $run
"""


def test_a_disk_that_stays_full_is_one_message_also_if_temporary_files_are_on_it() -> None:
    with tempfile.TemporaryDirectory(prefix="tw-") as disk:  # short, too
        script = FILL_THE_DISK.format(disk=disk, python=sys.executable)
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
            env=FAST, text=True, capture_output=True, timeout=90, check=False,
        )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip(f"mount namespaces are not allowed here: {done.stderr.strip()}")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert re.search(r"thinwire: .*cannot write .*No space left on device.*; free some space and --resume", done.stderr)
    assert "restart" not in done.stderr, "it would only happen again"


def test_a_folder_whose_name_is_too_long_for_sockets_is_used_for_the_rest(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 110)
    folder.mkdir()
    arguments = ("train", "--task", "synthetic", "--ranks", "2", "--epochs", "1", "--out", str(tmp_path / "run"))
    command = [*programs.PYTHON, "-m", "thinwire", *arguments]
    process = subprocess.Popen(command, env={**FAST, "TMPDIR": str(folder)}, stderr=subprocess.PIPE, text=True)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert not list(folder.iterdir())
    assert not list(Path("/tmp").glob(f"thinwire-{process.pid}-*"))
