"""What a plain model's forward does, seen while it runs on the meta device: every call, and the shapes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.analysis.attention_calls import AttentionCall, attention_call, leads_to
from shardwright.analysis.meta_device import on_meta


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: the shapes of its first input and of its output, and whether gradients flow back.

    ``num_forwards`` is 2 where the backward computes it again.
    """

    x_shape: tuple[int, ...]
    y_shape: tuple[int, ...]
    element_bytes: int
    needs_gradient: bool
    call: AttentionCall | None = field(default=None, repr=False)
    num_forwards: int = field(default=1, repr=False)


ModuleCalls = Mapping[str, tuple[ModuleCall, ...]]
"""By module name, the calls of one forward."""


def record_module_calls(model: nn.Module, inputs: Any) -> ModuleCalls:
    """Every module's calls in one forward of the plain model; runs on the meta device, so nothing is computed.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 2)).to("meta")
    >>> module_calls = record_module_calls(model, torch.empty(5, 2, device="meta"))
    >>> module_calls["1"]
    (Visit(x_shape=(5, 8), y_shape=(5, 2), element_bytes=4, needs_gradient=True),)
    """
    seen: dict[str, list[ModuleCall]] = {}
    weights: list[tuple[str, int, Tensor]] = []

    def note(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            if isinstance(module, nn.MultiheadAttention):  # it gives a pair, and does not call its own layer
                call = attention_call(module, *args, **named)
                shape, learns = call.shape(module.embed_dim), output[0].requires_grad
                if output[1] is not None:
                    weights.append((path, len(seen.get(path, ())), output[1]))
                seen.setdefault(path, []).append(ModuleCall(shape, shape, output[0].element_size(), learns, call))
                inner = ModuleCall(shape, shape, output[0].element_size(), learns)
                seen.setdefault(f"{path}.out_proj".lstrip("."), []).append(inner)
                return
            x = next((a for a in (*args, *named.values()) if isinstance(a, Tensor)), None)
            y = output if isinstance(output, Tensor) else None
            if x is not None and y is not None:
                visit = ModuleCall(tuple(x.shape), tuple(y.shape), y.element_size(), x.requires_grad)
                seen.setdefault(path, []).append(visit)

        return hook

    handles = [module.register_forward_hook(note(path), with_kwargs=True) for path, module in model.named_modules()]
    try:
        with torch.enable_grad(), on_meta(model):
            result = call_model(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    for path, number, each in weights:
        visit, used = seen[path][number], leads_to(each, result)
        assert visit.call is not None, "an attention was called"
        seen[path][number] = replace(visit, call=visit.call._replace(weights_learn=used))
    return {path: tuple(module_calls) for path, module_calls in seen.items()}


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Runs a model on a batch's inputs: one value, a tuple of arguments, or a dict of named ones.

    >>> call_model(nn.Identity(), (torch.ones(1),))
    tensor([1.])
    """
    args, named = given_to(inputs)
    return model(*args, **named)


def given_to(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch's inputs as a model is given them: in order, and by name.

    >>> given_to(1), given_to([1, 2]), given_to({"x": 3})
    (((1,), {}), ((1, 2), {}), ((), {'x': 3}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}
