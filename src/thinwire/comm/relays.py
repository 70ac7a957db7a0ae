"""Sockets: bounded waiting for bytes, and a thread that passes the bytes of connections on."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

CHUNK_BYTES = 2**16
MOST_PENDING_BYTES = 2**20  # that one side has not taken yet; meanwhile nothing more is read from the other
RETRY_SECONDS = 0.2


class Relays:
    """One thread that passes bytes on between pairs of sockets, in both directions, until either side closes.

    >>> relays = Relays("example")
    >>> (one, end), (other, end2) = socket.socketpair(), socket.socketpair()
    >>> relays.join(end, end2); one.sendall(b"hello"); receive(other, 5, time.monotonic() + 5)
    b'hello'
    >>> relays.close(); one.close(); other.close()
    """

    def __init__(self, name: str) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._bell_end = socket.socketpair()
        self._bell_end.setblocking(False)
        self._new: deque[tuple[socket.socket, socket.socket]] = deque()
        self._other: dict[socket.socket, socket.socket] = {}
        self._pending: dict[socket.socket, bytearray] = {}  # bytes for this socket
        self._ended: set[socket.socket] = set()  # sockets that will send no more
        self._closed = False
        self._selector.register(self._bell_end, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, one: socket.socket, other: socket.socket) -> None:
        """Pass on what either socket sends. Both are closed when one of them is."""
        self._new.append((one, other))
        self._ring()

    def close(self) -> None:
        """End all connections and the thread."""
        self._closed = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or the thread has ended
            self._bell.send(b"!", socket.MSG_DONTWAIT)

    # ---- in the thread

    def _run(self) -> None:
        while not self._closed:
            for key, events in self._selector.select():
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._bell_end:
                    self._bell_end.recv(CHUNK_BYTES)
                    self._begin()
                    continue
                if events & selectors.EVENT_WRITE and key.fileobj in self._other:
                    self._write(key.fileobj)
                if events & selectors.EVENT_READ and key.fileobj in self._other:
                    self._read(key.fileobj)
        self._begin()
        while self._other:
            self._end(next(iter(self._other)))
        self._selector.close()
        self._bell.close()
        self._bell_end.close()

    def _begin(self) -> None:
        while self._new:
            pair = self._new.popleft()
            for one, other in (pair, pair[::-1]):
                one.setblocking(False)
                if one.family != socket.AF_UNIX:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._other[one], self._pending[one] = other, bytearray()
                self._selector.register(one, selectors.EVENT_READ)

    def _read(self, one: socket.socket) -> None:
        other = self._other[one]
        try:
            found = one.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        if found:
            self._pending[other] += found
        else:
            self._ended.add(one)
        self._write(other)

    def _write(self, one: socket.socket) -> None:
        """Send what is pending. The connection ends once the other side has ended and all it sent was passed on."""
        pending, other = self._pending[one], self._other[one]
        try:
            while pending:
                del pending[: one.send(pending)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(one)
            return
        if other in self._ended and not pending:
            self._end(one)
            return
        self._watch(one)
        self._watch(other)

    def _watch(self, one: socket.socket) -> None:
        """Wait for what is possible with a socket now."""
        is_open = one not in self._ended and len(self._pending[self._other[one]]) < MOST_PENDING_BYTES
        events = is_open * selectors.EVENT_READ | bool(self._pending[one]) * selectors.EVENT_WRITE
        is_watched = one in self._selector.get_map()
        if events and is_watched:
            self._selector.modify(one, events)
        elif events:
            self._selector.register(one, events)
        elif is_watched:
            self._selector.unregister(one)

    def _end(self, one: socket.socket) -> None:
        for closing in (one, self._other[one]):
            if closing in self._selector.get_map():
                self._selector.unregister(closing)
            closing.close()
            self._ended.discard(closing)
            del self._other[closing], self._pending[closing]


# ---- waiting


def receive(peer: socket.socket, size: int, until: float) -> bytes:
    """So many bytes. TimeoutError if they are not there in time, EOFError if the other side closes before."""
    found = b""
    while len(found) < size:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError(f"{size} bytes were expected, {len(found)} came")
        peer.settimeout(left)
        more = peer.recv(size - len(found))
        if not more:
            raise EOFError(f"{size} bytes were expected, {len(found)} came")
        found += more
    return found


def send(peer: socket.socket, data: bytes, until: float) -> None:
    """Send bytes. TimeoutError if they are not taken in time."""
    peer.settimeout(max(0.001, until - time.monotonic()))
    peer.sendall(data)


def connect(address: str, port: int, until: float) -> socket.socket:
    """A connection, once something listens there. Raises the last error if nothing does in time."""
    while True:
        try:
            peer = socket.create_connection((address, port), max(0.1, until - time.monotonic()))
            if peer.getsockname() != peer.getpeername():
                return peer
            peer.close()  # Linux gave this socket the very port it was to reach, where nothing listens
            why = OSError(f"nothing listens at {address}:{port}")
        except OSError as error:
            why = error
        if time.monotonic() + RETRY_SECONDS > until:
            raise why
        time.sleep(RETRY_SECONDS)


def listen(address: str, port: int) -> socket.socket:
    """A listener at one address."""
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


def serve(listener: socket.socket, attend: Callable[[socket.socket], None], name: str) -> threading.Thread:
    """Give each new connection to a function, in a thread, until the listener is closed by `hang_up`."""

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                if listener.fileno() < 0 or not _is_listening(listener):
                    return
                time.sleep(RETRY_SECONDS)  # too many files are open
                continue
            attend(peer)

    thread = threading.Thread(target=accept, name=name, daemon=True)
    thread.start()
    return thread


def _is_listening(listener: socket.socket) -> bool:
    with suppress(OSError):
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def hang_up(one: socket.socket) -> None:
    """End a socket that another thread uses: what it waits for there ends."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
