"""One explicit table of everything that has a name, loaded only when it is used.

To add a method: write its module, add one line here, add one test file. Options are the parameters of the
function or class; positional-only parameters are filled in by thinwire itself and are not options.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pydantic import ConfigDict, ValidationError, create_model

from thinwire.errors import UsageError, unknown
from thinwire.spec import Spec, parse

TABLE: dict[str, dict[str, str]] = {
    "strategies": {
        "data_parallel": "thinwire.strategies.data_parallel:DataParallel",
        "alone": "thinwire.strategies.alone:Alone",
        "local_sgd": "thinwire.strategies.local_sgd:LocalSGD",
        "diloco": "thinwire.strategies.local_sgd:DiLoCo",
        "daso": "thinwire.strategies.daso:DASO",
        "ab": "thinwire.strategies.ab:AB",
        "ist": "thinwire.strategies.ist:IST",
        "local_parallel": "thinwire.strategies.local_parallel:LocalParallel",
        "pipeline": "thinwire.strategies.pipeline:Pipeline",
    },
    "reducers": {
        "mean": "thinwire.reducers.mean:mean",
        "fp16": "thinwire.reducers.half:fp16",
        "bf16": "thinwire.reducers.half:bf16",
        "maxnorm": "thinwire.reducers.maxnorm:maxnorm",
        "maxnorm_multiscale": "thinwire.reducers.maxnorm_multiscale:maxnorm_multiscale",
        "global_randk": "thinwire.reducers.global_randk:global_randk",
        "powersgd": "thinwire.reducers.powersgd:powersgd",
        "topk": "thinwire.reducers.topk:topk",
        "terngrad": "thinwire.reducers.terngrad:terngrad",
        "sign": "thinwire.reducers.sign:sign",
        "error_feedback": "thinwire.reducers.error_feedback:error_feedback",
        "partition": "thinwire.reducers.partition:partition",
        "warmup": "thinwire.reducers.warmup:warmup",
    },
    "heads": {
        "suited": "thinwire.surgery.heads.suited:suited",
        "linear": "thinwire.surgery.heads.linear:linear",
        "conv": "thinwire.surgery.heads.conv:conv",
        "predsim": "thinwire.surgery.heads.predsim:predsim",
        "auglocal": "thinwire.surgery.heads.auglocal:auglocal",
        "readout": "thinwire.surgery.heads.readout:readout",
        "own": "thinwire.surgery.heads.own:own",
    },
    "tasks": {
        "digits": "thinwire.tasks.digits:digits",
        "synthetic": "thinwire.tasks.synthetic:synthetic",
        "mnist": "thinwire.tasks.mnist:mnist",
        "cifar10": "thinwire.tasks.cifar10:cifar10",
        "shakespeare": "thinwire.tasks.shakespeare:shakespeare",
    },
    "models": {
        "mlp": "thinwire.tasks.models.mlp:mlp",
        "cnn": "thinwire.tasks.models.cnn:cnn",
        "vgg16": "thinwire.tasks.models.vgg:vgg16",
        "vgg8": "thinwire.tasks.models.vgg:vgg8",
        "resnet18": "thinwire.tasks.models.resnet:resnet18",
        "resnet32": "thinwire.tasks.models.resnet:resnet32",
        "resnet50": "thinwire.tasks.models.resnet:resnet50",
        "gpt": "thinwire.tasks.models.gpt:gpt",
        "vit": "thinwire.tasks.models.vit:vit",
    },
    "optimizers": {
        "sgd": "thinwire.optim:sgd",
        "adamw": "thinwire.optim:adamw",
    },
    "schedules": {
        "constant": "thinwire.optim:constant",
        "cosine": "thinwire.optim:cosine",
    },
}
SINGULAR = {
    "strategies": "strategy",
    "reducers": "reducer",
    "heads": "head",
    "tasks": "task",
    "models": "model",
    "optimizers": "optimizer",
    "schedules": "schedule",
}
NESTED = {"Reducer": "reducers", "Head": "heads"}  # an option of this type is itself a spec of that kind


class Option(NamedTuple):
    """One option of a registered thing, as its source code states it."""

    name: str
    type: str
    default: str | None
    about: str


class Entry(NamedTuple):
    """What `thinwire list` tells of a registered thing."""

    name: str
    about: str
    options: list[Option]
    wire: str  # of reducers: bits per element, and whether they sum on the wire


def build(kind: str, spec: Spec | str, *leading: Any) -> Any:
    """Make the thing a spec names: look it up, check its options, call it.

    >>> build("schedules", "cosine(warmup_epochs=1)")(0.5, 10)
    0.5
    """
    spec = spec if isinstance(spec, Spec) else parse(spec)
    return call(load(kind, spec.name), spec, *leading)


def call(target: Any, spec: Spec, *leading: Any) -> Any:
    """Call a function or class with the options of a spec, checked."""
    return target(*leading, **options(target, spec))


def check(kind: str, spec: Spec | str) -> None:
    """Raise UsageError unless the spec names a registered thing and all its options are valid."""
    spec = spec if isinstance(spec, Spec) else parse(spec)
    options(load(kind, spec.name), spec)


def find(kind: str, name: str) -> tuple[str, str]:
    """The module and attribute registered under a name."""
    if name not in TABLE[kind]:
        raise _elsewhere(kind, name) or unknown(SINGULAR[kind], name, TABLE[kind])
    module, attribute = TABLE[kind][name].split(":")
    return module, attribute


def _elsewhere(kind: str, name: str) -> UsageError | None:
    """The error for a name of another kind: a reducer where a strategy belongs, say."""
    other = kind_of(name)
    if other is None:
        return None
    example = ""
    if (kind, other) == ("strategies", "reducers"):
        example = f"; try data_parallel(reducer={name})"
    elif other not in NESTED.values():
        example = f"; give it as --{SINGULAR[other]} {name}"
    return UsageError(
        f"{name} is a {SINGULAR[other]}, not a {SINGULAR[kind]}{example}. Possible: {', '.join(sorted(TABLE[kind]))}"
    )


def kind_of(name: str) -> str | None:
    """The kind of thing that is registered under a name."""
    return next((kind for kind, names in TABLE.items() if name in names), None)


def load(kind: str, name: str) -> Any:
    """The function or class registered under a name."""
    module, attribute = find(kind, name)
    return getattr(importlib.import_module(module), attribute)


def imported(module: str, name: str, what: str) -> Any:
    """Something of the user's own: an attribute of a module, looked for in the current folder too."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    loaded = None
    try:
        loaded = importlib.import_module(module)
        return getattr(loaded, name)
    except (ImportError, AttributeError, ValueError) as error:
        near = difflib.get_close_matches(name, vars(loaded), n=1) if loaded else []
        hint = f"did you mean '{module}:{near[0]}'? Expected" if near else "expected"
        raise UsageError(
            f"cannot load {what}: {error}; {hint} package.module:function, importable from this folder"
        ) from error


def describe(kind: str) -> list[Entry]:
    """Names, summaries and options of one kind, read from the source without importing it (so without torch)."""
    return [_describe(name, *find(kind, name)) for name in TABLE[kind]]


def options(target: Any, spec: Spec, num_leading: int = 0) -> dict[str, Any]:
    """The keyword arguments that a spec gives to a function or class, checked against its signature.

    The first `num_leading` parameters, and all positional-only ones, are not options.
    """
    function = target.__init__ if inspect.isclass(target) else target
    hints = get_type_hints(function, include_extras=True)
    params = {
        p.name: p
        for p in list(inspect.signature(function).parameters.values())[num_leading:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"
    }
    if len(spec.args) > len(params):
        raise UsageError(f"{spec.name}: {len(spec.args)} values given, takes at most {len(params)}: {list(params)}")
    given = dict(zip(params, spec.args, strict=False))
    for name, value in spec.options.items():
        if name not in params:
            raise unknown(f"option of {spec.name}", name, params)
        if name in given:
            raise UsageError(f"{spec.name}: {name} is given twice")
        given[name] = value
    for name, p in params.items():
        if p.default is p.empty and name not in given and (nested := NESTED.get(_type_name(hints.get(name)))):
            raise UsageError(
                f"{spec.name}: {name} is missing; give a {SINGULAR[nested]}, for example {spec.name}(maxnorm)"
            )
    given = {name: _resolve(value, hints.get(name, Any)) for name, value in given.items()}
    fields: dict[str, Any] = {
        name: (_field_type(hints.get(name, Any)), ... if p.default is p.empty else p.default)
        for name, p in params.items()
    }
    model = create_model(spec.name, __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)
    try:
        checked = model(**given)
    except ValidationError as error:
        raise UsageError(explain(error, spec.name)) from None
    return {name: getattr(checked, name) for name in params}


def _resolve(value: Any, hint: Any) -> Any:
    """A nested spec becomes the thing it names where that is wanted, else the plain word it is."""
    kind = NESTED.get(_type_name(hint))
    if isinstance(value, str) and kind:
        value = parse(value)
    if kind and not isinstance(value, Spec):
        raise UsageError(f"{value!r} is not a {SINGULAR[kind]}; expected one of {', '.join(TABLE[kind])}")
    if not isinstance(value, Spec):
        return value
    if kind:
        return build(kind, value)
    if value.args or value.options:
        raise UsageError(f"{value} is not possible here; expected a plain value")
    return value.name


def _field_type(hint: Any) -> Any:
    return Any if _type_name(hint) in NESTED else hint


def _type_name(hint: Any) -> str:
    return str(getattr(hint, "__name__", ""))


def explain(error: ValidationError, owner: str, prefix: str = "") -> str:
    """pydantic's findings as one line: what was given, what is possible. Names are written as on the command line
    where a prefix is given."""
    parts = []
    for first, found in groupby(error.errors(), key=lambda item: item["loc"][:1]):
        items = list(found)  # several where any of several types would do
        elements = [[item] for item in items if isinstance((item["loc"] or [None])[-1], int)]  # wrong ones of a list
        parts += [_explained(some, str(first[0]) if first else owner, prefix) for some in elements or [items]]
    return f"{owner}: " + "; ".join(parts)


def _explained(items: Sequence[Any], name: str, prefix: str) -> str:
    """What is wrong with one value, by each of the types that it might have had."""
    item = items[0]
    place = f"[{item['loc'][-1]}]" if item["loc"] and isinstance(item["loc"][-1], int) else ""
    where = prefix + (name.replace("_", "-") if prefix else name) + place
    words = [i["msg"].removeprefix("Value error, ").removeprefix("Input should be ") for i in items]
    wanted = ", or ".join(dict.fromkeys(word.partition(", unable to parse")[0] for word in words))
    if item["type"] == "missing":
        return f"{where} is missing"
    if item["type"] == "value_error":
        return f"{where}: {wanted}"
    return f"{where}={item['input']!r} is not possible: should be {wanted}"


def _describe(name: str, module: str, attribute: str) -> Entry:
    path = _source(module)
    source = path.read_text(encoding="utf-8")
    node = next(n for n in ast.parse(source).body if getattr(n, "name", None) == attribute)
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    text = (ast.get_docstring(node) or "").split("\n")
    wire = next((line.removeprefix("Wire: ") for line in text if line.startswith("Wire: ")), "")
    if isinstance(node, ast.ClassDef):
        node = next(n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    lines = source.splitlines()
    args = node.args
    defaults: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    pairs = [*zip(args.args, defaults, strict=True), *zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return Entry(name, text[0], [_option(a, d, lines) for a, d in pairs if a.arg != "self"], wire)


def _option(arg: ast.arg, default: ast.expr | None, lines: list[str]) -> Option:
    note = lines[arg.lineno - 1].partition("  # ")[2]
    kind = ast.unparse(arg.annotation) if arg.annotation else ""
    return Option(arg.arg, kind, ast.unparse(default) if default else None, note)


def _source(module: str) -> Path:
    """Where a module of this package lies, without importing its parents."""
    return Path(__file__).parent.parent.joinpath(*module.split(".")).with_suffix(".py")
