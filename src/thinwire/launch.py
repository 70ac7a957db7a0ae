"""Start ranks on this machine through torch's elastic launcher, or be one of a world that exists already."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire import registry
from thinwire.comm.world import find_world
from thinwire.config import RunConfig, make_config, read_toml, resumed
from thinwire.errors import RunError, Stopped, ThinwireError, UsageError
from thinwire.records import RunFolder
from thinwire.spec import parse

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def settle(file: Path | None, asked: dict[str, Any]) -> RunConfig:
    """The config of a run from a TOML file, what was asked for, and, with --resume, what the run began with."""
    given = {**(read_toml(file) if file else {}), **asked}
    config = make_config(given, source=str(file or "settings"))
    if config.resume:
        saved = RunFolder.existing(config.out)
        return resumed(saved.load_config(), given, saved.path)
    return config


def launch(config: RunConfig) -> None:
    """Run a config: join the world that torchrun, srun or mpirun made, or start the ranks here."""
    world = find_world()
    if world is not None and world.size == 1 and (config.ranks or 1) > 1:
        world = None  # a shell that srun gave us, not a rank
    try:
        check_names(config)
        if world is not None and config.ranks not in (None, world.size):
            raise UsageError(
                f"--ranks {config.ranks}, but {world.launcher} started {world.size} ranks; leave out --ranks"
            )
    except UsageError:
        if world is not None and world.rank > 0:
            sys.exit(2)  # rank 0 says it for all
        raise
    if world is not None:
        from thinwire.worker import run_rank

        run_rank(config)
    else:
        _start_ranks(config, config.ranks or 1)


def _start_ranks(config: RunConfig, num_ranks: int) -> None:
    if not config.resume:
        config = config.model_copy(update={"out": RunFolder.new(config).path})
    # One process imports torch (and what optimizers import on first use) and forks the ranks: they start in a
    # moment and share its memory.
    multiprocessing.set_forkserver_preload(["thinwire.worker", "torch._dynamo"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the launcher alone
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)
    with tempfile.TemporaryDirectory(prefix="thinwire-") as scratch:
        tempfile.tempdir = scratch  # torch leaves files behind when ranks fail
        try:
            _run_agent(config, num_ranks, scratch)
        finally:
            tempfile.tempdir = None


def _run_agent(config: RunConfig, num_ranks: int, scratch: str) -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    from thinwire.rendezvous import LoopbackRendezvous

    check_options(config)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # we report failures ourselves
    rendezvous = LoopbackRendezvous(num_ranks, config.restarts, Path(scratch))
    spec = WorkerSpec(
        role="rank", local_world_size=num_ranks, rdzv_handler=rendezvous, entrypoint=rank_main,
        args=(config.model_dump_json(), os.getpid(), scratch), max_restarts=config.restarts, master_addr="127.0.0.1",
    )  # fmt: skip
    agent = LocalElasticAgent(
        spec, DefaultLogsSpecs(log_dir=scratch), start_method="forkserver", exit_barrier_timeout=10
    )
    try:
        result = agent.run()
    except SignalException as stopped:
        raise Stopped(f"stopped by {stopped.sigval.name}; --resume goes on from the last checkpoint") from None
    if result.is_failed():
        raise explain(result.failures)


def check_names(config: RunConfig) -> None:
    """Raise UsageError for a name that does not exist: at once, without torch."""
    for kind, spec in _specs(config):
        registry.find(kind, parse(spec).name)


def check_options(config: RunConfig) -> None:
    """Raise UsageError for an option that does not exist, before anything is started."""
    from thinwire.tasks.base import check_task

    check_task(config.task)
    for kind, spec in _specs(config):
        registry.check(kind, spec)


def _specs(config: RunConfig) -> list[tuple[str, str]]:
    specs = {
        "strategies": config.strategy,
        "tasks": None if ":" in config.task else config.task,
        "models": config.model,
        "optimizers": config.optimizer,
        "schedules": config.schedule,
    }
    return [(kind, spec) for kind, spec in specs.items() if spec is not None]


def rank_main(config_json: str, launcher: int, notes: str) -> None:
    """One rank, in its own process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once; the launcher says so, once
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    from thinwire.worker import run_rank

    try:
        run_rank(RunConfig.model_validate_json(config_json))
    except Exception as error:
        note = {"rank": int(os.environ["RANK"]), "kind": type(error).__name__, "message": str(error)}
        Path(notes, f"{note['rank']}.json").write_text(json.dumps(note))
        raise


def explain(failures: dict[int, ProcessFailure]) -> ThinwireError:
    """The first cause among failed ranks, as an error that names the rank and shows its traceback."""
    rank, failure = min(failures.items(), key=lambda item: ("PeerLost" in _message(item[1]), item[1].timestamp))
    message = _message(failure)
    kind, _, text = message.partition(": ")
    if kind == "UsageError":
        return UsageError(text)
    if kind in ("RunError", "PeerLost"):
        return RunError(f"rank {rank}: {text}")
    if failure.exitcode < 0:
        return RunError(f"rank {rank} (process {failure.pid}) was ended by {failure.signal_name()}; --resume goes on")
    if not failure.error_file_data:
        return RunError(f"rank {rank} (process {failure.pid}) ended with code {failure.exitcode}; --resume goes on")
    return RunError(f"rank {rank} failed: {message}\n{_traceback(failure)}")


def _message(failure: ProcessFailure) -> str:
    message: Any = failure.message
    return str(message.get("message", message)) if isinstance(message, dict) else str(message)


def _traceback(failure: ProcessFailure) -> str:
    data = failure.error_file_data.get("message", {})
    return str(data.get("extraInfo", {}).get("py_callstack", "")) if isinstance(data, dict) else ""


def _end_with(launcher: int) -> None:
    """Leave when the launcher is gone, killed say: nobody else would end this rank."""
    with suppress(OSError):  # it is gone already
        select.select([os.pidfd_open(launcher)], [], [])  # readable once it has ended
    os._exit(1)
