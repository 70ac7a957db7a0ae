"""What the facts of each rank's machine mean for a run."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from thinwire.advice.facts import Facts
from thinwire.advice.findings import Finding, by_rank, spell_ranks
from thinwire.comm.world import World
from thinwire.common.formats import format_bytes

LITTLE_BYTES = 10**9  # of memory for a rank, or of disk
EVERYWHERE = ("0.0.0.0", "::")


def machine_findings(facts: Sequence[Facts], world: World) -> list[Finding]:
    """All that can be said without sending anything. `facts` has one for each rank."""
    return [
        versions(facts),
        *devices(facts),
        hosts_allowed(facts),
        *addresses(facts, world),
        host_name(facts),
        listeners(facts, world),
        memory(facts),
        *disk(facts),
        open_files(facts),
    ]


def versions(facts: Sequence[Facts]) -> Finding:
    """Whether all ranks run the same programs. The last part of Python's version makes no difference."""
    names = list(facts[0].versions)
    alike = [{**one.versions, "python": one.versions["python"].rpartition(".")[0]} for one in facts]
    differing = [name for name in names if len({one[name] for one in alike}) > 1]
    if not differing:
        return Finding("ok", "versions", ", ".join(f"{name} {facts[0].versions[name]}" for name in names))
    value = ", ".join(f"{name} {by_rank([one.versions[name] for one in facts])}" for name in differing)
    return Finding(
        "failure", "versions", value,
        "Ranks that run different programs may wait for each other for ever, or train different models.",
        "Install the same versions on every machine, in the same kind of environment.",
    )  # fmt: skip


def devices(facts: Sequence[Facts]) -> list[Finding]:
    """What ranks compute on, and whether they have to share it."""
    what = [f"CPU ({one.cpu})" if one.device == "CPU" else one.device for one in facts]
    found = [Finding("ok", "device", by_rank(what)), Finding("ok", "backend", by_rank([one.backend for one in facts]))]
    if any(one.device != "CPU" and one.backend == "gloo" for one in facts) and len(facts) > 1:
        found[-1] = Finding(
            "note", "backend", "gloo",
            "nccl needs a GPU for each rank. Here tensors pass through the memory of the machine.",
            "Start as many ranks on a node as it has GPUs.",
        )  # fmt: skip
    cores = by_rank([f"{one.cores} for {one.local_ranks} ranks, {one.threads} threads each" for one in facts])
    cores = cores.replace(" for 1 ranks", "").replace("1 threads each", "1 thread each")
    crowded = [rank for rank, one in enumerate(facts) if one.device == "CPU" and one.local_ranks > one.cores]
    if not crowded:
        return [*found, Finding("ok", "cores", cores)]
    crowd = Finding(
        "warning", "cores", cores,
        f"There are more ranks than cores ({spell_ranks(crowded)}): ranks wait for each other to compute.",
        "Start fewer ranks on this node. For comparisons, times count only against runs with as many ranks.",
    )  # fmt: skip
    return [*found, crowd]


def hosts_allowed(facts: Sequence[Facts]) -> Finding:
    """Whether netlab may make hosts."""
    tried = [(rank, one.hosts_error) for rank, one in enumerate(facts) if one.hosts_error is not None]
    refused = [(rank, why) for rank, why in tried if why]
    if refused:
        return Finding(
            "note", "hosts on one machine", f"not possible on the machine of rank {refused[0][0]}: {refused[0][1]}",
            "--link and --nodes make no slow network here. Runs without them are not affected.",
            "See the message; or measure on several machines.",
        )  # fmt: skip
    return Finding("ok", "hosts on one machine", "can be made: --link and --nodes work" if tried else "in use")


def addresses(facts: Sequence[Facts], world: World) -> list[Finding]:
    """The interface and the address at which each rank is reached, and who else can read what is sent there."""
    used = by_rank([f"{one.address} ({one.interface})" for one in facts])
    lost = [rank for rank, one in enumerate(facts) if one.address is None]
    if lost:
        names = sorted({str(facts[rank].interface) for rank in lost})
        there = sorted({*facts[lost[0]].addresses.values()})
        return [
            Finding(
                "failure", "addresses", used,
                f"{spell_ranks(lost)}: there is no interface {', '.join(names)} with an address "
                f"that leads to rank 0 at {world.address}.",
                f"Unset GLOO_SOCKET_IFNAME, or give --iface one of {', '.join(there)}; check MASTER_ADDR.",
            )
        ]  # fmt: skip
    found = [Finding("ok", "addresses", used)]
    public = [rank for rank, one in enumerate(facts) if one.address is not None and is_public(one.address)]
    if public:
        found.append(
            Finding(
                "warning", "public addresses", ", ".join(dict.fromkeys(str(facts[rank].address) for rank in public)),
                f"{spell_ranks(public)} can be reached from the whole internet, and ranks send without encryption: "
                "others on the way can read and change gradients, weights and activations.",
                "Use a private network, or a tunnel such as WireGuard, and give its address as MASTER_ADDR; "
                "close other ports by a firewall.",
            )
        )  # fmt: skip
    return found


def host_name(facts: Sequence[Facts]) -> Finding:
    """Whether a machine's own name leads to itself alone, as 127.0.1.1 on Debian, which others cannot reach."""
    trapped = [rank for rank, one in enumerate(facts) if any(map(_is_loopback, one.name_addresses[:1]))]
    unknown = [rank for rank, one in enumerate(facts) if not one.name_addresses]
    value = by_rank([f"{one.host} is {one.name_addresses[0] if one.name_addresses else 'unknown'}" for one in facts])
    if trapped:
        several = len({one.host for one in facts}) > 1  # hosts of netlab have one name
        return Finding(
            "warning" if several else "note", "host name", value,
            f"On {spell_ranks(trapped)} the machine's own name is a loopback address. Other machines that are given "
            "this name, or this address, reach themselves.",
            "Give addresses, not names (MASTER_ADDR; torchrun --rdzv-endpoint, --local-addr), or correct /etc/hosts.",
        )  # fmt: skip
    if unknown:
        return Finding(
            "note", "host name", value,
            "Nobody knows the name of this machine. torch prints warnings, and thinwire uses the address above.",
            "Add the name to /etc/hosts to avoid the warnings.",
        )  # fmt: skip
    return Finding("ok", "host name", value)


def listeners(facts: Sequence[Facts], world: World) -> Finding:
    """What a run listens at: the store, and a port of each rank for the others."""
    if world.size == 1:
        return Finding("ok", "listeners", "none: one rank opens no port")
    where = f"store at {world.address}:{world.port}"
    ports = f"each rank at free ports of {by_rank([str(one.address) for one in facts])}"
    if not set(facts[0].store_listens_at) & set(EVERYWHERE):
        return Finding("ok", "listeners", f"{where}; {ports}")
    is_open = any(map(is_public, facts[0].addresses))
    return Finding(
        "warning" if is_open else "note", "listeners", f"{where}, on every interface of that machine; {ports}",
        f"{world.launcher} opened the store. Everyone who reaches {' or '.join(facts[0].addresses)} can write to it.",
        f"Close port {world.port} by a firewall for other machines, or start ranks by srun, by mpirun or "
        "with --ranks: then thinwire opens the store, at one address.",
    )  # fmt: skip


def memory(facts: Sequence[Facts]) -> Finding:
    """Free memory, which ranks of one node share."""
    value = by_rank([f"{format_bytes(one.memory_bytes)} free" for one in _one_per_node(facts)])
    value = value.replace("on rank", "on node")
    short = [rank for rank, one in enumerate(facts) if one.memory_bytes / one.local_ranks < LITTLE_BYTES]
    if not short:
        return Finding("ok", "memory", value)
    return Finding(
        "warning", "memory", value,
        f"{spell_ranks(short)} have less than {format_bytes(LITTLE_BYTES)} each. A rank needs several hundred MB for "
        "torch alone.",
        "Start fewer ranks there, or end other programs.",
    )  # fmt: skip


def disk(facts: Sequence[Facts]) -> list[Finding]:
    """Room for results, on each node's own disk."""
    found = []
    shut = [rank for rank, one in enumerate(facts) if not one.folder_is_writable]
    if shut:
        found.append(
            Finding(
                "failure", "folder for results", by_rank([one.folder for one in facts]),
                f"{spell_ranks(shut)} may not write there: a run could save neither checkpoints nor results.",
                "Give another folder with --out.",
            )
        )  # fmt: skip
    value = by_rank([f"{format_bytes(one.folder_bytes)} free in {one.folder}" for one in facts])
    full = [rank for rank, one in enumerate(facts) if one.folder_bytes < LITTLE_BYTES]
    if not full:
        return [*found, Finding("ok", "disk", value)]
    return [
        *found,
        Finding(
            "warning", "disk", value,
            f"Checkpoints of {spell_ranks(full)} may not fit: each has the rank's weights and optimizer state, "
            "and two are kept.",
            "Free some room, or give a folder on another disk with --out.",
        ),
    ]  # fmt: skip


def open_files(facts: Sequence[Facts]) -> Finding:
    """Whether the connections to all other ranks fit into the limit of open files."""
    value = by_rank([f"{one.open_files:,} at most" if one.open_files >= 0 else "no limit" for one in facts])
    needed = 100 + 8 * len(facts)  # libraries and files; connections of up to four pairs of groups to each rank
    few = [rank for rank, one in enumerate(facts) if 0 <= one.open_files < needed]
    if not few:
        return Finding("ok", "open files", value)
    return Finding(
        "failure", "open files", value,
        f"{spell_ranks(few)} may open fewer files than a world of {len(facts)} ranks needs, about {needed}: each "
        "connection is one.",
        f"Raise the limit before starting: ulimit -n {max(needed, 4096)}.",
    )  # fmt: skip


def is_public(address: str) -> bool:
    """Whether an address can be reached from the whole internet.

    >>> is_public("8.8.8.8"), is_public("10.0.0.1"), is_public("fe80::1%eth0")
    (True, False, False)
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_global


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _one_per_node(facts: Sequence[Facts]) -> list[Facts]:
    return list({one.node: one for one in reversed(facts)}.values())[::-1]
