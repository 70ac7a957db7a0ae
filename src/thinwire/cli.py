"""The command line: reads arguments and calls what they ask for."""

# long: one function for each command, most of it what --help shows

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire import __version__, registry
from thinwire.config import CompareConfig, PlanConfig, RunConfig, make_config
from thinwire.errors import ThinwireError, UsageError, invalid

app = App(
    name="thinwire",
    version=__version__,
    help_format="markdown",
    help="""Train neural networks over thin wires. Start here:

    ```
    # train on digits, in four processes
    thinwire train --ranks 4

    # compare two strategies on a real slow network
    thinwire compare data_parallel diloco --ranks 4 --link 100mbit

    # which strategy is fastest on a network that you need not have
    thinwire plan --ranks 8 --nodes 2 --link 1gbit

    # examine this machine, and a slow network that is made on it
    thinwire doctor --ranks 2 --link 100mbit

    # a script of your own on two hosts with a slow link, made on this machine
    thinwire lab --link 100mbit -- torchrun --nproc-per-node 2 my.py

    # list all strategies and their options
    thinwire list strategies

    # train in processes that torchrun starts
    torchrun --nproc-per-node 4 -m thinwire train
    ```
    """,
)


@app.command(sort_key=1)
def train(
    file: Annotated[
        Path | None, Parameter(help="TOML file of settings. Options on the command line override it.")
    ] = None,
    /,
    *,
    settings: Annotated[RunConfig, Parameter(name="*")] = RunConfig(),
) -> None:
    """Train a model with one strategy; print the metric that it reached and the bytes that it sent.

    A name may have options in brackets. For example:

    ```
    thinwire train --ranks 4 --epochs 10 --model "mlp(width=512, depth=3)"
    thinwire train --task cifar10 --data DIR --ranks 2 --autocast
    thinwire train --out runs/digits-data_parallel-1 --resume
    thinwire train --out runs/job --task digits --steps 2000 --resume=auto     # one command for a job that is requeued
    thinwire train --strategy diloco --elastic 10.0.0.1:29400     # one rank of a run whose ranks may come and go
    ```
    """
    from thinwire.launch.launcher import launch
    from thinwire.launch.settings import resolve

    launch(resolve(file, settings.model_dump(include=settings.model_fields_set)))


@app.command(sort_key=2)
def compare(
    *strategies: Annotated[
        str, Parameter(help="Names from 'thinwire list strategies', each with its options in brackets.")
    ],
    settings: Annotated[CompareConfig, Parameter(name="*")] = CompareConfig(),
) -> None:
    """Train the same model with several strategies; print a table and write report.html.

    All runs have the same task, data order, initial weights and seeds. For example, on two nodes with a real link
    of 100 Mbit/s between them:

    ```
    thinwire compare data_parallel "data_parallel(reducer=maxnorm)" --ranks 4 --nodes 2 --link 100mbit --target 95
    thinwire compare --out runs/compare-1 --resume      # do the runs that are not finished
    ```

    On the ranks and the network of a world that torchrun, srun or mpirun made:

    ```
    torchrun --nproc-per-node 2 -m thinwire compare data_parallel diloco
    ```
    """
    from thinwire.compare.runner import compare

    compare(list(strategies), settings.model_dump(include=settings.model_fields_set))


@app.command(sort_key=3)
def plan(
    *strategies: Annotated[
        str,
        Parameter(help="Names from 'thinwire list strategies', with options in brackets. Default: all that can run."),
    ],
    settings: Annotated[PlanConfig, Parameter(name="*")] = PlanConfig(),
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")] = False,
) -> None:
    """Tell which strategy to take on a network: seconds, bytes, waiting and memory of each, the fastest first.

    Computing is measured on this machine, in about a minute; the network is a model, so you need not have it. For
    example:

    ```
    thinwire plan --task cifar10 --data DIR --model resnet18 --ranks 8 --nodes 2 --link 1gbit --link 10gbit
    thinwire plan data_parallel diloco --ranks 4 --link 50mbit,20ms --out plans/wan
    ```
    """
    from thinwire.advice.plan import plan

    plan(strategies, settings, as_json)


@app.command(sort_key=3)
def report(
    *folders: Annotated[Path, Parameter(help="Folders that thinwire compare or thinwire train wrote.")],
    out: Annotated[
        Path | None,
        Parameter(help="Folder for report.html. Default: the folder itself, or for several a new one in runs/."),
    ] = None,
) -> None:
    """Write report.html, a page that needs no other files, about a comparison or a run, or about several of them.

    Several must have the same task. Their strategies are in one table, labelled by folder where one appears twice:

    ```
    thinwire report runs/compare-1
    thinwire report runs/slow runs/fast --out runs/both
    ```
    """
    from thinwire.compare.report import write_report
    from thinwire.compare.results import read_results

    if not folders:
        raise UsageError("report on what? Give one or more folders that thinwire compare or thinwire train wrote")
    if len(folders) == 1 and out is None:
        print(write_report(read_results(folders[0])))
        return
    from thinwire.compare.finish import print_results
    from thinwire.compare.several import report_several

    print_results(report_several(folders, out))


@app.command(sort_key=3)
def replay(folder: Annotated[Path, Parameter(help="Folder that thinwire train --elastic wrote.")], /) -> None:
    """Run an elastic run again with the same ranks in every round, on this machine, and compare the two bit for bit.

    ```
    thinwire replay runs/digits-diloco-1
    ```
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from thinwire.launch.replay import replay

    print(replay(folder))


@app.command(sort_key=4)
def doctor(
    *,
    ranks: Annotated[int | None, Parameter(help="Processes to start here. Default: those that are there.")] = None,
    nodes: Annotated[int | None, Parameter(help="Hosts to make on this machine, which share the ranks.")] = None,
    link: Annotated[str | None, Parameter(help="Rate and delay of the link of each host, as 1gbit,10ms.")] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Device; auto = GPUs if there are any.")] = "auto",
    iface: Annotated[str, Parameter(help="Network interface to connect through; auto = the one to rank 0.")] = "auto",
    secret_file: Annotated[Path | None, Parameter(help="File with a secret that every rank must know to join.")] = None,
    out: Annotated[Path | None, Parameter(help="Folder for results, whose disk is examined.")] = None,
    task: Annotated[str | None, Parameter(help="Also say which strategy to take for this task.")] = None,
    model: Annotated[str | None, Parameter(help="The task's model, if not its own.")] = None,
    data: Annotated[Path | None, Parameter(help="Folder of the task's data files, if it needs any.")] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object.")] = False,
) -> None:
    """Examine machines and network before a run: what would fail, what it means, what to try.

    It joins the world that torchrun, srun or mpirun made; with --ranks it starts ranks here; else it examines this
    machine alone. If a run would fail, the exit code is 1. For example:

    ```
    thinwire doctor
    thinwire doctor --ranks 4 --nodes 2 --link 100mbit --task digits
    torchrun --nproc-per-node 2 -m thinwire doctor
    ```
    """
    from thinwire.advice.doctor import doctor
    from thinwire.advice.doctor_table import diagnosis_table
    from thinwire.advice.recommendation import with_recommendation

    settings = {"ranks": ranks, "nodes": nodes, "link": link, "device": device, "iface": iface, "out": out}
    found = doctor(make_config({**settings, "secret_file": secret_file}, source="doctor"))
    if found is None:
        return
    found = with_recommendation(found, task, model, data)
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
    else:
        Console(highlight=False).print(diagnosis_table(found))
    sys.exit(1 if found.failed else 0)


@app.command(sort_key=4)
def lab(
    *command: Annotated[str, Parameter(help="The command and its arguments, after --.", allow_leading_hyphen=True)],
    link: Annotated[str, Parameter(help="The link of each host, as 100mbit or 1gbit,10ms.")],
    nodes: Annotated[int, Parameter(help="Number of hosts; each runs the command once.")] = 2,
) -> None:
    """Run a program of your own on hosts that are joined by a slow link, made on this machine.

    ```
    # a script of yours on two hosts with two ranks each
    thinwire lab --link 100mbit -- torchrun --nproc-per-node 2 my.py
    ```
    """
    from thinwire.launch.lab import run_in_lab

    sys.exit(run_in_lab(command, nodes, link))


@app.command(name="list", sort_key=5)
def list_(
    kind: Literal["strategies", "reducers", "heads", "tasks", "models", "optimizers", "schedules"] | None = None,
    /,
    *,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON.")] = False,
) -> None:
    """List strategies, reducers, heads, tasks, models, optimizers and schedules, with their options.

    Parameters
    ----------
    kind
        Show only names of this kind.
    """
    kinds = [kind] if kind else list(registry.TABLE)
    if as_json:
        entries = {
            k: {e.name: {**e._asdict(), "options": [o._asdict() for o in e.options]} for e in registry.describe(k)}
            for k in kinds
        }
        print(json.dumps(entries, indent=2))
        return
    console = Console(highlight=False)
    for k in kinds:
        table = Table(box=None, show_header=False, pad_edge=False, title=k, title_justify="left", title_style="bold")
        table.add_column(no_wrap=True)
        for entry in registry.describe(k):
            table.add_row(f"  [cyan]{entry.name}[/cyan]", escape(entry.about))
            if entry.wire:
                table.add_row("    on the wire", escape(entry.wire))
            for o in entry.options:
                option = f"    {o.name} = {o.default}" if o.default else f"    {o.name}"
                table.add_row(escape(option), f"[dim]{escape(o.about)}[/dim]")
        console.print(table)


def main() -> None:
    """Entry point. A mistake of the user ends with one message and exit code 2, a failed run with exit code 1."""
    try:
        app(_with_resume_spelled_out(sys.argv[1:]), exit_on_error=False, print_error=False)
    except CycloptsError as error:
        cause = error.__cause__
        command = next((word for word in sys.argv[1:] if word in [*app]), "")
        message = str(invalid(cause, command, "--")) if isinstance(cause, ValidationError) else _explain(error, command)
        _exit(message, 2)
    except ThinwireError as error:
        _exit(str(error), error.exit_code)
    except UnicodeEncodeError:
        _exit("an argument has bytes that are no UTF-8 text; give it in UTF-8", 2)
    except KeyboardInterrupt:
        _exit("stopped", 130)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _with_resume_spelled_out(words: list[str]) -> list[str]:
    """The arguments with --resume=true for --resume alone, so that it does not take the next word for its value."""
    if words[:1] not in (["train"], ["compare"]):
        return words
    following = [*words[1:], ""]
    is_alone = [word == "--resume" and after != "auto" for word, after in zip(words, following, strict=True)]
    return ["--resume=true" if alone else word for word, alone in zip(words, is_alone, strict=True)]


def _explain(error: CycloptsError, command: str) -> str:
    """What is wrong with the arguments, and what to try."""
    text = str(error).replace("Unused Tokens:", "too many arguments:")
    given = re.match(r"Unknown option: --([\w-]+)", text)
    name = given.group(1).replace("-", "_") if given else ""
    if (command, name) == ("compare", "strategy"):
        return "compare takes strategies without --strategy, as thinwire compare data_parallel local_sgd"
    if command == "lab" and text.endswith("--link requires an argument."):
        return "lab needs --link, as --link 100mbit"
    owners = [e.name for e in registry.describe("strategies") if name in {option.name for option in e.options}]
    if owners:
        return f'--{name.replace("_", "-")} goes in brackets: "{owners[0]}({name}=…)"'
    return f"{text} See {' '.join(['thinwire', *command.split(), '--help'])}"


def _exit(message: str, code: int) -> None:
    print(f"thinwire: {message}", file=sys.stderr)
    sys.exit(code)
