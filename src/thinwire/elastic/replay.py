"""Run again what a recorded membership says: with the same ranks in every round, and so bit for bit the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from thinwire.elastic.job import Job
from thinwire.elastic.meeting import LeftBehind, Meeting, Standing
from thinwire.elastic.member import Member
from thinwire.elastic.membership import POLL_SECONDS, Membership
from thinwire.elastic.notes import Notes
from thinwire.elastic.record import Record, Row
from thinwire.elastic.shares import Position
from thinwire.elastic.trainee import Trainee
from thinwire.errors import RunError

STUCK_SECONDS = 300.0


class Recorded(Membership):
    """The membership of a run that has been: what a Member asks, answered from the record."""

    patience = STUCK_SECONDS

    def __init__(self, rows: Sequence[Row], member: int, notes: Notes) -> None:
        self.id, self.notes = member, notes
        self.meetings = _meetings(rows)

    def about(self, member: int) -> dict[str, Any]:
        return {}

    def enter(self, standing: Standing, min_ranks: int, say: Callable[[str], None] = lambda text: None) -> Meeting:
        return next(meeting for meeting in self.meetings if self.id in meeting.members)

    def wait(
        self, meeting: Meeting, is_done: Callable[[], bool], late: Callable[[], Sequence[int]] = tuple
    ) -> Meeting | None:
        pause, end = POLL_SECONDS[0], time.monotonic() + STUCK_SECONDS
        while not is_done():
            if time.monotonic() > end:
                raise RunError(f"the replay stands still in round {meeting.round}")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS[1])
        return None

    def look(self, meeting: Meeting, may_commit: bool = False, is_last: bool = False) -> Meeting | None:
        return None

    def has_failed(self, meeting: Meeting) -> bool:
        return False

    def say_has_state(self, meeting: Meeting, giver: int) -> None: ...

    def say_failed(self, meeting: Meeting, unreached: Sequence[Sequence[int]] = ()) -> None:
        raise RunError(f"the replay's ranks lost each other in round {meeting.round}")

    def settle(self, meeting: Meeting, is_last: bool) -> Meeting:
        return self.meetings[meeting.number + 1]

    def count_step(self) -> None: ...
    def leave(self, why: str) -> None: ...
    def close(self) -> None: ...


def _meetings(rows: Sequence[Row]) -> list[Meeting]:
    """The attempts that were committed, those in which a member that was lost gave the state to others, and the end."""
    found: list[Meeting] = []
    for before, row in zip([None, *rows], rows, strict=False):
        began, is_first = tuple(row.began), True
        for giver in dict.fromkeys(row.heirs.values()):
            heirs, number = tuple(int(one) for one, whose in row.heirs.items() if whose == giver), len(found)
            found.append(Meeting(number, row.round, (giver, *heirs), began, heirs, number, committed=is_first))
            is_first = False
        is_same = before is not None and row.members == before.members and not row.joined
        found.append(
            Meeting(
                len(found), row.round, tuple(row.members), began, tuple(row.joined),
                found[-1].group if is_same else len(found), row.lost, is_first, resumed=row.resumed, heirs=row.heirs,
            )
        )  # fmt: skip
    return [*found, found[-1].after_commit((), is_last=True)]


def told_apart(rows: Sequence[Row]) -> list[Row]:
    """The rows with numbers of their own for all ranks that took part.

    In a store that was opened anew, an id may be that of another rank than before; and a rank that was resumed may
    have got another id.
    """
    numbers, now, found = count(), dict[int, int](), []
    for row in rows:
        now |= {int(one): now[was] for one, was in row.resumed.items() if was in now}
        for one in row.began:
            if one not in now or one in row.joined:
                now[one] = next(numbers)
        own = dict(now)
        found.append(
            replace(
                row, began=[own[one] for one in row.began], members=[own[one] for one in row.members],
                joined=[own[one] for one in row.joined], resumed={},
                lost={str(own[int(one)]): why for one, why in row.lost.items()},
                samples={str(own[int(one)]): number for one, number in row.samples.items()},
                heirs={str(own[int(one)]): own[giver] for one, giver in row.heirs.items()},
            )
        )  # fmt: skip
    return found


class Seat(NamedTuple):
    """Members that one thread, or process, plays in turn."""

    members: list[int]


def seats(rows: Sequence[Row]) -> list[Seat]:
    """As few seats as there were ranks at the same time."""
    found: list[tuple[Seat, int]] = []  # and the last round that is taken
    playing = [[*row.heirs.values(), *row.members] for row in rows]
    for member in dict.fromkeys(one for members in playing for one in members):
        present = [i for i, members in enumerate(playing) if member in members]
        free = next((i for i, (_, taken) in enumerate(found) if taken < present[0]), None)
        if free is None:
            found.append((Seat([member]), present[-1]))
        else:
            found[free][0].members.append(member)
            found[free] = (found[free][0], present[-1])
    return [seat for seat, _ in found]


def play(
    rows: Sequence[Row], seat: Seat, job: Job, connect: Callable[[], Notes], seeds_everything: bool
) -> list[tuple[Record, dict[str, Tensor]]]:
    """Play the members of a seat; returns what each recorded, and the weights that it ended with."""
    results = []
    for one in seat.members:
        trainee, membership = Trainee(job), Recorded(rows, one, connect())
        member = Member(membership, trainee, Record(), Position(), connect(), seeds_everything)
        member.at = Position(rows[0].round, rows[0].epoch, rows[0].given, rows[0].step)
        with suppress(LeftBehind):  # in the round in which it was lost
            member.run()
        weights = {name: tensor.detach().clone() for name, tensor in trainee.model.state_dict().items()}
        results.append((member.record, weights))
    return results


def replay(rows: Sequence[Row], job: Job, connect: Callable[[], Notes]) -> dict[str, Tensor]:
    """Run again on threads; returns the weights. RunError if a round ended with others than the record says.

    A model that draws random numbers, as for dropout, needs ranks that are processes.
    """
    results: dict[int, list[tuple[Record, dict[str, Tensor]]]] = {}
    errors: list[BaseException] = []
    rows = told_apart(rows)

    def run(number: int, seat: Seat) -> None:
        try:
            results[number] = play(rows, seat, job, connect, seeds_everything=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(seats(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    played = [one for seat in results.values() for one in seat if one[0].rows]
    for record, _ in played:
        refuse_difference(rows, record.rows)
    return max(played, key=lambda one: one[0].rows[-1].round)[1]


def refuse_difference(rows: Sequence[Row], again: Sequence[Row]) -> None:
    """Raise RunError for the first round that is not the same: members, samples, position, learning rate, weights."""
    known = {row.round: row for row in rows}
    for row in again:
        if row != known[row.round]:
            raise RunError(f"round {row.round} is not the same again: it was {known[row.round]}, and is now {row}")
