"""A lab: hosts to run programs on, joined by a link."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from thinwire.errors import RunError, UsageError
from thinwire.netlab import linux
from thinwire.netlab.link import Link, parse_link
from thinwire.netlab.probe import Measured

MAX_HOSTS = 254
ENTER_AND_RUN = """
import json, os, sys
from thinwire.netlab.lab import Host
Host(**json.loads(sys.argv[1])).enter()
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"{sys.argv[2]}: {error.strerror}")
"""


class NotAllowed(RunError):
    """This machine does not allow us to make hosts."""


@dataclass(frozen=True)
class Host:
    """One host: its address, and the paths of the namespaces that a process enters to be on it."""

    address: str
    net: str
    user: str | None = None

    def enter(self) -> None:
        """Move this thread, and those it starts, to this host. Without root, the process may have no other thread."""
        if self.user is not None:
            linux.setns(self.user, linux.CLONE_NEWUSER)
        linux.setns(self.net, linux.CLONE_NEWNET)

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on this host; options as for subprocess.Popen."""
        here = json.dumps({"address": self.address, "net": self.net, "user": self.user})
        return subprocess.Popen([sys.executable, "-c", ENTER_AND_RUN, here, *command], **options)

    def run(self, command: Sequence[str], timeout_seconds: float = 60) -> str:
        """Run a program on this host and return what it prints; RunError if it fails."""
        with self.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                output, errors = process.communicate(timeout=timeout_seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RunError(f"{command[0]} on {self.address} took longer than {timeout_seconds} s") from None
        if process.returncode:
            why = f": {errors.strip()}" if errors.strip() else ""
            raise RunError(f"{command[0]} on {self.address} ended with code {process.returncode}{why}")
        return str(output)


class Lab(Sequence[Host]):
    """Hosts on one network. `hosts` makes a lab and removes it again."""

    def __init__(self, num_hosts: int, link: Link | None, start_seconds: float | None = None) -> None:
        self.link = link
        command = [sys.executable, "-m", "thinwire.netlab.keeper", str(num_hosts), json.dumps(link)]
        pipe = subprocess.PIPE
        self._keeper = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True)
        assert self._keeper.stdout is not None
        if start_seconds is not None and not select.select([self._keeper.stdout], [], [], start_seconds)[0]:
            self._keeper.kill()
            self.close()
            raise NotAllowed(f"hosts were not made within {start_seconds:g} s; the machine may be too busy: try again")
        answer = self._read()
        if "error" in answer:
            self.close()
            raise NotAllowed(_not_allowed(answer["error"]))
        self.relayed = bool(answer["relayed"])  # latency by a relay, because the Linux kernel has no netem
        self.untaken: list[str] = answer["untaken"]  # settings that the Linux kernel did not accept
        self._hosts = [Host(**host) for host in answer["hosts"]]

    def measure(self) -> Measured:
        """Measure the link's rate and latency."""
        return Measured(**self._ask("measure"))

    def sent_bytes(self) -> list[dict[str, int]]:
        """Bytes that each host has sent, as the Linux kernel counts: `inside` it and `between` it and the others."""
        counts: list[dict[str, int]] = self._ask("sent")
        return counts

    def close(self) -> None:
        """Remove the hosts and their network."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        with suppress(OSError):  # it was killed
            self._keeper.stdin.close()
        try:
            self._keeper.wait(10)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._keeper.stdout.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: Any) -> Any:
        return self._hosts[index]

    def _ask(self, request: str) -> Any:
        assert self._keeper.stdin is not None
        try:
            self._keeper.stdin.write(request + "\n")
            self._keeper.stdin.flush()
        except (OSError, ValueError):  # it was killed, or the lab is closed
            raise RunError("this lab is closed; make another with netlab.hosts") from None
        return self._read()

    def _read(self) -> Any:
        assert self._keeper.stdout is not None
        line = self._keeper.stdout.readline()
        if not line:
            raise RunError("the process that holds the lab has ended; make another with netlab.hosts")
        return json.loads(line)


@contextmanager
def hosts(count: int, link: str | Link | None = None, start_seconds: float | None = None) -> Iterator[Lab]:
    """Make hosts on this machine, joined by a link (default: as fast as the machine can).

    Each has an address, a loopback and an interface `wire` of its own, and sends and receives at the link's rate
    through a switch. All of it is removed when the block or this process ends. If they cannot be made, or not within
    `start_seconds`, NotAllowed is raised.

    >>> from thinwire import netlab
    >>> with netlab.hosts(2, link="100mbit") as hosts:  # doctest: +SKIP
    ...     hosts[0].run(["hostname", "-I"]), hosts.measure().rate_mbit
    ('10.77.0.1 ', 98.7)
    """
    if not 1 <= count <= MAX_HOSTS:
        raise UsageError(f"{count} hosts; possible: 1 to {MAX_HOSTS}")
    lab = Lab(count, parse_link(link) if isinstance(link, str) else link, start_seconds)
    try:
        yield lab
    finally:
        lab.close()


def _not_allowed(reason: str) -> str:
    """The error message for the keeper's error, with what to try."""
    if "/dev/net/tun" in reason:
        return (
            f"a link with latency needs the Linux kernel's netem or /dev/net/tun ({reason}); run as root, or without "
            "latency"
        )
    for kind, limit in (("user", "user.max_user_namespaces"), ("network", "user.max_net_namespaces")):
        if limit in reason:
            return (
                f"the Linux kernel allows no more {kind} namespaces ({reason}); end other runs or containers that hold "
                f"some, or allow more: sysctl -w {limit}=10000 (in a container, on its host)"
            )
    if "Operation not permitted" not in reason and "Permission denied" not in reason:
        if reason.startswith("[Errno"):  # an error of a system call; netlink's look different
            return f"hosts cannot be made here ({reason}); try fewer of them, or free what is used up"
        return f"the Linux kernel lacks what a link needs: veth, bridge and tbf ({reason}); load these modules"
    if os.getuid() == 0:
        how = "give this container more rights (docker run --cap-add SYS_ADMIN --cap-add NET_ADMIN)"
    else:
        how = (
            "run as root, or allow user namespaces (sysctl -w user.max_user_namespaces=1000, and on some systems "
            "kernel.unprivileged_userns_clone=1 or kernel.apparmor_restrict_unprivileged_userns=0)"
        )
    return f"network namespaces are not allowed here ({reason}); {how}"
