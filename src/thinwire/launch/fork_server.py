"""One process that imports torch and forks the ranks, so that they start at once and share its memory."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import signal
import threading
from contextlib import suppress
from multiprocessing import forkserver, util
from typing import Any

from thinwire.common.files import folder_of_sockets

LAUNCHER = "THINWIRE_LAUNCHER"  # for thinwire.launch.forked, which this process does not import: it imports torch


def start_fork_server() -> None:
    """Start the fork server, unless it runs already. It and its ranks end with this process, however that ends."""
    multiprocessing.set_forkserver_preload(["thinwire.launch.forked"])
    _name_folder_of_sockets()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: only the launcher handles Ctrl-C
    if threading.current_thread() is threading.main_thread():  # for the Linux kernel a thread is the parent
        os.environ[LAUNCHER] = str(os.getpid())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop(LAUNCHER, None)
        signal.signal(signal.SIGINT, before)


def _name_folder_of_sockets() -> None:
    """Give multiprocessing a folder for its sockets that a later run removes if this process is killed.

    Its own has a name that does not tell whose it was.
    """
    about: Any = multiprocessing.current_process()
    if about._config.get("tempdir") is None:
        about._config["tempdir"] = folder = folder_of_sockets()
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)


def end_with(launcher_pid: int) -> None:
    """End this process when the launcher has ended, which would otherwise leave it behind if it was killed."""
    with suppress(OSError):  # it has ended already
        select.select([os.pidfd_open(launcher_pid)], [], [])  # readable once it has ended
    os._exit(1)
