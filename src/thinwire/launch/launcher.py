"""Run a config: as a rank of a world that exists, or by starting the ranks on this machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thinwire.comm.addresses import AUTO, addresses_of
from thinwire.comm.secret import read_secret
from thinwire.comm.world import World, find_world
from thinwire.config import RunConfig
from thinwire.errors import Stopped, UsageError
from thinwire.launch.agent import start_ranks
from thinwire.launch.settings import check_names, check_options
from thinwire.run.network import check_network, network
from thinwire.run.records import RunFolder


def launch(config: RunConfig) -> None:
    """Join the world that torchrun, srun or mpirun made and train as one of its ranks, or start the ranks here."""
    if config.elastic is not None:
        check_names(config)
        with stopped_by_signals(signal.SIGINT):
            from thinwire.elastic.command import train_as_member

            train_as_member(config)
        return
    world = world_to_join(config)
    if world is not None:
        check_as_rank(config, world)
        from thinwire.run.worker import run_rank

        run_rank(config)
        return
    check_names(config)
    check_network(config)
    check_options(config)
    with stopped_by_signals(), _with_folder(config) as config, network(config) as lab:
        start_ranks(config, lab)


@contextmanager
def _with_folder(config: RunConfig) -> Iterator[RunConfig]:
    """The config with the folder of a run. One that was made for it is removed if the run fails before it has files."""
    folder = config.out if config.resume else RunFolder.new(config).path
    try:
        yield config.model_copy(update={"out": folder})
    except BaseException:
        if config.out is None and folder is not None:
            with suppress(OSError):  # there are files in it, or it is gone
                folder.rmdir()
        raise


def world_to_join(config: RunConfig) -> World | None:
    """The world that this process is a rank of; None if ranks are to be started here."""
    world = find_world()
    if world is not None and world.size == 1 and (config.ranks or 1) > 1:
        return None  # a shell that srun gave us, not a rank
    return world


def check_as_rank(config: RunConfig, world: World) -> None:
    """Raise UsageError on rank 0 for settings that this world cannot have; the other ranks exit without a message."""
    check_machine(config.iface, config.secret_file, world)
    try:
        check_names(config)
        if config.ranks not in (None, world.size):
            raise UsageError(
                f"--ranks {config.ranks}, but {world.launcher} started {world.size} ranks; leave out --ranks"
            )
        if config.link or config.nodes:
            raise UsageError(
                f"--link and --nodes make hosts on this machine, but {world.launcher} started the ranks; "
                "leave them out, or let thinwire start the ranks with --ranks"
            )
    except UsageError:
        if world.rank > 0:
            sys.exit(2)
        raise


def check_machine(iface: str, secret_file: Path | None, world: World) -> None:
    """Raise UsageError on the first rank of a machine that lacks the interface or the file. Others may have them."""
    try:
        if iface != AUTO:
            addresses_of(iface)
        read_secret(secret_file)
    except UsageError:
        if world.local_rank > 0:
            sys.exit(2)
        raise


@contextmanager
def stopped_by_signals(*more: signal.Signals) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Stopped, so that they end the work in order and with a message, as Ctrl-C.

    So do `more` signals, unless this process was started to ignore them, as shells do with SIGINT in the background.
    """

    def stop(number: int, frame: object) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    numbers = (signal.SIGTERM, signal.SIGHUP, *(one for one in more if signal.getsignal(one) != signal.SIG_IGN))
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
