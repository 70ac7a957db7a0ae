"""The watch: ranks tell each other through the store where they are, so that one that waits can say for whom."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from thinwire.comm.patience import DEFAULT_SECONDS
from thinwire.comm.sightings import SILENT_BEATS, Sightings, ask_in_time
from thinwire.comm.whereabouts import Operation, Whereabouts
from thinwire.common.durations import format_duration
from thinwire.common.messages import say
from thinwire.errors import PeerLost

NOTICE_SECONDS = 10.0  # until a rank says for whom it waits; then after twice as long, and so on
BEATS = 4  # until then
END_SECONDS = 2.0  # that `close` waits for the thread
NO_ANSWER = "the store at rank 0 does not answer: rank 0's machine may be stopped, or its link down"
ADVICE = "look at that machine and its link (thinwire doctor), or be more patient: --patience, or tw.join(patience=…)"
VERDICT = "verdict"  # the key of what the first rank says whose patience is over


@dataclass
class Wait:
    """An operation that a thread is in. Its age is counted in beats: time in which this process was stopped is none."""

    operation: Operation
    next_notice: float
    beats: int = 0
    has_looked: bool = False
    was_said: bool = False


class Watch:
    """One rank's part: it counts the operations that the rank begins, and has a thread that tells and looks.

    The thread writes some 100 bytes to the store every few seconds. It reads what the others wrote only while this rank
    waits. Once a rank has waited long enough for a notice, the lowest rank that waits says so.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[int], patience: float) -> None:
        self.rank, self.members, self.patience = rank, tuple(members), patience
        self.doing = ""
        self._store = store.clone()  # a connection of its own
        self._notice = min(NOTICE_SECONDS, patience / 3)
        self._beat_seconds = self._notice / BEATS
        self._sightings = Sightings(store, rank, self.members, self._beat_seconds)
        self._beat = 0
        self._counts: Counter[str] = Counter()
        self._waits: list[Wait] = []
        self._latest: Operation | None = None
        self._said: dict[tuple[int, ...], float] = {}  # late ranks → the longest wait for them that was said
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._store.set(f"host/{rank}", socket.gethostname())
        self._tell()
        self._thread = threading.Thread(target=self._run, name="thinwire-watch", daemon=True)
        self._thread.start()

    # ---- what the rank does

    def begin(self, key: str, members: Sequence[int], name: str, purpose: str, step: int) -> Operation:
        """This rank begins an operation of a group."""
        with self._lock:
            self._counts[key] += 1
            self._latest = begun = Operation(key, self._counts[key], members, name, purpose, step)
        return begun

    def begin_message(self, key: str, other: int, name: str, purpose: str, step: int) -> Operation:
        """This rank begins to send a message to another one ("send"), or to receive one ("recv")."""
        mine, theirs = "<>" if name == "recv" else "><"
        with self._lock:
            self._counts[f"{key}{mine}{other}"] += 1
            number = self._counts[f"{key}{mine}{other}"]
            self._latest = begun = Operation(f"{key}{theirs}{self.rank}", number, (other,), name, purpose, step)
        return begun

    @contextmanager
    def inside(self, operation: Operation) -> Iterator[None]:
        """This thread is in an operation. A PeerLost from it gets a message that names who was late."""
        wait = Wait(operation, self._notice)
        with self._lock:
            self._waits.append(wait)
        try:
            yield
            if wait.was_said:
                say(f"going on after {format_duration(self._age(wait))}")
        except PeerLost as error:
            raise self._explained(error, wait) from error
        finally:
            with self._lock:
                self._waits.remove(wait)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(END_SECONDS)

    # ---- the thread

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the world ends
            while not self._ended.wait(self._beat_seconds):
                with self._lock:
                    self._beat += 1
                    for wait in self._waits:
                        wait.beats += 1
                    oldest = max(self._waits, key=lambda one: one.beats, default=None)
                self._tell()
                if oldest is not None:
                    self._watch_over(oldest)

    def _here(self) -> Whereabouts:
        with self._lock:
            doing = self.doing or (f"after {self._latest}" if self._latest else "")
            waits = [wait for wait in self._waits if wait.beats]
            waiting = max(waits, key=lambda one: one.beats).operation if waits else None
            return Whereabouts(self._beat, doing, dict(self._counts), waiting)

    def _tell(self) -> None:
        self._store.set(f"at/{self.rank}", self._here().to_json())

    def _age(self, wait: Wait) -> float:
        return wait.beats * self._beat_seconds

    def _watch_over(self, wait: Wait) -> None:
        """Look at the others some beats before a notice, and at the notice: who has not changed is silent."""
        age = self._age(wait) + self._beat_seconds / 2
        due = min(wait.next_notice, self.patience)
        if not wait.has_looked and age >= due - SILENT_BEATS * self._beat_seconds:
            wait.has_looked = True
            ask_in_time(self._look)
        if age >= wait.next_notice:
            wait.next_notice, wait.has_looked = 2 * wait.next_notice, False
            self._notify(wait, has_answer=ask_in_time(self._look) is not None)

    def _look(self) -> bool:
        return self._sightings.look(self._beat, self._here())

    def _notify(self, wait: Wait, has_answer: bool) -> None:
        age, limit = self._age(wait), f"waiting up to {format_duration(self.patience)}"
        if not has_answer:
            if self.rank in self.members[:2]:  # one of them may be the one that does not answer
                wait.was_said = True
                say(f"{wait.operation} takes {format_duration(age)}, and {NO_ANSWER}; {limit}")
            return
        if self._sightings.lowest_waiting < self.rank:
            return
        late = self._sightings.late(wait.operation)
        if self._sightings.silent.isdisjoint(late) and age < 2 * self._said.get(tuple(late), 0.0):
            return  # they are late now and then
        self._said[tuple(late)], wait.was_said = age, True
        say(f"{self._sightings.describe(wait.operation, late, age)}; {limit}")

    # ---- when patience is over

    def _explained(self, error: PeerLost, wait: Wait) -> PeerLost:
        """The error with the message of the first rank whose patience was over, if it was over on any."""
        is_over = "imed out" in str(error)
        text = ask_in_time(lambda: self._verdict(wait, is_over))
        if text is None and is_over:
            text = f"{wait.operation} took longer than {format_duration(self.patience)}, and {NO_ANSWER}; {ADVICE}"
        return PeerLost(text) if text else error

    def _verdict(self, wait: Wait, is_over: bool) -> str:
        """What the first such rank says, which may be this one; nothing if there is none."""
        store = self._sightings.store
        if is_over and not store.check([VERDICT]):
            self._look()
            late = self._sightings.late(wait.operation)
            own = f"{self._sightings.describe(wait.operation, late, self.patience)}; patience is over: {ADVICE}"
            store.compare_set(VERDICT, "", own)
        return str(store.get(VERDICT).decode()) if store.check([VERDICT]) else ""


def start_watch(store: Any, rank: int, members: Sequence[int], patience: timedelta | None) -> Watch | None:
    """A watch of these ranks of the world, in keys of its own in a store; None for a rank alone, or if the store cannot
    be used by several threads. Collective."""
    if len(members) == 1 or not hasattr(store, "clone"):
        return None
    return Watch(store, rank, members, DEFAULT_SECONDS if patience is None else patience.total_seconds())
