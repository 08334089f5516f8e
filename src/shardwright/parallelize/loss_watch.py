"""Finds what a loss reads that a run cannot give it: attributes of the plain model, gradients by the model's output."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.own_attributes import own_attributes
from shardwright.analysis.reached import ATOMS, code_objects, reached
from shardwright.errors import PlanError
from shardwright.forward_stack import STACK
from shardwright.parallelize.loss_settings import FOLLOWED

_OF_MODEL, _SET = "_copies_of_model", "_attributes_of_model_set"
_OURS = ("forward", STACK, FOLLOWED, _OF_MODEL, _SET)
"""The attributes by which a run's loss holds what is the library's: a forward that replaces its own, and notes."""


def held_objects(loss: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields each object that a loss of a user holds, directly or not, as pairs of its path and the object.

    >>> from shardwright.models.given_loss import as_loss
    >>> [path for path, each in held_objects(as_loss(lambda x, y, scale=torch.ones(1): ((x * scale).sum(), 1)))]
    ['function', "function's default"]
    """
    seen: dict[int, Any] = {}
    for path, module in loss.named_modules():
        for name, value in own_attributes(module).items():
            if name not in _OURS and type(value) not in ATOMS:
                yield from ((f"{path}.{name}{words}".lstrip("."), each) for words, each in reached(value, seen))


def note_copies(loss: nn.Module, model: nn.Module, memo: Mapping[int, Any]) -> None:
    """Notes in a copied loss the copies of the model's modules that it refers to, as a closure over the model does.

    ``memo`` maps the ids of what was copied to the copies.
    """
    found = {path: memo[id(module)] for path, module in model.named_modules() if id(module) in memo}
    if found:
        vars(loss)[_OF_MODEL] = found


def copies_of_model(loss: nn.Module) -> Collection[nn.Module]:
    """Returns the copies of the plain model's modules that a loss refers to (:func:`note_copies`)."""
    found: Mapping[str, nn.Module] = vars(loss).get(_OF_MODEL, {})
    return found.values()


def note_attributes(loss: nn.Module, graph: ModelGraph | None) -> None:
    """Notes in a loss that refers to the plain model which of its attributes the forward sets, if a record says so."""
    if graph is not None and vars(loss).get(_OF_MODEL):
        with suppress(Exception):  # of the user's forward: then it is seen in the first step, but for stages
            vars(loss)[_SET] = frozenset(graph.run.recording.set_attributes)


@contextmanager
def attributes_watched(loss: nn.Module, model: nn.Module) -> Iterator[None]:
    """Returns a context in which a loss runs that refers to the plain model; ``model`` is the run's, after a forward.

    Raises: PlanError: the loss has read an attribute that the forward changes, as ``self.aux_loss = ...`` does. The run
        trains a copy of the plain model, so there it stays as it was.
    """
    held: Mapping[str, nn.Module] = vars(loss).get(_OF_MODEL, {})
    read = set[tuple[str, str]]()
    kinds = [(module, type(module)) for module in held.values()]
    for path, module in held.items():
        own = frozenset(own_attributes(module))
        if own:
            with suppress(TypeError):  # a class whose instances cannot change theirs
                module.__class__ = _noting(type(module), path, own, read)
    try:
        yield
    finally:
        for module, kind in kinds:
            module.__class__ = kind
    modules = dict(model.named_modules())
    for path, name in sorted(read):
        now = vars(modules[path]).get(name, _MISSING) if path in modules else _MISSING
        is_changed = now is not _MISSING and not _is_equal(vars(held[path]).get(name), now)
        if is_changed or (path, name) in vars(loss).get(_SET, ()):
            raise PlanError(
                f"the loss reads '{f'{path}.{name}'.lstrip('.')}' of the model that was given, which its forward sets",
                given="an attribute that stays as it was there, since the run trains a copy of the model",
                allowed="losses of the output and the targets, and settings of the model that the forward leaves alone",
                fix="return it from the model's forward with the output, and read it from there",
            )


_MISSING = object()


def _noting(kind: type[nn.Module], path: str, own: frozenset[str], read: set[tuple[str, str]]) -> type[nn.Module]:
    """Returns a subclass of ``kind`` whose instances add to ``read`` which of the attributes ``own`` are read."""

    def __getattribute__(self: nn.Module, name: str) -> Any:  # noqa: N807  # Python's own name
        if name in own:
            read.add((path, name))
        return kind.__getattribute__(self, name)

    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__})


def _is_equal(before: Any, now: Any) -> bool:
    """Returns whether an attribute is the same; of values that are no tensors, numbers or text that is not known."""
    if isinstance(before, Tensor) and isinstance(now, Tensor):
        same = before.shape == now.shape and before.requires_grad == now.requires_grad and now.grad_fn is None
        return same and torch.equal(before.to(now), now)
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return False
    return type(now) not in ATOMS or bool(before == now)


def takes_gradients(loss: nn.Module) -> bool:
    """Returns whether code that a loss refers to names ``grad``, as a call of ``torch.autograd.grad`` does.

    >>> from shardwright.models.given_loss import as_loss
    >>> takes_gradients(as_loss(lambda x, y: (torch.autograd.grad(x.sum(), y)[0].sum(), 1)))
    True
    """
    held = [loss, *(each for _, each in held_objects(loss))]
    held += [vars(kind).get("forward") for each in held if isinstance(each, nn.Module) for kind in type(each).__mro__]
    held += [vars(type(each)).get("__call__") for each in held if not isinstance(each, nn.Module)]
    functions = (each for each in held if isinstance(each, FunctionType) and not each.__module__.startswith("torch."))
    return any("grad" in code.co_names for function in functions for code in code_objects(function))


class RefusesGradients(TorchFunctionMode):
    """A context in which a loss under ``pp`` runs: PlanError where it takes a gradient by a tensor of the ``output``.

    The last stage has its own part of the graph alone: what the stages before it compute of that tensor is no part of
    the gradient.
    """

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is torch.autograd.grad:
            inputs = args[1] if len(args) > 1 else named.get("inputs")
            if any(id(leaf) in self._output for leaf in tree_leaves(inputs)):
                raise PlanError(
                    "the loss takes a gradient by a tensor that the model returns, of which stages have parts",
                    given="torch.autograd.grad(..., inputs) under pp, with inputs from the model's output",
                    allowed="gradients by tensors that the loss has made itself; under dp also by the model's outputs",
                    fix="leave out pp, or take the gradient in the forward of a block that computes all of it",
                )
        return func(*args, **named)
