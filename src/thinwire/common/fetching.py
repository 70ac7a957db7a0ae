"""Batches of a dataset's samples by their indices; datasets that fit live on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from thinwire.common.prefetching import copied_to_gpu
from thinwire.common.tensors import num_bytes

GPU_SHARE = 0.1  # of a GPU's free memory that a dataset may take


def on_device(dataset: Dataset[Any], device: torch.device | None) -> Dataset[Any]:
    """A TensorDataset on a GPU, if it takes at most GPU_SHARE of the memory that is free there; else as it is."""
    if device is None or device.type != "cuda" or type(dataset) is not TensorDataset:
        return dataset
    free, _ = torch.cuda.mem_get_info(device)
    if sum(map(num_bytes, dataset.tensors)) > GPU_SHARE * free:
        return dataset
    return TensorDataset(*(tensor.to(device) for tensor in dataset.tensors))


def fetch(
    dataset: Dataset[Any],
    batches: Sequence[Tensor],
    num_workers: int = 0,
    seed: int = 0,
    device: torch.device | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
) -> Generator[Any, None, None]:
    """The batches of samples with these indices; from a TensorDataset, whole batches at a time.

    `collate_fn` makes a batch of a list of samples; with another one than torch's, a TensorDataset gives samples too.
    `seed` seeds the worker processes. Without it, torch would draw their seed from the generator of the training. With
    a GPU as `device`, batches are copied there beside the computing.
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
        order = [indices.tolist() for indices in batches]
        generator = torch.Generator().manual_seed(seed)
        loader = DataLoader(
            dataset, batch_sampler=order, num_workers=num_workers, generator=generator, collate_fn=collate_fn
        )  # fmt: skip
        fetched = iter(loader)
    if device is not None and device.type == "cuda" and not is_on_gpu:
        draws_nothing = in_batches and type(dataset) is TensorDataset
        fetched = copied_to_gpu(fetched, device, in_background=draws_nothing or num_workers > 0)
    yield from fetched


def _on_gpu(batches: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """The indices of all batches, copied to a GPU in one piece; the computing does not wait for them."""
    order = torch.cat(list(batches)).pin_memory().to(device, non_blocking=True)
    parts: Sequence[Tensor] = order.split([len(indices) for indices in batches])
    return parts
