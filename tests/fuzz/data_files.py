"""Files of data sets."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from random import Random

import numpy as np

from tests.fuzz import mutation
from tests.fuzz.harness import Case
from thinwire.data import num_samples
from thinwire.tasks import cifar10, mnist
from thinwire.tasks.shakespeare import shakespeare


def idx(sizes: tuple[int, ...], values: bytes) -> bytes:
    """An idx file of unsigned bytes."""
    return struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + values


class Run:
    """Pickled, it asks to call something."""

    def __init__(self, function: object, *args: object) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.function, self.args


def prepare(folder: Path) -> Case:
    """MNIST's files, those of CIFAR-10, and text."""
    pixels = bytes(range(256)) * 3 * 28 * 28
    files = {
        "train-images-idx3-ubyte": idx((12, 28, 28), pixels[: 12 * 784]),
        "train-labels-idx1-ubyte": idx((12,), bytes(range(10)) + b"\1\2"),
        "t10k-images-idx3-ubyte": idx((4, 28, 28), pixels[: 4 * 784]),
        "t10k-labels-idx1-ubyte": idx((4,), b"\0\1\2\3"),
    }
    (folder / "mnist").mkdir()
    for name, data in files.items():
        (folder / "mnist" / name).write_bytes(data)
    mnist.mnist(folder / "mnist", 0)
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"filenames": [b"a", b"b"]}
    lists = {b"data": [[1, 2]], b"labels": "x", "data": None}
    hostile = [
        Run(print, "x"),
        Run(eval, "1"),
        Run(np.empty, (10**14,)),
        Run(bytes, 2**40),
        Run(__import__, "antigravity"),
    ]
    pickles = [pickle.dumps(one, protocol) for one in (batch, lists, *hostile) for protocol in (0, 2, 4, 5)]
    bomb = gzip.compress(bytes(2**28), 9)
    (folder / "text").mkdir()

    def case(rng: Random) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            name = rng.choice(list(files))
            data = files[name]
            sizes = tuple(rng.choice((0, 1, 4, 12, 28, 10, 2**31)) for _ in range(rng.choice((0, 1, 2, 3, 3, 4))))
            data = idx(sizes, data[16:]) if rng.random() < 0.3 else mutation.octets(rng, data)
            path = folder / "mnist" / name
            packed = path.with_name(f"{name}.gz")
            try:
                if rng.random() < 0.3:
                    path.unlink()
                    zipped = gzip.compress(data, 1)
                    packed.write_bytes(bomb if rng.random() < 0.02 else mutation.octets(rng, zipped))
                else:
                    path.write_bytes(data)
                task = mnist.mnist(folder / "mnist", 0)
                images, labels = task.train.tensors  # type: ignore[attr-defined]
                assert images.shape[1:] == (28, 28), images.shape
                assert len(images) == len(labels)
                assert labels.max() < 10
            finally:
                packed.unlink(missing_ok=True)
                path.write_bytes(files[name])
        elif kind == 1:
            path = folder / "data_batch_1"
            path.write_bytes(mutation.octets(rng, rng.choice(pickles)))
            found, labels = cifar10._read_pickle(path)
            assert found.dtype == labels.dtype == np.uint8
        elif kind == 2:
            path = folder / "data_batch_1.bin"
            path.write_bytes(rng.randbytes(rng.choice((0, 1, 3072, 3073, 6146, 10_000))))
            found, labels = cifar10._read_binary(path)
            assert found.shape == (len(labels), 3072)
        else:
            example = ("To be, or not to be: that is the question. " * rng.choice((0, 1, 30))).encode()
            (folder / "text" / "input.txt").write_bytes(mutation.octets(rng, example))
            task = shakespeare(folder / "text", 0, context=rng.choice((1, 8, 10**9)))
            assert num_samples(task.train, "train") > 0

    return case
