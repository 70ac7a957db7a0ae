"""Run by torchrun on netlab hosts: the sharded loop of examples/ with two reducers. FOLDER/RANK.json has results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.sharded_loop import train
from thinwire.netlab import sent_bytes

REDUCERS = ("mean", "error_feedback(maxnorm(bits=4))")
STEPS = 100
FEW, MANY, WIDTH = 2, 8, 256  # steps of two runs of a larger model: their difference has neither start nor end


def bytes_of_steps(reducer: str) -> dict[str, int]:
    """Between hosts, as the Linux kernel counts on this one, and as the ledgers of all ranks have it."""
    kernel, ledger = [], []
    for steps in (FEW, MANY):
        dist.barrier()
        before = sent_bytes()["between"]
        dist.barrier()
        ledger.append(train(2, steps, reducer, "", WIDTH)[2])
        dist.barrier()
        kernel.append(sent_bytes()["between"] - before)
    return {"kernel": kernel[1] - kernel[0], "ledger": ledger[1] - ledger[0]}


def main(folder: Path) -> None:
    """The last losses, whether ranks are equal, and bytes, of each reducer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for reducer in REDUCERS:
        losses, are_equal, _ = train(2, STEPS, reducer, "")
        last = torch.tensor(losses[-10:]).mean()
        dist.all_reduce(last)
        about = {"first": losses[0], "last": last.item() / dist.get_world_size(), "equal": are_equal}
        found[reducer] = about | bytes_of_steps(reducer)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
