"""attach: an ordinary DDP loop with another exchange."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from tests.training import DEEP, PLAIN, batches, same, sgd, weights
from tests.worlds import ProcessWorlds
from thinwire.comm.base import Comm

loss = nn.functional.cross_entropy


def split(comm: Comm, num_steps: int) -> list[tuple[Tensor, Tensor]]:
    return [(x[comm.rank :: comm.size], y[comm.rank :: comm.size]) for x, y in batches(num_steps, 24)]


def loop(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in data:
        optimizer.zero_grad()
        loss(ddp(x), y).backward()
        optimizer.step()


def attached_and_prepared(comm: Comm, spec: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int, int]:
    ddp = DistributedDataParallel(copy.deepcopy(DEEP))
    attached = tw.attach(ddp, spec, bucket_mb=0.02)
    loop(ddp, sgd(ddp.parameters()), split(comm, 8))
    ours = tw.prepare(
        f"data_parallel(reducer={spec}, bucket_mb=0.02)", model=copy.deepcopy(DEEP), optimizer=sgd, loss=loss, comm=comm
    )
    for batch in split(comm, 8):
        ours.step(batch)
    sent = sum(row["wire_bytes"] for row in comm.ledger.rows() if row["purpose"] == "train")
    attached_sent = attached.ledger.wire_bytes
    attached.close()
    return weights(ddp.module), weights(ours.consolidate()), attached_sent, sent


@pytest.mark.parametrize("spec", ["mean", "error_feedback(maxnorm(bits=4))", "powersgd(rank=2)"])
def test_an_attached_ddp_trains_as_data_parallel_does(process_world: ProcessWorlds, spec: str) -> None:
    for theirs, ours, theirs_sent, ours_sent in process_world.run(attached_and_prepared, 4, spec):
        assert same(theirs, ours)
        assert theirs_sent == ours_sent


def compiled(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Not compiled, the DDP compiled, the model in it compiled: with backends that compute as torch does."""
    results = []
    for compiled_ddp, compiled_net in ((False, False), (True, False), (False, True)):
        net = copy.deepcopy(PLAIN)
        ddp: Any = DistributedDataParallel(torch.compile(net, backend="eager") if compiled_net else net)
        ddp = torch.compile(ddp, backend="aot_eager") if compiled_ddp else ddp
        attached = tw.attach(ddp, "error_feedback(maxnorm(bits=4))", bucket_mb=0.002)
        loop(ddp, sgd(ddp.parameters()), split(comm, 3))
        assert attached.ledger.wire_bytes > 0
        attached.close()
        results.append(weights(net))
    return results[0], results[1], results[2]


def test_a_compiled_ddp_trains_as_one_that_is_not(process_world: ProcessWorlds) -> None:
    for eager, outside, inside in process_world.run(compiled, 2):
        assert not same(eager, weights(PLAIN)), "it was trained"
        assert same(eager, outside)
        assert same(eager, inside)


def resumed(comm: Comm, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    data = split(comm, 8)
    spec = "error_feedback(global_randk(ratio=0.1))"
    results = []
    for cut in (8, 3):
        ddp = DistributedDataParallel(copy.deepcopy(DEEP))
        optimizer, attached = sgd(ddp.parameters()), tw.attach(ddp, spec, bucket_mb=0.02)
        loop(ddp, optimizer, data[:cut])
        if cut < 8:
            file = Path(path) / f"{comm.rank}.pt"
            state = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "exchange": attached.state_dict(),
            }
            torch.save(state, file)
            attached.close()
            state = torch.load(file, weights_only=True)
            ddp = DistributedDataParallel(copy.deepcopy(DEEP))
            optimizer, attached = sgd(ddp.parameters()), tw.attach(ddp, spec, bucket_mb=0.02)
            ddp.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            attached.load_state_dict(state["exchange"])
            loop(ddp, optimizer, data[cut:])
        attached.close()
        results.append(weights(ddp.module))
    return results[0], results[1]


def test_its_state_makes_a_resumed_loop_exact(process_world: ProcessWorlds, tmp_path: Path) -> None:
    for straight, after in process_world.run(resumed, 4, str(tmp_path)):
        assert same(straight, after)


def no_sync_and_dropped(comm: Comm) -> tuple[bool, bool]:
    """Without keeping what attach returns; two batches in no_sync and one without are one batch of all three."""
    data = split(comm, 6)
    outs = []
    for pieces in (1, 3):
        ddp = DistributedDataParallel(copy.deepcopy(PLAIN))
        tw.attach(ddp, "mean")
        gc.collect()
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for i in range(0, 6, 3):
            optimizer.zero_grad()
            if pieces == 1:
                x, y = (torch.cat(t) for t in zip(*data[i : i + 3], strict=True))
                loss(ddp(x), y).backward()
            else:
                with ddp.no_sync():
                    for x, y in data[i : i + 2]:
                        (loss(ddp(x), y) / 3).backward()
                (loss(ddp(data[i + 2][0]), data[i + 2][1]) / 3).backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            optimizer.step()
        ddp._thinwire.close()
        outs.append(weights(ddp.module))
    close = all(torch.allclose(outs[0][k], outs[1][k], rtol=1e-4, atol=1e-6) for k in outs[0])
    return close, not same(outs[0], weights(PLAIN))


def test_no_sync_and_clipping_work_as_before(process_world: ProcessWorlds) -> None:
    assert process_world.run(no_sync_and_dropped, 4) == [(True, True)] * 4


def with_scaler(comm: Comm, tell: bool) -> tuple[bool, list[float], dict[str, Tensor], float]:
    """A step overflows, is skipped, and the scale is halved; then training goes on."""
    ddp = DistributedDataParallel(copy.deepcopy(PLAIN))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    attached = tw.attach(ddp, "error_feedback(maxnorm(bits=4))", scaler=scaler if tell else None)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    scales, residual = [], 0.0
    for i, (x, y) in enumerate(split(comm, 8)):
        before = weights(ddp.module)
        optimizer.zero_grad()
        value = loss(ddp(x), y)
        scaler.scale(value * float("inf") if i == 2 and comm.rank == 0 else value).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        if i == 2:
            assert same(before, weights(ddp.module)), "skipped on every rank"
    state = attached.state_dict()["reducer"][0]
    residual = max(t.abs().max().item() for name, t in state.items() if name.startswith("residual"))
    attached.close()
    finite = all(t.isfinite().all() for t in weights(ddp.module).values()) and residual < float("inf")
    return bool(finite), scales, weights(ddp.module), residual


def test_steps_that_a_scaler_skips_leave_no_trace(process_world: ProcessWorlds) -> None:
    results: list[Any] = process_world.run(with_scaler, 4, True)
    assert all(finite for finite, *_ in results)
    assert results[0][1] == [1024, 1024, 512, 512, 512, 1024, 1024, 1024]
    assert same(results[0][2], results[1][2])
    assert results[0][3] < 1, "residuals are in units of the gradient, not of the scaled one"
    assert process_world.run(with_scaler, 4, False)[0][3] > 1


def scaled_or_not(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """With a scale that is a power of two and never overflows, every number is the same."""
    results = []
    for init_scale in (None, 1024.0):
        ddp = DistributedDataParallel(copy.deepcopy(DEEP))
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale or 1.0, enabled=init_scale is not None)
        attached = tw.attach(ddp, "error_feedback(maxnorm(bits=4))", bucket_mb=0.02, scaler=scaler)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        for x, y in split(comm, 5):
            optimizer.zero_grad()
            scaler.scale(loss(ddp(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
        attached.close()
        results.append(weights(ddp.module))
    return results[0], results[1]


def test_a_loss_scale_changes_nothing(process_world: ProcessWorlds) -> None:
    for plain, scaled in process_world.run(scaled_or_not, 4):
        assert same(plain, scaled)


class Overflow(torch.autograd.Function):
    """Passes on, but gradients become infinite on the way back when asked."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sick: bool) -> Tensor:
        ctx.sick = sick
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (float("inf") if ctx.sick else 1.0), None


class Sick(nn.Module):
    """Three layers; only the first gets an infinite gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy([PLAIN[0], PLAIN[2], PLAIN[4]]))
        self.sick = False

    def forward(self, x: Tensor) -> Tensor:
        first = Overflow.apply(self.layers[0](x), self.sick)  # type: ignore[no-untyped-call]
        out: Tensor = self.layers[2](self.layers[1](first).tanh())
        return out


def partly_sick(comm: Comm) -> tuple[int, bool, bool]:
    ddp = DistributedDataParallel(Sick())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    attached = tw.attach(ddp, "error_feedback(maxnorm(bits=2))", bucket_mb=0.001, scaler=scaler)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    unchanged = skipped = False
    for i, (x, y) in enumerate(split(comm, 4)):
        before, states = weights(ddp.module), copy.deepcopy(attached.state_dict()["reducer"])
        ddp.module.sick = i == 2 and comm.rank == 0
        optimizer.zero_grad()
        scaler.scale(loss(ddp(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
        if i == 2:
            skipped = same(before, weights(ddp.module))
            unchanged = all(same(a, b) for a, b in zip(states, attached.state_dict()["reducer"], strict=True))
    attached.close()
    return len(states), skipped, unchanged


def test_a_skipped_step_changes_no_buckets_residual(process_world: ProcessWorlds) -> None:
    """Also not of those buckets whose own result was finite."""
    for num_buckets, skipped, unchanged in process_world.run(partly_sick, 4):
        assert num_buckets > 1
        assert skipped
        assert unchanged


def closed_and_copied(comm: Comm) -> tuple[str, str]:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    attached = tw.attach(ddp, "maxnorm")
    assert copy.deepcopy(attached) is None, "a copy of the DDP has no exchange"
    state = attached.state_dict()
    with pytest.raises(tw.UsageError) as caught:
        attached.load_state_dict({**state, "reducer spec": "sign"})
    with pytest.raises(tw.UsageError, match="of rank 7 of 8"):
        attached.load_state_dict({**state, "rank": "7 of 8"})
    with pytest.raises(tw.UsageError, match="of reducer spec None"):
        attached.load_state_dict({})
    attached.close()
    attached.close()
    with pytest.raises(RuntimeError) as after:
        ddp(torch.ones(1, 3)).sum().backward()
    return str(after.value), str(caught.value)


def test_a_closed_exchange_says_so_and_states_of_others_are_refused(process_world: ProcessWorlds) -> None:
    for after, other in process_world.run(closed_and_copied, 4):
        assert "was closed" in after
        assert "the state is of reducer spec sign, and this is reducer spec maxnorm" in other


def mistakes(comm: Comm) -> list[str]:
    found = []
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    for wrong, spec, options in (
        (nn.Linear(3, 2), "mean", {}),
        (ddp, "maxnorm(bits=3)", {}),
        (ddp, "mean", {"bucket_mb": float("nan")}),
        (ddp, None, {}),
        (ddp, "data_parallel", {}),
        (ddp, "local_sgd(every=4)", {}),
        (ddp, "data_parallel(reducer=maxnorm(bits=4))", {}),
    ):
        with pytest.raises(tw.UsageError) as caught:
            tw.attach(wrong, spec, **options)
        found.append(str(caught.value))
    attached = tw.attach(ddp, "mean")
    hooked = DistributedDataParallel(nn.Linear(3, 2))
    hooked._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    for again in (ddp, hooked):
        with pytest.raises(tw.UsageError) as caught:
            tw.attach(again, "mean")
        found.append(str(caught.value))
    attached.close()
    return found


def test_mistakes_are_explained(process_world: ProcessWorlds) -> None:
    for found in process_world.run(mistakes, 4):
        expected = [
            "wrap the model in Distributed",
            "should be 2, 4 or 8",
            "more than 0",
            "is not a spec",
            "is a strategy, not a reducer",
            'trainer = tw.prepare("local_sgd(every=4)", model=',
            'Try tw.attach(ddp, "maxnorm(bits=4)"). Without DDP',
            "has, or had, an exchange",
            "hook",
        ]
        assert all(part in message for part, message in zip(expected, found, strict=True)), found


SCRIPT = """
import torch, torch.distributed as dist, thinwire as tw
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
tw.attach(ddp, "maxnorm")
ddp(torch.ones(3, 4)).sum().backward()
{end}
print(ddp.module.bias.grad.tolist())
"""


@pytest.mark.parametrize("end", ["", "dist.destroy_process_group()"])
def test_a_script_that_closes_nothing_ends_well(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(end=end)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "3.0" in done.stdout
