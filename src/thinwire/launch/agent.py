"""Start the ranks of a run on this machine with torch's elastic agent."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from thinwire.comm.addresses import AUTO, addresses_of
from thinwire.comm.secret import read_secret
from thinwire.comm.world import place
from thinwire.common.ending import end_with
from thinwire.common.files import scratch_folder
from thinwire.config import RunConfig
from thinwire.errors import Stopped
from thinwire.launch.failures import Failure, first_cause, make_room, read_failures
from thinwire.launch.fork_server import start_fork_server
from thinwire.netlab import Host, Lab
from thinwire.run.network import LinkReport, check_link
from thinwire.run.records import RunFolder

WAKE_SECONDS = 1.0  # between two looks for failed ranks
AGENT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # the agent replaces their handlers


def train(config: RunConfig, link: LinkReport, progress_file: Path | None) -> None:
    """What ranks do by default."""
    from thinwire.run.worker import run_rank

    run_rank(config, link, progress_file)


def start_ranks(
    config: RunConfig,
    lab: Lab | None,
    progress_file: Path | None = None,
    program: Callable[[RunConfig, LinkReport, Path | None], Any] = train,
) -> Any:
    """Run a config on ranks of this machine, on the lab's hosts if there is one; returns what rank 0's program does.

    With `progress_file`, ranks print nothing and write their progress to that file. The `program` of a rank is a
    function of a module.
    """
    payload = {
        "config": config.model_dump(mode="json"),
        "launcher_pid": os.getpid(),
        "link": check_link(lab, config),
        "hosts": [asdict(lab[node]) for node in place(config.ranks or 1, len(lab))] if lab else None,
        "progress_file": str(progress_file) if progress_file else None,
        "program": program,
    }
    if lab is not None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch warns that the hosts have no names
    start_fork_server()
    from thinwire.launch.local_ranks import local_ranks  # imports torch, as the fork server does meanwhile

    with scratch_folder() as scratch:
        make_room(scratch, range(config.ranks or 1))
        tempfile.tempdir = str(scratch)  # torch leaves files behind when ranks fail
        try:
            with local_ranks():
                return _run_agent(config, payload, str(scratch))
        finally:
            tempfile.tempdir = None


def _run_agent(config: RunConfig, payload: dict[str, Any], scratch: str) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std

    from thinwire.launch.rendezvous import LocalRendezvous

    _silence_torch()
    num_ranks = config.ranks or 1
    if payload["hosts"]:
        address = payload["hosts"][0]["address"]
    else:
        address = "127.0.0.1" if config.iface == AUTO else addresses_of(config.iface)[0]
    secret = read_secret(config.secret_file)
    on_hosts = bool(payload["hosts"])
    rendezvous = LocalRendezvous(num_ranks, config.restarts, Path(scratch), address, on_hosts, secret)
    spec = WorkerSpec(
        role="rank", local_world_size=num_ranks, rdzv_handler=rendezvous, entrypoint=rank_main,
        args=({**payload, "failures": scratch},), max_restarts=config.restarts,
    )  # fmt: skip
    logs = DefaultLogsSpecs(log_dir=scratch, redirects=Std.ALL if payload["progress_file"] else Std.NONE)
    agent = LocalElasticAgent(spec, logs, start_method="forkserver", exit_barrier_timeout=10)
    handlers = {number: signal.getsignal(number) for number in AGENT_SIGNALS}
    has_ended = threading.Event()
    threading.Thread(target=_wake_stopped, args=(agent, Path(scratch), has_ended), daemon=True).start()
    try:
        result = agent.run()
    except SignalException as stopped:
        raise Stopped(f"stopped by {stopped.sigval.name}; {how_to_go_on(config.out)}") from None
    finally:
        has_ended.set()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for rank in multiprocessing.active_children():  # if a signal came while the agent was starting ranks
            rank.kill()
            rank.join(5)
        rendezvous.shutdown()
    if result.is_failed():
        raise first_cause(result.failures, read_failures(Path(scratch)))
    return result.return_values[0]


def _wake_stopped(agent: Any, failures: Path, has_ended: threading.Event) -> None:
    """Once a rank has failed, wake those that are stopped: torch tells them to end, and waits 30 s for each that does
    not hear it."""
    while not has_ended.wait(WAKE_SECONDS):
        if agent._pcontext is not None and read_failures(failures):
            for pid in agent._pcontext.pids().values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def how_to_go_on(out: Path | None) -> str:
    """What to do after a run was stopped: it may have saved nothing yet."""
    if out is not None and any(RunFolder(out).checkpoints.glob("*/rank-*.json")):
        return "--resume goes on from the last checkpoint"
    return "nothing was saved yet; run the command again"


def _silence_torch() -> None:
    """Hide the agent's messages: thinwire reports failures itself."""
    for name in logging.root.manager.loggerDict:
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


def rank_main(payload: dict[str, Any]) -> Any:
    """The main function of a rank's process; with a lab, the process moves to its host first. Rank 0 has a result."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once; only the launcher prints a message
    rank = int(os.environ["RANK"])
    if payload["hosts"]:
        Host(**payload["hosts"][rank]).enter()  # before there is a second thread
    threading.Thread(target=end_with, args=(payload["launcher_pid"],), daemon=True).start()
    try:
        progress_file = Path(payload["progress_file"]) if payload["progress_file"] else None
        config, link = RunConfig(**payload["config"]), LinkReport(*payload["link"])
        result = payload["program"](config, link, progress_file)
        return result if rank == 0 else None
    except BaseException as error:  # also sys.exit; not raised: torch writes to the disk what is, which may be full
        Failure.of(rank, error).write(Path(payload["failures"]))
        sys.exit(1)
