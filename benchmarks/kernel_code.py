"""What Triton's kernels compile to, read from the machine code: no GPU is needed.

    python benchmarks/kernel_code.py [--capability 90] [--only unpack] [--sass FOLDER]

The kernels are those of kernels.py, compiled as it launches them. Counted are thread instructions for each element, on
the path that a full tile takes. An H200 copies 4.2 TB/s and issues an instruction of 32 threads on each of its 4 · 132
schedulers at 1.7 GHz: 6.8 thread instructions for each byte. A kernel that needs more than about 60 % of them is slower
than a copy. "alu" (whole numbers, logic, comparisons, I2FP) has half that rate, "slow" (other conversions, reciprocals)
an eighth; the share is that of the busiest. It says nothing about waiting for memory: that takes kernels.py and a GPU.
"""

from __future__ import annotations

import argparse
import heapq
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import triton.backends.nvidia
from kernels import cases
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from thinwire.kernels import triton as version

COUNT = 2**18
BUDGET = 132 * 4 * 1.7e9 * 32 / 4.2e12  # thread instructions for each byte
TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
ALU = re.compile(r"LOP3|PLOP3|IADD|VIADD|SHF|LEA|ISETP|FSETP|FMNMX|V?IMNMX|F?SEL|PRMT|I2FP|IABS|SGXT|MOV$")
SLOW = re.compile(r"I2F$|F2I|F2F|I2I|MUFU|FRND|POPC|FLO")
LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z]\w*)([\w.]*)\s*(.*?);")


class Instruction(NamedTuple):
    """A line of the disassembly."""

    predicate: str
    name: str
    suffix: str
    operands: str


class Target:
    """Takes the place of the driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, default=90, help="compute capability: 90 for an H100 or H200")
    parser.add_argument("--only", default="", help="only kernels with this in their name")
    parser.add_argument("--sass", type=Path, help="write the disassembly of each kernel into this folder")
    options = parser.parse_args()
    driver.set_active(Target(options.capability))
    print(f"{'':>30}  program  inst  alu  slow    B  share  regs  spill  KiB  global accesses")
    for what, num_bytes, elements, kernel in compiled(options.only):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            code, usage = tool("nvdisasm", "-c", file.name), tool("cuobjdump", "-res-usage", file.name)
        if options.sass:
            (options.sass / what.replace(" ", "_")).write_text(code)
        print(f"{what:>30}  {row(full_path(code), usage, num_bytes, elements, kernel.metadata)}")


def tool(name: str, *args: str) -> str:
    """What a program that comes with Triton prints."""
    return subprocess.run([TOOLS / name, *args], capture_output=True, text=True, check=True).stdout


def compiled(only: str) -> Iterator[tuple[str, float, int, Any]]:
    """Name, bytes moved for each element, elements of a program, and kernel: compiled and not launched."""
    made: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append((COUNT // (grid[0] * grid[1]), run(self, *args, grid=grid, warmup=True, **options)))

    JITFunction.run = compile_only
    for what, case in cases(version, COUNT, 2, "cpu"):
        if only in what:
            case.runs[0]()
            yield what, case.num_bytes / COUNT, *made.pop()


def row(path: list[Instruction], usage: str, num_bytes: float, elements: int, metadata: Any) -> str:
    """A row of the table."""
    per_element = 32 * metadata.num_warps / elements
    every = len(path) * per_element
    alu, slow = (sum(bool(rate.match(i.name)) for i in path) * per_element for rate in (ALU, SLOW))
    share = max(every, 2 * alu, 8 * slow) / (BUDGET * num_bytes)
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
    accesses = Counter(f"{i.name}.{width(i.suffix)}" for i in path if i.name in ("LDG", "STG"))
    return (
        f"{elements:>5}×{metadata.num_warps} {every:5.1f} {alu:4.1f} {slow:5.2f} {num_bytes:4.1f} {share:5.0%}  "
        f"{registers:>4} {stack:>6} {metadata.shared / 1024:4.1f}  "
        + " ".join(f"{count}×{access}" for access, count in sorted(accesses.items()))
    )


def width(suffix: str) -> str:
    """Bits of an access."""
    found = re.search(r"\.[US]?(8|16|64|128)\b", suffix)
    return found[1] if found else "32"


def full_path(text: str) -> list[Instruction]:
    """From the start to an end: with the fewest masked accesses, then the fewest calls, then the shortest."""
    code, labels = parsed(text)
    best, before = {0: (0, 0, 0)}, {0: 0}
    waiting = [(best[0], 0)]
    while True:
        cost, at = heapq.heappop(waiting)
        i = code[at]
        if i.name == "EXIT" and not i.predicate:
            break
        masked = i.name in ("LDG", "STG") and bool(i.predicate)
        total = cost[0] + masked, cost[1] + (i.name == "CALL"), cost[2] + 1
        for then in followers(i, at, labels):
            if then not in best or total < best[then]:
                best[then], before[then] = total, at
                heapq.heappush(waiting, (total, then))
    path = [at]
    while path[-1]:
        path.append(before[path[-1]])
    if any(then <= at for at in path for then in followers(code[at], at, labels)):
        raise SystemExit("there is a loop on the path of a full tile, so its instructions cannot be counted")
    return [code[at] for at in reversed(path)]


def parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and which one follows each label."""
    code: list[Instruction] = []
    labels = {}
    for line in text.splitlines():
        if found := re.match(r"(\.L_x_\d+):", line):
            labels[found[1]] = len(code)
        if found := LINE.search(line):
            code.append(Instruction(*(part or "" for part in found.groups())))
    return code, labels


def followers(i: Instruction, at: int, labels: dict[str, int]) -> list[int]:
    """Where the program may continue after an instruction."""
    if i.name != "BRA":
        return [at + 1]
    target = labels[re.findall(r"\.L_x_\d+", i.operands)[-1]]
    return [target, at + 1] if i.predicate or re.match(r"!?U?P\d", i.operands) else [target]


if __name__ == "__main__":
    main()
