"""The process groups of members, and functions that run while their rank looks at the membership."""

from __future__ import annotations

import datetime
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from thinwire.comm.base import Comm
from thinwire.comm.ledger import Ledger
from thinwire.comm.peers import check_peers
from thinwire.comm.process import ProcessComm
from thinwire.comm.process_groups import members_group_pair
from thinwire.comm.reach import find_unreached
from thinwire.comm.world import number_nodes
from thinwire.elastic.notes import Notes
from thinwire.errors import RunError

CLOSE_SECONDS = 3.0
OPERATION_SECONDS = 1800.0  # one operation of a living group; a lost member is found by its heart long before


class Work(Protocol):
    """What members do together: it may never end if one of them is lost."""

    def is_over(self) -> bool: ...
    def result(self) -> None: ...


class Task:
    """A function on a thread of its own. One that waits for a lost member is left behind: its thread ends with it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name="thinwire-elastic", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether it has ended, by an error or not."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Raise its error, if it ended by one."""
        if self.error is not None:
            raise self.error

    def _run(self, function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            self.error = error


class Unreachable(RunError):
    """Members cannot open connections to each other."""

    def __init__(self, pairs: list[tuple[int, int]]) -> None:
        super().__init__("ranks cannot connect to each other")
        self.pairs = pairs  # places in the group: who tried, and to whom


def try_connections(notes: Notes, number: int, place: int, addresses: Sequence[str]) -> None:
    """Raise Unreachable, on every member, if some cannot connect to others: gloo tries for a minute, and blames nobody.

    A member without an address is not tried.
    """
    store = dist.PrefixStore(f"try/{number}", notes.store)
    among = [i for i, address in enumerate(addresses) if address]
    if len(among) < 2:
        return
    found = find_unreached(store, place, len(addresses), addresses[place], among)
    if found:
        raise Unreachable([(one.source, one.to) for one in found])


def connect(
    notes: Notes, number: int, place: int, about: Sequence[dict[str, Any]], ledger: Ledger, device: torch.device,
    seconds: float,
) -> ProcessComm:  # fmt: skip
    """The group of members that said this of themselves; all call it, and wait for each other for some seconds."""
    try_connections(notes, number, place, [str(one.get("address", "")) for one in about])
    store = dist.PrefixStore(f"group/{number}", notes.store)
    timeout = datetime.timedelta(seconds=seconds)
    pair = members_group_pair(store, "members", (place, len(about)), "gloo", timeout)
    for group in pair:
        backend: Any = group._get_backend(torch.device("cpu"))
        backend._set_default_timeout(datetime.timedelta(seconds=OPERATION_SECONDS))
    check_peers(pair, notes.secret)
    return ProcessComm(
        pair, range(len(about)), "world", ledger, device, number_nodes([one.get("host", 0) for one in about])
    )


_closing: list[threading.Thread] = []


def let_go(comm: ProcessComm | None) -> None:
    """Close a group, without waiting for operations that a lost member holds up."""
    if comm is not None:
        thread = threading.Thread(target=comm.close, name="thinwire-closing", daemon=True)
        _closing.append(thread)
        thread.start()


def wait_for_closing() -> None:
    """Wait a moment for groups that are being closed: gloo's threads must end before the interpreter does."""
    while _closing:
        _closing.pop().join(CLOSE_SECONDS)


def share_json(comm: Comm, root: int, value: Any) -> Any:
    """A JSON value of the member at place `root`, on every member."""
    text = json.dumps(value).encode()
    with comm.ledger.purpose("start"):
        length = int(comm.broadcast(torch.tensor([len(text)]), root))
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8) if comm.rank == root else None
        data = comm.broadcast(torch.zeros(length, dtype=torch.uint8) if own is None else own, root)
    return json.loads(bytes(data.tolist()))
