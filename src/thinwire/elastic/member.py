"""One rank of an elastic run: train, meet, exchange, commit, merge; over and over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from thinwire.comm.ledger import Ledger
from thinwire.comm.process import ProcessComm
from thinwire.data import derive_seed
from thinwire.elastic.groups import Task, Unreachable, Work, connect, let_go, share_json
from thinwire.elastic.meeting import LeftBehind, Meeting, Standing
from thinwire.elastic.membership import Membership
from thinwire.elastic.notes import Notes, StoreLost
from thinwire.elastic.record import Record, Row
from thinwire.elastic.shares import Position, Shares, share_out, weights
from thinwire.elastic.tidings import changes, ended_without, left_out, let_in, set_back
from thinwire.elastic.trainee import Offer, Trainee
from thinwire.errors import Stopped
from thinwire.run.startup import seed_everything

CONNECT_SECONDS = 60.0  # for members that are all there


class Member:
    """A rank that takes part in a run until it is finished.

    An attempt goes through five points. A rank may be lost at any of them:

        gather     the members of a new group meet, and connect
        hand over  newcomers get the state of the run
        train      everyone trains its samples
        exchange   the mean movement is computed; nobody has changed its weights
        merge      once all have it whole, and so the round is committed
    """

    def __init__(
        self, membership: Membership, trainee: Trainee, record: Record, at: Position, groups: Notes,
        seeds_everything: bool = True,
    ) -> None:  # fmt: skip
        self.membership, self.trainee, self.record, self.at, self.groups = membership, trainee, record, at, groups
        self.seeds_everything = seeds_everything  # False for ranks that are threads
        self.ledger = Ledger()
        self.comm: ProcessComm | None = None
        self.group = -1  # the number of that group
        self.trained = -1  # the last round that this rank trained its samples of
        self.losses: list[float] = []  # of those samples
        self.has_state = True  # of the run; a newcomer gets it
        self.giver = -1  # from whom it got it
        self.was = -1  # its id when it had the state that it brings
        self.others = 0  # ranks that made the round before that, with itself
        self.has_merged = False  # a round, since it came
        self.on_state: Callable[[Sequence[Row]], None] = lambda rows: None  # when a newcomer has got it
        self.after_round: Callable[[Row], None] = lambda row: None
        self.say: Callable[[str], None] = lambda text: None
        self.first_does = ""  # what the first rank does for all, in words

    @property
    def id(self) -> int:
        """This rank's name in the run."""
        return self.membership.id

    @property
    def standing(self) -> Standing:
        """What this rank brings when it comes."""
        return Standing(self.at.round, self.trainee.checksums()["agreed"], self.was, self.others)

    @property
    def is_finished(self) -> bool:
        """Whether all epochs are trained."""
        return self.at.epoch >= self.trainee.job.epochs

    def run(self, min_ranks: int = 1) -> None:
        """Take part until the run is finished. Raises LeftBehind if the others went on without this rank."""
        try:
            meeting = self.membership.enter(self.standing, min_ranks, self.say)
            if self.id in meeting.newcomers:
                self._come_as_newcomer()
            if was_in := not meeting.ended:
                self.say(let_in(self.id, meeting, self.first_does))
            while not meeting.ended:
                if self.id not in meeting.members:
                    raise left_out(self.id, meeting, self.has_merged)
                before, meeting = meeting, self.attempt(meeting)
                for line in changes(self.membership, before, meeting):
                    self.say(line)
            if not self.is_finished:
                raise ended_without(self.id, meeting, was_in)
        except (StoreLost, LeftBehind):
            raise
        except BaseException as error:
            if isinstance(error, Stopped):
                self.say(f"{error}: telling the other ranks; no new checkpoint is written")
            with suppress(StoreLost):
                self.membership.leave(str(error).splitlines()[0] if str(error) else "stopped")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Stop the heart, and close the group."""
        self.membership.close()
        if self.comm is not None:
            self.comm.close()
        self.comm = None

    def attempt(self, meeting: Meeting) -> Meeting:
        """Make an attempt; returns the next one."""
        return self.gather(meeting) or self.hand_over(meeting) or self.train(meeting) or self.exchange(meeting)

    # ---- the points of an attempt: each returns the next attempt if this one is in vain

    def gather(self, meeting: Meeting) -> Meeting | None:
        """Meet the members of a new group, and connect to them."""
        if self.group == meeting.group:
            return None
        let_go(self.comm)
        self.comm = None
        notes, place = self.membership.notes, meeting.members.index(self.id)
        here = {one: f"here/{meeting.group}/{one}" for one in meeting.members}
        notes.write(here[self.id])
        decided = self.membership.look(meeting) or self.membership.wait(  # a rank that comes late connects to nobody
            meeting, lambda: notes.has([*here.values()]), lambda: [one for one in here if not notes.has([here[one]])]
        )
        if decided:
            return decided
        about = [self.membership.about(one) for one in here]
        made: list[ProcessComm] = []
        own, device = self.groups.another(), self.trainee.job.device
        task = Task(
            lambda: made.append(connect(own, meeting.group, place, about, self.ledger, device, CONNECT_SECONDS))
        )
        if decided := self._in_vain(meeting, task):
            return decided
        self.comm, self.group = made[0], meeting.group
        self.trainee.use_group(self.comm)
        return None

    def hand_over(self, meeting: Meeting) -> Meeting | None:
        """Give the state of the run to those who have just come, or get it."""
        newcomers = set(meeting.members) - set(meeting.with_state)
        if not newcomers:
            return None
        assert self.comm is not None
        comm, giver, found = self.comm, meeting.with_state[0], list[dict[str, Any]]()
        root, is_new = meeting.members.index(giver), self.id in newcomers and self.giver != giver
        if is_new:
            self.giver = -1
            self.membership.say_has_state(meeting, -1)
        own, offer = {"at": asdict(self.at), "rows": self.record.to_json()}, self.trainee.offer()

        def share() -> None:
            found.append(share_json(comm, root, own))
            offer.share(comm, root)

        if decided := self._in_vain(meeting, Task(share)):
            return decided
        if is_new:  # also if another member gave before, and was lost: then what was trained on that is void
            self._begin_with(offer, Position(**found[0]["at"]), [Row(**row) for row in found[0]["rows"]])
            self.giver, self.trained = giver, -1
            self.membership.say_has_state(meeting, giver)
        return None

    def train(self, meeting: Meeting) -> Meeting | None:
        """Train this rank's samples of the round, unless that was done in an attempt before."""
        if self.trained == meeting.round:
            return None
        place = meeting.began.index(self.id)
        if self.seeds_everything:
            seed_everything(derive_seed(self.trainee.job.seed, meeting.round, place))
        self.losses = self.trainee.train(self.shares(meeting), place, self.membership.count_step)
        self.trained = meeting.round
        return None

    def exchange(self, meeting: Meeting) -> Meeting:
        """Compute the mean movement, and merge it if the round is committed."""
        shares = self.shares(meeting)
        counts = dict(zip(meeting.began, shares.counts(len(meeting.began)), strict=True))
        place = meeting.members.index(self.id)
        self.trainee.start_exchange(weights([counts[one] for one in meeting.members])[place])
        decided = self._in_vain(meeting, self.trainee)
        if decided is None:
            decided = self.settle(meeting, is_last=shares.end.epoch >= self.trainee.job.epochs)
        if decided.committed:
            self.merge(meeting, shares)
        else:
            self.trainee.discard()
        return decided

    def settle(self, meeting: Meeting, is_last: bool) -> Meeting:
        """Say that this rank has the result whole, and wait for the decision."""
        return self.membership.settle(meeting, is_last)

    def merge(self, meeting: Meeting, shares: Shares) -> None:
        """Take the result, and go on to the next round."""
        self.trainee.merge()
        at, counts = self.at, shares.counts(len(meeting.began))
        row = Row(
            meeting.round, list(meeting.began), list(meeting.members), list(meeting.newcomers), meeting.lost,
            {str(one): count for one, count in zip(meeting.began, counts, strict=True)}, at.epoch, at.given, at.step,
            self.trainee.job.schedule(shares.epochs_done(shares.steps[-1]), self.trainee.job.epochs),
            self.trainee.checksums(), meeting.resumed, meeting.heirs,
        )  # fmt: skip
        self.at = shares.end
        self.has_merged = True
        self.record.add(row)
        self.after_round(row)

    def shares(self, meeting: Meeting) -> Shares:
        """Who trains what in a round."""
        assert meeting.round == self.at.round, (meeting, self.at)
        job = self.trainee.job
        return share_out(self.at, self.trainee.num_samples, len(meeting.began), job.batch_size, self.trainee.every)

    def _in_vain(self, meeting: Meeting, work: Work) -> Meeting | None:
        """Wait for work with the others; returns the next attempt if it cannot be finished."""
        unreached: list[tuple[int, int]] = []
        decided = self.membership.wait(meeting, lambda: work.is_over() or self.membership.has_failed(meeting))
        if decided is not None:
            return decided
        try:
            if work.is_over():
                work.result()
                return None
        except Stopped:
            raise
        except Unreachable as error:
            unreached = [(meeting.members[place], meeting.members[to]) for place, to in error.pairs]
        except RuntimeError:
            pass  # a connection broke: the hearts tell whose
        self.membership.say_failed(meeting, unreached)
        return self.membership.wait(meeting, lambda: False, lambda: self.membership.silent_about(meeting))

    def _come_as_newcomer(self) -> None:
        """Forget what this rank brought: the others are further."""
        self.has_state, self.trained, self.group, self.giver = False, -1, -1, -1
        self.trainee.begin_anew()

    def _begin_with(self, offer: Offer, at: Position, rows: list[Row]) -> None:
        """Go on from what another member has given."""
        for line in set_back(self.id, 0 if self.has_state else self.at.round, at.round):
            self.say(line)
        self.on_state(rows)
        self.trainee.take(offer)
        self.record.replace(rows)
        self.at, self.has_state = at, True
