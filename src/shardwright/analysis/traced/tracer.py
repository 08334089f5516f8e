"""The fx tracer that ``structure.trace`` uses, which also records weight reads, in-place writes and ``no_grad``."""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from shardwright import devices

NO_GRADIENT = "no_gradient"
"""A key of a node's ``meta``: whether the code makes this call under ``torch.no_grad``."""


class _Proxy(fx.Proxy):
    """An fx proxy that supports ``x[place] = value``, which becomes a node of the graph."""

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})


class Tracer(fx.proxy.GraphAppendingTracer):
    """An fx tracer whose nodes say in their ``meta`` whether the call was made under ``no_grad``.

    Raises: RuntimeError: a call is made under ``torch.autocast``, or inside an autograd function of the user's own; a
        graph cannot show these.
    """

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Returns an fx proxy for the result of ``node`` that also supports writes such as ``x[i] = y``."""
        return _Proxy(node, self)

    def create_node(self, *args: Any, **named: Any) -> fx.Node:
        """Appends a node to the graph, notes in its ``meta`` whether gradients are off, and returns it.

        Raises: RuntimeError: the code runs under ``torch.autocast``, or inside an autograd function.
        """
        if any(torch.is_autocast_enabled(kind) for kind in {"cpu", devices.accelerator()}):
            raise RuntimeError("a part of the code runs under autocast")
        if not torch.is_grad_enabled() and _in_autograd_function():
            raise RuntimeError("a part of the code is an autograd function with a backward of its own")
        node = super().create_node(*args, **named)
        node.meta[NO_GRADIENT] = not torch.is_grad_enabled()
        return node


def is_autograd_function(frame: FrameType) -> bool:
    """Returns whether a frame is that of ``torch.autograd.Function.apply``."""
    return frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function"


def _in_autograd_function() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_autograd_function(frame):
        frame = frame.f_back
    return frame is not None


@contextmanager
def refusing_own_functions() -> Iterator[None]:
    """Returns a context that raises an error at its end if code inside has called a ``torch.autograd.Function``.

    Such a function can return its argument as it is and work only in the backward; the traced graph then has no node
    for it. Under a profiler (``sys.setprofile``) calls are not noticed, and nothing is raised.

    Raises: RuntimeError: such a function was called, where gradients are enabled.
    """
    if sys.getprofile() is not None:
        yield
        return
    called = False

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal called
        called |= event == "call" and is_autograd_function(frame) and torch.is_grad_enabled()

    sys.setprofile(look)  # for this thread alone
    try:
        yield
    finally:
        sys.setprofile(None)
    if called:
        raise RuntimeError("a part of the code is an autograd function with a backward of its own")


ATTRIBUTES = "attributes"
"""A key of the output node's ``meta``: the plain module attributes that the code read, as (module path, attribute)."""


class AttributeReads:
    """Records which plain attributes of modules a model's code reads, other than those that the code has set itself.

    ``found`` has the reads as (module path, attribute). Parameters, buffers, submodules, ``training``, ``forward`` and
    names that begin with an underscore are left out. ``model`` must be a copy made for this purpose, because the
    classes of its modules are replaced.

    >>> model = nn.Sequential(nn.Linear(2, 3))
    >>> reads = AttributeReads(model)
    >>> model[0].out_features, reads.found, reads.has_changed()
    (3, {('0', 'out_features'): None}, False)
    """

    def __init__(self, model: nn.Module) -> None:
        """Replaces the classes of the modules of ``model``, a copy made for the trace."""
        self.found: dict[tuple[str, str], None] = {}
        self.given: set[str] = set()
        """The paths of the modules that had an attribute set by code."""
        self._modules = dict(model.named_modules())
        self._before = {path: dict(vars(module)) for path, module in self._modules.items()}
        self._held_before = {path: self._held(path) for path in self._modules}
        for path, module in self._modules.items():
            with suppress(TypeError):  # classes with slots cannot be replaced
                module.__class__ = self._recording_class(type(module), path)

    def _recording_class(self, kind: type[nn.Module], path: str) -> type[nn.Module]:
        reads, before, changed_paths = self.found, self._before[path], self.given

        def read(module: nn.Module, name: str) -> Any:
            value = kind.__getattribute__(module, name)
            is_original = name in before and before[name] is value
            if is_original and not name.startswith("_") and name not in ("forward", "training"):
                reads[path, name] = None
            return value

        def write(module: nn.Module, name: str, value: Any) -> None:
            changed_paths.add(path)
            kind.__setattr__(module, name, value)

        methods = {"__getattribute__": read, "__setattr__": write, "__module__": kind.__module__}
        return type(kind.__name__, (kind,), methods)

    def changed(self) -> list[str]:
        """Returns the paths of the modules in which code has set an attribute or changed a collection."""

        def is_changed(path: str) -> bool:
            now, before = vars(self._modules[path]), self._before[path]
            return now.keys() != before.keys() or any(now[name] is not value for name, value in before.items())

        return [
            path for path in self._modules
            if path in self.given or is_changed(path) or self._held(path) != self._held_before[path]
        ]  # fmt: skip

    def _held(self, path: str) -> dict[str, list[int]]:
        """Returns, by attribute name, the ids of the objects in a module's own dicts, lists and sets."""
        held = {name: value for name, value in vars(self._modules[path]).items() if not name.startswith("_")}
        return {
            name: [*map(id, value.values() if isinstance(value, dict) else value)]
            for name, value in held.items()
            if type(value) in (dict, list, set)
        }

    def has_changed(self) -> bool:
        """Returns whether the code has set an attribute that it has read, so that the next step reads another value."""
        return any(vars(self._modules[path]).get(name) is not self._before[path][name] for path, name in self.found)


class WeightReadTracer(TorchFunctionMode):
    """A torch mode that turns calls of torch functions on one of ``weights`` into nodes of the graph.

    A function that returns no tensor, such as a read of a shape or dtype, runs as usual.

    >>> tracer = Tracer(fx.Graph())
    >>> weight = torch.ones(2, 3)
    >>> with WeightReadTracer(tracer, [weight]):
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
        leaves = tree_flatten((args, named))[0]
        if any(isinstance(leaf, fx.Proxy) for leaf in leaves) or not any(id(leaf) in self._ids for leaf in leaves):
            return func(*args, **named)  # if an argument is a proxy, fx makes the node itself
        slices = [leaf for leaf in leaves if isinstance(leaf, slice)]  # tree_flatten does not look into slices
        if not any(isinstance(end, fx.Proxy) for span in slices for end in (span.start, span.stop, span.step)):
            on_meta = func(*tree_map(_to_meta, args), **tree_map(_to_meta, named))  # only to see the result's class
            if not any(isinstance(leaf, Tensor) for leaf in tree_flatten(on_meta)[0]):
                return func(*args, **named)
        return self._tracer.create_proxy("call_function", func, args, named)


def _to_meta(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def line_of(failure: Exception) -> str:
    """Returns the last line of user code in an exception's traceback, or empty text if there is none.

    It is the end of an error text, such as ``; here model.py:12: y = x.item()``.
    """
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
    frames = [
        frame for frame in traceback.extract_tb(failure.__traceback__) if not frame.filename.startswith(libraries)
    ]
    return f"; here {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
