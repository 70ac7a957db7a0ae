"""What tests of the adapters for frameworks share: ranks as torchrun makes them, and a small GPT-2 to train."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import thinwire as tw
from thinwire.comm.base import Comm

STEPS, EPOCHS, BATCH, RANKS = 6, 2, 4, 2
FEEDBACK = "error_feedback(maxnorm(bits=4))"


@contextmanager
def launched(comm: Comm) -> Iterator[None]:
    """Inside, this process has the variables that torchrun gives its ranks; what frameworks set is undone."""
    names = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size, "LOCAL_WORLD_SIZE": comm.size}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        yield
    finally:
        if "accelerate" in sys.modules:
            from accelerate.state import AcceleratorState, GradientState, PartialState

            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
        os.environ.clear()
        os.environ.update(before)


def gpt2() -> Any:
    """A small GPT-2, with the same weights wherever it is made."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def texts(per_rank: int = STEPS * BATCH) -> list[dict[str, Tensor]]:
    """Sequences that count up: what comes next can be learned."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 32, (per_rank * RANKS,), generator=generator)
    lines = [(start + torch.arange(16)) % 32 for start in first]
    return [{"input_ids": line, "labels": line} for line in lines]


def by_prepare(comm: Comm, spec: str) -> int:
    """The bytes of our own trainer for so many steps; they depend on the parameters alone."""

    def loss(output: Any, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten())

    trainer = tw.prepare(
        spec, model=gpt2(), comm=comm, optimizer=lambda p: torch.optim.SGD(p, 0.01), loss=loss, epochs=EPOCHS
    )
    for _ in range(EPOCHS):
        batches = [(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long))] * STEPS
        for batch in tw.epoch(trainer, batches, comm):
            trainer.step(batch)
    return sum(row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train")
