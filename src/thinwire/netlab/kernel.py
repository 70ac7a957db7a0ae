"""The few system calls that make and enter namespaces, and the kernel's count of what an interface sent."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

NEWUSER, NEWNET = 0x10000000, 0x40000000
LIMITS = {NEWUSER: "user.max_user_namespaces", NEWNET: "user.max_net_namespaces"}
WIRE = "wire"  # the interface of a host that leads to the others

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(kind: int) -> None:
    """Move this thread to a new namespace of a kind; where no more of them may be made, name the limit."""
    try:
        _checked(_libc.unshare(kind), "unshare")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        name = LIMITS[kind]
        raise OSError(
            errno.ENOSPC, f"{name} = {Path('/proc/sys', name.replace('.', '/')).read_text().strip()}"
        ) from None


def setns(path: str, flag: int) -> None:
    """Move this thread to the namespace that a path of /proc stands for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked(_libc.setns(descriptor, flag), f"setns {path}")
    finally:
        os.close(descriptor)


def become_root() -> None:
    """In a new user namespace, where this user is root: allowed to make networks, of its own only."""
    uid, gid = os.getuid(), os.getgid()
    unshare(NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def sent_bytes() -> dict[str, int]:
    """Bytes that this host has sent: `inside` it (over loopback) and `between` it and the others."""
    sent = {"lo": 0, WIRE: 0}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, fields = line.partition(":")
        if name.strip() in sent:
            sent[name.strip()] = int(fields.split()[8])
    return {"inside": sent["lo"], "between": sent[WIRE]}


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
