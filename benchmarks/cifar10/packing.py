"""The state of all cells in a few small files, for a machine that is lost: results, and checkpoints that fit.

A checkpoint has a file for each rank, and many tensors are equal on all ranks: with data_parallel parameters and
momentum, with local_sgd at the end of an epoch the parameters. Each tensor is kept once. ResNet-18 with momentum is
then about 85 MB instead of 360; what has moments of its own on each rank does not fit into 8 files of 16 MiB. Of
checkpoints that do not fit, those of the largest cells are left out: such a cell begins anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

from thinwire.common.files import write_atomically
from thinwire.run.records import RunFolder

MIB = 2**20
TEXTS = ("config.toml", "metrics.jsonl", "ledger.jsonl", "timeline.jsonl", "summary.json")
Entries = dict[str, bytes]  # of the archive: names and compressed content


def complete_steps(run: RunFolder, ranks: int) -> list[int]:
    """The steps of the checkpoints that all ranks have written, oldest first."""
    folders = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in run.checkpoints.glob("step-*"))
    found = [int(match[1]) for match, path in folders if match and len(list(path.glob("rank-*.json"))) == ranks]
    return sorted(found)


def pack(out: Path, unfinished: list[tuple[RunFolder, int]], file: Path, parts: int, part_mib: float) -> list[str]:
    """Write FILE.0, FILE.1, …; returns the names of unfinished cells whose checkpoint is left out.

    `unfinished` has the folder and the number of ranks of each cell that has begun and is not finished.
    """
    limit, part = int(parts * part_mib * MIB), int(part_mib * MIB)
    texts = [path for run in out.glob("cells/*") for name in TEXTS if (path := run / name).exists()]
    entries = {str(path.relative_to(out)): zlib.compress(path.read_bytes()) for path in [*texts, *out.glob("*.json")]}
    states = {run.path.name: _state(out, run, ranks, limit) for run, ranks in unfinished if complete_steps(run, ranks)}
    left_out = []
    for name, state in sorted(states.items(), key=lambda pair: _size(pair[1])):
        if _size({**entries, **state}) <= limit:
            entries |= state
        else:
            left_out.append(name)
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    whole = buffer.getvalue()
    if len(whole) > limit:
        raise SystemExit(f"the results alone take {len(whole) / MIB:.1f} MiB; allow more --parts")
    old, new = _parts(file), []
    for i in range(0, len(whole), part):
        new.append(file.with_name(f"{file.name}.{i // part}"))
        new[-1].with_suffix(".new").write_bytes(whole[i : i + part])
        new[-1].with_suffix(".new").replace(new[-1])
    for surplus in set(old) - set(new):
        surplus.unlink()
    return left_out


def unpack(file: Path, out: Path) -> None:
    """Put everything that `pack` wrote to FILE.0, FILE.1, … into an empty folder."""
    parts = _parts(file)
    if not parts:
        raise SystemExit(f"there is no {file.name}.0 in {file.parent}; give the name that --pack was given")
    with zipfile.ZipFile(BytesIO(b"".join(path.read_bytes() for path in parts))) as archive:
        for name in archive.namelist():
            if name.startswith("pieces/"):
                continue
            content = zlib.decompress(archive.read(name))
            if name.endswith(".pieces"):
                content = b"".join(zlib.decompress(archive.read(f"pieces/{key}")) for key in json.loads(content))
            write_atomically(out / name.removesuffix(".pieces"), partial(_write, content))


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _state(out: Path, run: RunFolder, ranks: int, limit: int) -> Entries:
    """The newest complete checkpoint of a cell; only a part of it if it is larger than the limit."""
    entries: Entries = {}
    for path in sorted((run.checkpoints / f"step-{complete_steps(run, ranks)[-1]:08d}").glob("rank-*")):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            keys = []
            for piece in _split(path):
                keys.append(hashlib.sha256(piece).hexdigest())
                if f"pieces/{keys[-1]}" not in entries and _size(entries) <= limit:
                    entries[f"pieces/{keys[-1]}"] = zlib.compress(piece, 1)
            entries[f"{name}.pieces"] = zlib.compress(json.dumps(keys).encode())
        else:
            entries[name] = zlib.compress(path.read_bytes())
    return entries


def _split(path: Path) -> Iterator[bytes]:
    """A safetensors file in pieces: its header, and each tensor."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    ends = sorted({begin + end for one in header.values() for end in one["data_offsets"]} | {begin})
    yield content[:begin]
    for start, end in itertools.pairwise(ends):
        yield content[start:end]


def _size(entries: Entries) -> int:
    """The size of an archive with these entries, and a little more."""
    return sum(200 + 2 * len(name) + len(content) for name, content in entries.items())


def _parts(file: Path) -> list[Path]:
    found = (path for path in file.parent.glob(f"{file.name}.*") if re.fullmatch(r"\d+", path.suffix[1:]))
    return sorted(found, key=lambda path: int(path.suffix[1:]))
