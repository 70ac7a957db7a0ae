"""What the fork server imports: from now on it ends with its launcher, and it has what ranks need to start at once.

Imports take seconds, in which no code of ours would notice that the launcher was killed. So the Linux kernel ends the
fork server with the launcher, and a rank with the fork server.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
LAUNCHER = "THINWIRE_LAUNCHER"  # the environment variable that has the launcher's process id while it starts the server


def end_with_parent(parent: int) -> None:
    """Have the Linux kernel end this process when its parent does, which may have happened already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _end_with_fork_server(server: int) -> None:
    """In a new process: end with the fork server, if that forked it. Processes that ranks fork are their own matter."""
    if os.getppid() == server:
        end_with_parent(server)


if launcher := os.environ.pop(LAUNCHER, None):  # else this is no fork server
    end_with_parent(int(launcher))
    server = os.getpid()
    os.register_at_fork(after_in_child=lambda: _end_with_fork_server(server))

import torch._dynamo  # noqa: E402, F401  # optimizers import it on first use

import thinwire.launch.agent  # noqa: E402
import thinwire.launch.local_ranks  # noqa: E402
import thinwire.run.worker  # noqa: E402, F401
