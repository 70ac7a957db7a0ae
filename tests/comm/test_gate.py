"""Who knows the secret gets through the gate to the store; nobody else does, whatever they send."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from thinwire.comm import gate as gates
from thinwire.comm.gate import GATE, RANK, REFUSED, Gate, Passage, connect_through, refuse_gate
from thinwire.comm.relays import Relays, receive
from thinwire.comm.secret import VARIABLE, Secret, read_secret
from thinwire.comm.store import local_store
from thinwire.errors import UsageError

TEXT, OTHER = "a secret that no other program knows", "a secret that was changed yesterday"
SECRET = Secret(TEXT)
HELLO_BYTES = len(GATE) + 32


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def port_of(one: socket.socket) -> int:
    return int(one.getsockname()[1])


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def gate(told: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate in front of a listener that says what it hears, back."""
    monkeypatch.setattr(gates, "HANDSHAKE_SECONDS", 0.5)
    with closing(Relays("echo")) as relays, echo(relays) as port, closing(
        Gate("127.0.0.1", 0, port, SECRET, told.append)
    ) as made:  # fmt: skip
        yield made


@contextmanager
def echo(relays: Relays) -> Iterator[int]:
    with listener() as server:

        def answer() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                with peer:
                    while heard := peer.recv(1000):
                        peer.sendall(heard)

        thread = threading.Thread(target=answer)
        thread.start()
        yield port_of(server)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def reach(gate: Gate) -> socket.socket:
    return socket.create_connection((gate.address, gate.port), 10)


def is_refused(peer: socket.socket) -> bool:
    """Whether the gate ends the connection, within a bounded time, without letting anything through."""
    peer.settimeout(5)
    heard = b""
    try:
        while more := peer.recv(1000):
            heard += more
    except ConnectionResetError:  # it was closed with bytes that were not read
        pass
    except TimeoutError:
        return False
    return (heard[HELLO_BYTES:] if heard.startswith(GATE) else heard) in (b"", REFUSED)


def works(gate: Gate) -> bool:
    with connect_through(gate.address, gate.port, SECRET, soon()) as peer:
        peer.sendall(b"hello")
        return receive(peer, 5, soon()) == b"hello"


def wait_for(holds: Callable[[], object]) -> None:
    end = soon(5)
    while not holds() and time.monotonic() < end:
        time.sleep(0.01)
    assert holds()


def proven(gate_hello: bytes, secret: Secret, role: str, where: str, nonce: bytes = bytes(32)) -> bytes:
    return RANK + nonce + secret.prove(role, GATE, RANK, where.encode(), gate_hello[16:], nonce)


def test_who_knows_the_secret_gets_through_and_is_not_reported(gate: Gate, told: list[str]) -> None:
    assert works(gate)
    assert works(gate), "again: each connection is for itself"
    assert told == []


def test_a_rank_with_another_secret_is_told_what_to_do(gate: Gate, told: list[str]) -> None:
    with pytest.raises(UsageError, match="refused this rank: its secret is another one; give all ranks the same"):
        Passage(gate.address, gate.port, Secret(OTHER), 5)
    wait_for(lambda: told)
    assert "refused a connection from 127.0.0.1" in told[0]
    assert "its proof of the secret is wrong" in told[0]
    assert works(gate)


def test_a_rank_without_a_secret_is_told_what_to_do(gate: Gate, told: list[str]) -> None:
    with pytest.raises(UsageError, match=r"asks for a secret, and this rank has none; .* --secret-file"):
        refuse_gate(gate.address, gate.port, soon())
    wait_for(lambda: told)
    assert works(gate)


def test_a_rank_with_a_secret_does_not_join_an_open_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "HANDSHAKE_SECONDS", 0.3)
    store = local_store(2)
    with pytest.raises(UsageError, match=r"has a secret, but the store at .* asks for none; give rank 0 the same"):
        Passage("127.0.0.1", store.port, SECRET, 5)
    refuse_gate("127.0.0.1", store.port, soon())  # a rank without one does


@pytest.mark.parametrize(
    "sent",
    [b"", b"x", RANK, RANK + bytes(32), RANK + bytes(63), RANK + bytes(64), os.urandom(100_000), bytes(80)],
    ids=["nothing", "a byte", "no nonce", "no proof", "cut", "zeros", "garbage", "another protocol"],
)  # fmt: skip
@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_what_proves_nothing_is_refused_in_a_bounded_time(
    sent: bytes, leaves: bool, gate: Gate, told: list[str]
) -> None:
    with reach(gate) as peer:
        with suppress(OSError):  # it may be refused before it has said all
            peer.sendall(sent)
            if leaves:
                peer.shutdown(socket.SHUT_WR)
        assert is_refused(peer)
    wait_for(lambda: told)
    assert works(gate)


def test_bytes_that_come_slowly_are_refused_when_the_time_is_over(gate: Gate, told: list[str]) -> None:
    with reach(gate) as peer:
        hello = receive(peer, HELLO_BYTES, soon())
        whole = proven(hello, SECRET, "rank", f"127.0.0.1:{gate.port}")
        with suppress(ConnectionError):
            for byte in whole:  # two seconds, where half of one is allowed; each byte comes in time
                peer.sendall(bytes([byte]))
                time.sleep(0.025)
        assert is_refused(peer)
    wait_for(lambda: told)
    assert "within 0.5 s" in told[0]


def test_a_handshake_that_was_recorded_opens_nothing(gate: Gate, told: list[str]) -> None:
    with Recorder(gate) as recorder, connect_through("127.0.0.1", recorder.port, SECRET, soon()):
        pass
    with reach(gate) as peer:
        peer.sendall(recorder.sent)
        assert is_refused(peer)
    wait_for(lambda: told)
    assert "its proof of the secret is wrong" in told[0]


class Recorder:
    """Another address that leads to the gate, which records what a rank says. It says itself that it is the gate."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.sent = gate, b""
        self.listener = listener()
        self.port = port_of(self.listener)
        self.thread = threading.Thread(target=self.record)

    def __enter__(self) -> Recorder:
        self.before = gates._spell
        gates._spell = lambda address: b"here"  # else the address alone would refuse it
        self.thread.start()
        return self

    def record(self) -> None:
        peer, _ = self.listener.accept()
        with reach(self.gate) as there, peer:
            peer.sendall(receive(there, HELLO_BYTES, soon()))
            self.sent = receive(peer, len(RANK) + 64, soon())
            there.sendall(self.sent)
            peer.sendall(receive(there, 32, soon()))

    def __exit__(self, *_: object) -> None:
        self.thread.join()
        self.listener.close()
        gates._spell = self.before


def test_a_gate_at_another_address_cannot_pass_a_proof_on(gate: Gate, told: list[str]) -> None:
    """Whoever pretends to be rank 0's machine asks the real gate, and hands each side what the other says."""

    def between() -> None:
        peer, _ = middle.accept()
        with peer, reach(gate) as there:
            peer.sendall(receive(there, HELLO_BYTES, soon()))
            there.sendall(receive(peer, len(RANK) + 64, soon()))
            peer.sendall(receive(there, 32, soon()))

    with listener() as middle:
        thread = threading.Thread(target=between)
        thread.start()
        with pytest.raises(UsageError, match="refused this rank"):
            connect_through("127.0.0.1", port_of(middle), SECRET, soon(2))
        thread.join()
    wait_for(lambda: told)
    assert "its proof of the secret is wrong" in told[0]


def test_a_gate_answers_no_challenge_that_could_be_its_own(gate: Gate) -> None:
    """Reflection: what one connection is asked is asked on another one, which proves nothing before it has a proof."""
    with reach(gate) as first, reach(gate) as second:
        hello = receive(first, HELLO_BYTES, soon())
        receive(second, HELLO_BYTES, soon())
        second.sendall(RANK + hello[16:] + bytes(32))
        answered = receive(second, 32, soon())
        assert answered == REFUSED
        first.sendall(RANK + bytes(32) + answered)
        assert is_refused(first)


@pytest.mark.parametrize("answers", ["echo", "garbage", "another version"])
def test_a_rank_refuses_a_false_gate(answers: str) -> None:
    """It knows no secret; the best that it can do is to send the rank's own words back."""

    def pretend() -> None:
        peer, _ = server.accept()
        with peer:
            nonce = os.urandom(32)
            peer.sendall((b"thinwire gate 2\n" if answers == "another version" else GATE) + nonce)
            if answers != "another version":
                said = receive(peer, len(RANK) + 64, soon())
                peer.sendall(said[-32:] if answers == "echo" else os.urandom(32))

    with listener() as server:
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(UsageError, match=r"does not know the secret|no gate of this version"):
            connect_through("127.0.0.1", port_of(server), SECRET, soon(2))
        thread.join()


def test_a_proof_of_the_other_role_or_another_secret_is_refused(gate: Gate) -> None:
    where = f"127.0.0.1:{gate.port}"
    for secret, role, said in ((SECRET, "gate", where), (Secret(OTHER), "rank", where), (SECRET, "rank", "10.0.0.1:1")):
        with reach(gate) as peer:
            peer.sendall(proven(receive(peer, HELLO_BYTES, soon()), secret, role, said))
            assert is_refused(peer)
    with reach(gate) as peer:  # of another version of the protocol
        hello = receive(peer, HELLO_BYTES, soon())
        other = SECRET.prove("rank", GATE, b"thinwire rank 2\n", where.encode(), hello[16:], bytes(32))
        peer.sendall(RANK + bytes(32) + other)
        assert is_refused(peer)
    with reach(gate) as peer:  # the right one, made by hand
        peer.sendall(proven(receive(peer, HELLO_BYTES, soon()), SECRET, "rank", where) + b"hello")
        assert receive(peer, 37, soon())[32:] == b"hello"


def test_strangers_who_hold_connections_do_not_keep_ranks_out(
    gate: Gate, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "HANDSHAKE_SECONDS", 30.0)
    monkeypatch.setattr(gates, "MOST_HALF_OPEN", 8)
    held = [reach(gate) for _ in range(40)]
    try:
        assert works(gate)
        assert len(gate._half_open) <= 8
        wait_for(lambda: len(told) == 2)
    finally:
        for one in held:
            one.close()
    assert "(10 attempts so far)" in told[1], "said at the first, and at the tenth"


def test_a_gate_that_is_late_is_asked_again(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process was stopped, or had too much to do; it is not taken for a store that asks for no secret."""
    late, greet = [0.8], gates.greet

    def greet_late(peer: socket.socket, secret: Secret, until: float) -> bytes:
        time.sleep(late.pop() if late else 0)
        return greet(peer, secret, soon())

    monkeypatch.setattr(gates, "greet", greet_late)
    assert works(gate)
    assert not late


def test_what_takes_connections_and_says_nothing_is_no_store_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HANDSHAKE_SECONDS", "PING_SECONDS"):
        monkeypatch.setattr(gates, name, 0.2)
    with listener() as silent, pytest.raises(TimeoutError, match="says nothing"):
        connect_through("127.0.0.1", port_of(silent), SECRET, soon(1))


def test_strangers_of_one_address_drop_each_other_and_not_a_rank_that_is_slow(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank has said nothing yet, as one that is far away, when they come, and so is the oldest of all."""
    monkeypatch.setattr(gates, "HANDSHAKE_SECONDS", 30.0)
    monkeypatch.setattr(gates, "MOST_HALF_OPEN", 8)
    with reach(gate) as rank, ExitStack() as strangers:
        hello = receive(rank, HELLO_BYTES, soon())
        for _ in range(40):
            one = strangers.enter_context(socket.create_connection((gate.address, gate.port), 10, ("127.0.0.9", 0)))
            with suppress(EOFError, ConnectionError):  # dropped already
                receive(one, HELLO_BYTES, soon())
        rank.sendall(proven(hello, SECRET, "rank", f"127.0.0.1:{gate.port}") + b"hello")
        assert receive(rank, 37, soon())[32:] == b"hello"
        assert len(gate._half_open) <= 8


def test_a_gate_that_cannot_start_a_thread_is_there_for_the_next_connection(
    gate: Gate, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, limit = threading.Thread.start, [0]

    def start_unless_full(thread: threading.Thread) -> None:
        if thread.name == "thinwire-gate-handshake" and limit:
            limit.pop()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_unless_full)
    with reach(gate) as peer:
        assert is_refused(peer)
    assert works(gate)
    assert len(told) == 1
    assert "no more threads" in told[0]
    assert not gate._half_open


def test_a_store_of_torch_works_through_a_passage(told: list[str]) -> None:
    real, timeout = local_store(2), datetime.timedelta(seconds=10)
    gate = Gate("127.0.0.1", 0, real.port, SECRET, told.append)
    passage = Passage(gate.address, gate.port, SECRET, 5)
    with closing(gate), closing(passage):
        far = dist.TCPStore("127.0.0.1", passage.port, 2, False, timeout, wait_for_workers=False)
        far.set("from the rank", "x" * 3_000_000)  # more than a relay keeps
        assert len(real.get("from the rank")) == 3_000_000
        real.set("from rank 0", "y" * 3_000_000)
        assert len(far.get("from rank 0")) == 3_000_000
        assert far.add("count", 2) == 2
        assert far.clone().get("from rank 0")[:1] == b"y"
        del far
    assert told == []


# ---- where the secret comes from


def test_a_file_that_others_may_open_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    file.write_text(f"{TEXT}\n")
    for mode in (0o640, 0o604, 0o666):
        file.chmod(mode)
        with pytest.raises(UsageError, match=r"other users of this machine may open it.*chmod 600"):
            read_secret(file)
    file.chmod(0o600)
    read = read_secret(file)
    assert read is not None
    assert read.prove("rank") == SECRET.prove("rank"), "without the end of the line"


@pytest.mark.parametrize(("content", "why"), [(b"short", "16 to 4096"), (b"\xff" * 20, "not text"), (None, "No such")])
def test_a_file_without_a_secret_is_refused(content: bytes | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "secret.txt"
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o600)
    with pytest.raises(UsageError, match=f"{why}.*openssl rand") as caught:
        read_secret(file)
    assert "short" not in str(caught.value)


def test_a_pipe_in_the_place_of_the_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret.txt", 0o600)
    with pytest.raises(UsageError, match="it is no regular file"):
        read_secret(tmp_path / "secret.txt")


def test_the_environment_has_the_secret_if_no_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_secret() is None
    monkeypatch.setenv(VARIABLE, TEXT)
    read = read_secret()
    assert read is not None
    assert read.prove("rank") == SECRET.prove("rank")
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(UsageError, match=r"THINWIRE_SECRET: .* this one has 0"):
        read_secret()


def test_a_secret_is_not_shown() -> None:
    assert TEXT not in f"{SECRET} {SECRET!r} {vars(SECRET)}"
    with pytest.raises(TypeError, match="not pickled"):
        SECRET.__reduce__()
