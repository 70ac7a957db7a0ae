"""What a rank tells its user: who comes and who goes, and why it cannot take part."""

from __future__ import annotations

from collections.abc import Iterator

from thinwire.elastic.meeting import TRIES, Meeting, left_behind
from thinwire.elastic.membership import UNREACHABLE, Membership
from thinwire.errors import RunError


def changes(membership: Membership, before: Meeting, after: Meeting) -> Iterator[str]:
    """A line for each rank that is lost with an attempt, and for each that joins after it; one if attempts fail."""
    for name, why in after.lost.items():
        if name not in before.lost and not after.committed:
            yield f"round {before.round}: {_named(membership, int(name))} has left ({why}); {_go_on(after)}"
    if after.failures == TRIES:
        pairs = ", ".join(f"{one} to {other}" for one, other in membership.unreached(before))
        what = f"ranks cannot connect ({pairs})" if pairs else "connections of ranks break"
        yield f"round {before.round}: {what}; they try again"
    for one in after.newcomers if after.committed else ():
        yield f"round {after.round}: {_named(membership, one)} joins; {_go_on(after)}"


def let_in(member: int, meeting: Meeting, first_does: str) -> str:
    """The line of a rank that begins to train: with whom, and what the first of them does for all, if anything."""
    number, first = len(meeting.members), meeting.members[0]
    joined = f"rank {member} has joined; " if member in meeting.newcomers else ""
    does = f"; rank {first} {first_does}" if first_does else ""
    return f"round {meeting.round}: {joined}{number} rank{'s' * (number != 1)} train{'s' * (number == 1)}{does}"


def _named(membership: Membership, member: int) -> str:
    return f"rank {member} ({membership.about(member).get('name', 'unknown')})"


def _go_on(meeting: Meeting) -> str:
    number = len(meeting.members)
    return f"{number} rank{'s' * (number != 1)} {'go' if number != 1 else 'goes'} on"


def set_back(member: int, brought: int, found: int) -> Iterator[str]:
    """A line for a rank whose own state is not used, although it is further than the run."""
    if brought > found:
        yield (
            f"rank {member} brought the state after {brought} rounds, but the run had gone on after {found} without "
            "it; it takes that"
        )


def left_out(member: int, meeting: Meeting, has_merged: bool) -> RunError:
    """The error of a rank that the others go on without. It comes again, unless that would be in vain."""
    if meeting.lost.get(str(member)) != UNREACHABLE or has_merged:
        return left_behind(member, meeting)
    return RunError(
        f"rank {member} cannot take part: it reaches the store, but {UNREACHABLE}; see that machines reach each other "
        "at any port, or choose the network by --iface. The others go on without it"
    )


def ended_without(member: int, meeting: Meeting, was_in: bool) -> RunError:
    """The error of a rank whose run has ended, although it is not finished."""
    if was_in and member not in (*meeting.members, *meeting.newcomers):
        return left_behind(member, meeting)  # a newcomer gave all up that had the state; this rank has it
    what = "the run was finished without it" if meeting.committed else "all that had its state have left"
    return RunError(f"rank {member} cannot go on: {what}")
