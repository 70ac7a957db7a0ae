"""Specs as text: what is read says the same when written, and is checked against what is registered."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fuzz import mutation
from tests.fuzz.harness import Case
from thinwire import registry
from thinwire.spec import Spec, parse

EXAMPLES = [
    "data_parallel",
    "data_parallel(reducer=maxnorm(bits=4))",
    "maxnorm(bits=4)",
    "error_feedback(topk(ratio=0.01))",
    "sequence([ab(cutoff=0.3), data_parallel(reducer=maxnorm(bits=4))], [1, 2])",
    "daso(ranks_per_node=2, merge=delta)",
    "local_parallel(cut=['2.conv', '5'], head=readout(every=2))",
    "ist(shares=[3, 2, 2, 1])",
    "partition(maxnorm, vectors=bf16)",
    "warmup(maxnorm(bits=4), steps=3)",
    "adamw(beta2=0.99, weight_decay=0.1)",
    "mlp(width=512, depth=3)",
    "cosine(warmup_epochs=1)",
    "synthetic(samples=100)",
    "ab(unit=epochs, sync_every=0.6, moments=rotate)",
    "f(-1, None, [True, 'a'])",
]


def prepare(folder: Path) -> Case:
    """Parse, write, check and build."""
    names = [name for table in registry.TABLE.values() for name in table]
    options = {
        kind: {entry.name: [option.name for option in entry.options] for entry in registry.describe(kind)}
        for kind in registry.TABLE
    }
    for kind, table in registry.TABLE.items():
        for name in table:
            registry.load(kind, name)
    words = [*names, *(option for table in options.values() for own in table.values() for option in own)]

    def grown(rng: Random, depth: int = 3) -> str:
        """A text that the grammar allows."""
        kind = rng.choice(list(options))
        name = rng.choice(list(options[kind]))
        given = []
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            shown = amount(rng, depth)
            own = options[kind][name] or ["x"]
            given.append(shown if rng.random() < 0.2 else f"{rng.choice(own if rng.random() < 0.9 else words)}={shown}")
        return f"{name}({', '.join(given)})" if given else name

    def amount(rng: Random, depth: int) -> str:
        choice = rng.randrange(7)
        if choice == 0 and depth:
            return grown(rng, depth - 1)
        if choice == 1 and depth:
            return f"[{', '.join(amount(rng, depth - 1) for _ in range(rng.randrange(4)))}]"
        if choice == 2:
            return rng.choice(mutation.NASTY_TEXT)
        if choice == 3:
            return repr(rng.choice(mutation.NASTY_TEXT))
        if choice == 4:
            return rng.choice(("None", "True", "False", "equal", "mean", rng.choice(words)))
        number = rng.choice(mutation.NASTY_NUMBERS)
        return str(number) if rng.random() < 0.6 else str(rng.choice((1, 2, 4, 0.1, 0.5)))

    def case(rng: Random) -> None:
        if rng.random() < 0.01:
            pair = rng.choice(("()", "[]", "- ", "f(x=)", "f([)])", "not ", "a.", "x if y else "))
            text = pair[:-1] * rng.choice((10, 90, 200, 5000)) + "1" + pair[-1] * rng.choice((0, 10, 90, 5000))
        else:
            text = grown(rng) if rng.random() < 0.5 else mutation.text(rng, rng.choice(EXAMPLES), words)
        spec = parse(text)
        assert isinstance(spec, Spec)
        assert parse(str(spec)) == spec, f"{text!r} became {str(spec)!r}"
        kind = registry.kind_of(spec.name) or "strategies"
        registry.check(kind, spec)
        if kind == "strategies":
            assert all(isinstance(one, Spec) for one in registry.strategies_in(spec))
        if kind in ("reducers", "schedules", "heads"):
            registry.build(kind, spec)

    return case
