"""One way down: who may import whom, read from the source."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.architecture import FILES, LAYERS, PAGE, SOURCE, graph, imports, layer, name, own, written

NO_TORCH = ("errors", "spec", "registry", "config", "netlab", "compare", "cli", "__main__")  # so that they start fast
NO_TORCH_MODULES = {
    "common/messages",
    "common/formats",
    "common/files",
    "comm/ledger",
    "comm/wire_bytes",
    "comm/world",
    "tasks/naming",
}
NO_TORCH_MODULES |= {"run/records", "run/progress", "run/network", "run/tables"}
MAY_USE_DISTRIBUTED = {
    "comm/process",
    "comm/process_groups",
    "comm/pipelining",
    "comm/join",
    "comm/store",
    "launch/agent",
    "launch/failures",
    "launch/rendezvous",
}


@pytest.mark.parametrize("path", [p for p in FILES if name(p) != "__init__"], ids=name)
def test_imports_go_one_way_down(path: Path) -> None:
    for module in own(path):
        assert LAYERS.index(layer(module)) <= LAYERS.index(layer(name(path))), f"{name(path)} imports {module}"


def test_strategies_do_not_import_each_other() -> None:
    """A strategy may have further files: those of ab.py are called ab_….py."""
    common = {"base", "replicas", "learner", "groups", "staged"}
    for path in (SOURCE / "strategies").glob("*.py"):
        siblings = {m.split("/")[1] for m in own(path) if m.startswith("strategies/")}
        others = {m for m in siblings if not m.startswith(f"{path.stem}_")} - common
        assert not others, f"{path.name} imports {others}"


def test_reducers_may_build_on_each_other_but_not_in_a_circle() -> None:
    reducers = {name(path): own(path) for path in (SOURCE / "reducers").glob("*.py")}
    TopologicalSorter(reducers).prepare()  # raises CycleError


@pytest.mark.parametrize(
    "path", [p for p in FILES if layer(name(p)) in NO_TORCH or name(p) in NO_TORCH_MODULES], ids=name
)
def test_what_must_start_fast_imports_no_torch(path: Path) -> None:
    assert not {m for m in imports(path, everywhere=False) if m.split(".")[0] == "torch"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_few_files_talk_to_torch_distributed(path: Path) -> None:
    if name(path) not in MAY_USE_DISTRIBUTED:
        assert not {m for m in imports(path) if m.startswith("torch.distributed")}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_from_peers_or_files_is_evaluated(path: Path) -> None:
    """eval, exec, torch.load and object collectives run what others wrote; pickle is read in one guarded place."""
    for node in ast.walk(ast.parse(path.read_text())):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        assert called not in {"eval", "exec", "torch.load", "pickle.load", "pickle.loads"}, f"line {node.lineno}"
        assert "_object" not in called, f"line {getattr(node, 'lineno', 0)}: {called}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_public_functions_and_classes_say_what_they_do(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{name(path)}.{node.name} has no docstring"


def test_every_module_is_in_a_layer() -> None:
    assert {layer(name(p)) for p in FILES} == set(LAYERS)


def test_few_modules_lie_beside_the_folders() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 9


def test_folders_do_not_import_each_other_in_a_circle() -> None:
    for one, others in graph().items():
        assert all(LAYERS.index(other) < LAYERS.index(one) for other in others), one


def test_the_page_shows_the_import_graph_of_today() -> None:
    """To draw it again: python -m tests.architecture."""
    page = PAGE.read_text()
    assert "flowchart" in page
    assert written(page) == page


def test_attach_needs_no_terminal_and_no_command_line() -> None:
    """tw.attach in a plain DDP loop loads nothing that only the command line or the report needs."""
    program = """
import sys, torch, torch.distributed as dist, thinwire as tw
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
attached = tw.attach(ddp, "error_feedback(maxnorm(bits=4))")
ddp(torch.ones(3, 4)).sum().backward()
attached.close(); dist.destroy_process_group()
print([m for m in ("rich", "cyclopts", "plotly", "sklearn", "thinwire.config", "thinwire.run") if m in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.strip() == "[]"
