"""The kernels against a memory copy, in the same run: eager torch, torch.compile and Triton.

    python benchmarks/kernels.py [--device cuda|cpu] [--sizes-mib 16 64 256 1024] [--versions eager compiled triton]
                                 [--sweep] [--json FILE]

On a GPU the table has the share of the copy's rate: (bytes that a kernel must read and write ÷ its time) ÷ (bytes ÷
time of a copy). Launches are recorded in a CUDA graph, so that Python is not measured, and go round several buffers,
so that no cache has the data. `--sweep` measures Triton's kernels with other programs: elements and warps.
On a CPU the table has times, in one thread, as multiples of one copy of 25 MiB. Results go to buffers that are reused;
in the row "allocating", thinwire.kernels does the same with new tensors.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from conditions import conditions, where, write_json
from kernels_cases import BLOCK, BLOCKS, KEY, LEVELS, Run, cases
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import VERSIONS, dispatch

L2_BYTES = 128 * 2**20  # buffers together are at least as large: more than the largest cache
ROUNDS = 15
CPU_MIB = 25
SWEEP_ELEMENTS, SWEEP_WARPS = (512, 1024, 2048, 4096, 8192), (1, 2, 4, 8)
GOALS = {"quantise 8 + dequantise": "goal: compiled ≤ 2"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes-mib", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--versions", nargs="+", choices=list(VERSIONS))
    parser.add_argument("--sweep", action="store_true", help="other programs for Triton's kernels, at the last size")
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda, but torch finds no GPU here; use --device cpu")
    if options.device == "cpu" and "triton" in (options.versions or []):
        parser.error("--versions triton is for --device cuda; possible on a CPU: eager, compiled")
    versions = options.versions or [v for v in VERSIONS if options.device == "cuda" or v != "triton"]
    found = conditions(options.device)
    if options.device == "cpu":
        found["times of a copy"] = on_cpu(versions)
    else:
        found["sweep"] = sweep(options.sizes_mib[-1]) if options.sweep else {}
        found["shares of the copy rate"] = {f"{mib} MiB": on_gpu(mib, versions) for mib in options.sizes_mib}
    if options.json:
        write_json(options.json, found)
    print_found(found)


# ---- on a GPU


def on_gpu(mib: int, versions: list[str]) -> dict[str, dict[str, float]]:
    """Shares of the copy's rate, by kernel and version."""
    count, num_buffers = mib * 2**18, num_buffers_for(mib)
    rate = copy_rate(mib)
    shares: dict[str, dict[str, float]] = {"(copy, TB/s)": dict.fromkeys(versions, rate / 1e12)}
    for name in versions:
        version = importlib.import_module(VERSIONS[name])
        for what, case in cases(version, count, num_buffers, "cuda"):
            shares.setdefault(what, {})[name] = case.num_bytes / gpu_seconds(case.runs) / rate
        torch.cuda.empty_cache()
    return shares


def sweep(mib: int) -> dict[str, dict[str, float]]:
    """Shares of the copy's rate by kernel and program, of Triton's kernels."""
    from thinwire.kernels import triton

    rate = copy_rate(mib)
    shares: dict[str, dict[str, float]] = {}
    for what, case in cases(triton, mib * 2**18, num_buffers_for(mib), "cuda"):
        launch = triton.launches.get(case.launch, triton.Launch())
        for elements in SWEEP_ELEMENTS:
            for warps in SWEEP_WARPS:
                if 16 <= elements / warps / 32 <= 64:
                    triton.launches[case.launch] = launch._replace(elements=elements, warps=warps)
                    share = case.num_bytes / gpu_seconds(case.runs, rounds=5) / rate
                    shares.setdefault(what, {})[f"{elements}×{warps}"] = share
        triton.launches[case.launch] = launch
    return shares


def num_buffers_for(mib: int) -> int:
    return max(2, -(-L2_BYTES // (mib * 2**20)))


def copy_rate(mib: int) -> float:
    """Bytes a second of a copy, read and written: by the driver or by a kernel, whichever is faster."""
    xs = [torch.randn(mib * 2**18, device="cuda") for _ in range(num_buffers_for(mib))]
    ys = [torch.empty_like(x) for x in xs]
    by_driver: list[Run] = [functools.partial(y.copy_, x) for x, y in zip(xs, ys, strict=True)]
    by_kernel: list[Run] = [functools.partial(torch.mul, x, 1.0, out=y) for x, y in zip(xs, ys, strict=True)]
    return 8 * xs[0].numel() / min(gpu_seconds(by_driver), gpu_seconds(by_kernel))


def gpu_seconds(runs: list[Run], rounds: int = ROUNDS) -> float:
    """Median seconds of one run, of launches recorded in a graph."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(runs))
    return statistics.median(times)


# ---- on a CPU


def on_cpu(versions: list[str]) -> dict[str, dict[str, float]]:
    """Times as multiples of one copy, by kernel and version."""
    torch.set_num_threads(1)
    torch.empty(30 * 2**18)  # freed at once: from now on glibc keeps memory, as in a process that has trained a while
    count = CPU_MIB * 2**18
    x = torch.randn(count)
    copied = torch.empty_like(x)
    ratios: dict[str, dict[str, float]] = {}
    for name in versions:
        version = importlib.import_module(VERSIONS[name])
        made = {what: case.runs[0] for what, case in cases(version, count, 1, "cpu")}
        made["quantise 8 + dequantise"] = in_turn(made, ["quantise 8", "dequantise 8"])
        made["… and abs-max"] = in_turn(made, ["abs-max", "quantise 8", "dequantise 8"])
        made["… and abs-max, allocating"] = functools.partial(with_new_tensors, x)
        for bits in BLOCKS:
            made[f"pack {bits} + unpack"] = in_turn(made, [f"pack {bits}", f"unpack {bits}"])
        choose(name)
        for what, run in made.items():
            run()
            pairs = [(seconds(functools.partial(copied.copy_, x)), seconds(run)) for _ in range(ROUNDS)]
            ratios.setdefault(what, {})[name] = statistics.median(took / copy for copy, took in pairs)
    return ratios


def with_new_tensors(x: Tensor) -> Tensor:
    """Through 8 bits and back, by the functions that reducers call."""
    scales = kernels.abs_max(x, BLOCK)
    return kernels.dequantise(kernels.quantise(x, scales, LEVELS, BLOCK, KEY), scales, LEVELS, BLOCK)


def choose(version: str) -> None:
    """Let thinwire.kernels use a version from now on."""
    os.environ["THINWIRE_KERNELS"] = version
    dispatch._chosen_version.cache_clear()


def in_turn(made: dict[str, Run], names: list[str]) -> Run:
    runs = [made[name] for name in names]
    return lambda: [run() for run in runs]


def seconds(run: Run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


# ---- the table


def print_found(found: dict[str, Any]) -> None:
    print(f"{where(found['hardware'])}, torch {found['versions']['torch']}, {found['date']}, at {found['revision']}")
    for what, shares in found.get("sweep", {}).items():
        best = sorted(shares.items(), key=lambda item: -item[1])
        print(f"{what:>32}  " + "  ".join(f"{program} {share:.2f}" for program, share in best))
    for size, table in found.get("shares of the copy rate", {}).items():
        print_table(f"{size}: share of the copy's rate", table)
    if "times of a copy" in found:
        print_table(f"{CPU_MIB} MiB, one thread: times one memory copy", found["times of a copy"])


def print_table(title: str, table: dict[str, dict[str, float]]) -> None:
    versions = list(next(iter(table.values())))
    print(f"\n{title}\n{'':>32}" + "".join(f"{version:>10}" for version in versions))
    for what, values in table.items():
        columns = "".join(f"{values[version]:10.2f}" if version in values else f"{'–':>10}" for version in versions)
        print(f"{what:>32}{columns}  {GOALS.get(what, '')}".rstrip())


if __name__ == "__main__":
    main()
