"""Runs reentrant checkpoints as ``torch.utils.checkpoint`` with ``use_reentrant=False`` while the library runs a model.

A reentrant checkpoint is an autograd function. Its forward runs the user's code without gradients, and its backward
runs the code again and takes the gradient inside. Torch's own is ``use_reentrant=True``, the default of older code;
diffusion models, fairscale and others define their own, as a ``CheckpointFunction``::

    class CheckpointFunction(torch.autograd.Function):
        def forward(ctx, run_function, length, *args):
            ctx.run_function = run_function
            with torch.no_grad():
                return run_function(*args[:length])

Torch runs such a function as a whole. A plan would see one operator in place of the many inside: none of these could be
sharded, and no pipeline stage could begin inside. If a checkpoint without reentry runs the code instead, the plan sees
the operators of the code, and memory and gradients are the same.

A reentrant checkpoint is recognized by its code: its ``forward`` names ``run_function``, the attribute of ``ctx``.
Three kinds are left as they are:

- checkpoints that compute gradients only of their arguments (``torch.autograd.grad``) and take no parameters as
  arguments, so that they train no parameters;
- checkpoints that run the code on other tensors than their arguments, such as copies;
- checkpoints that return other tensors than the code returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from inspect import unwrap
from threading import Lock, local
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.autograd.function import _is_setup_context_defined
from torch.utils._pytree import tree_leaves

from shardwright.analysis.calls.checkpoint_calls import OF_REENTRANT
from shardwright.errors import PlanError

_OF_THREAD = local()
_LOOKED_AT = WeakSet[type[Function]]()
_LEFT_ALONE = WeakSet[type[Function]]()
"""The classes that were found to run code on other tensors than their arguments, or to return other tensors than it."""
_LOOKING = Lock()


@contextmanager
def without_reentry() -> Iterator[None]:
    """Returns a context in which this thread runs reentrant checkpoints as torch's checkpoints without reentry.

    The first time that the context meets a class of such checkpoints, it replaces the class's ``apply``. Outside of the
    context the replacement only calls the original ``apply``.

    >>> layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    >>> with without_reentry():
    ...     y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    >>> z = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=True)
    >>> type(y.grad_fn).__name__, type(z.grad_fn).__name__
    ('AddmmBackward0', 'CheckpointFunctionBackward')
    """
    _look_at_new()
    before = is_without_reentry()
    _OF_THREAD.is_on = True
    try:
        yield
    finally:
        _OF_THREAD.is_on = before


def is_without_reentry() -> bool:
    """Returns whether this thread is inside of :func:`without_reentry`."""
    return getattr(_OF_THREAD, "is_on", False)


def _look_at_new() -> None:
    """Searches all autograd function classes again if the number of direct subclasses of ``Function`` has changed.

    A search takes as long as a small layer, and this function runs in every step.
    """
    classes = len(Function.__subclasses__())
    if classes != getattr(_OF_THREAD, "num_classes", 0):
        _look_at(Function)
        _OF_THREAD.num_classes = classes


def _look_at(function: type[Function]) -> None:
    """Replaces the method ``apply`` of those subclasses of ``function`` that are reentrant checkpoints.

    Torch's function modes do not see calls of ``apply``, so the method is replaced on the class.
    """
    for subclass in function.__subclasses__():
        with _LOOKING:
            if subclass not in _LOOKED_AT:
                _LOOKED_AT.add(subclass)
                plain = getattr(subclass.apply, "__func__", None)
                if plain is not None and _is_checkpoint(subclass) and not hasattr(plain, "__wrapped__"):
                    subclass.apply = classmethod(_replaced(plain))  # type: ignore[assignment, method-assign]
        _look_at(subclass)


def _replaced(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the replacement of a class's ``apply``; ``plain`` is the original, which takes the class first."""

    @wraps(plain)
    def apply(function: type[Function], *args: Any, **named: Any) -> Any:
        learns = torch.is_grad_enabled() and any(map(_learns, args))
        if is_without_reentry() and learns and not named and _is_checkpoint(function):
            return _checkpointed(function, partial(plain, function), args)
        return plain(function, *args, **named)

    return apply


def _is_checkpoint(function: type[Function]) -> bool:
    """Returns whether the class's forward sets ``ctx.run_function``, and the class is not to be left as it is."""
    is_known = OF_REENTRANT in _names(function, "forward") and function not in _LEFT_ALONE
    return is_known and not _is_setup_context_defined(function.setup_context)


def _names(function: type[Function], method: str) -> tuple[str, ...]:
    """Returns the names of globals and attributes that a method of the class uses."""
    names: tuple[str, ...] = getattr(getattr(unwrap(getattr(function, method)), "__code__", None), "co_names", ())
    return names


def _checkpointed(function: type[Function], plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs a reentrant checkpoint as one without reentry, or calls ``plain`` if the checkpoint is to stay as it is.

    Raises: PlanError: the forward of the class returns other tensors than the code that it runs. That shows only after
        the code has run, so this call fails, and later calls run ``plain``. A record that fails so is made again.
    """
    place = next((number for number, arg in enumerate(args) if callable(arg) and not isinstance(arg, Tensor)), None)
    takes_given = "backward" not in _names(function, "backward")  # its backward takes gradients of arguments only
    if place is None or (takes_given and not any(isinstance(arg, nn.Parameter) for arg in args)):
        return plain(*args)
    tensors: list[Tensor] = []

    def run(*inputs: Any, **named: Any) -> Any:
        for value in (*inputs, *named.values()):
            if isinstance(value, Tensor) and not any(value is arg for arg in args):  # gradients would not reach args
                raise _OtherTensorError
        with torch.enable_grad():
            code = partial(_run, args[place], named)
            results = torch.utils.checkpoint.checkpoint(code, *inputs, use_reentrant=False)
        tensors.extend(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
        return results

    try:
        with torch.no_grad():  # as torch runs it
            output = function.forward(_Context(args), *args[:place], run, *args[place + 1 :])
    except _OtherTensorError:
        _LEFT_ALONE.add(function)
        return plain(*args)
    if any(isinstance(leaf, Tensor) and not any(leaf is tensor for tensor in tensors) for leaf in tree_leaves(output)):
        _LEFT_ALONE.add(function)
        raise PlanError(
            f"the checkpoint '{function.__name__}' returns other tensors than the code inside of it",
            given="an autograd function that runs code again in its backward, and changes what the code returns",
            allowed="checkpoints that return what their code returns",
            fix="use torch.utils.checkpoint, or instead recompute:full or recompute:PATTERN in the layout",
        )
    return output


def _learns(value: Any) -> bool:
    """Returns whether a value needs a gradient; a proxy, which stands for a tensor in a trace, always counts as one."""
    return isinstance(value, fx.Proxy) or (isinstance(value, Tensor) and value.requires_grad)


def _run(code: Callable[..., Any], named: dict[str, Any], *inputs: Any) -> Any:
    """Runs the code of a checkpoint: in the forward, and again in the backward, which may run on autograd's thread."""
    with without_reentry():
        return code(*inputs, **named)


class _OtherTensorError(Exception):
    """Raised where a checkpoint class would run the user's code on other tensors than its arguments, as on copies."""


class _Context:
    """Stands for the ``ctx`` of a checkpoint that torch's checkpoint without reentry replaces: it keeps no tensors."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args)

    def save_for_backward(self, *tensors: Any) -> None:
        """Does nothing: the other checkpoint keeps what it needs."""

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward
