"""Batches of a dataset's samples by their indices; datasets that fit live on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from thinwire.common.ending import end_with_parent
from thinwire.common.prefetching import copied_to_gpu
from thinwire.common.seeding import OwnRandomness
from thinwire.common.tensors import num_bytes

GPU_SHARE = 0.1  # of a GPU's free memory that a dataset may take


def on_device(
    dataset: Dataset[Any], device: torch.device | None, collate_fn: Callable[[list[Any]], Any] = default_collate
) -> Dataset[Any]:
    """A TensorDataset on a GPU, if it takes at most GPU_SHARE of the memory that is free there; else as it is.

    With a `collate_fn` other than torch's its samples are read one by one, so it stays where it is.
    """
    is_plain = type(dataset) is TensorDataset and collate_fn is default_collate
    if device is None or device.type != "cuda" or not is_plain:
        return dataset
    assert isinstance(dataset, TensorDataset)
    free, _ = torch.cuda.mem_get_info(device)
    if sum(map(num_bytes, dataset.tensors)) > GPU_SHARE * free:
        return dataset
    return TensorDataset(*(tensor.to(device) for tensor in dataset.tensors))


def fetch(
    dataset: Dataset[Any],
    batches: Sequence[Tensor],
    num_workers: int = 0,
    seeds: Sequence[int] = (),
    device: torch.device | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> Generator[Any, None, None]:
    """The batches of samples with these indices; from a TensorDataset, whole batches at a time.

    `seeds` has one for each batch: random numbers that reading and collating it draw depend on that alone, in this
    process as in worker processes, and those of the training go on as if nothing was read. With a GPU as `device`,
    batches are copied there beside the computing. `collate_fn` makes a batch of a list of samples; with another one
    than torch's, samples of a TensorDataset are read one by one.
    """
    if not batches:
        return
    in_batches = isinstance(dataset, TensorDataset) and collate_fn is default_collate
    is_on_gpu = isinstance(dataset, TensorDataset) and all(tensor.is_cuda for tensor in dataset.tensors)
    fetched: Iterator[Any]
    if isinstance(dataset, TensorDataset) and in_batches:
        chosen = _on_gpu(batches, dataset.tensors[0].device) if is_on_gpu else batches
        fetched = (dataset[indices] for indices in chosen)
    else:
        order: Any = [_SeededIndices(seed, part.tolist()) for seed, part in zip(seeds, batches, strict=True)]
        fetched = iter(DataLoader(_Seeded(dataset, collate_fn), sampler=order, **loader_options(num_workers)))
    if device is not None and device.type == "cuda" and not is_on_gpu:
        draws_nothing = in_batches and type(dataset) is TensorDataset
        fetched = copied_to_gpu(fetched, device, in_background=draws_nothing or num_workers > 0)
    yield from fetched


def loader_options(num_workers: int) -> dict[str, Any]:
    """Options of a DataLoader whose dataset makes whole batches, which it passes on as they are.

    Workers start as copies of this process, without importing everything again. That is torch's way on Linux too, but
    ranks that were started by a fork server would use one of their own. Without a generator, torch would draw the
    workers' seed from that of the training.
    """
    context = "fork" if num_workers else None
    workers = {"num_workers": num_workers, "multiprocessing_context": context, "worker_init_fn": end_with_parent}
    return {**workers, "batch_size": None, "collate_fn": _as_it_is, "generator": torch.Generator()}


def _as_it_is(batch: Any) -> Any:
    return batch


class _SeededIndices(NamedTuple):
    """A batch to be read."""

    seed: int
    indices: list[int]


class _Seeded(Dataset[Any]):
    """The batches of a dataset, made with random numbers that depend on the batch's seed alone."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn

    def __getitem__(self, batch: _SeededIndices) -> Any:
        with OwnRandomness(batch.seed).used():
            if callable(read := getattr(self.dataset, "__getitems__", None)):
                return self.collate_fn(list(read(batch.indices)))
            return self.collate_fn([self.dataset[i] for i in batch.indices])


def _on_gpu(batches: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The indices of all batches, copied to a GPU in one piece; the computing does not wait for them."""
    order = torch.cat(list(batches)).pin_memory().to(device, non_blocking=True)
    parts: Sequence[Tensor] = order.split([len(indices) for indices in batches])
    return parts
