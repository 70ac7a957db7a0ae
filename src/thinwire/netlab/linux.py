"""System calls that make and enter Linux namespaces, and the Linux kernel's count of what an interface sent."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
LIMITS = {CLONE_NEWUSER: "user.max_user_namespaces", CLONE_NEWNET: "user.max_net_namespaces"}
INTERFACE = "wire"  # the interface of a host that leads to the others

if sys.version_info >= (3, 12):
    _unshare, _setns = os.unshare, os.setns
else:
    import ctypes

    _libc = ctypes.CDLL(None, use_errno=True)

    def _unshare(flags: int) -> None:
        _check(_libc.unshare(flags))

    def _setns(descriptor: int, flags: int) -> None:
        _check(_libc.setns(descriptor, flags))

    def _check(result: int) -> None:
        if result != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def unshare(flag: int) -> None:
    """Move this thread to a new namespace. If no more of its kind may be made, the error names the limit."""
    try:
        _unshare(flag)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise OSError(error.errno, f"unshare: {error.strerror}") from None
        name = LIMITS[flag]
        value = Path("/proc/sys", name.replace(".", "/")).read_text().strip()
        raise OSError(errno.ENOSPC, f"{name} = {value}") from None


def setns(path: str, flag: int) -> None:
    """Move this thread to the namespace at a path in /proc."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _setns(descriptor, flag)
    except OSError as error:
        raise OSError(error.errno, f"setns {path}: {error.strerror}") from None
    finally:
        os.close(descriptor)


def become_root() -> None:
    """Move to a new user namespace in which this user is root, and may make network namespaces."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1")


def sent_bytes() -> dict[str, int]:
    """Bytes that this host has sent: `inside` it (over loopback) and `between` it and the others."""
    sent = {"lo": 0, INTERFACE: 0}
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines()[2:]:
        name, _, fields = line.partition(":")
        if name.strip() in sent:
            sent[name.strip()] = int(fields.split()[8])
    return {"inside": sent["lo"], "between": sent[INTERFACE]}
