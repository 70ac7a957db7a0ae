"""A gate in front of a store: only who proves to know the secret gets through.

torch's TCPStore answers everyone who can connect. So with a secret it listens on loopback, and a `Gate` listens where
others connect. A rank reaches it through a `Passage`: a listener of its own on loopback, whose connections go on to the
gate. Both sides prove that they know the secret, by HMAC-SHA256 over both sides' fresh random numbers:

    gate → rank    GATE + its nonce, as soon as there is a connection
    rank → gate    RANK + its nonce + proof("rank", GATE, RANK, address and port of the gate, both nonces)
    gate → rank    proof("gate", the same), or REFUSED

The roles differ, so no proof can be sent back to whoever made it. The nonces are new for each connection, so none can
be used again. The address is in it, so a gate elsewhere cannot pass it on. What follows is the store's own protocol: it
is not encrypted, and whoever sits on the way between machines can change it (docs/security.md).
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from thinwire.comm.addresses import network_of
from thinwire.comm.relays import RETRY_SECONDS, Relays, connect, hang_up, listen, receive, send, serve
from thinwire.comm.secret import NONCE_BYTES, PROOF_BYTES, Secret
from thinwire.common.messages import print_line
from thinwire.errors import UsageError

GATE, RANK = b"thinwire gate 1\n", b"thinwire rank 1\n"  # the version of the protocol is part of them
REFUSED = b"thinwire refuses".ljust(PROOF_BYTES)
HANDSHAKE_SECONDS = 10.0
MOST_HALF_OPEN = 64  # connections that have proved nothing yet; of more, one of the network that has most is dropped
MOST_ADDRESSES = 1000  # of refused strangers that are counted one by one
PING_SECONDS = 2.0
PING = b"\x00\xce\xf7\x85\x3c" + b"\x0d" + b"ping"  # torch's store sends the last four bytes back


class Gate:
    """Listens at an address, and lets through to a store on this machine's loopback who knows the secret.

    It knows nothing of the store but its port: any store will do. Refused connections are reported, once for each
    address and then when their number reaches 10, 100 and so on.

    >>> with socket.create_server(("127.0.0.1", 0)) as store:
    ...     gate = Gate("127.0.0.1", 0, store.getsockname()[1], Secret("correct horse battery staple"))
    ...     gate.close()
    """

    def __init__(
        self, address: str, port: int, store_port: int, secret: Secret, report: Callable[[str], None] = print_line
    ) -> None:
        self._listener = listen(address, port)
        self.address, self.port = address, int(self._listener.getsockname()[1])
        self._store_port, self._secret, self._report = store_port, secret, report
        self._half_open: dict[socket.socket, str] = {}  # from which network, the oldest first
        self._refused: dict[str, int] = {}
        self._lock = threading.Lock()
        self._relays = Relays("thinwire-gate")
        self._accepting = serve(self._listener, self._admit, "thinwire-gate-accept")

    def close(self) -> None:
        """Stop listening, and end the connections."""
        hang_up(self._listener)
        self._accepting.join()
        self._listener.close()
        with self._lock:
            half_open = list(self._half_open)
        for one in half_open:
            hang_up(one)
        self._relays.close()

    def _admit(self, peer: socket.socket) -> None:
        where = "an unknown address"
        with suppress(OSError):  # it has left already
            where = str(peer.getpeername()[0])
        with self._lock:
            self._half_open[peer] = network_of(where)
            if len(self._half_open) > MOST_HALF_OPEN:
                self._drop_one()
        about: Any = {"args": (peer, where), "daemon": True, "name": "thinwire-gate-handshake"}
        try:
            threading.Thread(target=self._examine, **about).start()
        except RuntimeError:  # without this, the gate would be closed for good
            with self._lock:
                self._half_open.pop(peer, None)
            peer.close()
            self._count(where, "this process can start no more threads")

    def _drop_one(self) -> None:
        """End the oldest connection of a network that has most: who opens many drops their own, and not a rank's."""
        numbers = Counter(self._half_open.values())
        oldest = max(self._half_open, key=lambda one: numbers[self._half_open[one]])  # the first of these
        del self._half_open[oldest]
        hang_up(oldest)  # its thread then ends

    def _examine(self, peer: socket.socket, where: str) -> None:
        """Let a connection through, or refuse it."""
        until = time.monotonic() + HANDSHAKE_SECONDS
        try:
            proof = greet(peer, self._secret, until)
            with self._lock:
                self._half_open.pop(peer, None)  # from here on it is not dropped for others
            store = socket.create_connection(("127.0.0.1", self._store_port), HANDSHAKE_SECONDS)
            send(peer, proof, until)
            self._relays.join(peer, store)
        except Refused as refused:
            peer.close()
            self._count(where, str(refused))
        except OSError as error:
            peer.close()
            self._count(where, f"the connection broke ({error.strerror or error})")
        finally:
            with self._lock:
                self._half_open.pop(peer, None)

    def _count(self, where: str, why: str) -> None:
        with self._lock:
            where = where if where in self._refused or len(self._refused) < MOST_ADDRESSES else "other addresses"
            self._refused[where] = count = self._refused.get(where, 0) + 1
        if str(count).strip("0") == "1":  # 1, 10, 100 …
            attempts = f"{count} attempts so far" if count > 1 else "the run goes on"
            self._report(f"refused a connection from {where} to {self.address}:{self.port}: {why} ({attempts})")


class Passage:
    """This rank's way through a gate: what connects to `port` on its loopback is at the store behind the gate.

    Raises UsageError if the gate does not know this secret, or if there is none, and OSError if nothing listens there
    for `seconds`.
    """

    def __init__(self, address: str, port: int, secret: Secret, seconds: float) -> None:
        self._to, self._secret = (address, port), secret
        connect_through(address, port, secret, time.monotonic() + seconds).close()  # the first error is raised here
        self._relays = Relays("thinwire-passage")
        self._listener = listen("127.0.0.1", 0)
        self.port = int(self._listener.getsockname()[1])
        self._accepting = serve(self._listener, self._pass_on, "thinwire-passage-accept")

    def close(self) -> None:
        """Stop listening, and end the connections."""
        hang_up(self._listener)
        self._accepting.join()
        self._listener.close()
        self._relays.close()

    def _pass_on(self, own: socket.socket) -> None:
        try:
            self._relays.join(own, connect_through(*self._to, self._secret, time.monotonic() + HANDSHAKE_SECONDS))
        except (OSError, UsageError):  # the gate is gone; the store's own error says so
            own.close()


class Refused(Exception):
    """Why a connection is refused. Nobody else is told."""


def greet(peer: socket.socket, secret: Secret, until: float) -> bytes:
    """The gate's side of the handshake, up to its proof, which is returned. Raises Refused."""
    nonce = os.urandom(NONCE_BYTES)
    send(peer, GATE + nonce, until)
    try:
        if receive(peer, len(RANK), until) != RANK:
            raise Refused("it offered no proof of the secret")
        theirs = receive(peer, NONCE_BYTES, until)
        proof = receive(peer, PROOF_BYTES, until)
    except TimeoutError:
        raise Refused(f"it offered no proof of the secret within {HANDSHAKE_SECONDS:g} s") from None
    except EOFError:
        raise Refused("it left without a proof of the secret") from None
    about = GATE, RANK, _spell(peer.getsockname()), nonce, theirs
    if not secret.accepts(proof, "rank", *about):
        send(peer, REFUSED, until)
        raise Refused("its proof of the secret is wrong")
    return secret.prove("gate", *about)


def answer(gate: socket.socket, secret: Secret, until: float) -> None:
    """A rank's side of the handshake. Raises UsageError if there is no gate with this secret."""
    where, nonce = "{}:{}".format(*gate.getpeername()[:2]), os.urandom(NONCE_BYTES)
    try:
        hello = receive(gate, len(GATE), until)
        if hello != GATE:
            raise UsageError(f"{where} is no gate of this version of thinwire; install one version on all machines")
        theirs = receive(gate, NONCE_BYTES, until)
    except EOFError:
        raise ConnectionResetError(f"{where} closed the connection") from None
    except TimeoutError:
        if _ping(gate) == PING[-4:]:
            why = f"this rank has a secret, but the store at {where} asks for none; give rank 0 the same secret"
            raise UsageError(why) from None
        raise TimeoutError(f"{where} takes connections and says nothing") from None
    about = GATE, RANK, _spell(gate.getpeername()), theirs, nonce
    send(gate, RANK + nonce + secret.prove("rank", *about), until)
    try:
        proof = receive(gate, PROOF_BYTES, until)
    except EOFError:
        raise ConnectionResetError(f"{where} closed the connection during the handshake") from None
    if proof == REFUSED:
        raise UsageError(f"the gate at {where} refused this rank: its secret is another one; give all ranks the same")
    if not secret.accepts(proof, "gate", *about):
        raise UsageError(
            f"what listens at {where} does not know the secret; check that MASTER_ADDR is rank 0's machine, and that "
            "all ranks have the same secret"
        )
    gate.settimeout(None)


def connect_through(address: str, port: int, secret: Secret, until: float) -> socket.socket:
    """A connection to the store behind a gate. Tries again while nothing listens there."""
    while True:
        gate = connect(address, port, until)
        try:
            answer(gate, secret, min(until, time.monotonic() + HANDSHAKE_SECONDS))
            return gate
        except OSError:  # the gate was flooded, or ended
            gate.close()
            if time.monotonic() + RETRY_SECONDS > until:
                raise
            time.sleep(RETRY_SECONDS)
        except BaseException:
            gate.close()
            raise


def refuse_gate(address: str, port: int, until: float) -> None:
    """Raise UsageError if a gate listens there, for a rank without a secret. Waits until something listens."""
    with connect(address, port, until) as peer:
        if _ping(peer) == GATE[:4]:
            raise UsageError(
                f"the store at {address}:{port} asks for a secret, and this rank has none; give it the file of rank 0 "
                "with --secret-file, or set THINWIRE_SECRET"
            )


def _ping(peer: socket.socket) -> bytes:
    """The first bytes that a gate says, or what a store answers to PING; none if it is neither."""
    with suppress(TimeoutError, EOFError, ConnectionError):
        send(peer, PING, time.monotonic() + PING_SECONDS)
        return receive(peer, 4, time.monotonic() + PING_SECONDS)
    return b""


def _spell(address: tuple[Any, ...]) -> bytes:
    """An address and a port, as both sides of a connection write them."""
    return f"{str(address[0]).partition('%')[0]}:{address[1]}".encode()
