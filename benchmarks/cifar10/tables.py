"""The tables of results on CIFAR-10, as plain data: which models and strategies, at which scale, with which goals."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

ScaleName = Literal["full", "small"]
SGD, ADAMW = "sgd(nesterov=True, weight_decay=0.0005)", "adamw(weight_decay=0.1)"
SCHEDULE = "cosine(warmup_epochs=1)"
TUNING_IMAGES = 5000  # of the training set that --tune tests on


@dataclass(frozen=True)
class Model:
    """A model, with the optimizer that it is trained with."""

    name: str  # on the page
    spec: str
    lr: float
    optimizer: str = SGD
    clip_norm: float | None = None
    epoch_seconds: float = 6.0  # a guess, for the time that a cell takes before one like it was measured


@dataclass(frozen=True)
class Scale:
    """How large everything is. `models` has the model for each role that rows name."""

    epochs: int
    batch_size: int  # of a rank
    models: dict[str, Model]
    train: int | None = None  # training images; None: all
    held_out: int = 0  # training images to test on; 0: the test set
    autocast: bool = True
    seeds: int = 2


FULL = Scale(
    epochs=30, batch_size=128,
    models={
        "main": Model("ResNet-18", "resnet18", 0.1),
        "residual": Model("ResNet-18", "resnet18", 0.1),
        "thin": Model("ResNet-32", "resnet32", 0.1),
        "vgg": Model("VGG16", "vgg16", 0.003, ADAMW, 1.0),
        "vgg_sgd": Model("VGG16, SGD", "vgg16", 0.05),
        "wide": Model("VGG16, 134 M", "vgg16(classifier=4096, places=7)", 0.003, ADAMW, 1.0, 20.0),
        "mlp": Model("MLP", "mlp(width=2048, depth=3, norm=True)", 0.1, epoch_seconds=5.0),
    },
)  # fmt: skip
SMALL = Scale(
    epochs=8, batch_size=32, train=4000, held_out=5000, autocast=False, seeds=1,
    models={
        "main": Model("VGG8, SGD", "vgg8(width=16)", 0.1, epoch_seconds=7.0),
        "residual": Model("ResNet-32", "resnet32", 0.1, epoch_seconds=16.0),
        "thin": Model("ResNet-32", "resnet32", 0.1, epoch_seconds=16.0),
        "vgg": Model("VGG8, AdamW", "vgg8(width=16)", 0.003, ADAMW, 1.0, 7.0),
        "vgg_sgd": Model("VGG8, SGD", "vgg8(width=16)", 0.1, epoch_seconds=7.0),
        "wide": Model("MLP, AdamW", "mlp(width=512)", 0.001, ADAMW, 1.0, 4.0),
        "mlp": Model("MLP, SGD", "mlp(width=512, norm=True)", 0.1, epoch_seconds=4.0),
    },
)  # fmt: skip
SCALES: dict[ScaleName, Scale] = {"full": FULL, "small": SMALL}


@dataclass(frozen=True)
class Row:
    """A model and a strategy. Runs of other lengths and sizes than the scale's are said as shares of them."""

    model: str  # a role
    strategy: str
    small: str = ""  # the strategy at the small scale, if it differs
    epochs: float = 1.0  # share of the scale's epochs
    batch: float = 1.0  # share of the scale's batch of a rank
    ranks: int = 4
    lr: float = 1.0  # share of the model's learning rate

    def spec(self, scale: ScaleName) -> str:
        """The strategy at a scale."""
        return self.small if scale == "small" and self.small else self.strategy


@dataclass(frozen=True)
class Goal:
    """What one of `rows` is to reach, compared with the row `than`. Goals are those of the full scale."""

    text: str
    rows: list[Row]
    than: Row
    points: float | None = None  # that its accuracy may be lower
    sent: float | None = None  # largest share of the bytes that a rank of the other row sends
    ratio: float | None = None  # least number of parameters of the model ÷ those of the small one
    accuracy: float | None = None  # in per cent


@dataclass(frozen=True)
class Table:
    """Rows that are compared, each with the first of the same model."""

    title: str
    rows: list[Row]
    goals: list[Goal] = field(default_factory=list)
    candidates: list[Row] = field(default_factory=list)  # further rows of --tune


DP = "data_parallel"
EXACT, BITS8, BITS4, FED_BITS4, BITS2, POWER = COMPRESSION = (
    DP, *(f"{DP}(reducer={reducer})" for reducer in (
        "maxnorm", "maxnorm(bits=4)", "error_feedback(maxnorm(bits=4))", "error_feedback(maxnorm(bits=2))",
        "powersgd(rank=4)",
    ))
)  # fmt: skip
FED8 = "error_feedback(maxnorm)"
AB, AB_ALONE = "ab(cutoff=0.3)", "ab(cutoff=0.3, joint=0)"  # with a joint end, and as published
AB_THEN_EXACT = f"sequence([ab(cutoff=0.4, joint=0), {DP}], [0.6, 0.4])"
AB_THEN_BITS4 = f"sequence([ab(cutoff=0.4, joint=0), {BITS4}], [0.6, 0.4])"
SUBNETS = "ist(cut=blocks, subnets=2)"
IST_THEN_LOCAL = f"sequence([{SUBNETS}, local_sgd(every=16)], [0.6, 0.4], schedule=restart)"
FRAGMENTS4 = "diloco(fragments=4, reducer=maxnorm(bits=4))"
BEGINNINGS = ((DP, "local_sgd"), (DP, "diloco"), (BITS4, "local_sgd(reducer=maxnorm(bits=4))"), (BITS4, FRAGMENTS4))
DASO = ("daso", "daso(warmup_epochs=1, cooldown_epochs=1)")  # at the full and at the small scale
POOLINGS, EQUAL = "['14', '24', '34']", "['10', '20', '30']"  # layers of VGG16: behind poolings; at equal operations
PERIODIC = ("local_sgd", "diloco", "diloco(fragments=4)")


def _ab(strategy: str, model: str = "vgg") -> Row:
    """A row with ab; short runs of small networks need a higher cutoff."""
    return Row(model, strategy, strategy.replace("cutoff=0.3", "cutoff=0.5").replace("cutoff=0.4", "cutoff=0.6"))


def _late_ab(model: str, cutoff: float, reducer: str, options: str = "", warmup: int = 12, groups: int = 3) -> Row:
    """A row with ab that factors the model late: 12 of 30 epochs at full rank, 3 in groups and 15 jointly."""
    full = f"warmup={warmup}, sync_every=3, joint={30 - groups - warmup}, unit=epochs, reducer={reducer}{options})"
    small = f"warmup=3, sync_every=1, joint={4 if groups else 5}, unit=epochs, reducer={reducer}{options})"
    return Row(model, f"ab(cutoff={cutoff}, {full}", f"ab(cutoff={cutoff + 0.2:.2g}, {small}")


def _ab_table() -> Table:
    exact, wide = Row("vgg", DP), Row("wide", DP, ranks=1, batch=4.0)
    small = [_ab(strategy) for strategy in (AB_ALONE, AB, "ab(cutoff=0.4)", AB_THEN_EXACT, AB_THEN_BITS4)]
    small += [_late_ab("vgg", 0.37, "maxnorm"), _late_ab("vgg", 0.35, FED8, warmup=15)]
    small += [_late_ab("vgg", 0.37, FED8, groups=0)]  # one rank, which has no groups either, lost less
    smallest = [_late_ab("wide", 0.2, FED8, ", min_rank=16"), _ab("ab(cutoff=0.15)", "wide")]
    smallest += [replace(_late_ab("wide", 0.2, "mean", ", min_rank=16"), ranks=1, batch=4.0)]
    goals = [
        Goal("a fifth of the bytes and 9 : 1 within 0.5 points", small, exact, points=0.5, sent=0.2, ratio=9),
        Goal("44 : 1 within 1.0 points", smallest, wide, points=1.0, ratio=44),
    ]
    bits4 = "unit=epochs, reducer=maxnorm(bits=4)"
    candidates = [
        Row("vgg", f"ab(cutoff=0.4, warmup=12, sync_every=3, joint=15, {bits4})"),
        *(Row("vgg", f"ab(cutoff={cutoff}, warmup=15, joint=15, {bits4})") for cutoff in (0.4, 0.3)),
        *(replace(row, ranks=1, batch=4.0) for row in (exact, _late_ab("vgg", 0.37, "mean"))),
        Row("wide", f"ab(cutoff=0.35, min_rank=16, warmup=12, sync_every=3, joint=15, {bits4})"),
        _late_ab("vgg", 0.33, FED8),
        _late_ab("vgg", 0.3, FED8, warmup=15),
        replace(_late_ab("wide", 0.3, "mean", ", min_rank=16"), ranks=1, batch=4.0),
    ]
    return Table("AB-training: low-rank factors", [exact, *small, wide, *smallest], goals, candidates)


def _ist_table() -> Table:
    local, narrow = Row("residual", "local_sgd"), Row("residual", "ist(cut=blocks)")
    others = [narrow, *(Row("residual", strategy) for strategy in (SUBNETS, "ist(local_steps=64)", IST_THEN_LOCAL))]
    mlp = [Row("mlp", strategy) for strategy in ("local_sgd", DP, "ist", "ist(local_steps=64)")]
    goals = [Goal("within 1.0 points of local_sgd", others, local, points=1.0)]
    candidates = [Row("residual", SUBNETS, lr=2.0), Row("residual", "ist(cut=blocks, local_steps=64)")]
    return Table("IST: narrow networks", [local, Row("residual", DP), *others, *mlp], goals, candidates)


def _compression_table() -> Table:
    rows = {(model, strategy): Row(model, strategy) for model in ("main", "vgg") for strategy in COMPRESSION}
    goals = []
    for model in ("main", "vgg"):
        exact, bits2 = rows[model, EXACT], rows[model, BITS2]
        bits4 = [rows[model, BITS4], rows[model, FED_BITS4]]
        goals += [
            Goal("4 bits: a seventh of the bytes within 0.3 points", bits4, exact, points=0.3, sent=1 / 7),
            Goal("2 bits with error feedback within 0.5 points", [bits2], exact, points=0.5),
        ]
    return Table("Compressed gradients", list(rows.values()), goals)


def _local_table() -> Table:
    thin_alone = Row("thin", DP, ranks=1)
    thin = [thin_alone, Row("thin", "local_parallel(blocks=4)", batch=0.25)]
    thin += [replace(row, batch=2 * row.batch, epochs=3.0) for row in thin]
    best = ("head=auglocal(depth=6)", "window=2", "head=auglocal(depth=6), window=2")  # of --tune
    thin += [replace(thin[3], strategy=f"local_parallel(blocks=4, {options})") for options in best]
    vgg = Row("vgg_sgd", "local_parallel(blocks=4)", batch=0.25)
    vgg_alone = Row("vgg_sgd", DP, ranks=1)
    goals = [
        Goal("error of at most 8.6 %", [thin[1], *thin[3:]], thin_alone, accuracy=91.4),
        Goal("within 0.5 points of one rank", [vgg], vgg_alone, points=0.5),
    ]
    candidates = [replace(vgg, strategy=f"local_parallel(blocks=4, cut={cut})") for cut in (EQUAL, POOLINGS)]
    candidates += [replace(row, strategy="local_parallel(blocks=4, window=2)") for row in (vgg, thin[1])]
    candidates += [replace(thin[1], strategy="local_parallel(blocks=4, head=auglocal(depth=4))")]
    shallow, deep, deepest = (f"local_parallel(blocks=4, head=auglocal(depth={depth}))" for depth in (2, 4, 6))
    half = replace(thin[1], batch=0.5)  # 256 images an update, as in the long runs
    candidates += [replace(half, strategy=strategy) for strategy in (shallow, deep, deepest)]
    candidates += [replace(half, strategy="local_parallel(blocks=4, window=2)"), replace(half, strategy=deep, lr=2.0)]
    candidates += [replace(thin_alone, batch=2.0)]
    rows = [*thin, vgg_alone, vgg]
    return Table("Local losses: four blocks on four ranks", rows, goals, candidates)


def _pareto_table() -> Table:
    rows = [Row("main", DP), Row("main", DP, epochs=2 / 3), Row("main", DP, epochs=0.4)]
    rows += [Row("main", strategy) for strategy in (*COMPRESSION[1:], *PERIODIC)]
    rows += [Row("main", FRAGMENTS4), Row("main", *DASO)]
    rows += [Row("main", SUBNETS, "ist"), Row("main", "ist(local_steps=64)")]
    rows += [Row("main", IST_THEN_LOCAL, IST_THEN_LOCAL.replace(SUBNETS, "ist(subnets=2)"))]
    rows += [_ab(strategy, "main") for strategy in (AB, AB_THEN_EXACT, AB_THEN_BITS4)]
    rows += [Row("main", f"sequence([{first}, {then}], [0.2, 0.8])") for first, then in BEGINNINGS]
    return Table("All methods: accuracy against bytes between nodes", rows)


TABLES: dict[str, Table] = {
    "ab": _ab_table(),
    "ist": _ist_table(),
    "compression": _compression_table(),
    "periodic": Table(
        "Parameters exchanged now and then",
        [Row("main", DP), *(Row("main", strategy) for strategy in PERIODIC), Row("main", *DASO)],
    ),
    "local": _local_table(),
    "pareto": _pareto_table(),
}
