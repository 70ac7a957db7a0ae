"""Local parallelism: what is computed, by whom, and what crosses the wire."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thinwire as tw
from tests import training
from tests.training import Data, adamw, same, steps, weights
from tests.worlds import ProcessWorlds, World, on_threads
from thinwire.comm.base import Comm
from thinwire.common.seeding import seeded
from thinwire.data import derive_seed
from thinwire.errors import PeerLost, RunError, UsageError
from thinwire.strategies.local_parallel import LocalParallel
from thinwire.surgery.heads.base import HeadModule
from thinwire.surgery.heads.readout import Readout
from thinwire.tasks.models.gpt import gpt

LABEL_BYTES = 9 * 8  # before each tensor: fingerprint of the targets, type and shape


def deep_net(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise([6, 16, 16, 16]):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(16, 3))


def small_gpt(dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return gpt((5,), 11, width=8, depth=4, heads=2, dropout=dropout)


MODELS = {(kind, p): make(p) for kind, make in (("deep", deep_net), ("gpt", small_gpt)) for p in (0.0, 0.3)}


def batches(kind: str, num_steps: int, size: int = 12) -> Data:
    generator = torch.Generator().manual_seed(1)
    if kind == "gpt":
        texts = [torch.randint(0, 11, (size, 6), generator=generator) for _ in range(num_steps)]
        return [(text[:, :-1], text[:, 1:]) for text in texts]
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(num_steps)
    ]


def loss_of(out: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), targets.flatten())


def trainer(comm: Comm, spec: str, model: nn.Module, optimizer: Any = adamw, **options: Any) -> LocalParallel:
    made = training.trainer(comm, spec, model, optimizer, loss=loss_of, **options)
    assert isinstance(made, LocalParallel)
    return made


# ---- the one-process loop: for each batch, for each block


def in_one_process(exits: list[nn.Module], seed: int, data: Data, overlap: int, reduce: str, pieces: int) -> None:
    """Train the blocks of a model, all in this process. `exits` are the blocks up to each head, with that head.

    Losses' gradients go back through `overlap` blocks; a block's weights get those of its window, or the farthest.
    """
    blocks, heads = [exit[k] for k, exit in enumerate(exits)], [exit[-1] for exit in exits]
    num_blocks = len(blocks)
    optimizers = [
        adamw([p for p in [*b.parameters(), *h.parameters()] if p.requires_grad])
        for b, h in zip(blocks, heads, strict=True)
    ]
    copies: list[dict[str, Tensor]] = []
    for step, (inputs, targets) in enumerate(data):
        every = next((head.every for head in heads if isinstance(head, Readout)), 0)
        if every and step and step % every == 0:
            for head in heads:
                if isinstance(head, Readout) and copies:
                    head.last_segment.load_state_dict(copies[-1])
            copies.append(weights(blocks[-1][-1]))
        for piece, (x, y) in enumerate(zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True)):
            ins, outs, losses_at = [], [], [[] for _ in range(num_blocks)]
            for k, (block, head) in enumerate(zip(blocks, heads, strict=True)):
                torch.manual_seed(derive_seed(seed, k, 0, step, piece, 0))
                z = (outs[-1].detach() if k else x).clone()
                ins.append(z.requires_grad_() if k else z)
                outs.append(block(ins[-1].clone() if k else ins[-1]))
                judged = outs[-1].detach().requires_grad_()
                torch.manual_seed(derive_seed(seed, k, 0, step, piece, 1))
                loss = (head.loss(judged, y, loss_of) if isinstance(head, HeadModule) else loss_of(head(judged), y)) * (
                    len(x) / len(inputs)
                )
                trains = [
                    i
                    for i in range(num_blocks)
                    if (i <= k < i + overlap if reduce == "sum" else k == min(i + overlap, num_blocks) - 1)
                ]
                if not trains:
                    continue
                loss.backward()
                gradient = judged.grad
                for i in range(k, min(trains) - 1, -1):
                    if i in trains:
                        losses_at[i].append(gradient)
                    if i > min(trains):
                        (gradient,) = torch.autograd.grad(outs[i], ins[i], gradient, retain_graph=True)
            for out, gradients in zip(outs, losses_at, strict=True):
                out.backward(sum(gradients[1:], gradients[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def pipelined_and_not(
    comm: Comm, kind: str, dropout: float, spec: str, overlap: int, reduce: str, pieces: int, stop: int
) -> bool:
    """Train over ranks; on each of them also train all blocks in one process; are both the same?"""
    data = batches(kind, 7, size=13)  # which no number of pieces divides
    strategy = trainer(comm, spec, MODELS[kind, dropout])
    strategy.begin(data[0][0])
    parts = strategy.cut_model.gather(heads=True)
    blocks, heads = [], []
    for stage, tensors in zip(strategy.cut_model.stages, parts, strict=True):
        alone = copy.deepcopy(stage).to_empty(device="cpu")
        alone.load_state_dict(tensors)
        blocks.append(alone.block)
        heads.append(alone.head if alone.head is not None else nn.Identity())
    exits = [nn.Sequential(*blocks[: k + 1], heads[k]) for k in range(len(blocks))]
    strategy.begin_epoch(stop)  # so that messages are received ahead of need
    for batch in data[:stop]:
        strategy.step(batch)
    strategy.end_epoch()
    found = weights(strategy.consolidate())
    found_heads = [weights(exit) for exit in strategy.exits()]
    with seeded(torch.device("cpu"), 0):  # threads share one generator
        in_one_process(exits, strategy.seed, data[:stop], overlap, reduce, pieces)
    wanted = dict(zip(found, (t for block in blocks for t in block.state_dict().values()), strict=True))
    wanted_heads = [
        weights(exit) for exit, stage in zip(exits, strategy.cut_model.stages, strict=True) if stage.head is not None
    ]
    return same(found, wanted) and all(same(a, b) for a, b in zip(found_heads, wanted_heads, strict=True))


CASES = [
    ("deep", 2, "blocks=2", 1, "sum", 1),
    ("deep", 4, "head=linear", 1, "sum", 1),
    ("deep", 3, "head=predsim, microbatches=3, queue=1", 1, "sum", 3),
    ("deep", 4, "window=2", 2, "sum", 1),
    ("deep", 4, "window=3, microbatches=2", 3, "sum", 2),
    ("deep", 4, "window=2, losses=farthest, microbatches=3", 2, "farthest", 3),
    ("deep", 4, "window=3, losses=farthest", 3, "farthest", 1),
    ("gpt", 2, "blocks=2, head=readout(every=2)", 1, "sum", 1),
    ("gpt", 4, "head=readout(every=3), window=2", 2, "sum", 1),
    ("gpt", 4, "head=auglocal, microbatches=2", 1, "sum", 2),
]


@pytest.mark.parametrize(("kind", "ranks", "options", "overlap", "reduce", "pieces"), CASES)
def test_pipelined_over_processes_is_the_one_process_loop_bit_for_bit(
    process_world: ProcessWorlds, kind: str, ranks: int, options: str, overlap: int, reduce: str, pieces: int
) -> None:
    """With AdamW, BatchNorm or attention, and dropout."""
    spec = f"local_parallel({options})"
    assert all(process_world.run(pipelined_and_not, ranks, kind, 0.3, spec, overlap, reduce, pieces, 7))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "options", "overlap", "reduce", "pieces"), CASES)
def test_so_it_is_on_threads(kind: str, ranks: int, options: str, overlap: int, reduce: str, pieces: int) -> None:
    def run(comm: Comm) -> bool:
        return pipelined_and_not(comm, kind, 0.3, f"local_parallel({options})", overlap, reduce, pieces, 5)

    assert all(tw.simulate(run, ranks=ranks))


# ---- what it is equal to


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, 0.9, weight_decay=0.01)


def backprop(model: nn.Module, data: Data, optimizer: Any) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    stepper = optimizer(model.parameters())
    for x, y in data:
        stepper.zero_grad()
        loss_of(model(x), y).backward()
        stepper.step()
    return weights(model)


def trained(comm: Comm, spec: str, kind: str, optimizer: Any, num_steps: int = 6) -> dict[str, Tensor]:
    strategy = trainer(comm, spec, MODELS[kind, 0.0], optimizer)
    steps(strategy, batches(kind, num_steps))
    return weights(strategy.consolidate())


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("kind", ["deep", "gpt"])
def test_one_block_is_backpropagation_bit_for_bit(world: World, kind: str, optimizer: Any) -> None:
    wanted = backprop(MODELS[kind, 0.0], batches(kind, 6), optimizer)
    for found in world(trained, 1, "local_parallel", kind, optimizer):
        assert same(found, wanted)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize(("kind", "ranks"), [("deep", 4), ("gpt", 3)])
def test_the_farthest_loss_of_a_window_of_all_blocks_is_backpropagation_bit_for_bit(
    world: World, kind: str, ranks: int, optimizer: Any
) -> None:
    wanted = backprop(MODELS[kind, 0.0], batches(kind, 6), optimizer)
    for found in world(trained, ranks, f"local_parallel(window={ranks}, losses=farthest)", kind, optimizer):
        assert same(found, wanted)


def first_gradients(comm: Comm, spec: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[int]]:
    """How far each weight goes in the first step of plain gradient descent, and what blocks and heads began with."""
    strategy = trainer(comm, spec, MODELS["deep", 0.0], lambda p: torch.optim.SGD(p, 1.0))
    batch = batches("deep", 1)[0]
    strategy.begin(batch[0])
    before, parts = weights(strategy.consolidate()), strategy.cut_model.gather(heads=True)
    strategy.step(batch)
    after = weights(strategy.consolidate())
    return {name: before[name] - after[name] for name in before}, parts, strategy.starts


@pytest.mark.parametrize("reduce", ["sum", "farthest"])
@pytest.mark.parametrize("overlap", [1, 2, 3, 4])
def test_weights_get_the_losses_of_their_window_and_no_others(reduce: str, overlap: int) -> None:
    """Against torch's own derivative of those losses, computed over again from where each window begins."""
    spec = f"local_parallel(head=linear, window={overlap}, losses={reduce})"
    moved, parts, starts = tw.simulate(lambda comm: first_gradients(comm, spec), ranks=4)[0]
    net, (x, y) = copy.deepcopy(MODELS["deep", 0.0]), batches("deep", 1)[0]
    cuts = [0, 4, 8, 12, 13]
    assert starts == [0, 1, 2, 3]
    blocks = [net[a:b] for a, b in pairwise(cuts)]
    for k, block in enumerate(blocks):
        window = range(k, min(k + overlap, 4)) if reduce == "sum" else [min(k + overlap, 4) - 1]
        z = x
        for earlier in blocks[:k]:
            z = earlier(z).detach()
        total, z = torch.zeros(()), block(z)
        for j in range(k, 4):
            if j > k:
                z = blocks[j](z)
            if j in window:
                layers = {n.removeprefix("head.layers.0."): t for n, t in parts[j].items() if n.startswith("head.")}
                out = nn.functional.linear(z, layers["weight"], layers["bias"]) if j < 3 else z
                total = total + loss_of(out, y)
        gradients = torch.autograd.grad(total, list(block.parameters()))
        for (name, _), gradient in zip(block.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(moved[name], gradient, rtol=1e-4, atol=1e-6)


def test_replicas_of_blocks_are_blocks_with_larger_batches(world: World) -> None:
    """Without BatchNorm; with it, statistics are a replica's own."""
    alone = world(trained, 2, "local_parallel(blocks=2)", "gpt", sgd)[0]
    for found in world(trained, 4, "local_parallel(blocks=2)", "gpt", sgd):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


# ---- what crosses the wire


def sent(comm: Comm, spec: str) -> tuple[list[tuple[str, int, int]], int]:
    strategy = trainer(comm, spec, MODELS["deep", 0.0])
    for batch in batches("deep", 5, size=12):
        strategy.step(batch)
    strategy.end_epoch()
    rows = [row for row in comm.ledger.rows() if row["purpose"] == "train"]
    return [
        (row["op"], row["calls"], row["wire_bytes"]) for row in rows if row["wire_bytes"]
    ], strategy.layout.stage_index


@pytest.mark.parametrize(
    ("options", "z_bytes"),
    [("", 12 * 16 * 4), ("wire=bf16", 12 * 16 * 2), ("wire=int8", 260), ("microbatches=3", 12 * 16 * 4)],
)
def test_activations_go_forward_and_nothing_comes_back(world: World, options: str, z_bytes: int) -> None:
    pieces = 3 if "micro" in options else 1
    for rows, number in world(sent, 4, f"local_parallel({options})"):
        messages = 5 * pieces
        assert rows == ([("send", 2 * messages, 5 * z_bytes + LABEL_BYTES * messages)] if number < 3 else [])


@pytest.mark.parametrize(("overlap", "reduce"), [(2, "sum"), (3, "sum"), (2, "farthest"), (4, "farthest")])
def test_gradients_come_back_from_a_window_only(world: World, overlap: int, reduce: str) -> None:
    z = 12 * 16 * 4 + LABEL_BYTES
    for rows, number in world(sent, 4, f"local_parallel(window={overlap}, losses={reduce})"):
        losses = [
            j
            for j in range(number, min(number + overlap - 1, 4))
            if number and (reduce == "sum" or j >= overlap - 1 or j == 3)
        ]
        assert sum(row[2] for row in rows) == 5 * z * ((number < 3) + len(losses))


# ---- a slow stage, a dead one


def slowly(comm: Comm, queue: int) -> tuple[list[float], int]:
    """The third of four stages is slow. When does each stage begin a step; and how many messages wait at most?"""
    strategy = trainer(comm, f"local_parallel(queue={queue})", MODELS["deep", 0.0])
    begins, most = [], 0
    strategy.begin_epoch(20)
    for batch in batches("deep", 20):
        begins.append(time.monotonic())
        if comm.rank == 2:
            time.sleep(0.02)
        strategy.step(batch)
        if strategy.z_to_next is not None:
            most = max(most, len(strategy.z_to_next.under_way))
        if strategy.z_from_previous is not None:
            most = max(most, len(strategy.z_from_previous.coming))
    strategy.end_epoch()
    return begins, most


@pytest.mark.parametrize("queue", [1, 3])
def test_nobody_runs_further_ahead_of_a_slow_stage_than_the_queues_allow(world: World, queue: int) -> None:
    results = world(slowly, 4, queue)
    assert max(most for _, most in results) <= queue
    for ahead, behind in pairwise([begins for begins, _ in results]):
        for i in range(2 * queue + 2, 20):  # what both queues hold, and one in hand on either side
            assert ahead[i] > behind[i - 2 * queue - 2]


def one_dies(comm: Comm) -> str:
    strategy = trainer(comm, "local_parallel", MODELS["deep", 0.0])
    for i, batch in enumerate(batches("deep", 20)):
        if comm.rank == 2 and i == 3:
            raise MemoryError("no more")
        try:
            strategy.step(batch)
        except PeerLost as error:
            return str(error)
    return ""


def test_a_dead_stage_is_named_by_its_neighbours() -> None:
    found: dict[int, str] = {}

    def run(comm: Comm) -> None:
        found[comm.rank] = one_dies(comm)

    with pytest.raises(MemoryError):
        tw.simulate(run, ranks=4)
    assert "stage 3 of 4 does not answer" in found[1]
    assert "stage 3 of 4 does not answer" in found[3]
    assert found[0].startswith("stage 2 of 4 does not answer") or found[0] == ""


# ---- what is possible


@pytest.mark.parametrize(
    ("spec", "ranks", "message"),
    [
        ("local_parallel(blocks=5)", 5, r"5 blocks, but the model can be cut into 4, which begin at 0, 4, 8, 12; use"),
        ("local_parallel(blocks=3)", 4, r"4 ranks cannot share 3 blocks equally; try blocks=1 or 2 or 4, or 6 ranks"),
        ("local_parallel(blocks=4)", 2, r"2 ranks cannot share 4 blocks equally; try blocks=1 or 2, or 4 ranks"),
        ("local_parallel(blocks=3)", 1, r"1 rank cannot share 3 blocks equally; try blocks=1, or 3 ranks"),
        (
            "local_parallel(head=own('tests.user_task:one_argument'))",
            2,
            r"must be a function of \(z, output\): too many",
        ),
        ("local_parallel(cut=['4', '9'], blocks=2)", 3, r"2 cut\(s\) make 3 blocks; leave out blocks=2"),
        ("local_parallel(cut=['99'])", 2, r"can begin with layer '99'; possible: 1, 2, 3, 4"),
        (
            "local_parallel(cut=['4', '8'])",
            4,
            r"cannot share 3 blocks equally; try 0 or 1 or 3 cuts, or 6 ranks",
        ),
        ("local_parallel(cut=['4', '4'])", 3, r"name each layer that a block shall begin with once"),
        ("local_parallel(cut=[])", 3, r"name each layer that a block shall begin with once"),
        ("local_parallel(cut=['2', '4'])", 3, r"block 2, from layer 2 on, has nothing to train"),
        (
            "local_parallel(cut=flop)",
            2,
            r"cut='flop' is not possible: should be 'flops', 'time' or 'parameters', or a v",
        ),
        ("local_parallel(cut=['4', 8])", 2, r"cut\[1\]=8 is not possible: should be a valid string"),
        ("local_parallel(head=nonsense)", 2, r"unknown head 'nonsense'"),
        ("local_parallel(window=0)", 2, r"window=0 is not possible"),
        ("local_parallel(head=conv)", 2, r"head=conv is for the classification of images"),
        ("pipeline", 2, r"need processes"),
    ],
)
def test_what_is_not_possible_is_said(spec: str, ranks: int, message: str) -> None:
    def run(comm: Comm) -> None:
        trainer(comm, spec, MODELS["deep", 0.0]).step(batches("deep", 1)[0])

    with pytest.raises(UsageError, match=message):
        tw.simulate(run, ranks=ranks)


def test_tied_weights_are_not_cut_apart() -> None:
    model = copy.deepcopy(MODELS["gpt", 0.0])
    model[-1].weight = model[0].weight

    def run(comm: Comm) -> None:
        trainer(comm, "local_parallel", model).step(batches("gpt", 1)[0])

    with pytest.raises(
        UsageError, match=r"0.weight and 7.weight are one tensor, of which blocks 1 and 2 would train different copies"
    ):
        tw.simulate(run, ranks=2)
    assert tw.simulate(run, ranks=1) == [None]


def test_blocks_begin_at_names_or_where_costs_are_equal() -> None:
    def cut(spec: str) -> list[str]:
        def run(comm: Comm) -> list[str]:
            strategy = trainer(comm, spec, MODELS["deep", 0.0])
            strategy.step(batches("deep", 1)[0])
            return strategy.status()["blocks"]

        found = tw.simulate(run, ranks=2)
        assert found[0] == found[1]
        return found[0]

    assert cut("local_parallel(cut=['9'])") == ["0", "9"]
    assert cut("local_parallel(cut=parameters)") == ["0", "8"]
    assert cut("local_parallel") == ["0", "8"]
    assert cut("local_parallel(cut=time)")[0] == "0"


def test_a_block_that_makes_the_others_wait_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """One layer cannot be cut; and of the first, nobody needs the gradient at its input."""
    wide = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 90), nn.Linear(90, 90), nn.Linear(90, 3))

    def run(comm: Comm, spec: str) -> dict[str, Any]:
        strategy = trainer(comm, spec, wide)
        strategy.begin(batches("deep", 1)[0][0])
        return strategy.status()

    (found, *_) = tw.simulate(lambda comm: run(comm, "local_parallel(head=linear, blocks=3)"), ranks=3)
    assert found["blocks"] == ["0", "1", "2"], "of nearly equal cuts the one that passes on least"
    costs = [4 * 6 * 4 + 6 * 4 * 3, 4 * 4 * 90 + 6 * 90 * 3, 4 * 90 * 90 + 6 * 90 * 3]
    assert found["operation_shares"] == [round(cost / sum(costs), 3) for cost in costs]
    said = "note: local_parallel: block 3 of 3, from layer 2 on, has 91 % of the operations, its head's included"
    assert capsys.readouterr().err.count(said) == 1
    tw.simulate(lambda comm: run(comm, "local_parallel(cut=['1'], head=linear)"), ranks=2)
    assert "block 2 of 2, from layer 1 on, has 100 % of the operations" in capsys.readouterr().err
    for spec, ranks in (
        ("local_parallel", 1),
        ("local_parallel(cut=['3'], head=linear)", 2),
        ("local_parallel(cut=time)", 3),
    ):
        tw.simulate(lambda comm, spec=spec: run(comm, spec), ranks=ranks)
    assert "block 1 of 2" in (err := capsys.readouterr().err)
    assert err.count("operations") == 1


def test_replicas_add_nothing_to_what_a_sample_costs() -> None:
    def run(comm: Comm) -> dict[str, Any]:
        strategy = trainer(comm, "local_parallel(blocks=2, head=linear)", MODELS["deep", 0.0])
        strategy.begin(batches("deep", 1)[0][0])
        return strategy.status()

    assert tw.simulate(run, ranks=2)[0] == tw.simulate(run, ranks=6)[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.ones(1, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def test_a_model_whose_operations_are_not_counted_costs_nothing() -> None:
    net = nn.Sequential(Scaled(), Scaled())

    def run(comm: Comm) -> dict[str, Any]:
        strategy = trainer(comm, "local_parallel(cut=['1'], window=2, losses=farthest)", net)
        strategy.begin(batches("deep", 1)[0][0])
        return strategy.status()

    found = tw.simulate(run, ranks=2)[0]
    assert (found["operation_shares"], found["operations"][0]) == ([0.0, 0.0], 0.0)


def test_the_first_layers_input_needs_no_gradient_and_so_costs_less() -> None:
    equal = nn.Sequential(*(nn.Linear(12, 12) for _ in range(5)))  # 4 + 6 + 6 + 6 + 6: 16 and 12, not 12 and 18

    def run(comm: Comm) -> list[str]:
        strategy = trainer(comm, "local_parallel(head=linear)", equal)
        strategy.begin(torch.ones(2, 12))
        return strategy.status()["blocks"]

    assert tw.simulate(run, ranks=2)[0] == ["0", "3"]


def test_there_are_no_exits_before_there_are_blocks() -> None:
    def run(comm: Comm) -> int:
        strategy = trainer(comm, "local_parallel", MODELS["deep", 0.0])
        with pytest.raises(RunError, match=r"no blocks before the first step; trainer.begin\(inputs\) cuts the model"):
            strategy.exits()
        strategy.begin(batches("deep", 1)[0][0])
        return len(strategy.exits())

    assert tw.simulate(run, ranks=3) == [2, 2, 2]


def test_heads_follow_the_models_first_weights_and_the_seed() -> None:
    def heads(comm: Comm, model: nn.Module, seed: int) -> dict[str, Tensor]:
        strategy = trainer(comm, f"local_parallel(blocks=2, head=linear, seed={seed})", model)
        strategy.begin(batches("deep", 1)[0][0])
        return weights(strategy.exits()[0][-1])

    one, again, other_weights, other_seed = (
        tw.simulate(lambda comm, case=case: heads(comm, *case), ranks=2)[0]
        for case in ((deep_net(), 0), (deep_net(), 0), (deep_net(seed=1), 0), (deep_net(), 1))
    )
    assert same(one, again)
    assert not same(one, other_weights)
    assert not same(one, other_seed)


class Written(nn.Module):
    """Not a sequence, and with a weight that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(3))
        self.end = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out: Tensor = self.end(x)
        return out


def written_by_hand(comm: Comm) -> tuple[dict[str, Tensor], str, float]:
    torch.manual_seed(0)
    strategy = trainer(comm, "local_parallel(window=2, losses=farthest)", WRITTEN, sgd)
    for batch in batches("deep", 4):
        strategy.step(batch)
    whole = strategy.consolidate()
    return weights(whole), type(whole).__name__, strategy.costs.flops_per_sample


WRITTEN = training.seeded(1, Written)


def test_a_model_that_is_not_a_sequence_trains_and_comes_back_as_it_is_written(world: World) -> None:
    wanted = backprop(WRITTEN, batches("deep", 4), sgd)
    for found, kind, _ in world(written_by_hand, 2):
        assert kind == "Written"
        assert same(found, wanted)


def test_early_exits_are_the_blocks_so_far_with_their_head(world: World) -> None:
    for exits, whole, losses in world(exits_of, 3):
        assert len(exits) == 2
        assert [len(exit) for exit in exits] == [2, 3]
        x, y = batches("deep", 1)[0]
        assert torch.equal(exits[0][0](x), whole[:4](x))
        for exit, before in zip(exits, losses, strict=True):
            assert loss_of(exit(x), y).item() < before


def exits_of(comm: Comm) -> tuple[list[nn.Module], nn.Module, list[float]]:
    strategy = trainer(comm, "local_parallel", MODELS["deep", 0.0])
    x, y = batches("deep", 1)[0]
    strategy.begin(x)
    before = [loss_of(exit.eval()(x), y).item() for exit in strategy.exits()]
    for _ in range(30):
        strategy.step((x, y))
    return [exit.eval() for exit in strategy.exits()], strategy.consolidate().eval(), before


def test_operations_of_heads_are_counted(world: World) -> None:
    def run(comm: Comm, spec: str) -> tuple[float, float]:
        strategy = trainer(comm, spec, MODELS["deep", 0.0])
        strategy.begin(batches("deep", 1)[0][0])
        return strategy.costs.flops_per_sample, strategy.costs.backprop_flops_per_sample

    layers = [6 * 16, 16 * 16, 16 * 16, 16 * 3]
    backprop_flops = 2 * (2 * layers[0] + 3 * sum(layers[1:]))
    heads = 3 * 2 * 3 * (16 * 3)
    found = tw.simulate(lambda comm: run(comm, "local_parallel(head=linear)"), ranks=4)[0]
    assert found == (2 * 2 * sum(layers) + heads, backprop_flops)
    twice = tw.simulate(lambda comm: run(comm, "local_parallel(head=linear, window=2)"), ranks=4)[0]
    assert twice[0] == 2 * (2 * sum(layers) + sum(layers[1:])) + heads
    farthest = tw.simulate(lambda comm: run(comm, "local_parallel(window=4, losses=farthest)"), ranks=4)[0]
    assert farthest == (backprop_flops, backprop_flops)


# ---- what reviewers found


def in_place_net() -> nn.Sequential:
    return nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True),
        nn.Linear(8, 3),
    )  # fmt: skip


IN_PLACE = training.seeded(0, in_place_net)


@pytest.mark.parametrize("options", ["cut=['2', '4']", "cut=['2', '4'], window=2", "cut=['2', '4'], head=auglocal"])
def test_blocks_and_heads_may_begin_in_place(options: str) -> None:
    def run(comm: Comm) -> Tensor:
        strategy = trainer(comm, f"local_parallel({options})", IN_PLACE, sgd)
        batch = batches("deep", 1)[0]
        strategy.step((batch[0].clone(), batch[1]))
        return strategy.step((batch[0].clone(), batch[1]))

    assert all(torch.isfinite(loss) for loss in tw.simulate(run, ranks=3))


def test_looking_at_the_first_batch_does_not_change_it() -> None:
    wanted = backprop(IN_PLACE, [(x.clone(), y) for x, y in batches("deep", 3)], sgd)

    def run(comm: Comm) -> dict[str, Tensor]:
        strategy = trainer(comm, "local_parallel", IN_PLACE, sgd)
        for x, y in batches("deep", 3):
            strategy.step((x.clone(), y))
        return weights(strategy.consolidate())

    assert same(tw.simulate(run, ranks=1)[0], wanted)


def left_early(comm: Comm, spec: str) -> list[dict[str, Tensor]]:
    """Epochs that end before their time, twice; then one that does not."""
    found = []
    for promised in (6, 20):
        strategy = trainer(comm, spec, MODELS["deep", 0.0])
        for num_steps in (3, 1, 6):
            strategy.begin_epoch(promised)
            for batch in batches("deep", num_steps):
                strategy.step(batch)
            strategy.end_epoch()
        assert strategy.z_from_previous is None or not strategy.z_from_previous.coming
        assert not strategy.gradients_to_previous.under_way
        found.append(weights(strategy.consolidate()))
    return found


@pytest.mark.parametrize("options", ["", "window=2", "microbatches=3, queue=3"])
def test_an_epoch_may_be_left_early(world: World, options: str) -> None:
    for one, other in world(left_early, 3, f"local_parallel({options})"):
        assert same(one, other)


def stopped(comm: Comm) -> bool:
    """Go on with dropout, in a trainer that began from other weights, with a copy of the last layer under way."""
    spec, data = "local_parallel(head=readout(every=2))", batches("gpt", 9)
    straight, other = trainer(comm, spec, MODELS["gpt", 0.3]), trainer(comm, spec, small_gpt(0.3, seed=5))
    for batch in data[:5]:
        straight.step(batch)
    state = copy.deepcopy(straight.state_dict())
    for batch in data[:3]:
        other.step(batch)
    other.load_state_dict(state)
    for batch in data[5:]:
        straight.step(batch)
        other.step(batch)
    return same(weights(straight.consolidate()), weights(other.consolidate()))


def test_a_run_with_dropout_goes_on_exactly(process_world: ProcessWorlds) -> None:
    assert all(process_world.run(stopped, 3))


def on_the_same_batch(comm: Comm, dropout: float) -> dict[str, Tensor]:
    strategy = trainer(comm, "local_parallel(blocks=1)", MODELS["gpt", dropout], sgd)
    strategy.step(batches("gpt", 1)[0])
    return weights(strategy.consolidate())


@pytest.mark.slow
def test_replicas_drop_different_units() -> None:
    for dropout, alike in ((0.0, True), (0.3, False)):
        one, two = (on_threads(on_the_same_batch, n, dropout)[0] for n in (1, 2))
        assert all(torch.allclose(one[n], two[n], atol=1e-6) for n in one) is alike


def statistics(comm: Comm) -> tuple[Tensor, Tensor]:
    strategy = trainer(comm, "local_parallel(blocks=2)", MODELS["deep", 0.0])
    x, y = batches("deep", 1)[0]
    strategy.step((x[strategy.layout.replica :: 2], y[strategy.layout.replica :: 2]))
    return strategy.consolidate()[1].running_mean, strategy.stage.block[0][1].running_mean


def test_statistics_of_replicas_are_averaged() -> None:
    results = tw.simulate(statistics, ranks=4)
    (whole, first), (_, second), *_ = results
    assert not torch.equal(first, second)
    torch.testing.assert_close(whole, (first + second) / 2)


def held(comm: Comm) -> tuple[int, int]:
    """How many of the given tensors are still alive, and how many this rank's block has."""
    model = copy.deepcopy(MODELS["deep", 0.0])
    given = [weakref.ref(p) for p in model.parameters()]
    strategy = tw.prepare("local_parallel", model=model, optimizer=sgd, loss=loss_of, comm=comm)
    del model
    strategy.step(batches("deep", 1)[0])
    strategy.end_epoch()
    gc.collect()
    return sum(ref() is not None for ref in given), sum(1 for _ in strategy.model.parameters())


def test_a_rank_keeps_its_own_block_only(process_world: ProcessWorlds) -> None:
    for alive, own in process_world.run(held, 4):
        assert alive == 0
        assert own in (2, 4 + 2)


def test_activations_under_autocast_travel_as_they_are() -> None:
    batch = (torch.randn(4, 1, 6, 6), torch.randint(0, 3, (4,)))

    def plain(comm: Comm) -> int:
        strategy = trainer(comm, "local_parallel(cut=['3'])", CONVOLUTIONS, autocast=True)
        strategy.step(batch)
        strategy.end_epoch()
        return sum(row["wire_bytes"] for row in comm.ledger.rows() if row["op"] == "send")

    assert tw.simulate(plain, ranks=2) == [LABEL_BYTES + 4 * 5 * 6 * 6 * 2, 0]


CONVOLUTIONS = nn.Sequential(
    nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 5, 3, padding=1),
    nn.Conv2d(5, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
)  # fmt: skip
