"""Tasks: official file formats, read from files made here."""

from __future__ import annotations

import gzip
import pickle
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from thinwire.errors import UsageError
from thinwire.tasks.base import Task
from thinwire.tasks.cifar10 import crop_and_flip
from thinwire.tasks.loading import load_task

GENERATOR = np.random.default_rng(0)


def test_digits_are_the_real_ones() -> None:
    task = load_task("digits", None, 0)
    assert (len(task.train), len(task.test)) == (1437, 360)
    pixels, labels = (torch.cat(t) for t in zip(task.train.tensors, task.test.tensors, strict=True))
    original = load_digits()
    ours = sorted(zip(pixels.add(0.5).mul(16).flatten(1).int().tolist(), labels.tolist(), strict=True))
    theirs = sorted(zip(original.data.astype(int).tolist(), original.target.tolist(), strict=True))
    assert ours == theirs


def test_the_split_is_the_same_for_every_seed() -> None:
    one, other = load_task("digits", None, 0), load_task("digits", None, 5)
    assert torch.equal(one.test.tensors[0], other.test.tensors[0])


def test_synthetic_follows_its_seed_and_options() -> None:
    task = load_task("synthetic(features=12, classes=4, samples=100, width=16)", None, 1)
    assert task.train.tensors[0].shape == (100, 12)
    assert set(task.train.tensors[1].tolist()) == {0, 1, 2, 3}
    assert not torch.equal(
        task.train.tensors[0], load_task("synthetic(features=12, classes=4, samples=100)", None, 2).train.tensors[0]
    )
    assert task.build_model()(task.train.tensors[0]).shape == (100, 4)


def write_mnist(folder: Path, zipped: bool) -> dict[str, np.ndarray]:
    arrays = {
        "train-images-idx3-ubyte": GENERATOR.integers(0, 256, (20, 28, 28), np.uint8),
        "train-labels-idx1-ubyte": GENERATOR.integers(0, 10, 20).astype(np.uint8),
        "t10k-images-idx3-ubyte": GENERATOR.integers(0, 256, (5, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte": GENERATOR.integers(0, 10, 5).astype(np.uint8),
    }
    for name, array in arrays.items():
        raw = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_reads_idx_files(tmp_path: Path, zipped: bool) -> None:
    (tmp_path / "mnist").mkdir()
    arrays = write_mnist(tmp_path / "mnist", zipped)
    task = load_task("mnist", tmp_path, 0)
    assert np.array_equal(task.train.tensors[0].numpy(), arrays["train-images-idx3-ubyte"])
    assert task.test.tensors[1].tolist() == arrays["t10k-labels-idx1-ubyte"].tolist()
    inputs = task.transform(task.train.tensors[0], None)
    assert inputs.shape == (20, 1, 28, 28)
    assert task.build_model()(inputs).shape == (20, 10)


def test_a_damaged_mnist_file_is_named(tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=False)
    file = tmp_path / "t10k-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(UsageError, match="t10k-images-idx3-ubyte is damaged"):
        load_task("mnist", tmp_path, 0)


CIFAR_FILES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


@pytest.fixture(scope="module")
def cifar() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
        name: (GENERATOR.integers(0, 256, (10000, 3072), np.uint8), GENERATOR.integers(0, 10, 10000).astype(np.uint8))
        for name in CIFAR_FILES
    }


@pytest.mark.slow
def test_cifar10_reads_binary_and_python_files_alike(
    tmp_path: Path, cifar: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    binary, python = tmp_path / "cifar-10-batches-bin", tmp_path / "py" / "cifar-10-batches-py"
    binary.mkdir()
    python.mkdir(parents=True)
    for name, (pixels, labels) in cifar.items():
        (binary / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
        batch = {b"data": pixels, b"labels": labels.tolist(), b"batch_label": b"x", b"filenames": [b"a.png"]}
        (python / name).write_bytes(pickle.dumps(batch, protocol=2))
    one, other = load_task("cifar10", tmp_path, 0), load_task("cifar10", tmp_path / "py", 0)
    assert one.train.tensors[0].shape == (50000, 3, 32, 32)
    for a, b in zip((*one.train.tensors, *one.test.tensors), (*other.train.tensors, *other.test.tensors), strict=True):
        assert torch.equal(a, b)
    assert one.train.tensors[0][10001].flatten().tolist() == cifar["data_batch_2"][0][1].tolist()
    assert one.test.tensors[1].tolist() == cifar["test_batch"][1].tolist()


@pytest.mark.slow
def test_cifar10_holds_out_training_images_and_does_not_read_the_test_set(
    tmp_path: Path, cifar: dict[str, tuple[np.ndarray, np.ndarray]]
) -> None:
    for name, (pixels, labels) in cifar.items():
        if name != "test_batch":
            (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
    expected = [label for name in CIFAR_FILES[:-1] for label in cifar[name][1].tolist()]
    first = np.concatenate([cifar[name][0] for name in CIFAR_FILES[:-1]])[:, :8]  # pixels that tell images apart
    few, many, other = (load_task(f"cifar10(held_out={n})", tmp_path, s) for n, s in ((100, 0), (49000, 0), (100, 7)))
    assert [len(task.train) for task in (few, many)] == [49900, 1000]
    assert [len(task.test) for task in (few, many)] == [100, 49000]
    assert torch.equal(few.test.tensors[0], other.test.tensors[0]), "the same for every seed of a run"
    assert torch.equal(few.test.tensors[0], many.test.tensors[0][-100:]), "fewer are the last of more"
    for task in (few, many):
        images, labels = (torch.cat(t) for t in zip(task.train.tensors, task.test.tensors, strict=True))
        ours = sorted(zip(images.flatten(1)[:, :8].tolist(), labels.tolist(), strict=True))
        assert ours == sorted(zip(first.tolist(), expected, strict=True)), "every image is in one of both parts"
    part = load_task("cifar10(held_out=100, train=300)", tmp_path, 3)
    for own, whole in zip(part.train.tensors, few.train.tensors, strict=True):
        assert torch.equal(own, whole[:300])
    assert torch.equal(part.test.tensors[1], few.test.tensors[1])
    with pytest.raises(UsageError, match="give at most 49900"):
        load_task("cifar10(held_out=100, train=49901)", tmp_path, 0)
    with pytest.raises(UsageError, match=r"none of test_batch\.bin"):
        load_task("cifar10", tmp_path, 0)
    with pytest.raises(UsageError, match="held_out"):
        load_task("cifar10(held_out=50000)", tmp_path, 0)


class Evil:
    def __reduce__(self) -> object:
        return (exec, ("raise SystemExit('code of a data file was run')",))


def test_a_python_batch_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(UsageError, match="exec is not allowed"):
        load_task("cifar10", tmp_path, 0)


@pytest.mark.slow
def test_cifar10_normalises_and_augments_only_in_training(
    cifar: dict[str, tuple[np.ndarray, np.ndarray]], tmp_path: Path
) -> None:
    for name, (pixels, labels) in cifar.items():
        (tmp_path / f"{name}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
    images = load_task("cifar10", tmp_path, 0).test.tensors[0][:500]
    for spec, moved in (("cifar10", True), ("cifar10(augment=False)", False)):
        transform = load_task(spec, tmp_path, 0).transform
        plain = transform(images, None)
        again = transform(images, None)
        trained = transform(images, torch.Generator().manual_seed(0))
        assert torch.equal(plain, again)
        assert torch.equal(plain, trained) != moved


def test_crops_and_flips_are_shifts_and_mirrors() -> None:
    image = torch.arange(1.0, 65).reshape(1, 1, 8, 8)
    batch = image.expand(400, 1, 8, 8)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))[0, 0]
    windows = [padded[r : r + 8, c : c + 8] for r in range(5) for c in range(5)]
    possible = {tuple(w.flatten().tolist()) for w in windows} | {tuple(w.flip(1).flatten().tolist()) for w in windows}
    seen = {tuple(out.flatten().tolist()) for out in crop_and_flip(batch, torch.Generator().manual_seed(0), pad=2)}
    assert seen == possible, "every shift and mirror image occurs, and nothing else"


def test_crops_keep_the_order_of_the_images() -> None:
    images = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    usual, last = (
        crop_and_flip(images.contiguous(memory_format=order), torch.Generator().manual_seed(2), pad=2)
        for order in (torch.contiguous_format, torch.channels_last)
    )
    assert torch.equal(usual, last)
    assert usual.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)


def test_shakespeare_predicts_the_next_character(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 7) for i in range(2000))
    (tmp_path / "input.txt").write_text(text)
    task = load_task("shakespeare(context=16)", tmp_path, 0)
    inputs, targets = task.train.tensors
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert task.classes == 7
    assert task.metric == "loss"
    assert len(task.test) < len(task.train) / 5
    logits = task.build_model("gpt(width=16, depth=1, heads=2)")(inputs)
    assert task.loss(logits, targets).shape == ()


@pytest.mark.parametrize("name", ["mnist", "cifar10", "shakespeare"])
def test_missing_data_says_what_to_give(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="as --data DIR"):
        load_task(name, None, 0)
    with pytest.raises(UsageError, match="is not a folder"):
        load_task(name, tmp_path / "none", 0)
    with pytest.raises(UsageError, match=f"{name}: none of .* is in"):
        load_task(name, tmp_path, 0)


def test_one_class_is_refused() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(UsageError, match="accuracy needs two or more"):
        Task(data, data, (2,), 1, "mlp")
    Task(data, data, (2,), 1, "mlp", loss=torch.nn.functional.mse_loss, metric="loss")


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    """Samples without end, and so without numbers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.zeros(2)


class Unsized(torch.utils.data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


def f1(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metric": f1}, r"metric f1 does not say which way is better; write below it: f1.higher_is_better = True"),
        ({"metric": "f1"}, "metric='f1'; possible: 'accuracy'"),
        ({"test": Stream()}, "test is Stream, a stream"),
        ({"train": Unsized()}, "train is Unsized, .*without a length"),
        (
            {"test": torch.utils.data.TensorDataset(torch.zeros(0, 2), torch.zeros(0))},
            "6 samples in train and 0 in test",
        ),
        ({"model": torch.nn.Linear(2, 2)}, "model is a Linear; give a function that makes one"),
        ({"loss": "cross_entropy"}, "loss='cross_entropy'; give a function"),
        ({"transform": 3}, "transform=3; give a function"),
    ],
)
def test_a_task_that_cannot_be_run_is_refused_when_it_is_made(changes: dict[str, Any], message: str) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6))
    with pytest.raises(UsageError, match=message):
        Task(**{"train": data, "test": data, "shape": (2,), "classes": 2, "model": "mlp", **changes})


def test_the_training_data_may_be_a_stream() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(6, 2), torch.zeros(6))
    assert isinstance(Task(Stream(), data, (2,), 2, "mlp").train, Stream)


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shakespeare.txt").write_text("to be or not to be")
    with pytest.raises(UsageError, match="18 characters, too few for context=128"):
        load_task("shakespeare", tmp_path, 0)


def not_a_task(data: Path | None, seed: int, /) -> int:
    return 3


def no_parameters() -> int:
    return 3


def plain_parameters(data: Path | None, seed: int, *, width: int = 3) -> Task:
    return load_task(f"synthetic(width={width})", data, seed)


def without_types(data, seed, turns=2):  # type: ignore[no-untyped-def]
    return load_task(f"synthetic(depth={turns})", data, seed)


def test_users_own_tasks() -> None:
    assert load_task("tests.tasks.test_tasks:without_types(turns=3)", None, 0).model == "mlp(width=256, depth=3)"
    assert load_task("tests.tasks.test_tasks:plain_parameters(width=5)", None, 0).model == "mlp(width=5, depth=2)"
    assert isinstance(load_task("tests.user_task:noisy(step=4)", None, 0), Task)
    for text, message in [
        ("tests.tasks.test_tasks:not_a_task", "returned int; expected a thinwire.Task"),
        ("tests.tasks.test_tasks:no_parameters", r"must be a function of \(data, seed, /, \*, options…\)"),
        ("tests.nowhere:f", "cannot load task 'tests.nowhere:f'"),
        ("tests.user_task:nothing", "cannot load task"),
        ("tests.user_task:noisy(colour=1)", "unknown option of noisy 'colour'"),
    ]:
        with pytest.raises(UsageError, match=message):
            load_task(text, None, 0)
