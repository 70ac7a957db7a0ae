"""Real hosts on one machine: the link holds, the ledger agrees with the Linux kernel's counters, nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import programs
from tests.run.test_worker import same_files
from thinwire import netlab, registry
from thinwire.comm.world import place
from thinwire.errors import RunError, UsageError
from thinwire.run.records import read_rows

ROOT = Path(__file__).parent.parent.parent


pytestmark = pytest.mark.usefixtures("program_server")


@pytest.fixture(scope="module", autouse=True)
def _allowed() -> None:
    try:
        with netlab.hosts(1):
            pass
    except netlab.NotAllowed as error:
        pytest.skip(str(error))


def holds(link: str, num_hosts: int, check: Callable[[netlab.Measured], bool]) -> None:
    """Measured until it does, for at most half a minute: the machine that the tests run on is shared, and busy."""
    with netlab.hosts(num_hosts, link=link) as hosts:
        found: list[netlab.Measured] = []
        end = time.monotonic() + 30
        while time.monotonic() < end:
            found.append(hosts.measure())
            print(f"{link}, {num_hosts} hosts: {found[-1].rate_mbit:.2f} Mbit/s, {found[-1].latency_ms:.3f} ms")
            if check(found[-1]):
                return
    raise AssertionError(f"{link} with {num_hosts} hosts: {found}")


@pytest.mark.parametrize("num_hosts", [2, 4])
@pytest.mark.parametrize(("link", "mbit"), [("10mbit", 10), ("100mbit", 100), ("1gbit", 1000)])
def test_the_link_holds_within_ten_percent(link: str, mbit: float, num_hosts: int) -> None:
    holds(link, num_hosts, lambda found: abs(found.rate_mbit / mbit - 1) < 0.1)


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_the_latency_holds_within_twenty_percent(num_hosts: int) -> None:
    if os.getuid() != 0 and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        pytest.skip("latency needs netem or /dev/net/tun, and this user may not open it")
    holds("100mbit,10ms", num_hosts, lambda found: abs(found.latency_ms / 10 - 1) < 0.2 and found.rate_mbit > 90)


def test_everyone_can_send_to_one_host_only_at_its_rate() -> None:
    """A receiving host has a link too: two senders share it."""
    server = """
        import socket, sys, time
        listener = socket.create_server((sys.argv[1], 5000))
        print("up", flush=True)
        streams = [listener.accept()[0] for _ in range(2)]
        begin, got = time.monotonic(), 0
        while time.monotonic() < begin + 1.5:
            got += sum(len(stream.recv(2**16)) for stream in streams)
        print(got * 8e-6 / (time.monotonic() - begin))
    """
    client = """
        import socket, sys
        stream = socket.create_connection((sys.argv[1], 5000))
        try:
            while True:
                stream.send(bytes(2**16))
        except OSError:
            pass
    """
    with netlab.hosts(3, link="50mbit") as hosts:
        python = [sys.executable, "-c"]
        address = hosts[0].address
        receiver = hosts[0].start([*python, textwrap.dedent(server), address], stdout=subprocess.PIPE, text=True)
        assert receiver.stdout.readline() == "up\n"
        senders = [hosts[i].start([*python, textwrap.dedent(client), address]) for i in (1, 2)]
        rate = float(receiver.communicate(timeout=30)[0])
        for sender in senders:
            sender.wait(timeout=30)
    assert rate < 55, f"two senders brought {rate:.1f} Mbit/s through a link of 50"


SEND_AFTER_PAUSES = """
import socket, sys, time
stream = socket.create_connection((sys.argv[1], 5000))
for _ in range(5):
    time.sleep(0.3)
    stream.sendall(bytes(15_000))
    stream.recv(1)
"""
ANSWER_EACH = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
stream = listener.accept()[0]
times = []
for _ in range(5):
    stream.recv(1, socket.MSG_PEEK)
    begin, got = time.perf_counter(), 0
    while got < 15_000:
        got += len(stream.recv(2**16))
    times.append(time.perf_counter() - begin)
    stream.send(b"!")
print(sorted(times)[2])
"""


@pytest.mark.parametrize(("link", "seconds"), [("5mbit", 0.024), ("10mbit", 0.012), ("10mbit,2ms", 0.012)])
def test_a_small_message_after_a_pause_takes_its_time_too(link: str, seconds: float) -> None:
    """15 kB, as a compressed gradient may be: no bucket may let it pass for nothing."""
    with netlab.hosts(2, link=link) as hosts:
        python = [sys.executable, "-c"]
        there = hosts[1].start([*python, ANSWER_EACH, hosts[1].address], stdout=subprocess.PIPE, text=True)
        assert there.stdout.readline() == "up\n"
        hosts[0].run([*python, SEND_AFTER_PAUSES, hosts[1].address])
        took = float(there.communicate(timeout=30)[0])
    assert took > 0.6 * seconds, f"{1e3 * took:.2f} ms instead of {1e3 * seconds:.0f}"


def test_a_lab_whose_holder_is_killed_says_so() -> None:
    with netlab.hosts(2) as hosts:
        os.kill(int(hosts[0].net.split("/")[2]), signal.SIGKILL)
        with pytest.raises(RunError, match="make another"):
            hosts.measure()
        with pytest.raises(RunError, match="make another"):
            hosts.sent_bytes()


def test_hosts_are_apart_and_inside_a_host_nothing_is_shaped() -> None:
    with netlab.hosts(2, link="1mbit") as hosts:
        listing = [hosts[i].run(["cat", "/proc/net/dev"]) for i in range(2)]
        assert all("wire:" in text and "lo:" in text and "eth0" not in text for text in listing)
        names = {os.readlink("/proc/self/ns/net"), *(hosts[i].run(["readlink", "/proc/self/ns/net"]) for i in range(2))}
        assert len(names) == 3
        script = (
            "import socket; a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname());"
            "c = a.accept()[0]; b.settimeout(5)\n"
            "for _ in range(100): b.sendall(bytes(2**15)); c.recv(2**15, socket.MSG_WAITALL)"
        )
        begin = time.monotonic()
        hosts[0].run([sys.executable, "-c", script])
        assert time.monotonic() - begin < 10, "3.3 MB at 1 Mbit/s would take 26 s"
        inside, between = (hosts.sent_bytes()[0][link] for link in ("inside", "between"))
        assert inside > 3_200_000
        assert between < 1000


def test_a_program_that_fails_on_a_host_is_an_error() -> None:
    with netlab.hosts(1) as hosts:
        with pytest.raises(RunError, match="ended with code 3: oh"):
            hosts[0].run(["sh", "-c", "echo oh >&2; exit 3"])
        with pytest.raises(RunError, match="took longer than"):
            hosts[0].run(["sleep", "5"], timeout_seconds=0.2)


@pytest.mark.parametrize("count", [0, 300])
def test_too_few_or_too_many_hosts(count: int) -> None:
    with pytest.raises(UsageError, match="possible: 1 to 254"), netlab.hosts(count):
        pass


# ---- nothing stays behind


def processes(word: str) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word in path.read_text():
                found.add(int(path.parent.name))
    return found


def descends(pid: int, ancestor: int) -> bool:
    with suppress(OSError):
        while pid > 1 and pid != ancestor:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == ancestor


def gone(pids: set[int], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("link", ["100mbit", "100mbit,10ms"])
def test_after_kill_9_nothing_is_left_and_a_new_lab_works(link: str) -> None:
    """No name is given to anything outside of the namespaces, and those end with the processes in them."""
    before = processes("thinwire.netlab.keeper")
    script = f"""
        import time
        from thinwire import netlab
        with netlab.hosts(2, link={link!r}) as hosts:
            print(hosts[0].net, flush=True)
            time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    namespace = os.stat(process.stdout.readline().strip()).st_ino
    made = {
        pid for pid in processes("thinwire.netlab.keeper") - before if descends(pid, process.pid)
    }  # not others' labs
    assert made
    inside = {pid for pid in processes("") if net_of(pid) == namespace}  # by pid: Linux gives the number away again
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert gone(made | inside)
    with netlab.hosts(2, link=link) as hosts:
        assert hosts[0].run(["true"]) == ""


def net_of(pid: int) -> int | None:
    with suppress(OSError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    return None


# ---- without permission


def test_without_root_a_user_namespace_serves(tmp_path: Path) -> None:
    """As another user, who sees this Python through mounts of its own if it lies in a private folder."""
    if os.getuid() != 0:
        pytest.skip("the tests run without root, so all of them show this")
    script = tmp_path / "script.py"
    script.write_text(
        "import os; from thinwire import netlab\n"
        "with netlab.hosts(2, link='100mbit') as hosts:\n"
        "    rates = [hosts.measure().rate_mbit for _ in range(3)]  # the machine is shared\n"
        "    rate = min(rates, key=lambda rate: abs(rate - 100))\n"
        "    print(os.getuid(), hosts[0].user is not None, rate, hosts[1].run(['id', '-u']))\n"
    )
    tmp_path.chmod(0o755)
    home, prefix = Path("/root"), Path(sys.base_prefix)
    mounts = []
    if prefix.is_relative_to(home):
        within = prefix.relative_to(home)
        (tmp_path / "python").mkdir()
        mounts = [
            f"mount --bind {prefix} {tmp_path}/python", f"mount -t tmpfs -o mode=755 none {home}",
            f"mkdir -p {home / within}", f"mount --bind {tmp_path}/python {home / within}",
        ]  # fmt: skip
    inside = Path("/run") / f"thinwire-test-{os.getpid()}"
    steps = [
        *mounts,
        f"mkdir -p {inside}",
        f"mount -t tmpfs none {inside}",
        f"cp {script} {inside}/script.py",
        f"cd {inside}",
        f"exec setpriv --reuid 65534 --regid 65534 --clear-groups {sys.executable} script.py",
    ]
    try:
        command = ["unshare", "--mount", "sh", "-ec", "\n".join(steps)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"},
        )  # fmt: skip
    finally:
        inside.rmdir()
    if "unshare:" in done.stderr or "setpriv:" in done.stderr:
        pytest.skip(f"cannot become another user here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    uid, own_user, rate, uid_there = done.stdout.split()
    assert (uid, own_user, uid_there) == ("65534", "True", "0")
    assert 80 < float(rate) < 110


def thinwire(*arguments: str, forbid: bool = False, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command, in a process that may not make namespaces if so wanted."""
    command = [*programs.PYTHON, "-m", "thinwire", *arguments]
    if forbid:
        without_rights = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", sys.executable]
        command = [*without_rights, "-m", "thinwire", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"},
    )  # fmt: skip
    assert done.returncode == expect, done.stderr
    return done


def test_without_permission_a_run_goes_on_and_says_so(tmp_path: Path) -> None:
    settings = ("train", "--ranks", "2", "--link", "10mbit", "--epochs", "1", "--out", str(tmp_path / "run"))
    done = thinwire(*settings, forbid=True)
    assert "namespaces are not allowed here" in done.stderr
    assert "--cap-add SYS_ADMIN" in done.stderr or "run as root" in done.stderr
    assert "times are not shaped" in done.stderr
    assert "link 10mbit, NOT SHAPED" in done.stdout
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["link"], summary["link_state"], summary["link_measured"]) == ("10mbit", "not shaped", None)
    assert summary["nodes"] == 1
    assert summary["kernel_bytes_by_link"] is None
    settings = (*settings[:-1], str(tmp_path / "strict"), "--strict")
    assert "namespaces are not allowed here" in thinwire(*settings, forbid=True, expect=1).stderr
    assert not (tmp_path / "strict").exists()


# ---- what the ledger says and what the Linux kernel counts


def on_hosts(
    num_ranks: int, num_nodes: int, command: Sequence[str], folders: Sequence[Path] | None = None
) -> list[str]:
    """What each rank of a program prints, the ranks spread over hosts as by torchrun."""
    with netlab.hosts(num_nodes) as hosts:
        world = {"WORLD_SIZE": str(num_ranks), "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        world |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        placed = place(num_ranks, num_nodes)
        ranks = []
        for rank, node in enumerate(placed):
            own = {"RANK": rank, "LOCAL_RANK": rank - placed.index(node), "LOCAL_WORLD_SIZE": placed.count(node)}
            env = {**os.environ, **world, **{name: str(value) for name, value in own.items()}}
            cwd = folders[rank] if folders else None
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            command_there = [*programs.python_on(hosts[node]), *command]
            ranks.append(subprocess.Popen(command_there, env=env, text=True, cwd=cwd, **pipes))
        outputs = [rank.communicate(timeout=100) for rank in ranks]
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors
    return [output for output, _ in outputs]


@pytest.mark.parametrize(("num_ranks", "num_nodes"), [(4, 4), (4, 2), (3, 2)])
def test_each_operation_sends_what_the_ledger_says_inside_and_between_nodes(num_ranks: int, num_nodes: int) -> None:
    outputs = on_hosts(num_ranks, num_nodes, [str(Path(__file__).parent / "on_hosts.py")])
    rows = [json.loads(line) for output in outputs for line in output.splitlines()]
    nodes = place(num_ranks, num_nodes)
    assert len({row["op"] for row in rows}) == 6
    for op in {row["op"] for row in rows}:
        of_op = [row for row in rows if row["op"] == op]
        assert all(row["nodes"] == nodes for row in of_op)
        for link in ("inside", "between"):
            booked, counted = Counter[int](), Counter[int]()
            for row in of_op:
                between = row["between_bytes"]
                booked[row["attempt"]] += between if link == "between" else row["wire_bytes"] - between
                if row["rank"] == nodes.index(nodes[row["rank"]]):
                    counted[row["attempt"]] += row[link]
            (ledger,) = set(booked.values())
            kernel = min(counted.values())
            assert abs(kernel - ledger) < max(0.01 * ledger, 20_000), f"{op}, {link}: {ledger} booked, {kernel} counted"


AT_MOST = {
    "maxnorm": 0.27, "maxnorm(bits=4)": 0.14, "maxnorm(bits=2)": 0.08, "global_randk(ratio=0.01)": 0.012,
    "powersgd(rank=4)": 0.02,
}  # fmt: skip


def test_reducers_send_so_much_of_float32_by_the_kernels_count() -> None:
    """VGG16 on four hosts."""
    outputs = on_hosts(4, 4, [str(Path(__file__).parent / "on_hosts.py"), *AT_MOST])
    rows = [json.loads(line) for output in outputs for line in output.splitlines()]
    exact = 1.5 * 4 * sum(p.numel() for p in registry.build("models", "vgg16", (3, 32, 32), 10).parameters())
    for spec, limit in AT_MOST.items():
        for rank in range(4):
            row = min((row for row in rows if (row["op"], row["rank"]) == (spec, rank)), key=lambda row: row["between"])
            share = row["between"] / exact
            print(f"{spec}: kernel {share:.5f} of float32, {100 * (row['between'] / row['wire_bytes'] - 1):+.2f} %")
            assert share <= limit
            assert abs(row["between"] - row["wire_bytes"]) < max(0.01 * row["wire_bytes"], 20_000)


def agrees(summary: dict[str, Any]) -> bool:
    """Whether the Linux kernel counted what the ledger says, inside nodes and between them. It never counts less."""
    assert (summary["ranks"], summary["nodes"], summary["link"]) == (4, 2, "1gbit")
    apart = []
    for link in ("inside", "between"):
        ledger, kernel = (summary[f"{who}_bytes_by_link"][link] for who in ("wire", "kernel"))
        apart.append(kernel / ledger - 1)
        print(f"{summary['strategy']}, {link}: ledger {ledger:,} B, kernel {kernel:,} B, {100 * apart[-1]:+.3f} %")
    assert min(apart) > -0.01
    return max(apart) < 0.01


WITHOUT_WAITING = "daso(warmup_epochs=0, cooldown_epochs=0)"


def test_ledger_and_kernel_agree_within_one_percent_for_every_strategy(tmp_path: Path) -> None:
    """With a model of some megabytes: what the formulas leave out (headers, acknowledgements, gloo's own notes) is
    about 350 bytes a message, and grows with the number of messages, not with their size."""
    special = {"daso": WITHOUT_WAITING, "ab": "ab(cutoff=0.5)"}  # with factors to send
    special |= {"sequence": "sequence([data_parallel, local_sgd])", "auto": "auto(loss_allowed=0)"}
    specs = [special.get(name, name) for name in registry.TABLE["strategies"]]
    apart = ["ist"], ["local_parallel", "pipeline"]  # slices go in n·(n−1) messages, activations in one for each batch
    rest = [spec for spec in specs if spec not in apart[0] + apart[1]]
    runs: dict[str, dict[str, Any]] = {}
    for attempt in range(2):  # a busy Linux kernel sends, and counts, again what it takes for lost
        for some, width, epochs, batch in ((rest, 768, 2, 16), (apart[0], 1536, 1, 16), (apart[1], 768, 1, 128)):
            todo = [spec for spec in some if spec not in runs or not agrees(runs[spec])]
            settings = (
                "--model",
                f"mlp(width={width}, norm=True)",
                "--epochs",
                str(epochs),
                "--batch-size",
                str(batch),
            )
            folder = tmp_path / f"{attempt}-{width}-{batch}"
            if todo:
                where = ("--ranks", "4", "--nodes", "2", "--link", "1gbit", "--out", str(folder))
                thinwire("compare", *todo, *settings, *where, "--seeds", "1", "--baseline", "none")
            runs |= {run["strategy"]: run for run in (summary_of(path.parent) for path in folder.rglob("summary.json"))}
    assert set(runs) == set(specs)
    assert all(agrees(run) for run in runs.values())
    flat, daso = (runs[spec]["kernel_bytes_by_link"]["between"] for spec in ("data_parallel", WITHOUT_WAITING))
    print(f"between nodes, daso while cycling: {daso / flat:.4f} of data_parallel's bytes")
    assert daso <= flat / 4
    (alone,) = tmp_path.rglob("*-alone/seed-0/ledger.jsonl")
    assert sum(row["between_bytes"] for row in read_rows(alone) if row["purpose"] == "train") == 0


def test_two_hosts_with_disks_of_their_own_that_nobody_shares(tmp_path: Path) -> None:
    folders = [tmp_path / "host0", tmp_path / "host1"]
    for folder in folders:
        folder.mkdir()

    def train(*arguments: str) -> None:
        on_hosts(2, 2, ["-m", "thinwire", "train", *arguments], folders)

    settings = ["--model", "mlp(width=512)", "--batch-size", "64", "--schedule", "constant"]
    train(*settings, "--epochs", "2", "--out", "cut")
    assert {p.name for p in (folders[1] / "cut").iterdir()} == {"config.toml", "checkpoints"}
    assert {p.name for p in (folders[1] / "cut" / "checkpoints").glob("*/*")} == {"rank-1.json", "rank-1.safetensors"}
    train("--out", "cut", "--resume", "--epochs", "4")
    train(*settings, "--epochs", "4", "--out", "whole")
    assert same_files(folders[0] / "whole", folders[0] / "cut")


# ---- runs on hosts


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_slow_link_makes_ranks_wait_and_changes_no_number(tmp_path: Path) -> None:
    settings = ("train", "--ranks", "2", "--epochs", "1", "--model", "mlp(width=256)", "--out")
    thinwire(*settings, str(tmp_path / "fast"))
    done = thinwire(*settings, str(tmp_path / "slow"), "--link", "20mbit")
    fast, slow = summary_of(tmp_path / "fast"), summary_of(tmp_path / "slow")
    assert same_files(tmp_path / "fast", tmp_path / "slow")
    assert slow["wire_bytes_per_rank"] == fast["wire_bytes_per_rank"]
    assert (fast["nodes"], slow["nodes"]) == (1, 2)
    assert fast["wire_bytes_by_link"]["between"] == 0
    assert slow["wire_bytes_by_link"]["inside"] == 0
    floor = slow["wire_bytes_per_rank"] * 8e-6 / 20
    assert slow["train_seconds"] > 0.9 * floor, "faster than the wire"
    assert slow["waiting_share"] > 0.5
    assert 0 <= fast["waiting_share"] <= 1
    assert slow["link_state"] == ("off" if abs(slow["link_measured"]["rate_mbit"] / 20 - 1) > 0.1 else "shaped")
    assert "2 nodes; link 20mbit, measured" in done.stdout


def test_restart_and_resume_on_hosts_are_exact(tmp_path: Path) -> None:
    common = ("--ranks", "3", "--nodes", "2", "--epochs", "2", "--checkpoint-every", "5")
    thinwire("train", "--task", "tests.user_task:noisy", *common, "--out", str(tmp_path / "whole"))
    task = f"tests.user_task:noisy(fault='kill', step=12, once={str(tmp_path / 'happened')!r})"
    done = thinwire("train", "--task", task, *common, "--restarts", "1", "--out", str(tmp_path / "cut"))
    assert "restart 1 of 1" in done.stderr
    assert same_files(tmp_path / "whole", tmp_path / "cut")
    whole, cut = summary_of(tmp_path / "whole"), summary_of(tmp_path / "cut")
    assert whole["wire_bytes_by_link"] == cut["wire_bytes_by_link"]
