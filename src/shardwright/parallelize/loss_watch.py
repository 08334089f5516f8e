"""Finds uses in a loss that a run cannot provide: attributes of the plain model, gradients by the model's output."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.objects.own_attributes import own_attributes
from shardwright.analysis.objects.reached import ATOMS, code_objects, reached
from shardwright.errors import PlanError
from shardwright.forward_stack import STACK
from shardwright.parallelize.loss_settings import FOLLOWED, MOST_ENTRIES, entries_of, entry_at
from shardwright.strategies.pipeline.pipeline_stage import is_received

_READS = "_reads_of_model"
_OURS = ("forward", STACK, FOLLOWED, _READS)
"""The attributes that this library sets on a run's loss: a forward in place of the loss's own, and notes."""

MOST_FUNCTIONS = 1000
"""The largest number of functions, of a loss or called by these, whose code is looked at."""

_PACKAGES = ("torch.", "shardwright.")


def objects_of_loss(loss: nn.Module, but: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yields a pair (path, object) for each object that a user's loss holds, directly or through other objects.

    Left out are objects whose ids are in ``but``, the objects that these hold, and the contents of collections with
    more than ``MOST_ENTRIES`` entries.

    >>> from shardwright.models.given_loss import as_loss
    >>> [path for path, each in objects_of_loss(as_loss(lambda x, y, scale=torch.ones(1): ((x * scale).sum(), 1)))]
    ['function', "function's default"]
    """
    seen = dict.fromkeys(but)
    for path, module in loss.named_modules():
        for name, value in own_attributes(module).items():
            if name not in _OURS:
                for words, member in reached(value, seen, most=MOST_ENTRIES):
                    yield f"{path}.{name}".lstrip(".") + words, member


class ModelReads:
    """What a loss may read of the plain model: the modules that the loss refers to, and the names in its code.

    ``held`` has the modules by their path in the model. A module in a closure is there as a copy, and one behind a
    global name as the plain model's own.
    """

    def __init__(self, held: Mapping[str, nn.Module], names: Collection[str]) -> None:
        self.held, self.names = held, names
        self.of_record: Collection[tuple[str, str]] = ()
        """The attributes that the forward sets to values that it computes, as (module, name), by a record of it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelReads:
        return self  # shared: copies of the loss are for rehearsals, which check nothing

    def check(self, model: nn.Module, *, is_cut: bool) -> None:
        """Raises PlanError if the loss's code names an attribute that the forward of the run's ``model`` has changed.

        ``is_cut`` says that pipeline stages run the model's code, and may leave its attributes unset; then the record
        says which attributes the forward would set.
        """
        for path, module in model.named_modules():
            if path not in self.held:
                continue
            before, now = _named_values(self.held[path], self.names), _named_values(module, self.names)
            for name in sorted(now):
                of_stages = is_cut and (path, name) in self.of_record
                if of_stages or not _is_equal(before.get(name, _MISSING), now[name]):
                    raise _stale(f"{path}.{name}".lstrip("."))


_MISSING = object()


def _stale(name: str) -> PlanError:
    return PlanError(
        f"the loss reads '{name}' of the model that was given, which its forward sets",
        given="an attribute that stays as it was there, since the run trains a copy of the model",
        allowed="losses of the output and the targets, and settings of the model that the forward leaves alone",
        fix="return it from the model's forward with the output, and read it from there",
    )


def _named_values(module: nn.Module, names: Collection[str]) -> dict[str, Any]:
    own = own_attributes(module) | module._buffers
    return {name: value for name, value in own.items() if name in names}


def _is_equal(before: Any, now: Any) -> bool:
    """Returns whether an attribute has not changed.

    Numbers, text, tensors and collections are compared; any other object counts as equal, and so does a buffer of
    which a rank holds a part.
    """
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        if before.shape != now.shape:
            return isinstance(now, nn.Parameter) or now.grad_fn is None
        return now.grad_fn is None and torch.equal(before.detach().to(now), now)
    if isinstance(now, list | tuple | dict) and type(before) is type(now):
        if len(before) != len(now) or len(now) > MOST_ENTRIES:
            return len(before) == len(now)
        return all(_is_equal(entry_at(before, key, _MISSING), value) for key, value in entries_of(now))
    if isinstance(now, Tensor | list | tuple | dict) or type(now) in ATOMS:
        return type(before) is type(now) and bool(before == now)
    return True


def note_reads(loss: nn.Module, model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Notes in a copied loss what it may read of the plain ``model``; ``memo`` maps ids of originals to copies."""
    own = {id(module): (path, module) for path, module in model.named_modules()}
    held = {path: memo[key] for key, (path, _) in own.items() if key in memo}
    functions = list(functions_of_loss(loss, {*own, *map(id, held.values())}))
    for function in functions:
        for name in {name for code in code_objects(function) for name in code.co_names}:
            if id(function.__globals__.get(name)) in own:
                path, module = own[id(function.__globals__[name])]
                held |= dict(module.named_modules(prefix=path))
    if held:
        names = {name for function in functions for code in code_objects(function) for name in code.co_names}
        vars(loss)[_READS] = ModelReads(held, _with_methods(names, {type(module) for module in held.values()}))


def _with_methods(names: set[str], kinds: Collection[type]) -> frozenset[str]:
    """Returns ``names`` and, for each that is a method of one of the classes, the names in its code, and so on."""
    all_names, waiting = set[str](), set(names)
    while waiting:
        name = waiting.pop()
        all_names.add(name)
        for kind in kinds:
            method = getattr(kind, name, None)
            if _is_of_user(method):
                waiting |= {inner_name for code in code_objects(method) for inner_name in code.co_names} - all_names
    return frozenset(all_names)


def reads_of(loss: nn.Module) -> ModelReads | None:
    """Returns what a run's loss may read of the plain model (:func:`note_reads`); None if it does not refer to it."""
    reads: ModelReads | None = vars(loss).get(_READS)
    return reads


def note_attributes(loss: nn.Module, graph: ModelGraph | None) -> None:
    """Notes in a loss that refers to the plain model which attributes of the model the recorded forward sets."""
    reads = reads_of(loss)
    if graph is not None and reads is not None:
        with suppress(Exception):  # the user's forward failed; without stages the first step finds the attributes
            reads.of_record = frozenset(graph.run.recording.set_attributes)


def functions_of_loss(loss: nn.Module, but: Collection[int] = ()) -> Iterator[FunctionType]:
    """Yields the functions of a user that a loss consists of, and those that they call by a global name or as methods.

    Functions of objects whose ids are in ``but``, such as the model's modules, are left out.

    >>> from shardwright.models.given_loss import as_loss
    >>> __name__ = "program"  # the library's own functions are left out
    >>> def slope(x, y):
    ...     return torch.autograd.grad(x.sum(), y)[0].sum()
    >>> loss = as_loss(lambda x, y, slope=slope: (slope(x, y), 1))
    >>> [each.__name__ for each in functions_of_loss(loss)]
    ['<lambda>', 'slope']
    """
    members = [*loss.modules(), *(member for _, member in objects_of_loss(loss, but))]
    kinds = {type(member) for member in members}
    waiting: list[Any] = [*members]
    for member in members:
        names = ("forward",) if isinstance(member, nn.Module) else ("__call__",)
        waiting += [vars(kind)[name] for kind in type(member).__mro__ for name in names if name in vars(kind)]
        waiting.append(getattr(member, "__func__", None))
    seen = set[int]()
    while waiting and len(seen) < MOST_FUNCTIONS:
        function = waiting.pop(0)
        if id(function) in seen or not _is_of_user(function):
            continue
        seen.add(id(function))
        yield function
        for name in {name for code in code_objects(function) for name in code.co_names}:
            waiting += [function.__globals__.get(name), *(getattr(kind, name, None) for kind in kinds)]


def _is_of_user(value: Any) -> TypeGuard[FunctionType]:
    return isinstance(value, FunctionType) and not f"{value.__module__}.".startswith(_PACKAGES)


def takes_gradients(loss: nn.Module) -> bool:
    """Returns whether a loss's code names ``grad``, as a call of ``torch.autograd.grad`` does.

    >>> from shardwright.models.given_loss import as_loss
    >>> __name__ = "program"  # the library's own functions are left out
    >>> takes_gradients(as_loss(lambda x, y: (torch.autograd.grad(x.sum(), y)[0].sum(), 1)))
    True
    """
    reads = reads_of(loss)
    of_model = {id(module) for module in reads.held.values()} if reads is not None else ()
    return any(
        "grad" in code.co_names for function in functions_of_loss(loss, of_model) for code in code_objects(function)
    )


class RefusesGradients(TorchFunctionMode):
    """A context for a loss under ``pp``: raises PlanError if it takes a gradient by a received tensor of ``output``.

    The last stage has received such a tensor from an earlier stage. It has only its own part of the autograd graph, so
    the gradient would lack what earlier stages compute from the tensor. Gradients by tensors that the last stage
    computes itself are whole.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._sent = {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and is_received(leaf)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else named.get("inputs")
            if any(id(leaf) in self._sent for leaf in tree_leaves(inputs)):
                raise PlanError(
                    "the loss takes a gradient by a tensor that the model returns, of which stages have parts",
                    given="torch.autograd.grad(..., inputs) under pp, with inputs that an earlier stage has computed",
                    allowed="gradients by tensors of the last stage, or that the loss makes itself; without pp all",
                    fix="leave out pp, or take the gradient in the forward of a block that computes all of it",
                )
        return func(*args, **named)
