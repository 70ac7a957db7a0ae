"""Worlds to run a function in: n threads, or n processes that are started once."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import thinwire as tw
from thinwire.comm import user_groups
from thinwire.comm.ledger import Ledger
from thinwire.comm.process_groups import without_grace
from thinwire.comm.store import local_store

REPLY_SECONDS = 100
PATIENCE_SECONDS = 60.0
PR_SET_PDEATHSIG = 1  # of Linux's prctl
World = Callable[..., list[Any]]  # run(function, ranks, *args) → each rank's result


def worlds(threads: list[int], processes: list[int]) -> pytest.MarkDecorator:
    """Run a test with `world` and `ranks`: worlds of so many threads, and of so many processes."""
    cases = [("threads", n) for n in threads] + [("processes", n) for n in processes]
    return pytest.mark.parametrize(("world", "ranks"), cases, indirect=["world"])


def on_threads(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """function(comm, *args) on n threads."""
    return tw.simulate(lambda comm: function(comm, *args), ranks=ranks)


no_grace = without_grace


class ProcessWorlds:
    """A world of n processes for every n that is asked for. `run` takes a module-level function."""

    def __init__(self) -> None:
        self.worlds: dict[int, _ProcessWorld] = {}

    def run(self, function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
        if ranks not in self.worlds:
            self.worlds[ranks] = _ProcessWorld(ranks)
        try:
            return self.worlds[ranks].run(function, *args)
        except (TimeoutError, BrokenPipeError):
            self.worlds.pop(ranks).close()  # the next test gets a new one
            raise

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()


class _ProcessWorld:
    """Its processes are stopped while no test uses them: each of gloo's threads would wake up 100 times a second."""

    def __init__(self, size: int) -> None:
        self.store = local_store(size)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["thinwire.run.worker", "torch._dynamo"])
        self.pipes = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            one = context.Process(target=_serve, args=(rank, size, self.store.port, there), daemon=True)
            one.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(one)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        self._signal(signal.SIGCONT)
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        replies = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(REPLY_SECONDS):
                self.close()
                raise TimeoutError(f"rank {rank} did not answer within {REPLY_SECONDS} s")
            replies.append(pickle.loads(pipe.recv_bytes()))
        self._signal(signal.SIGSTOP)
        for rank, (ok, value) in enumerate(replies):
            if not ok:
                raise AssertionError(f"on rank {rank}:\n{value}")
        return [value for _, value in replies]

    def _signal(self, number: signal.Signals) -> None:
        for one in self.processes:
            assert one.pid is not None
            with suppress(ProcessLookupError):  # the pipe tells of one that has ended
                os.kill(one.pid, number)

    def close(self) -> None:
        for one in self.processes:
            one.kill()
            one.join()


END_SECONDS = 45


def ends_of(function: Callable[..., Any], nodes: list[int], *args: Any) -> list[str]:
    """How function(comm, *args) ended on each of the ranks of some nodes, in processes of their own.

    The name of what it raised, "" for nothing; a rank that does not end within a time has "waits for ever".
    """
    store = local_store(sum(nodes))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.run.worker", "torch._dynamo"])
    places = [(size, local) for size in nodes for local in range(size)]
    ranks = []
    for rank, (local_size, local) in enumerate(places):
        here, there = context.Pipe()
        world = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": local_size}
        one = context.Process(target=_run_once, args=(world, store.port, there, function, args), daemon=True)
        one.start()
        there.close()
        ranks.append((one, here))
    deadline = time.monotonic() + END_SECONDS
    ends = []
    for one, pipe in ranks:
        one.join(max(0.0, deadline - time.monotonic()))
        ends.append(_told(pipe) if one.exitcode is not None else "waits for ever")
        one.kill()
        one.join()
    return ends


def _told(pipe: Any) -> str:
    try:
        return str(pipe.recv_bytes().decode())
    except EOFError:
        return "ended without a word"


def _run_once(world: dict[str, int], port: int, pipe: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update({name: str(value) for name, value in world.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    end = ""
    try:
        with no_grace(), tw.join("gloo", device="cpu") as comm:
            function(comm, *args)
    except Exception as error:
        end = type(error).__name__
    pipe.send_bytes(end.encode())


def _end_with_the_fork_server() -> None:
    """So with the tests, even if they are killed while this process is stopped; it must not keep the server alive."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    _end_with_the_fork_server()
    gc.freeze()  # what the fork server imported stays: no search for garbage looks at it
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    opened: list[Callable[[], None]] = []
    user_groups.atexit = SimpleNamespace(register=opened.append)  # type: ignore[assignment]  # closed after each function
    with suppress(EOFError), tw.join(patience=PATIENCE_SECONDS) as comm:
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            ledger = Ledger()
            for lane in comm.lanes:
                lane.ledger = ledger
            try:
                reply = (True, function(comm, *args))
            except BaseException:
                reply = (False, traceback.format_exc())
            _be_patient_again(comm)
            comm.close_subgroups()
            while opened:
                opened.pop()()
            pipe.send_bytes(pickle.dumps(reply))


def _be_patient_again(comm: Any) -> None:
    """As at first: a function that runs the program of a rank makes the world more patient."""
    for group in (comm.group, comm.side_group):
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=PATIENCE_SECONDS))
    if comm.watch is not None:
        comm.watch.patience = PATIENCE_SECONDS


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A device mesh of all ranks, made once: torch keeps its groups, and each wakes up 100 times a second."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)
