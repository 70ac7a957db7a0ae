"""The rows of benchmarks/floor.py: what is measured, and how long one period of it is."""

from __future__ import annotations

from dataclasses import dataclass

DDP = "DDP"
FP16_HOOK = "DDP, fp16_compress_hook"
POWERSGD_HOOK = "DDP, powerSGD_hook, rank 4"
LOOPBACK = "none"  # the link of rows without hosts
FULL_LINK = "1gbit"  # on this link all rows are measured; on the others the main ones


@dataclass(frozen=True)
class Row:
    """A strategy or a hook of torch, and how to measure it."""

    name: str  # a strategy's spec, or one of the three names above
    main: bool = False  # measured on every link
    period: int = 1  # steps after which the exchanges repeat; a round has whole periods
    blocks: bool = False  # computing stands still during an exchange, so the bound is compute + floor
    warmup: int = 3  # steps before anything is timed, or a period; DDP groups its buckets anew after the first
    hosts_of_two: bool = False  # hosts have two ranks each, not one
    staged: bool = False  # the model is cut into stages, which must know how many steps come
    epochs: int | None = None  # for strategies with phases
    on_gpu: bool = True


def _reducer(reducer: str, main: bool = False) -> Row:
    return Row(f"data_parallel(reducer={reducer})", main)


ROWS = [
    Row(DDP, main=True),
    Row(FP16_HOOK, main=True),
    Row(POWERSGD_HOOK, main=True, warmup=5),  # it compresses from the third step on
    Row("data_parallel", main=True),
    _reducer("bf16", main=True),
    _reducer("fp16"),
    _reducer("maxnorm", main=True),
    _reducer("maxnorm(predicted=True)"),
    _reducer("maxnorm(bits=4)", main=True),
    _reducer("error_feedback(maxnorm(bits=4))"),
    _reducer("error_feedback(maxnorm(bits=2))", main=True),
    _reducer("maxnorm_multiscale"),
    _reducer("powersgd(rank=4)", main=True),
    _reducer("error_feedback(global_randk(ratio=0.01))"),
    _reducer("error_feedback(topk(ratio=0.01))"),
    _reducer("error_feedback(sign)"),
    _reducer("terngrad"),
    Row("local_sgd", main=True, period=8, blocks=True),
    Row("diloco", main=True, period=16, blocks=True),
    # A fragment is sent every four steps. Rounds begin three steps after that, when all of it is in the ledger.
    Row("diloco(fragments=4)", main=True, period=16, warmup=19),
    Row("diloco(fragments=4, reducer=maxnorm(bits=4))", main=True, period=16, warmup=19),
    Row("ist(local_steps=64)", main=True, period=64, blocks=True),
    # The warm-up is over after two steps, and the first sync is far away: steps that train factors inside groups.
    # Random weights have no small singular values, so more of them are dropped than in a run.
    Row("ab(group_size=2, warmup=2, sync_every=1000000, climb=0, cutoff=0.8)", main=True, warmup=5),
    Row("local_parallel(blocks=4)", staged=True),
    Row("local_parallel(blocks=4, wire=int8)", staged=True),
    Row("pipeline", staged=True, on_gpu=False),  # torch's pipelines send no CUDA tensors on gloo
    # Both rails exchange once in a period.
    Row("daso(warmup_epochs=9, cooldown_epochs=0)", period=2, blocks=True, hosts_of_two=True, epochs=9),
    Row("daso(warmup_epochs=0, cooldown_epochs=0)", main=True, period=8, hosts_of_two=True, epochs=9),
]
BY_NAME = {row.name: row for row in ROWS}


def selected(link: str, only: list[str], device: str) -> list[Row]:
    """The rows to measure on a link: those that `only` names, or names a part of; without it all, or the main ones."""
    possible = [row for row in ROWS if row.on_gpu or device == "cpu"]
    if only:
        return [row for row in possible if any(_names(word, row.name) for word in only)]
    return [row for row in possible if row.main or link == FULL_LINK]


def by_hosts(rows: list[Row], ranks: int, link: str) -> dict[int, list[Row]]:
    """The rows by the number of hosts that they need; 0 on loopback."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        number = 0 if link == LOOPBACK else ranks // 2 if row.hosts_of_two else ranks
        found.setdefault(number, []).append(row)
    return found


def _names(word: str, name: str) -> bool:
    return word == name or (word not in BY_NAME and word in name)
