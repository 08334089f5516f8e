"""Finds the call of ``torch.utils.checkpoint``, or of a similar function, inside of which a model's code is running.

The model passes a function to such a call, and the backward runs that function again.

The library's own activation checkpointing is not meant: it runs the forward of whole modules again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from shardwright.errors import PlanError

OF_REENTRANT = "run_function"
"""The attribute of ``ctx`` in which reentrant checkpoints, torch's and others, keep the function to call again."""
_FUNCTIONS = ("recompute_fn", OF_REENTRANT)
"""The attributes in which a checkpoint keeps the function that a backward calls again.

The first is an attribute of torch's checkpoint frames, the second one of the ``ctx`` of reentrant checkpoints.
"""


_T = TypeVar("_T")


class CheckpointCall:
    """A checkpoint whose forward is running; ``place`` is the object that keeps the function for the backward.

    ``place`` is torch's frame object of the checkpoint (``_CheckpointFrame``) or, if the checkpoint is reentrant, its
    ``ctx``, which is autograd's node of the call.
    """

    def __init__(self, place: Any) -> None:
        self.place = place
        self._name = next((name for name in _FUNCTIONS if callable(getattr(place, name, None))), "")

    @property
    def is_known(self) -> bool:
        """Whether ``place`` has a known attribute in which it keeps the function."""
        return bool(self._name)

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function, which the backward calls again to recompute activations; another one can be set.

        A context that :func:`prepare_checkpoint` has put around the call stays around it.
        """
        function: Callable[..., Any] = getattr(self.place, self._name)
        return function.function if isinstance(function, _Prepared) else function

    @function.setter
    def function(self, function: Callable[..., Any]) -> None:
        old_function = getattr(self.place, self._name)
        if isinstance(old_function, _Prepared):
            old_function.function = function
        else:
            setattr(self.place, self._name, function)

    def kept(self, name: str, kind: Callable[[], _T], within: Callable[[_T], AbstractContextManager[Any]]) -> _T:
        """Returns a container that the forward fills and the backward reads; it is kept with the function as ``name``.

        The first call for a checkpoint makes the container by ``kind()``, an empty list or dict. The backward calls the
        function inside of the context that ``within(container)`` returns.
        """
        if not hasattr(self.function, name):
            again, store = self.function, kind()

            @wraps(again)
            def repeated(*args: Any, **named: Any) -> Any:
                with within(store):
                    return again(*args, **named)

            setattr(repeated, name, store)
            self.function = repeated
        contents: _T = getattr(self.function, name)
        return contents


def checkpoint_call(within: CodeType) -> CheckpointCall | None:
    """Returns the checkpoint inside of whose forward the caller's code runs, or None if it runs inside of none.

    The search ends at the innermost running function that has the code ``within``: checkpoints that were called
    outside of that function do not count.

    Raises: PlanError: the caller's code runs inside of several nested checkpoints.

    >>> found = []
    >>> def run(x):
    ...     found.append(checkpoint_call(forward.__code__))
    ...     return x.exp()
    >>> def forward(x):
    ...     run(x)
    ...     return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    >>> output = forward(torch.ones(2, requires_grad=True))
    >>> found[0], found[1].is_known
    (None, True)
    """
    places = list(_places(within))
    if len(places) > 1 and any(checkpoint is not None for checkpoint in places):
        raise PlanError(
            "random numbers are drawn inside of several checkpoints, one in the other",
            given=f"{len(places)} checkpoints around the same code",
            allowed="one checkpoint around code that draws; or modules that draw, such as nn.Dropout",
            fix="draw in a module of its own, or leave out one of the checkpoints",
        )
    return places[0] if places else None


def checkpoints_around() -> Sequence[CheckpointCall]:
    """Returns the checkpoints inside of whose forwards the caller's code runs, innermost first.

    The result is empty if saved-tensor hooks inside of the checkpoint, instead of it, keep what autograd saves.
    """
    if torch.is_grad_enabled() and not is_in_checkpoint():
        return ()
    return [checkpoint for checkpoint in _places(None) if checkpoint is not None]


def saved_by() -> Any:
    """Returns the pack function of the innermost ``saved_tensors_hooks``, which a checkpoint may have set, or None."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def prepare_checkpoint(
    prepared: Callable[[Sequence[Any]], Callable[[Sequence[Any]], AbstractContextManager[Any]]],
) -> None:
    """Prepares the checkpoint inside of whose forward the caller's code runs, if any, for code that runs on shards.

    ``prepared(inputs)`` is called once for each checkpoint, with its positional inputs. It returns a function that
    takes the inputs which the backward has, and returns a context in which the backward runs the code again. If hooks
    around the checkpoint have saved the inputs, the backward has other tensors, which lack the attributes of the
    originals.
    """
    frame = _frame_of(saved_by())
    if frame is None or isinstance(frame.recompute_fn, _Prepared):
        return
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code is not _CHECKPOINT:
        caller = caller.f_back
    frame.recompute_fn = _Prepared(frame.recompute_fn, prepared(() if caller is None else caller.f_locals["args"]))


def is_in_checkpoint() -> bool:
    """Returns whether the innermost hook that keeps what autograd saves belongs to a checkpoint without reentry."""
    return _frame_of(saved_by()) is not None


_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


class _Prepared:
    """The function of a checkpoint, run in the context that ``prepare`` returns for the function's inputs."""

    def __init__(
        self, function: Callable[..., Any], prepare: Callable[[Sequence[Any]], AbstractContextManager[Any]]
    ) -> None:
        self.function, self._prepare = function, prepare

    def __call__(self, *inputs: Any) -> Any:
        with self._prepare(inputs):
            return self.function(*inputs)


def _frame_of(hook: Any) -> _CheckpointFrame | None:
    """Returns the checkpoint that a saved-tensor hook belongs to, or None for any other hook."""
    cells = getattr(hook, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _CheckpointFrame)), None)


def _frame_in(call: FrameType) -> _CheckpointFrame | None:
    """Returns the checkpoint that a running call of ``torch.utils.checkpoint`` has opened; None if it keeps nothing."""
    generator = call.f_locals.get("gen")
    place = None if generator is None or generator.gi_frame is None else generator.gi_frame.f_locals.get("new_frame")
    return place if isinstance(place, _CheckpointFrame) else None


def _places(within: CodeType | None) -> Iterator[CheckpointCall | None]:
    """Yields the checkpoints whose forwards are running in this thread, innermost first, up to a call of ``within``.

    If ``within`` is None, all are yielded. A yielded None stands for a checkpoint of torch that keeps no function,
    because gradients are off around it. Its forward may still run again, as part of an outer checkpoint's function.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not within:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        place: Any = None
        if frame.f_code is _CHECKPOINT and not frame.f_locals.get("use_reentrant"):
            place = _frame_in(frame)
            if place is None:
                yield None
        elif frame.f_code.co_name == "forward" and names and names[0] != "self":
            place = frame.f_locals.get(names[0])
            place = place if isinstance(place, BackwardCFunction) else None
        if place is not None and CheckpointCall(place).is_known:
            yield CheckpointCall(place)
        frame = frame.f_back
