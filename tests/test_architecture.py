"""One way down: who may import whom, read from the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "thinwire"
FILES = sorted(SOURCE.rglob("*.py"))

# Lower layers first. A module may import from its own layer or a lower one, never from a higher one.
LAYERS = [
    {"errors"},
    {"spec"},
    {"registry", "config", "records", "data", "optim", "dtypes", "netlab"},
    {"noise", "results", "verdicts", "tables", "baseline", "progress"},
    {"comm", "kernels"},
    {"network", "meters", "codecs"},
    {"reducers", "surgery"},
    {"overlap", "averaging", "factoring", "homes", "assembly", "checkpoint", "mail"},
    {"strategies", "attaching", "tasks"},
    {"evaluation", "summary", "startup"},
    {"worker", "rendezvous"},
    {"launch"},
    {"bench", "display", "report"},
    {"cli"},
    {"__main__", "__init__"},
]
NO_TORCH = {
    "baseline",
    "tables",
    "results",
    "noise",
    "verdicts",
    "report/page",
    "report/figures",
    "report/ranks",
    "network",
    "display",
    "netlab/lab",
    "netlab/keeper",
    "errors",
    "spec",
    "registry",
    "config",
    "records",
    "progress",
    "cli",
    "__main__",
    "comm/ledger",
    "comm/world",
    "tasks/naming",
}
MAY_USE_DISTRIBUTED = {"comm/process", "comm/pipelining", "comm/joining", "comm/meeting", "launch", "rendezvous"}


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE).with_suffix(""))


def layer(module: str) -> int:
    return next(i for i, members in enumerate(LAYERS) if module.split("/")[0] in members)


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Modules that a file imports; with everywhere=False, only those that importing it imports."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if everywhere else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: Path) -> set[str]:
    modules = {name(p) for p in FILES}
    wanted = {m.removeprefix("thinwire.").replace(".", "/") for m in imports(path) if m.startswith("thinwire.")}
    return {m for m in wanted if m in modules or f"{m}/__init__" in modules}


@pytest.mark.parametrize("path", [p for p in FILES if name(p) != "__init__"], ids=name)
def test_imports_go_one_way_down(path: Path) -> None:
    for module in own(path):
        assert layer(module) <= layer(name(path)), f"{name(path)} imports {module}"


def test_strategies_reducers_and_tasks_do_not_import_each_other() -> None:
    for folder, common in (
        ("strategies", {"base", "learner", "groups", "phases", "staged"}),
        ("reducers", {"base", "mean", "owners", "error_feedback", "maxnorm"}),
    ):
        for path in (SOURCE / folder).glob("*.py"):
            siblings = {m.split("/")[1] for m in own(path) if m.startswith(f"{folder}/")}
            assert siblings <= common, f"{path.name} imports {siblings - common}"


@pytest.mark.parametrize("path", [p for p in FILES if name(p) in NO_TORCH], ids=name)
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
    assert {name(p).split("/")[0] for p in FILES} == set().union(*LAYERS)
