"""Runs on the ranks of a world that torchrun, srun or mpirun made, one after the other.

For each run every rank starts a new process, which joins the new processes of the other ranks. So nothing of a run is
left in the next one: no process group, no thread, no hook, no memory; and a run that fails does not take the world with
it. The ranks themselves talk through the store alone, once a second at most, and may wait for as long as it takes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, cast

from thinwire.comm.patience import patience_seconds
from thinwire.comm.reach import leave_store
from thinwire.comm.secret import read_secret
from thinwire.comm.world import World, node_key, number_nodes
from thinwire.common.durations import format_duration
from thinwire.common.ending import end_with
from thinwire.common.files import scratch_folder, write_text
from thinwire.common.messages import print_line
from thinwire.config import RunConfig
from thinwire.launch.agent import train
from thinwire.launch.failures import Failure, WorldLost, cause_of, ended, first_of, make_room, read_failures
from thinwire.launch.fork_server import start_fork_server
from thinwire.run.network import LinkReport, measure_link
from thinwire.run.records import RunFolder

POLL_SECONDS = 1.0  # between two questions to the store
ANSWER_SECONDS = 60.0  # unless a patience is given: a rank whose process works says so every second
LAST_SECONDS = 3.0  # that others wait after rank 0 has ended with an error, so that the launcher sees it first
PROGRAMS: dict[str, Callable[[RunConfig, LinkReport, Path | None], Any]] = {
    "train": train,
    "measure_link": measure_link,
}
Order = dict[str, Any]


class WorldRanks:
    """This rank of the world, which has met the others. Rank 0 leads with `run` and `end`; the others `follow`."""

    patience: float | None = None  # that was asked for

    def __init__(self, world: World, iface: str, secret_file: Path | None = None, patience: str | None = None) -> None:
        from thinwire.comm.store import met_at, rendezvous

        self.world = world
        start_fork_server()  # which imports while ranks meet
        self.patience = None if patience is None else patience_seconds(patience)
        secret = read_secret(secret_file)
        self.store = cast(Any, rendezvous(world, iface, self.patience, secret))
        self.address, self.port = met_at(world, iface, secret)  # of the store, as this rank reaches it
        self.num_orders = self.num_gathers = 0
        self.nodes = number_nodes([tuple(key) for key in self.gather(node_key(world))])

    # ---- what ranks tell each other

    def gather(self, value: Any) -> list[Any]:
        """Every rank's JSON value, on every rank. Collective. A rank whose process still works is waited for."""
        self.num_gathers += 1
        name = f"gather/{self.num_gathers}"
        self.store.set(f"{name}/{self.world.rank}", json.dumps(value))
        return [self._read(f"{name}/{rank}", rank) for rank in range(self.world.size)]

    def _read(self, key: str, rank: int | None = None) -> Any:
        """The JSON value of a key, once there is one. Signals interrupt it, which torch's own waiting would put off.

        With `rank`, that rank sets it, and is lost if it shows no sign of life for longer than the patience.
        """
        seen, since, pause = 0, time.monotonic(), 0.01
        while not self._has(key):
            self._check_all_here()
            if rank is not None and (signs := self._signs_of_life(rank)) != seen:
                seen, since = signs, time.monotonic()
            patience = self.patience or ANSWER_SECONDS
            if rank is not None and time.monotonic() > since + patience:
                raise WorldLost(
                    f"rank {rank} has not answered for {format_duration(patience)}; if it may, give --patience"
                )
            time.sleep(pause)
            pause = min(POLL_SECONDS, 1.5 * pause)
        return json.loads(self.store.get(key))

    def _signs_of_life(self, rank: int, more: int = 0) -> int:
        """How often a rank has said that its process still works."""
        return int(self._ask(lambda: self.store.add(f"alive/{rank}", more)))

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.check([key])))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise WorldLost(f"rank {self.world.rank} lost the store of rank 0 ({str(error).splitlines()[0]})") from None

    def _check_all_here(self) -> None:
        if self._has("gone"):
            raise WorldLost(str(json.loads(self.store.get("gone"))))

    def leave(self, why: str) -> None:
        """Tell the others that this rank ends before its time."""
        with suppress(RuntimeError):
            self.store.set("gone", json.dumps(f"rank {self.world.rank} left: {why}"))
            leave_store(self.store, self.world.rank, self.world.size)

    # ---- rank 0

    def run(self, config: RunConfig, link: LinkReport, progress_file: Path | None, program: str = "train") -> Any:
        """Have all ranks do a run, or another of PROGRAMS; returns what it returns on rank 0. Raises its first error.

        A rank that dies is started again with the others, as often as the config allows.
        """
        order = {"program": program, "config": config.model_dump(mode="json"), "link": link}
        num_failed = 0
        while True:
            self._tell(order)
            outcomes = self._perform(order, progress_file)
            failure = first_of([Failure(**one["failure"]) for one in outcomes if "failure" in one])
            if failure is None:
                return outcomes[0]["result"]
            num_failed += 1
            if num_failed > config.restarts or failure.kind in ("UsageError", "RunError"):
                raise cause_of(failure)
            print_line(f"{str(cause_of(failure)).splitlines()[0]}; restart {num_failed} of {config.restarts}")

    def end(self, code: int) -> None:
        """Have all ranks end with an exit code."""
        with suppress(RuntimeError):  # the store is gone, and so are the others
            self._tell({"end": code})
            leave_store(self.store, self.world.rank, self.world.size)

    def _tell(self, order: Order) -> None:
        self.num_orders += 1
        self.store.set(f"order/{self.num_orders}", json.dumps(order))

    # ---- the others

    def follow(self, own: dict[str, Any]) -> int:
        """Do what rank 0 says until it ends; returns the exit code. `own` are settings of this machine alone."""
        while True:
            self.num_orders += 1
            order = self._read(f"order/{self.num_orders}")
            if "end" in order:
                leave_store(self.store, self.world.rank, self.world.size)
                return int(order["end"])
            order["config"] |= own
            self._perform(order, Path(os.devnull))

    # ---- all ranks

    def _perform(self, order: Order, progress_file: Path | None) -> list[dict[str, Any]]:
        """Do this rank's part of an order; returns what became of every rank's."""
        config = RunConfig(**order["config"])
        if order["program"] == "train":
            assert config.out is not None
            config = config.model_copy(update={"resume": self._has_begun(RunFolder(config.out))})
        run = f"run/{self.num_orders}"
        outcome = self._in_a_process(run, order, config, progress_file)
        if "failure" in outcome:
            self.store.set(f"{run}/failed", "")
        return self.gather(outcome)

    def _has_begun(self, folder: RunFolder) -> bool:
        """Whether a run is to be resumed: all ranks have begun it. Where some have not, those without a checkpoint
        begin anew: machines that share no disk may have been stopped before each had written its first file."""
        begun = self.gather(folder.config.exists())
        if any(begun) and not all(begun):
            folder.remove_if_empty()
        return folder.config.exists()

    def _in_a_process(self, run: str, order: Order, config: RunConfig, progress_file: Path | None) -> dict[str, Any]:
        from thinwire.comm.store import JOIN_VARIABLE

        with scratch_folder() as scratch:
            make_room(scratch, [self.world.rank])
            # A store is there, with other keys.
            env = {"TORCHELASTIC_USE_AGENT_STORE": "True", JOIN_VARIABLE: run, "MASTER_ADDR": self.address}
            env |= {"MASTER_PORT": str(self.port)}
            payload = {
                "program": order["program"], "config": config.model_dump(mode="json"), "link": order["link"],
                "progress_file": progress_file and str(progress_file), "env": env, "parent": os.getpid(),
                "rank": self.world.rank, "outcome": str(scratch / "outcome.json"),
            }  # fmt: skip
            process = multiprocessing.get_context("forkserver").Process(target=rank_process, args=(payload,))
            process.start()
            try:
                while not wait_for([process.sentinel], POLL_SECONDS):
                    self._check_all_here()
                    self._signs_of_life(self.world.rank, more=1)
                    if self._has(f"{run}/failed"):
                        return {}  # on another rank
                process.join()
                return self._outcome(Path(payload["outcome"]), process.pid, process.exitcode)
            finally:
                process.kill()
                process.join()

    def _outcome(self, file: Path, pid: int | None, code: int | None) -> dict[str, Any]:
        if failures := read_failures(file.parent):
            return {"failure": failures[0]._asdict()}
        if file.exists():
            found: dict[str, Any] = json.loads(file.read_text())
            return found
        assert code is not None
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return {"failure": Failure(self.world.rank, "", ended(pid, how))._asdict()}


def rank_process(payload: dict[str, Any]) -> None:
    """The main function of the process that does a rank's part of a run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # only the rank that started it handles Ctrl-C
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    threading.Thread(target=end_with, args=(payload["parent"],), daemon=True).start()
    os.environ.update(payload["env"])
    config, link = RunConfig(**payload["config"]), LinkReport(*payload["link"])
    progress_file = Path(payload["progress_file"]) if payload["progress_file"] else None
    outcome = Path(payload["outcome"])
    try:
        result = PROGRAMS[payload["program"]](config, link, progress_file)
        write_text(outcome, json.dumps({"result": result}))
    except BaseException as error:  # also sys.exit
        Failure.of(payload["rank"], error).write(outcome.parent)
