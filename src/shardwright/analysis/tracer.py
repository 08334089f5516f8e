"""What a trace must show beside calls of layers: weights that code reads itself, writes, and where gradients end."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

NO_GRADIENT = "no_gradient"
"""In the ``meta`` of a trace's node: the code makes this call under ``torch.no_grad``."""


class _Proxy(fx.Proxy):
    """A value of a trace; unlike torch's own it may be written into."""

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})


class Tracer(fx.proxy.GraphAppendingTracer):
    """Notes with each call whether gradients are wanted there.

    Raises: RuntimeError: a call under ``torch.autocast``, which a trace does not show.
    """

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the result of ``node`` while the code runs."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **named: Any) -> fx.Node:
        """A node, with what its call depends on."""
        if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
            raise RuntimeError("a part of the code runs in another precision")
        node = super().create_node(*args, **named)
        node.meta[NO_GRADIENT] = not torch.is_grad_enabled()
        return node


ATTRIBUTES = "attributes"
"""In the ``meta`` of a trace's output: the modules' own values that the code read, each by path and name."""


class AttributeReads:
    """Which plain attributes of a model's modules its code reads, as they were before it ran.

    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> reads = AttributeReads(model)
    >>> model[0].out_features, reads.found, reads.has_changed()
    (3, {('0', 'out_features'): None}, False)
    """

    def __init__(self, model: nn.Module) -> None:
        """Watches ``model``, which is a copy for this alone."""
        self.found: dict[tuple[str, str], None] = {}
        self._modules = dict(model.named_modules())
        self._before = {path: dict(vars(module)) for path, module in self._modules.items()}
        for path, module in self._modules.items():
            with suppress(TypeError):  # a class that cannot be taken the place of
                module.__class__ = self._watched(type(module), path)

    def _watched(self, kind: type[nn.Module], path: str) -> type[nn.Module]:
        found, before = self.found, self._before[path]

        def look(module: nn.Module, name: str) -> Any:
            value = kind.__getattribute__(module, name)
            own = name in before and before[name] is value
            if own and not name.startswith("_") and name not in ("forward", "training"):
                found[path, name] = None
            return value

        return type(kind.__name__, (kind,), {"__getattribute__": look, "__module__": kind.__module__})

    def has_changed(self) -> bool:
        """Whether the code has set what it had read before: the next step would read something else."""
        return any(vars(self._modules[path]).get(name) is not self._before[path][name] for path, name in self.found)


class ShowsReads(TorchFunctionMode):
    """While it is on, a function of ``weights`` that gives tensors becomes a node; a shape or a dtype stays a value.

    >>> tracer = Tracer(fx.Graph())
    >>> weight = torch.ones(2, 3)
    >>> with ShowsReads(tracer, [weight]):
    ...     weight.shape[0], isinstance(weight.sum(), fx.Proxy)
    (2, True)
    """

    def __init__(self, tracer: fx.proxy.TracerBase, weights: Collection[Tensor]) -> None:
        super().__init__()
        self._tracer = tracer
        self._ids = {id(weight) for weight in weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = tree_flatten((args, named))[0]
        if any(isinstance(each, fx.Proxy) for each in given) or not any(id(each) in self._ids for each in given):
            return func(*args, **named)  # a proxy makes the node itself
        if any(isinstance(each, slice) and _is_traced(each) for each in given):
            return self._tracer.create_proxy("call_function", func, args, named)
        shapes_only = func(*tree_map(_without_values, args), **tree_map(_without_values, named))
        if not any(isinstance(each, Tensor) for each in tree_flatten(shapes_only)[0]):
            return func(*args, **named)
        return self._tracer.create_proxy("call_function", func, args, named)


def _is_traced(place: slice) -> bool:
    """Whether only a run of the code knows where a slice begins or ends."""
    return any(isinstance(each, fx.Proxy) for each in (place.start, place.stop, place.step))


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def line_of(failure: Exception) -> str:
    """The last line that ran of a model's own code, as the end of a message; nothing where none did."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    theirs = [each for each in traceback.extract_tb(failure.__traceback__) if not each.filename.startswith(ours)]
    return f"; here {Path(theirs[-1].filename).name}:{theirs[-1].lineno}: {theirs[-1].line}" if theirs else ""
