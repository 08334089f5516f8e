"""Records the backward of user-defined ``autograd.Function`` classes, whose operators the forward does not show.

Such a backward computes with the tensors that a rank has, and nothing sums over ranks there. So a tensor that it sums
over, reads sizes of, or cuts by numbers must be whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from shardwright.analysis.calls.autograd_graph import node_of, nodes_behind
from shardwright.analysis.calls.checkpoint_calls import CheckpointCall
from shardwright.analysis.calls.draw_calls import draw_of
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.analysis.recorded.recording import Recorded, RecordedCall, Recording, TensorUse

_MEASURES = frozenset(
    (
        "__get__", "__getitem__", "__len__", "__setitem__", "as_strided", "element_size", "expand", "expand_as",
        "narrow", "nelement", "numel", "pad", "repeat", "reshape", "select", "size", "split", "split_with_sizes",
        "stride", "tile", "unflatten", "untyped_storage", "view",
    )
)  # fmt: skip
"""Names of torch functions that read sizes of a tensor, or take sizes and indices as numbers.

In the backward of a user's own function such sizes and indices would be those of a rank's shard.
"""


def record_own_functions(outputs: Sequence[Tensor], recorded: Recorded) -> None:
    """Runs a backward from ``outputs``, and records the operators in the backward of each ``torch.autograd.Function``.

    ``recorded`` has recorded the forward, and knows the tensors that the functions have saved. The record is added to
    ``functions``, ``measured_in_backward``, ``drawing_backwards`` and ``adding_backwards`` of its :class:`Recording`.
    If there are no such functions, no backward runs.
    """
    nodes = [node for node in nodes_behind(outputs) if isinstance(node, BackwardCFunction)]
    if not nodes:
        return
    forward, recorded.recording = recorded.recording, Recording()
    made = {(node, tensor.output_nr): tensor for tensor in recorded.kept() if (node := node_of(tensor)) is not None}
    for node in nodes:
        function = _FunctionBackward(recorded, forward, node, made)
        node.register_prehook(function.begin)
        node.register_hook(function.end)
    learning = [output for output in outputs if output.requires_grad]
    try:
        with recorded, torch._C.DisableTorchFunction():  # the forward itself does not make this call
            torch.autograd.backward(learning, [torch.empty_like(output) for output in learning])
    finally:
        recorded.recording = forward


class _FunctionBackward:
    """One call of a user's autograd function, whose backward is recorded into ``forward``, the record of the forward.

    ``node`` is autograd's node of the call. ``made`` has the tensors of the forward, by the node that made each tensor
    and the tensor's place among the results of that node.
    """

    def __init__(
        self, recorded: Recorded, forward: Recording, node: Any, made: Mapping[tuple[Any, int], Tensor]
    ) -> None:  # fmt: skip
        self._recorded, self._forward, self._node, self._made = recorded, forward, node, made
        self._running, self._given = ExitStack(), set[TensorUse]()

    def begin(self, gradients: Any) -> None:
        """Begins to record; ``gradients`` are the gradients of the function's results."""
        self._recorded.recording.calls.clear()
        self._given.clear()
        for place, gradient in enumerate(gradients):
            if gradient is not None and (self._node, place) in self._made:
                self._recorded.treat_as(gradient, self._made[self._node, place])
            if gradient is not None:
                self._given.add(self._recorded.use(gradient))
        self._running.enter_context(torch._C._EnableTorchFunction())
        self._running.enter_context(_BackwardReads(self._recorded, self._forward, self._node))

    def end(self, gradients: Any, _: Any) -> None:
        """Ends the record; ``gradients`` are the gradients of the function's operands."""
        self._running.close()
        name, calls = type(self._node).__name__, list(self._recorded.recording.calls)
        # autograd drops what a backward returns for operands that need no gradient, such as masks
        needed = (gradient for gradient, (node, _) in zip(gradients, self._node.next_functions, strict=True) if node)
        returned = [self._recorded.use(tensor) for tensor in needed if tensor is not None]
        # torch's own functions are left out: a checkpoint, for example, runs a whole backward inside of its own
        is_torchs = self._node._forward_cls.__module__.startswith("torch.")
        if not is_torchs and _adds_terms(calls, self._given, returned):
            self._forward.adding_backwards.append(name)
        for gradient, (before, place) in zip(gradients, self._node.next_functions, strict=True):
            at = before, place
            operand = self._made[at] if at in self._made else getattr(before, "variable", None)
            if gradient is not None and operand is not None and operand.shape == gradient.shape:
                copy = self._recorded.use(gradient), self._recorded.use(operand.detach())
                calls.append(RecordedCall(torch.ops.aten.clone.default, copy[:1], {}, copy[1:]))
        self._forward.functions.setdefault(name, []).extend(calls)


_ZEROS = frozenset(
    ("zeros", "zeros_like", "new_zeros", "zero_", "zero", "empty", "empty_like", "new_empty", "empty_strided")
)
"""Operators that make zeros, or uninitialized tensors that code fills afterwards."""
_SUMS = frozenset(("add", "sub", "rsub", "where", "index_add", "scatter_add", "cat", "stack"))
_OF_ZEROS = frozenset(("mul", "view", "expand", "reshape", "permute", "transpose", "clone", "_to_copy", "neg", "div"))
"""Operators whose results are zeros if one of their operands is zeros."""


def _adds_terms(calls: Sequence[RecordedCall], gradients: Collection[TensorUse], returned: Sequence[TensorUse]) -> bool:
    """Returns whether a backward returns gradients with terms that do not depend on ``gradients``, which it is given.

    A returned gradient has such a term if it does not depend on ``gradients`` at all, or if something other than zeros
    was added to it.
    """
    scaled, zeros = set(gradients), set[TensorUse]()
    for call in calls:
        name, made = call.name.removesuffix("_"), [*call.results, *call.written]
        depends = [use for use in call.operands if use in scaled]
        if call.name in _ZEROS or (name in _OF_ZEROS and any(use in zeros for use in call.operands)):
            zeros.update(made)
            continue
        zeros.difference_update(made)  # a tensor that is written to is no longer zeros
        if not depends:
            continue
        # a single number, such as an epsilon or the fill value of a mask, is no term of a loss
        others = (use for use in call.operands if use.shape and 0 not in use.shape and use.has_fractions)
        if name in _SUMS and any(use not in scaled and use not in zeros for use in others):
            return True
        scaled.update(made)
    return any(use not in scaled and use not in zeros for use in returned)


class _BackwardReads(TorchFunctionMode):
    """Notes in the record ``forward`` which sizes a user's backward reads, and whether it draws random numbers.

    ``node`` is autograd's node of the call. The mode changes no result. Code that a checkpoint repeats inside of the
    backward does not count.
    """

    def __init__(self, recorded: Recorded, forward: Recording, node: Any) -> None:
        super().__init__()
        self._recorded, self._forward, self._node = recorded, forward, node

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        with torch._C.DisableTorchFunction():
            if not self._recorded.runs_again():
                if getattr(func, "__name__", "") in _MEASURES:
                    self._forward.measured_in_backward += map(self._recorded.use, tensors_of((args, named)))
                if draw_of(func, args, named) is not None and not self._repeats():
                    self._forward.drawing_backwards.append(type(self._node).__name__)
            return func(*args, **named)

    def _repeats(self) -> bool:
        """Returns whether the running code repeats a forward's draws: inside of a module's forward, or a checkpoint."""
        return bool(self._recorded.where()[0]) or (torch.is_grad_enabled() and CheckpointCall(self._node).is_known)
