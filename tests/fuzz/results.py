"""The files of finished runs, as `thinwire report`, `thinwire compare` and `thinwire plan --from` read them."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from tests.compare.comparisons import DENSE, LOW, compare
from tests.fuzz import mutation
from tests.fuzz.harness import Case
from thinwire.compare.report import page, shell
from thinwire.compare.results import read_results
from thinwire.compare.results_json import results_json
from thinwire.compare.several import read_several
from thinwire.compare.terminal_table import comparison_lines, comparison_table
from thinwire.plan.measured import read_own
from thinwire.run.records import RunFolder
from thinwire.strategies.series import Series

SEQUENCE = "sequence([local_sgd, data_parallel])"
ARTIFACT = {
    "name": "factored",
    "about": "low-rank",
    "file": "factored.safetensors",
    "column": "Factored",
    "parameters": 10,
    "bytes": 40,
    "ratio": 9.5,
    "value": 89.0,
}


def prepare(folder: Path) -> Case:
    """Change one file of a comparison; then everything that reads it."""
    shell.get_plotlyjs = lambda: ""  # 4 MB in each page, which no data gets into
    example = folder / "example"
    own = Series("Phase", "lines", "of each epoch", "row", "cell")._asdict()
    compare(
        example,
        [DENSE, LOW, SEQUENCE],
        (0, 1),
        target=96.0,
        epochs=3,
        artifacts=[ARTIFACT],
        status={"phase": "x"},
        errors={"runs/3-sequence/seed-1": "RunError: x"},
    )
    for path in example.rglob("metrics.jsonl"):
        rows = [json.loads(line) | {"part": 1, "part_strategy": "local_sgd", "share": 0.5} for line in path.open()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in example.rglob("summary.json"):
        summary = json.loads(path.read_text())
        path.write_text(json.dumps(summary | {"series": summary["series"] | {"share": own}}))
    for path in example.rglob("seed-0"):
        (path / "config.toml").write_text('task = "digits"\nstrategy = "local_sgd"\nbatch_size = 8\n')
    files = {path.relative_to(example): path.read_bytes() for path in example.rglob("*") if path.is_file()}
    work = folder / "work"
    shutil.copytree(example, work)
    (folder / "secret" / "seed-0").mkdir(parents=True)
    (work / "runs" / "1-x").mkdir()
    _read_everything(work, Random(1), run=True)
    _read_everything(work, Random(1), run=False)

    def case(rng: Random) -> None:
        names = list(files)
        chosen = {rng.choice(names) for _ in range(rng.choice((1, 1, 2)))}
        if rng.random() < 0.3:
            chosen.add(
                next(
                    name
                    for name in names
                    if name.name == rng.choice(("compare.json", "summary.json")) or name.name == "compare.json"
                )
            )
        try:
            for name in chosen:
                (work / name).write_bytes(changed(rng, name, files[name]))
            _read_everything(work, rng, run=rng.random() < 0.3)
        finally:
            for name in chosen:
                (work / name).write_bytes(files[name])

    return case


def changed(rng: Random, name: Path, data: bytes) -> bytes:
    """A file with other bytes, or other JSON in a row."""
    if rng.random() < 0.2 or name.suffix == ".toml":
        return mutation.octets(rng, data)
    if rng.random() < 0.02:
        return b'{"task": ' + b"[" * rng.choice((100, 100_000))
    lines = data.decode().splitlines() if name.suffix == ".jsonl" else [data.decode()]
    i = rng.randrange(len(lines))
    try:
        lines[i] = json.dumps(mutation.json_value(rng, json.loads(lines[i]), _plain))
    except RecursionError:
        lines[i] = "[" * 3000
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _plain(rng: Random) -> Any:
    """A value of JSON that is written as it is."""
    made = mutation.value(rng)
    return made if not isinstance(made, float) or math.isfinite(made) or rng.random() < 0.5 else 1.5


def _read_everything(work: Path, rng: Random, run: bool) -> None:
    """As the commands do it."""
    results = read_results(work / "runs" / "1-data_parallel" / "seed-0" if run else work)
    html = page(results)
    assert "Content-Security-Policy" in html
    json.dumps(results_json(results))
    console = Console(width=100, file=None, quiet=True)
    console.print(comparison_table(results, 100))
    console.print(*comparison_lines(results), markup=False)
    if rng.random() < 0.2:
        page(read_several([work, work / "runs" / "1-data_parallel" / "seed-0"], work / "several"))
    read_own(work)
    RunFolder(work / "runs" / "1-data_parallel" / "seed-0").drop_rows_after(10**6)
