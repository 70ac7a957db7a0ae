"""Settings: TOML files, options of the command line, links, and the variables of launchers."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from cyclopts import CycloptsError
from pydantic import ValidationError

from tests.fuzz import mutation
from tests.fuzz.harness import Case
from thinwire import cli, registry
from thinwire.comm.world import World, find_world, first_host, place
from thinwire.config import CompareConfig, PlanConfig, RunConfig, make_config, parse_every, read_toml, resumed
from thinwire.errors import ThinwireError, UsageError
from thinwire.launch.settings import check_names, check_options
from thinwire.netlab.link import parse_link
from thinwire.run.network import check_network
from thinwire.run.records import RunFolder

VALUES: dict[str, list[Any]] = {
    "task": ["digits", "synthetic(samples=100)", "fuzz_trap:run"],
    "strategy": ["data_parallel", "diloco(every=2)"],
    "model": ["mlp(width=8)", "resnet18"],
    "epochs": [1, 3],
    "steps": [10],
    "lr": [0.1, 1],
    "optimizer": ["sgd", "adamw(beta1=0.5)"],
    "schedule": ["cosine"],
    "test_every": [1, "200steps"],
    "ranks": [2],
    "nodes": [2],
    "link": ["100mbit,10ms"],
    "device": ["cpu"],
    "iface": ["eth0"],
    "seed": [0],
    "resume": [True, "auto"],
    "keep": [2],
    "minutes": [1.5],
    "clip_norm": [1.0],
    "metric": ["loss"],
    "track": ["wandb"],
    "batch_size": [8],
    "strict": [True],
    "autocast": [False],
    "out": ["runs/x"],
    "data": ["."],
}


def toml(rng: Random, values: dict[str, Any]) -> str:
    """Settings as TOML, or nearly."""
    lines = []
    for key, one in values.items():
        shown = repr(one).lower() if isinstance(one, bool | int | float) else '"' + str(one).replace('"', '\\"') + '"'
        lines.append(f"{rng.choice((key, key.replace('_', '-')))} = {shown}")
    text = "\n".join(lines) + "\n"
    if rng.random() < 0.03:
        return "x = " + "[" * rng.choice((10, 500, 100_000))
    return mutation.text(rng, text, list(VALUES)) if rng.random() < 0.4 else text


def prepare(folder: Path) -> Case:
    """A TOML file or options, up to the check of all names and options; and what is saved is read back."""
    path = folder / "settings.toml"
    for kind, table in registry.TABLE.items():
        for name in table:
            registry.load(kind, name)
    check_options(RunConfig(optimizer="sgd", metric="loss", schedule="cosine", model="mlp", compile=True))
    with suppress(UsageError):
        _command_line(["train", "--epochs", "x"])

    def values_of(rng: Random) -> dict[str, Any]:
        found = {key: rng.choice(VALUES[key]) for key in rng.sample(list(VALUES), rng.randrange(5))}
        for _ in range(rng.choice((0, 1, 1, 2))):
            key = rng.choice(list(VALUES))
            example = str(rng.choice(VALUES[key]))
            found[key] = mutation.text(rng, example) if rng.random() < 0.5 else mutation.value(rng, 1)
        return found

    def case(rng: Random) -> None:
        values = values_of(rng)
        if rng.random() < 0.1:
            words = [word for key, one in values.items() for word in (f"--{key.replace('_', '-')}", str(one))]
            _command_line([rng.choice(("train", "compare", "plan", "doctor")), *words])
            return
        if rng.random() < 0.5:
            data = toml(rng, values).encode("utf-8", "surrogatepass")
            path.write_bytes(mutation.octets(rng, data) if rng.random() < 0.2 else data)
            config = make_config(read_toml(path), source=str(path))
        else:
            config = make_config(values)
        _check_saved(config, folder)
        check_names(config)
        if registry.is_own(config.task) or registry.is_own(config.metric or "") or ":" in (config.optimizer or ""):
            return  # what is the user's own is imported: that is what it is for
        check_network(config)
        check_options(config)

    return case


def _check_saved(config: RunConfig, folder: Path) -> None:
    """What a run saves is what it reads when it goes on."""
    run = RunFolder(folder)
    run.save_config(config)
    saved = run.load_config()
    assert saved == config.model_copy(update={"resume": False}), f"{saved} is not {config}"
    resumed(saved, {"out": config.out}, folder)


def _command_line(words: list[str]) -> None:
    """The arguments of a command as the command line reads them; nothing is run."""
    made = {"train": RunConfig, "compare": CompareConfig, "plan": PlanConfig, "doctor": RunConfig}[words[0]]
    try:
        _, bound, _ = cli.app.parse_args(words, exit_on_error=False, print_error=False)
    except (CycloptsError, ValidationError, UnicodeEncodeError):  # cli.main has a message for each
        raise UsageError("refused by the command line") from None
    assert any(isinstance(one, made) for one in bound.arguments.values()) or words[0] == "doctor" or not bound.kwargs


LINKS = ["100mbit", "1gbit,10ms", "2.5mbit, 500us", "10 mbit/s", "1GBIT,2s", "1.5kbit,0.1ms"]


def prepare_links(folder: Path) -> Case:
    """A link is within its bounds and is the same when written; a number of epochs or steps is one."""

    def case(rng: Random) -> None:
        text = mutation.text(rng, rng.choice(LINKS), ["mbit", "gbit", "ms", ",", "/s", "1e5", "."])
        if rng.random() < 0.3:
            number = rng.choice((*mutation.NASTY_NUMBERS, rng.uniform(0, 2e4), rng.expovariate(1.0)))
            text = f"{number}{rng.choice(('kbit', 'mbit', 'gbit'))},{rng.choice(mutation.NASTY_NUMBERS)}ms"
        if rng.random() < 0.3:
            try:
                every = parse_every(mutation.text(rng, rng.choice(("2", "200steps", "3 steps")), ["steps", "step"]))
            except ValueError as error:
                raise UsageError(str(error)) from None
            assert every.number >= 0
            return
        link = parse_link(text)
        assert 1.0 <= link.rate_mbit <= 10_000.0
        assert 0.0 <= link.latency_ms <= 2000.0
        again = parse_link(str(link))
        assert math.isclose(again.rate_mbit, link.rate_mbit, rel_tol=1e-4), f"{text!r}: {link} and {again}"
        assert math.isclose(again.latency_ms, link.latency_ms, rel_tol=1e-4), f"{text!r}: {link} and {again}"

    return case


WORLDS: list[dict[str, str]] = [
    {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    },
    {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    {
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "gpu[03-07,9],login1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_NODEID": "1",
        "SLURM_JOB_ID": "123",
        "SLURM_STEP_ID": "0",
    },
]
WORDS = [
    "2(x3),1",
    "1(x999999999999)",
    "2(x0)",
    "gpu[1-3]",
    "[",
    "a[",
    "]",
    "rack[1-2]n[5,7]",
    "-3",
    "65536",
    "4294967294",
]


def prepare_worlds(folder: Path) -> Case:
    """A world has its rank in it, an address and a port; or the error names a variable."""

    def case(rng: Random) -> None:
        env = dict(rng.choice(WORLDS))
        for _ in range(rng.choice((1, 1, 2, 3))):
            key = rng.choice(list(env) or ["RANK"])
            change = rng.randrange(4)
            if change == 0:
                env.pop(key, None)
            elif change == 1:
                env[key] = mutation.text(rng, env.get(key, ""), WORDS)
            elif change == 2:
                env[key] = rng.choice((*WORDS, *mutation.NASTY_TEXT))
            else:
                env[key] = str(rng.choice(mutation.NASTY_NUMBERS[:-4]))
        found, message = None, ""
        try:
            found = find_world(env)
        except ThinwireError as error:
            message = str(error)
        assert not message or any(name in message for one in WORLDS for name in one), message
        if isinstance(found, World):
            assert 0 <= found.rank < found.size, found
            assert found.local_rank >= 0, found
            assert 0 < found.local_size <= found.size, found
            assert found.local_rank < found.local_size or found.launcher == "srun", found
            assert 0 < found.port < 65536, found
            assert found.address, found
            place(min(found.size, 1000), min(found.local_size, 1000))
        name = first_host(mutation.text(rng, "gpu[03-07,9],login1", WORDS))
        assert name
        assert not set(name) & set("[],")

    return case
