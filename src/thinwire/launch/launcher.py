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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thinwire import registry
from thinwire.comm.world import find_world, place
from thinwire.common.files import scratch_folder
from thinwire.common.messages import print_line
from thinwire.config import MAY_CHANGE, RunConfig, make_config, read_toml, resumed
from thinwire.errors import RunError, Stopped, ThinwireError, UsageError
from thinwire.netlab import Host, Lab
from thinwire.run.network import LinkReport, check_link, check_network, network
from thinwire.run.records import RunFolder, is_free
from thinwire.spec import parse
from thinwire.tasks.naming import check_task_name

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def resolve(file: Path | None, asked: dict[str, Any]) -> RunConfig:
    """The config of a run from a TOML file, what was asked for, and, with --resume, what the run began with.

    Where there is no run yet, --resume starts one if its settings are given: a job that is queued again is one command.
    """
    kind = registry.kind_of(str(file).partition("(")[0])
    if file is not None and kind is not None and not file.exists():
        what = registry.SINGULAR[kind]
        raise UsageError(f"{file} is a {what}, not a TOML file of settings; give names by their options, as --{what}")
    given = {**(read_toml(file) if file else {}), **asked}
    config = make_config(given, source=str(file or "settings"))
    if config.resume and config.out is not None and is_free(config.out) and not given.keys() <= MAY_CHANGE:
        world = find_world()
        if world is None or world.rank == 0:
            print_line(f"no run in {config.out} yet: starting one")
        return config.model_copy(update={"resume": False})
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
        if world is not None and (config.link or config.nodes):
            raise UsageError(
                f"--link and --nodes make hosts on this machine, but {world.launcher} started the ranks; "
                "leave them out, or start with thinwire train --ranks"
            )
    except UsageError:
        if world is not None and world.rank > 0:
            sys.exit(2)  # rank 0 says it for all
        raise
    if world is not None:
        from thinwire.run.worker import run_rank

        run_rank(config)
    else:
        check_network(config)
        check_options(config)
        if not config.resume:
            config = config.model_copy(update={"out": RunFolder.new(config).path})
        with stopped_by_signals(), network(config) as lab:
            start_ranks(config, lab)


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP end the work as Ctrl-C does: in order, with a word."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(f"stopped by {signal.Signals(number).name}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start_ranks(config: RunConfig, lab: Lab | None, progress_file: Path | None = None) -> None:
    """Run a config on ranks of this machine, on a lab's hosts if there is one; in quiet, with progress in a file."""
    payload = {
        "config": config.model_dump(mode="json"),
        "launcher": os.getpid(),
        "link": check_link(lab, config),
        "hosts": [asdict(lab[node]) for node in place(config.ranks or 1, len(lab))] if lab else None,
        "progress_file": str(progress_file) if progress_file else None,
    }
    if lab is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that the hosts have no names
    # One process imports torch (and what optimizers import on first use) and forks the ranks: they start in a
    # moment and share its memory.
    multiprocessing.set_forkserver_preload(["thinwire.run.worker", "torch._dynamo"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for the launcher alone
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    with scratch_folder() as scratch:
        tempfile.tempdir = str(scratch)  # torch leaves files behind when ranks fail
        try:
            _run_agent(config, payload, str(scratch))
        finally:
            tempfile.tempdir = None


def _run_agent(config: RunConfig, payload: dict[str, Any], scratch: str) -> None:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

    from thinwire.launch.rendezvous import LocalRendezvous

    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # we report failures ourselves
    num_ranks = config.ranks or 1
    address = payload["hosts"][0]["address"] if payload["hosts"] else None
    rendezvous = LocalRendezvous(num_ranks, config.restarts, Path(scratch), address)
    spec = WorkerSpec(
        role="rank", local_world_size=num_ranks, rdzv_handler=rendezvous, entrypoint=rank_main,
        args=({**payload, "notes": scratch},), max_restarts=config.restarts,
    )  # fmt: skip
    quiet = Std.ALL if payload["progress_file"] else Std.NONE
    logs = DefaultLogsSpecs(log_dir=scratch, redirects=quiet)
    agent = LocalElasticAgent(spec, logs, start_method="forkserver", exit_barrier_timeout=10)
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    try:
        result = agent.run()
    except SignalException as stopped:
        raise Stopped(f"stopped by {stopped.sigval.name}; --resume goes on from the last checkpoint") from None
    finally:
        for number, handler in handlers.items():  # the agent leaves its own behind
            signal.signal(number, handler)
        for rank in multiprocessing.active_children():  # and a rank, if the signal came while it was starting them
            rank.kill()
            rank.join(5)
    if result.is_failed():
        raise explain(result.failures)


def check_names(config: RunConfig) -> None:
    """Raise UsageError for a name that does not exist: at once, without torch."""
    check_task_name(config.task)
    for kind, spec in _specs(config):
        registry.find(kind, parse(spec).name)


def check_options(config: RunConfig) -> None:
    """Raise UsageError for an option that does not exist, before anything is started."""
    from thinwire.tasks.loading import check_task

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


def rank_main(payload: dict[str, Any]) -> None:
    """One rank, in its own process, on its own host if it has one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once; the launcher says so, once
    rank = int(os.environ["RANK"])
    if payload["hosts"]:
        Host(**payload["hosts"][rank]).enter()  # before there is a second thread
    threading.Thread(target=_end_with, args=(payload["launcher"],), daemon=True).start()
    from thinwire.run.worker import run_rank

    try:
        progress_file = Path(payload["progress_file"]) if payload["progress_file"] else None
        run_rank(RunConfig(**payload["config"]), LinkReport(*payload["link"]), progress_file)
    except Exception as error:
        note = {"rank": rank, "kind": type(error).__name__, "message": str(error)}
        Path(payload["notes"], f"{rank}.json").write_text(json.dumps(note))
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
