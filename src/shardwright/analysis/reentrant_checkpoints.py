"""Runs reentrant checkpoints as ``torch.utils.checkpoint`` with ``use_reentrant=False`` while the library runs a model.

A reentrant checkpoint is an autograd function. Its forward runs the user's code without gradients, and its backward
runs the code again and takes the gradient inside. Torch's own is ``use_reentrant=True``, the default of older code;
diffusion models, fairscale and others define their own, as a ``CheckpointFunction``::

    class CheckpointFunction(torch.autograd.Function):
        def forward(ctx, run_function, length, *args):
            ctx.run_function = run_function
            with torch.no_grad():
                return run_function(*args[:length])

Torch runs such a function as a whole: a plan sees one operator where there are many, so none of them can be cut, and a
pipeline cannot be cut inside. Run by the other kind of checkpoint, the operators are those of the code, and memory and
gradients are the same. Which functions are meant is told by their code: a ``forward`` that names ``run_function``, the
attribute of ``ctx``. Three kinds stay as they are: those that take gradients of what they are given alone
(``torch.autograd.grad``) and are given no parameters, so that they train none; those that run the code on other tensors
than they are given, as on copies; and those that return others than the code does.
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

from shardwright.analysis.checkpoint_calls import OF_REENTRANT
from shardwright.errors import PlanError

_OF_THREAD = local()
_LOOKED_AT = WeakSet[type[Function]]()
_LEFT_ALONE = WeakSet[type[Function]]()
"""The classes of which it was found that they run code on other tensors, or return others than the code does."""
_LOOKING = Lock()


@contextmanager
def without_reentry() -> Iterator[None]:
    """Returns a context in which this thread runs reentrant checkpoints as torch's checkpoints without reentry.

    The first time that it meets a class of such functions, it replaces the ``apply`` of that class. Outside of the
    context the replacement only calls the one before.

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
    """Looks at all classes of autograd functions if there are others directly below torch's than the last time.

    Looking at all takes as long as a small layer, and this is done in each step.
    """
    classes = len(Function.__subclasses__())
    if classes != getattr(_OF_THREAD, "num_classes", 0):
        _look_at(Function)
        _OF_THREAD.num_classes = classes


def _look_at(function: type[Function]) -> None:
    """Replaces the method ``apply`` of those subclasses of ``function`` that are reentrant checkpoints.

    No function mode of torch sees a call of ``apply``: it has to be replaced where code looks it up, on the class.
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
    """Returns what takes the place of a class's ``apply``, which is ``plain`` with the class as its first argument."""

    @wraps(plain)
    def apply(function: type[Function], *args: Any, **named: Any) -> Any:
        learns = torch.is_grad_enabled() and any(map(_learns, args))
        if is_without_reentry() and learns and not named and _is_checkpoint(function):
            return _checkpointed(function, partial(plain, function), args)
        return plain(function, *args, **named)

    return apply


def _is_checkpoint(function: type[Function]) -> bool:
    """Returns whether the class's forward sets ``ctx.run_function``, and nothing is known against it."""
    is_known = OF_REENTRANT in _names(function, "forward") and function not in _LEFT_ALONE
    return is_known and not _is_setup_context_defined(function.setup_context)


def _names(function: type[Function], method: str) -> tuple[str, ...]:
    """Returns the names of globals and attributes that a method of the class uses."""
    names: tuple[str, ...] = getattr(getattr(unwrap(getattr(function, method)), "__code__", None), "co_names", ())
    return names


def _checkpointed(function: type[Function], plain: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Runs a reentrant checkpoint as one without reentry, or by ``plain``, if it is one of those that stay as they are.

    Raises: PlanError: the forward of the class returns other tensors than the code that it runs. That is known only
        when the code has run, so this call fails; later ones run by ``plain``. A record that fails is made again.
    """
    place = next((number for number, arg in enumerate(args) if callable(arg) and not isinstance(arg, Tensor)), None)
    takes_given = "backward" not in _names(function, "backward")  # gradients of what it is given, and of no more
    if place is None or (takes_given and not any(isinstance(arg, nn.Parameter) for arg in args)):
        return plain(*args)
    tensors: list[Tensor] = []

    def run(*inputs: Any, **named: Any) -> Any:
        for value in (*inputs, *named.values()):
            if isinstance(value, Tensor) and not any(value is arg for arg in args):  # its gradient would end here
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
    """Returns whether a value needs a gradient; what stands for a tensor in a trace counts as one that does."""
    return isinstance(value, fx.Proxy) or (isinstance(value, Tensor) and value.requires_grad)


def _run(code: Callable[..., Any], named: dict[str, Any], *inputs: Any) -> Any:
    """Runs the code of a checkpoint: in the forward, and again in the backward, which a thread of autograd may run."""
    with without_reentry():
        return code(*inputs, **named)


class _OtherTensorError(Exception):
    """Raised where a checkpoint class would run the user's code on other tensors than its arguments, as on copies."""


class _Context:
    """Stands for the ``ctx`` of a checkpoint whose backward torch's own takes the place of: it keeps no tensors."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(arg, Tensor) and arg.requires_grad for arg in args)

    def save_for_backward(self, *tensors: Any) -> None:
        """Does nothing: the other checkpoint keeps what it needs."""

    mark_dirty = mark_non_differentiable = set_materialize_grads = save_for_backward
