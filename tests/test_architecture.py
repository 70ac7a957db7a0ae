"""One way down: who may import whom, read from the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib import import_module

from tests.architecture import (
    FILES,
    LAYERS,
    PAGE,
    PICTURE,
    SOURCE,
    drawn,
    graph,
    imports,
    layer,
    name,
    own,
    parsed,
    written,
)
from thinwire.comm.base import Comm
from thinwire.registry.table import TABLE

NO_TORCH = ("errors", "spec", "registry", "config", "netlab", "compare", "cli", "__main__")  # so that they start fast
NO_TORCH_MODULES = {
    "common/messages",
    "common/formats",
    "common/files",
    "comm/ledger",
    "comm/wire_bytes",
    "comm/world",
    "comm/reach",
    "advice/findings",
    "tasks/naming",
    "strategies/series",
}
NO_TORCH_MODULES |= {"run/records", "run/progress", "run/network", "run/tables"}
MAY_USE_DISTRIBUTED = {
    "comm/pairwise",
    "comm/process",
    "comm/process_work",
    "comm/process_groups",
    "comm/user_groups",
    "comm/sharding",
    "comm/pipelining",
    "comm/join",
    "comm/store",
    "comm/open_store",
    "comm/peers",
    "elastic/groups",
    "elastic/notes",
    "launch/agent",
    "launch/failures",
    "launch/local_ranks",
    "launch/rendezvous",
}


def test_imports_go_one_way_down() -> None:
    assert not [
        f"{name(path)} imports {module}"
        for path in FILES
        for module in own(path)
        if name(path) != "__init__" and LAYERS.index(layer(module)) > LAYERS.index(layer(name(path)))
    ]


def test_strategies_do_not_import_each_other() -> None:
    """A module with a registered strategy is imported by no other of the folder; the others are there to be shared."""
    places = (place.partition(":")[0] for place in TABLE["strategies"].values())
    registered = {module.removeprefix("thinwire.").replace(".", "/") for module in places}
    assert registered <= {name(path) for path in FILES}
    for path in (SOURCE / "strategies").rglob("*.py"):
        assert not (own(path) & registered) - {name(path)}, name(path)


def test_reducers_may_build_on_each_other_but_not_in_a_circle() -> None:
    reducers = {name(path): own(path) for path in (SOURCE / "reducers").glob("*.py")}
    TopologicalSorter(reducers).prepare()  # raises CycleError


def test_what_must_start_fast_imports_no_torch() -> None:
    fast = [path for path in FILES if layer(name(path)) in NO_TORCH or name(path) in NO_TORCH_MODULES]
    assert {layer(name(path)) for path in fast} >= set(NO_TORCH)
    assert {name(path) for path in fast} >= NO_TORCH_MODULES
    assert not [name(path) for path in fast if "torch" in {m.split(".")[0] for m in imports(path, everywhere=False)}]


def test_few_files_talk_to_torch_distributed() -> None:
    using = {name(path) for path in FILES if any(m.startswith("torch.distributed") for m in imports(path))}
    assert using <= MAY_USE_DISTRIBUTED


def test_nothing_from_peers_or_files_is_evaluated() -> None:
    """eval, exec, torch.load and object collectives run what others wrote; pickle is read in one guarded place."""
    called = [
        (ast.unparse(node.func), f"{name(path)}, line {node.lineno}")
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
    ]
    never = {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler", "np.load"}
    assert not [(function, where) for function, where in called if function in never or "_object" in function]
    loaders = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml"}
    assert {name(path) for path in FILES if imports(path) & loaders} == {"tasks/cifar10"}


def test_public_functions_and_classes_say_what_they_do() -> None:
    assert not [
        f"{name(path)}.{node.name} has no docstring"
        for path in FILES
        for node in parsed(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if not ast.get_docstring(node)
    ]


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
    assert "cli          → " in page
    assert written(page) == page
    assert PICTURE.read_text() == drawn()


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


def test_the_page_names_modules_that_exist() -> None:
    """In the table of folders, a word in code is a module or a folder in that folder, or a class."""
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", PAGE.read_text(), re.M)
    assert {folder for folder, _ in rows} == {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    for folder, text in rows:
        inside = {path.stem for path in (SOURCE / folder).rglob("*") if path.suffix in ("", ".py")}
        named = {word.rstrip("/") for word in re.findall(r"`([a-z_]+/?)`", text)}
        assert not named - inside - {path.stem for path in SOURCE.glob("*.py")}, folder


def test_the_glossary_names_things_that_exist() -> None:
    """`Name` in `folder.module` can be imported; a module alone is there."""
    text = (PAGE.parent / "glossary.md").read_text()
    placed = re.findall(r"`(\w+)(?:\(\))?` in `([a-z_.]+)`", text)
    assert len(placed) >= 15
    assert not [(what, where) for what, where in placed if not hasattr(import_module(f"thinwire.{where}"), what)]
    folders = {path.name for path in SOURCE.iterdir()}
    modules = {name(path).removesuffix("/__init__").replace("/", ".") for path in FILES}
    named = {word for word in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", text) if word.split(".")[0] in folders}
    of_comm = {f"comm.{attribute}" for attribute in (*Comm.__annotations__, *vars(Comm))}  # comm.rank, say
    assert not named - modules - of_comm


def test_no_import_is_relative() -> None:
    """The rules above read absolute imports."""
    assert not [name(p) for p in FILES for n in ast.walk(parsed(p)) if isinstance(n, ast.ImportFrom) and n.level]


def test_the_command_line_and_the_report_start_without_torch() -> None:
    program = """
import sys, thinwire.cli, thinwire.compare.report, thinwire.launch.settings
from thinwire import registry
[registry.describe(kind) for kind in registry.TABLE]
print("torch" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ran.stdout.strip() == "False"


def test_files_and_functions_are_short() -> None:
    """At most 250 lines in a file and 40 in a function, unless a comment at its head says why: "# long: …"."""
    for path in FILES:
        text = path.read_text()
        lines = text.splitlines()
        assert len(lines) <= 250 or "# long: " in "\n".join(lines[:10]), name(path)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                head = lines[node.lineno - 1]
                assert node.end_lineno - node.lineno < 40 or "# long: " in head, f"{name(path)}: {node.name}"
