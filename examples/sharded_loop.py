"""A plain FSDP2 loop: shards inside each node, and thinwire between nodes. The lines with `tw` are all that it adds.

torchrun --nproc-per-node 4 examples/sharded_loop.py --nodes 2 --reducer "error_feedback(maxnorm(bits=4))"
torchrun --nproc-per-node 4 examples/sharded_loop.py --nodes 2 --rounds "diloco(every=4)"

On real machines, start one torchrun on each; --nodes is then the number of machines.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw

CONTEXT, VOCABULARY = 32, 64


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def make_model(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block(width) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY))


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sequences that count up in steps of one to three: what comes next can be learned."""
    first = torch.randint(VOCABULARY, (16, 1), generator=generator)
    step = torch.randint(1, 4, (16, 1), generator=generator)
    text = (first + step * torch.arange(CONTEXT + 1)) % VOCABULARY
    return text[:, :-1], text[:, 1:]


def train(nodes: int, steps: int, reducer: str, rounds_spec: str, width: int = 48) -> tuple[list[float], bool, int]:
    """Returns this rank's losses, whether all ranks have ended with the same weights, and the bytes between nodes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (nodes, ranks // nodes), mesh_dim_names=("nodes", "shards"))
    model = make_model(width)
    for block in model:
        fully_shard(block, mesh=mesh["shards"])
    fully_shard(model, mesh=mesh["shards"])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    rounds = tw.rounds(model, rounds_spec) if rounds_spec else None
    exchange = rounds or tw.attach(model, reducer)

    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(steps):
        inputs, targets = batch(generator)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rounds:
            rounds.after_step()
        losses.append(loss.item())
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.3f}", flush=True)
    if rounds:
        rounds.together()

    weights = torch.cat([p.full_tensor().flatten() for p in model.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(ranks)]
    dist.all_gather(everywhere, weights)
    sent = torch.tensor(sum(row["wire_bytes"] for row in exchange.ledger.rows() if row["purpose"] == "train"))
    dist.all_reduce(sent)
    exchange.close()
    return losses, all(torch.equal(weights, other) for other in everywhere), int(sent)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--reducer", default="mean")
    parser.add_argument("--rounds", default="")
    parser.add_argument("--width", type=int, default=48)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    _, are_equal, sent = train(args.nodes, args.steps, args.reducer, args.rounds, args.width)
    if dist.get_rank() == 0:
        print(f"ranks are {'equal' if are_equal else 'NOT equal'}; {sent:,} bytes between nodes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
