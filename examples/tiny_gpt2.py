"""What the examples for frameworks train: a small GPT-2 on the bytes of a made-up text. Nothing is downloaded."""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 48
ARTICLES, ADJECTIVES = ("a", "the", "every", "my"), ("small", "old", "red", "quiet")
NOUNS, VERBS = ("dog", "house", "river", "friend"), ("sees", "likes", "follows", "hears")


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=CONTEXT, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def pieces(count: int = 960) -> list[dict[str, Tensor]]:
    """Pieces of a text of simple sentences."""
    choose = random.Random(0).choice
    kinds = (ARTICLES, ADJECTIVES, NOUNS, VERBS, ARTICLES, ADJECTIVES, NOUNS)
    text = "".join(" ".join(choose(words) for words in kinds) + ". " for _ in range(2 * count))
    codes = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return [{"input_ids": piece, "labels": piece} for piece in codes[: count * CONTEXT].view(-1, CONTEXT)]


def outcome(losses: list[float], model: nn.Module, exchange: Any) -> dict[str, Any]:
    """This rank's losses, whether all ranks have the same weights, and the bytes that this rank sent. Collective."""
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everywhere = [weights]
    if dist.is_initialized():  # else it is a single process
        everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, weights)
    sent = sum(row["wire_bytes"] for row in exchange.ledger.rows() if row["purpose"] == "train")
    return {
        "losses": losses,
        "ranks are equal": all(torch.equal(weights, other) for other in everywhere),
        "bytes": sent,
        "bytes of one gradient": 4 * weights.numel(),
    }


def show(found: dict[str, Any]) -> None:
    first, last = found["losses"][0], found["losses"][-1]
    equal = "equal" if found["ranks are equal"] else "NOT equal"
    print(f"loss {first:.3f} to {last:.3f}; ranks are {equal}; each sent {found['bytes']:,} bytes", flush=True)


def main(train: Callable[[str, bool], dict[str, Any]]) -> None:
    """Train with the spec of the command line, as a reducer or in rounds; rank 0 shows what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("spec")
    parser.add_argument("--rounds", action="store_true")
    args = parser.parse_args()
    found = train(args.spec, args.rounds)
    if not dist.is_initialized() or dist.get_rank() == 0:
        show(found)
    if dist.is_initialized():
        dist.destroy_process_group()
