"""Python programs started by a process that has imported torch already: in a moment, where a start takes seconds.

What is run is the same: a process of its own with its own arguments, environment, folder and output, and ranks of its
own, forked in the same way. But it is not in the process group of whoever started it, all of them order sets alike (one
PYTHONHASHSEED), and they end without taking their modules apart. So tests of signals, of how processes end, and some of
equal results start Python itself.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from thinwire.netlab import Host

ROOT = Path(__file__).parent.parent
SOCKET = str(Path(tempfile.gettempdir(), f"tw-programs-{os.getpid()}"))
PYTHON = [sys.executable, "-SE", __file__, SOCKET, "null"]  # takes the arguments of Python: -m module, or a script
CLONE_NEWNS = 0x20000  # of Linux: mount namespaces
NOTE = "PROGRAM_NOTE"  # a file descriptor to which the number of the program's session is written
MODULES = (
    "thinwire.cli",
    "thinwire.compare.runner",
    "thinwire.compare.finish",
    "thinwire.advice.doctor",
    "thinwire.advice.plan",
    "thinwire.launch.launcher",
    "thinwire.launch.rendezvous",
    "thinwire.run.worker",
    "thinwire.strategies.data_parallel",
    "thinwire.tasks.digits",
    "thinwire.tasks.models",
    "torch._dynamo",
    "torch.distributed.elastic.agent.server.api",
)


def python_on(host: Host) -> list[str]:
    """As PYTHON, on a netlab host."""
    return [*PYTHON[:-1], json.dumps(asdict(host))]


def python_in(mounts: str, user: str | None) -> list[str]:
    """As PYTHON, in the mount namespace at a path in /proc, and in a user namespace."""
    return [*PYTHON[:-1], json.dumps({"mounts": mounts, "user": user})]


def start_server() -> subprocess.Popen[bytes]:
    """A process that PYTHON starts programs from; it ends when its stdin does."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.programs", SOCKET], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n"  # meanwhile it imports
    return server


# ---- the program that is started instead of Python


def ask(path: str, host: str, arguments: Sequence[str]) -> int:
    """Have a program run with this process's environment, folder and output; returns its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        what = {"args": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "host": json.loads(host)}
        request = json.dumps(what).encode()
        socket.send_fds(server, [struct.pack("I", len(request))], [0, 1, 2])
        server.sendall(request)
        session, code = (struct.unpack("i", server.recv(4, socket.MSG_WAITALL))[0] for _ in range(2))
        if NOTE in os.environ:
            os.write(int(os.environ[NOTE]), str(session).encode())
    if code < 0:
        os.kill(os.getpid(), -code)  # as it was ended
    return int(code)


# ---- the server


def serve(path: str) -> None:
    """Fork a program for every request, until stdin ends."""
    import gc
    import importlib
    import multiprocessing.util

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this, and ends stdin
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for programs
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as events:
        listener.bind(path)
        listener.listen(64)
        try:
            print("listening", flush=True)
            for name in MODULES:
                importlib.import_module(name)
            gc.freeze()  # what is imported stays: no program's search for garbage looks at it
            multiprocessing.util.spawnv_passfds = fork_instead  # type: ignore[attr-defined]
            events.register(sys.stdin, selectors.EVENT_READ)
            events.register(listener, selectors.EVENT_READ)
            while sys.stdin not in [key.fileobj for key, _ in events.select()]:
                caller, _ = listener.accept()
                if os.fork() == 0:
                    try:
                        events.close()
                        listener.close()
                        attend(caller)
                    except BaseException:
                        traceback.print_exc()
                    finally:
                        os._exit(1)
                caller.close()
        finally:
            os.unlink(path)


def attend(caller: socket.socket) -> NoReturn:
    """Run what is asked for in a process of its own, and tell how it ended; it ends with whoever asked."""
    header, descriptors, _, _ = socket.recv_fds(caller, 4, 3)
    request = json.loads(caller.recv(struct.unpack("I", header)[0], socket.MSG_WAITALL))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    program = os.fork()
    if program == 0:
        caller.close()
        become(descriptors, **request)
    try:
        caller.sendall(struct.pack("i", program))
        with selectors.DefaultSelector() as events:
            ended = os.pidfd_open(program)
            events.register(ended, selectors.EVENT_READ)
            events.register(caller, selectors.EVENT_READ)
            if ended in [key.fileobj for key, _ in events.select()]:
                code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
                caller.sendall(struct.pack("i", code))
                os._exit(0)
    finally:  # nobody waits for it any more
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            with suppress(ProcessLookupError):
                kill(program, signal.SIGKILL)
        os._exit(1)


def become(
    descriptors: list[int], args: list[str], cwd: str, env: dict[str, str], host: dict[str, Any] | None
) -> NoReturn:
    """Be the program: this process's state as if it had been started by itself."""
    import atexit
    import multiprocessing.process
    import runpy

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for here, there in enumerate(descriptors):
        os.dup2(there, here)
        os.close(there)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    multiprocessing.process.ORIGINAL_DIR = cwd
    tempfile.tempdir = None
    if "OMP_NUM_THREADS" in env:
        import torch

        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    if host is not None and "mounts" in host:
        from thinwire.netlab import linux

        if host["user"] is not None:
            linux.setns(host["user"], linux.CLONE_NEWUSER)
        linux.setns(host["mounts"], CLONE_NEWNS)
        os.chdir(cwd)
    elif host is not None:
        from thinwire.netlab import Host

        Host(**host).enter()
    sys.path[:0] = [cwd if args[0] == "-m" else str(Path(args[0]).parent), *env.get("PYTHONPATH", "").split(":")]
    code: Any = 0
    try:
        if args[0] == "-m":
            sys.argv = args[1:]
            runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = args
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # taking all the modules apart takes a second


def fork_instead(path: str, args: Sequence[Any], descriptors: Sequence[int]) -> int:
    """What multiprocessing starts Python for, its fork server, without the imports."""
    child = os.fork()
    if child:
        return child
    try:
        assert args[-2] in ("-c", b"-c"), args
        keep = sorted({0, 1, 2, *descriptors})
        for one, next_one in zip(keep, [*keep[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(one + 1, next_one)
        exec(args[-1], {"__name__": "__main__"})
    except SystemExit:
        pass
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2], sys.argv[3:]))
    serve(sys.argv[1])
