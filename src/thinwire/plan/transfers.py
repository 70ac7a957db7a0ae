"""Operations of recorded ranks: which starts belong together, and which links their bytes pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from thinwire.comm.trace import Event, Trace
from thinwire.comm.wire_bytes import Sent
from thinwire.plan.wire import Wire, hops, messages

MANY_RANKS = 64  # of a group
Place = tuple[str, int]  # the link out of a node, into it, or inside it
MOST_NODES = 16  # links of more nodes are not told apart: the busiest of them decides


@dataclass
class Operation:
    """An operation of a group, or a message from one rank to another; `siblings` are the groups that it stands for."""

    op: str
    siblings: list[list[int]]
    nodes: Sequence[int]
    needed: int  # ranks that must have reached it
    starts: dict[int, Event] = field(default_factory=dict)  # by rank in the world
    has_begun: bool = False
    is_done: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.starts) == self.needed

    @property
    def is_between(self) -> bool:
        """Whether it leaves a node."""
        return any(len({self.nodes[r] for r in group}) > 1 for group in self._used())

    def _used(self) -> list[list[int]]:
        """The groups; of a message, its two ranks in each of them."""
        return self.siblings

    @property
    def num_hops(self) -> float:
        """Messages that it waits for, one after the other."""
        return hops(self.op, max(event.payload for event in self.starts.values()), len(self.siblings[0]))

    def demands(self, wire: Wire) -> dict[Place, float]:
        """How many seconds of each link it takes."""
        loads: dict[Place, float] = defaultdict(float)
        if self.op == "all_to_all" and len(self.siblings[0]) > MANY_RANKS:
            return self._demands_of_equal_parts(wire)
        for group in self.siblings:
            for index, rank in enumerate(group):
                for to, count, number in self._sends(group, index):
                    kernel = wire.kernel_bytes(count, number)
                    here, there = self.nodes[rank], self.nodes[group[to]]
                    if here == there:
                        loads["inside", here] += kernel * wire.seconds_per_byte(False)
                    else:
                        loads["out", here] += kernel * wire.seconds_per_byte(True)
                        loads["in", there] += kernel * wire.seconds_per_byte(True)
        return _busiest(loads)

    def _demands_of_equal_parts(self, wire: Wire) -> dict[Place, float]:
        """Of an all_to_all in large groups: every rank sends about as much to each other one."""
        event = next(iter(self.starts.values()))
        loads: dict[Place, float] = defaultdict(float)
        for group in self.siblings:
            part = wire.kernel_bytes(sum(event.sent.values()) / max(1, len(group) - 1), 1.0)
            for node, count in Counter(self.nodes[rank] for rank in group).items():
                between = part * count * (len(group) - count) * wire.seconds_per_byte(True)
                loads["inside", node] += part * count * (count - 1) * wire.seconds_per_byte(False)
                loads["out", node] += between
                loads["in", node] += between
        return _busiest(loads)

    @property
    def shape(self) -> Hashable:
        """Operations of the same shape take the same links for the same time."""
        starts = sorted((rank, event.payload, tuple(event.sent.items())) for rank, event in self.starts.items())
        return self.op, id(self.siblings), tuple(starts)

    def _sends(self, group: list[int], index: int) -> list[tuple[int, int, float]]:
        """What a rank of a group sends: to whom, bytes, messages. One that is not recorded sends as a recorded one."""
        event = self.starts.get(group[index])
        shift = 0
        if event is None:
            known, event = next(iter(self.starts.items()))
            own = next(g for g in self.siblings if known in g)
            shift = index - own.index(known)
        sent: Sent = event.sent
        total = messages(self.op, event.payload, len(group), len(sent))
        return [((to + shift) % len(group), count, total / max(1, len(sent))) for to, count in sent.items()]


def _busiest(loads: dict[Place, float]) -> dict[Place, float]:
    """The loads, or of very many the largest of each kind."""
    if len(loads) <= 3 * MOST_NODES:
        return dict(loads)
    return {(kind, -1): max(s for (k, _), s in loads.items() if k == kind) for kind in {kind for kind, _ in loads}}


class Transfers:
    """Matches the starts of recorded ranks with each other."""

    def __init__(self, traces: Mapping[int, Trace], stands_for: Sequence[int], nodes: Sequence[int]) -> None:
        self.stands_for, self.nodes = stands_for, nodes
        self.groups = next(iter(traces.values())).groups
        self.counts: Counter[Hashable] = Counter()
        self.open: dict[Hashable, Operation] = {}
        self._places: dict[tuple[int, int], tuple[list[int], list[list[int]], frozenset[int]]] = {}

    def ranks_on_node(self, rank: int) -> float:
        """Ranks of a recorded rank's node that it stands for."""
        return sum(1 for r, n in enumerate(self.nodes) if n == self.nodes[rank] and self.stands_for[r] == rank)

    def reached(self, rank: int, event: Event) -> Operation:
        """A recorded rank starts an operation."""
        group, siblings, image = self._place(event.channel.group, rank)
        if event.op in ("send", "recv"):
            return self._message(rank, event, group, siblings)
        count = self.counts["all", event.channel, rank]
        self.counts["all", event.channel, rank] += 1
        key = "all", event.channel, image, count
        operation = self.open.get(key) or self.open.setdefault(
            key, Operation(event.op, siblings, self.nodes, len(image))
        )
        operation.starts[rank] = event
        if operation.is_complete:
            del self.open[key]
        return operation

    def _message(self, rank: int, event: Event, group: list[int], siblings: list[list[int]]) -> Operation:
        """A message belongs to a send and a receive."""
        is_send = event.op == "send"
        other = group[next(iter(event.sent)) if is_send else event.source] if event.sent or not is_send else rank
        peer = self.stands_for[other]
        ends = (rank, peer) if is_send else (peer, rank)
        count = self.counts[event.op, event.channel, ends]
        self.counts[event.op, event.channel, ends] += 1
        key = "message", event.channel, ends, count
        operation = self.open.get(key) or self.open.setdefault(key, Message("send", siblings, self.nodes, 2))
        operation.starts[rank if is_send else -1 - rank] = event
        if isinstance(operation, Message) and is_send:
            operation.sender, operation.offset = group.index(rank), group.index(other)
        if operation.is_complete:
            del self.open[key]
        return operation

    def _place(self, split: int, rank: int) -> tuple[list[int], list[list[int]], frozenset[int]]:
        """The group of a rank in a split, the groups that it stands for, and the recorded ranks in it."""
        if (split, rank) not in self._places:
            groups = self.groups[split]
            images = [frozenset(self.stands_for[r] for r in group) for group in groups]
            own = next(i for i, group in enumerate(groups) if rank in group)
            siblings = [group for group, image in zip(groups, images, strict=True) if image == images[own]]
            self._places[split, rank] = groups[own], siblings, images[own]
        return self._places[split, rank]


@dataclass
class Message(Operation):
    """A message from one rank of a group to another."""

    sender: int = 0  # index in the group
    offset: int = 0  # of the receiver

    def _used(self) -> list[list[int]]:
        return [[group[self.sender], group[self.offset]] for group in self.siblings]

    def _sends(self, group: list[int], index: int) -> list[tuple[int, int, float]]:
        if index != self.sender:
            return []
        event = next(one for one in self.starts.values() if one.op == "send")
        return [(self.offset, event.payload, 1.0)]
