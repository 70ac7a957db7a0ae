"""A whole network that is run layer by layer, each fetched from the shards when it runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from thinwire.common.tensors import named_tensors
from thinwire.errors import RunError
from thinwire.exchange.sharded import ShardedTensors
from thinwire.surgery.meta import with_tensors
from thinwire.surgery.standard import to_standard_modules

Factors = Mapping[str, float]  # what some tensors of the whole network are multiplied by


class StreamedModel(nn.Module):
    """The whole network, of which each rank holds one layer at a time.

    A layer's parameters are fetched from the shards when it is about to run and dropped afterwards. All ranks must run
    the model equally often. Buffers, which are small, are there all the time.
    """

    def __init__(self, model: nn.Module, sharded: ShardedTensors, factors: Factors) -> None:
        super().__init__()
        self.sharded, self.factors, self.standard_names = sharded, factors, _standard_names(model)
        buffers = [name for name, t in named_tensors(model).items() if not isinstance(t, nn.Parameter)]
        self.model = with_tensors(model, dict(sharded.gather(buffers)))
        known = {id(p): name for name, p in self.model.named_parameters()}
        self.names = {
            module: {key: known[id(p)] for key, p in module._parameters.items() if p is not None}
            for module in self.model.modules()
        }
        for module, names in self.names.items():
            self._drop(module)
            if names:
                module.register_forward_pre_hook(self._fetch)
                module.register_forward_hook(self._drop, always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _fetch(self, module: nn.Module, inputs: Any) -> None:
        names = self.names[module]
        with self.sharded.comm.ledger.purpose("eval"):
            tensors = dict(self.sharded.gather(dict.fromkeys(names.values())))
        for key, name in names.items():
            scaled = times_factor(tensors[name], self.factors.get(name))
            module._parameters[key] = nn.Parameter(scaled, requires_grad=False)

    def _drop(self, module: nn.Module, inputs: Any = None, output: Any = None) -> None:
        for key in self.names[module]:
            fetched = module._parameters[key]
            assert fetched is not None
            module._parameters[key] = _DroppedParameter(fetched.to("meta"), False)


class _DroppedParameter(nn.Parameter):
    """A parameter that has no values now. On the meta device torch would compute with whatever is in memory."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in ("__get__", "numel", "element_size", "dim", "size", "to", "detach", "__repr__"):
            raise RunError(
                "a weight is read by something else than its own layer, so this network cannot be run layer by layer; "
                "ist(whole_gb=…) says how large a network may be that is put together"
            )
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def times_factor(tensor: Tensor, factor: float | None) -> Tensor:
    """A tensor times its factor, if it has one."""
    return tensor if factor is None else tensor * factor


def _standard_names(model: nn.Module) -> dict[str, str]:
    """What tensors are called in the model as torch has it, without what surgery put in."""
    twin = copy.deepcopy(model)
    before = {id(t): name for name, t in named_tensors(twin).items()}
    return {before[id(t)]: name for name, t in named_tensors(to_standard_modules(twin)).items()}
