"""A loop with Accelerate. The lines with `attach`, `rounds` and `exchange` are all that thinwire adds.

torchrun --nproc-per-node 2 -m examples.accelerate_loop "error_feedback(maxnorm(bits=4))"
torchrun --nproc-per-node 2 -m examples.accelerate_loop "diloco(every=8)" --rounds
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from examples.tiny_gpt2 import gpt2, main, outcome, pieces
from thinwire.integrations.accelerate import attach, rounds


def train(spec: str, in_rounds: bool) -> dict[str, Any]:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batches = DataLoader(pieces(), batch_size=16, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    exchange: Any = (rounds if in_rounds else attach)(model, spec, accelerator)

    losses = []
    for _ in range(2):
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if in_rounds:
        exchange.together()
    found = outcome(losses, accelerator.unwrap_model(model), exchange)
    exchange.close()
    return found


if __name__ == "__main__":
    main(train)
