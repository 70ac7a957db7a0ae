"""auto against what it could have chosen: seconds of training until a target, on links of several speeds.

python benchmarks/auto_check.py --json auto-check.json --data DIR    # DIR has shakespeare.txt; some minutes
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from thinwire.compare.results import read_results
from thinwire.compare.runner import compare
from thinwire.plan.auto import CANDIDATES
from thinwire.plan.measured import is_safe, qualities

CASES = {
    "digits": {"task": "digits", "epochs": 20, "target": 97.0},
    "gpt": {"task": "shakespeare", "model": "gpt(width=64, depth=2)", "batch_size": 64, "epochs": 3, "target": 2.52},
    "wide": {
        "task": "synthetic(samples=4096)", "model": "mlp(width=4096, depth=2)", "batch_size": 64, "epochs": 2,
        "target": 50.0,
    },
}  # fmt: skip
OPTIMIZERS = {"digits": "sgd", "gpt": "adamw", "wide": "sgd"}  # the tasks' defaults
LINKS = ["10mbit", "100mbit", "1gbit", None]


def choices(case: str) -> list[str]:
    """What auto may choose."""
    return [spec for spec in CANDIDATES if is_safe(spec, qualities(spec, OPTIMIZERS[case]), 0.5)]


def seconds_to_target(name: str, link: str | None, data: Path | None) -> dict[str, float | None]:
    """Seconds of training until the target, the probe included, of auto and of all that it could have chosen."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "runs")
        options = {**case, "ranks": 2, "seeds": 1, "baseline": "none", "out": out, "link": link, "data": data}
        compare([*choices(name), "auto"], {name: value for name, value in options.items() if value is not None})
        found = {}
        for entry in read_results(out).entries:
            record = entry.records[0]
            chosen = record.summary["status"].get("choice") if record.summary else None
            found[entry.spec] = record.seconds_to(case["target"])
            if chosen:
                found["chosen"] = chosen
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=Path("auto-check.json"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    args = parser.parse_args()
    rows = []
    for name in args.cases:
        for link in LINKS:
            if (name, link) == ("wide", "10mbit"):  # a step of data_parallel would take a minute
                continue
            found = seconds_to_target(name, link, args.data if name == "gpt" else None)
            times = {spec: found[spec] for spec in choices(name) if found.get(spec)}
            best = min(times, key=lambda spec: times[spec])
            rows.append({"case": name, "link": link, "best": best, **found})
            ratio = (found["auto"] or float("nan")) / times[best]
            print(
                f"{name} {link}: auto took {found.get('chosen')}, {ratio:.2f} of the best ({best}); {found}", flush=True
            )
            args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
