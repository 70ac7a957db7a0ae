"""Examine the present world: what would fail, what it means and what to try."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from thinwire.advice.diagnosis import Diagnosis
from thinwire.advice.facts import Facts, look
from thinwire.advice.findings import Finding, worst
from thinwire.advice.machine import machine_findings
from thinwire.advice.measurements import Measurements, measure_world
from thinwire.advice.wire import reach_finding, wire_findings
from thinwire.comm.addresses import gloo_interface
from thinwire.comm.join import WORLD_OF_ONE, join
from thinwire.comm.link_probe import first_ranks
from thinwire.comm.reach import Store, find_unreached, gather_through, leave_store
from thinwire.comm.secret import read_secret
from thinwire.comm.store import rendezvous
from thinwire.comm.world import World, find_world, number_nodes
from thinwire.config import RunConfig
from thinwire.errors import UsageError
from thinwire.launch.agent import start_ranks
from thinwire.launch.launcher import check_as_rank, stopped_by_signals, world_to_join
from thinwire.run.network import LinkReport, check_network, network
from thinwire.run.startup import use_device

ANSWER_SECONDS = 60.0  # a rank that does not answer for so long is lost
JOINING = ("versions", "addresses", "connections")  # if one of these fails, ranks do not try to join


def doctor(config: RunConfig) -> Diagnosis | None:
    """Examine the world that torchrun, srun or mpirun made, ranks that a config asks for, or this machine alone.

    Ranks of a world other than rank 0 get None.
    """
    world = world_to_join(config)
    if world is not None:
        check_as_rank(config, world)
        found = diagnose(config)
        return found if world.rank == 0 else None
    check_network(config)
    if (config.ranks or 1) == 1:
        return diagnose(config)
    with stopped_by_signals(), network(config) as lab:
        found = start_ranks(config, lab, program=diagnose)
        assert isinstance(found, Diagnosis)
        return replace(found, launcher="thinwire")


def diagnose(config: RunConfig, link: LinkReport = LinkReport(), progress_file: Path | None = None) -> Diagnosis:
    """Examine the world as one of its ranks. Collective; every rank gets the same."""
    world = find_world() or WORLD_OF_ONE
    device = use_device(config, world)
    with gloo_interface(world.address, config.iface):
        return _diagnose_rank(config, world, device, link)


def _diagnose_rank(config: RunConfig, world: World, device: torch.device, link: LinkReport) -> Diagnosis:
    own = look(config, world, device, link)
    try:
        store = rendezvous(world, config.iface, secret=read_secret(config.secret_file))
    except (UsageError, RuntimeError) as error:
        return Diagnosis(world.launcher, [own], [*machine_findings([own], world), not_met(world, str(error))])
    facts = [Facts(**one) for one in gather_through(store, "facts", world.rank, world.size, asdict(own))]
    findings = [*alone(world), *machine_findings(facts, world), *connections(store, facts, world)]
    if worst([one for one in findings if one.title in JOINING]) == "failure":
        leave_store(store, world.rank, world.size)
        return Diagnosis(world.launcher, facts, [*findings, not_measured()])
    try:
        backend = "nccl" if {one.backend for one in facts} == {"nccl"} else "gloo"
        measured = _join_and_measure(backend, device, config)
    except RuntimeError as error:
        return Diagnosis(world.launcher, facts, [*findings, not_joined(world, error)])
    return Diagnosis(world.launcher, facts, [*findings, *wire_findings(measured, link, config.link)], measured)


def connections(store: Store, facts: list[Facts], world: World) -> list[Finding]:
    """Whether ranks can connect with each other. Collective."""
    if world.size == 1:
        return []
    nodes = number_nodes([one.node for one in facts])
    address = facts[world.rank].address or "127.0.0.1"
    unreached = find_unreached(store, world.rank, world.size, address, first_ranks(nodes))
    return [reach_finding(unreached, len(set(nodes)))]


def alone(world: World) -> list[Finding]:
    """That there is only one rank."""
    if world.size > 1:
        return []
    return [
        Finding(
            "note", "world", "one rank alone",
            "Only this machine was examined, and no network.",
            "Start it as a run will be started, as torchrun --nproc-per-node 2 -m thinwire doctor, "
            "or on hosts that are made here: thinwire doctor --ranks 2 --link 100mbit.",
        )
    ]  # fmt: skip


def not_met(world: World, error: str) -> Finding:
    """That ranks did not find each other."""
    return Finding(
        "failure", "store", f"{world.address}:{world.port}",
        f"The ranks did not meet, and a run would not start: {error}.",
        "Check that all ranks were started, that MASTER_ADDR is an address of rank 0's machine which others reach, "
        "and that a firewall lets MASTER_PORT through.",
    )  # fmt: skip


def not_joined(world: World, error: Exception) -> Finding:
    """That ranks could connect, and still could not work together."""
    return Finding(
        "failure", "joining", str(error).strip().partition("\n")[0],
        f"{world.size} ranks reach each other, but could not exchange tensors. A run would fail in the same way.",
        "The other ranks may have printed the cause. For nccl, set NCCL_DEBUG=INFO; try --device cpu, which uses gloo.",
    )  # fmt: skip


def not_measured() -> Finding:
    """That links were left out."""
    return Finding(
        "note", "rate", "not measured",
        "Ranks cannot join, so nothing was sent between them.",
        "Mend the failure above, and run this again.",
    )  # fmt: skip


def _join_and_measure(backend: str, device: torch.device, config: RunConfig) -> Measurements:
    with join(backend, ANSWER_SECONDS, device, config.iface, config.secret_file) as comm:
        return measure_world(comm, device)
