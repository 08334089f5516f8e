"""Values that cross between stages: any tree of tensors, sent as they lie, received before they are needed.

The first time that values of some shapes cross an edge, their *form* goes ahead: shapes, dtypes, which need gradients,
and all that is no tensor. From then on both sides know it, and tensors alone travel. A form belongs to a ``key`` that
both sides can tell by themselves (the shapes of the microbatch), so that shapes may change from step to step.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwright.comm.axis import Axis, Pending
from shardwright.errors import PlanError
from shardwright.strategies.pipeline.messages import StageMessage
from shardwright.strategies.pipeline.receive_buffers import ReceiveBuffers

PLAIN = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.Size, slice)


class TensorSpec(NamedTuple):
    """The form of a tensor that crosses."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class ValueSpec(NamedTuple):
    """The form of all that crosses an edge: where the tree's tensors are, and its other leaves as they are."""

    spec: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors' forms."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))


def spec_of(values: Any, where: str) -> tuple[ValueSpec, list[Tensor]]:
    """The form of a tree, and its tensors, detached.

    Raises: PlanError: a leaf that is neither a tensor nor a plain value.

    >>> form, tensors = spec_of({"x": torch.ones(2), "n": 3}, "chunk 0")
    >>> [leaf if isinstance(leaf, int) else leaf.shape for leaf in form.leaves]
    [(2,), 3]
    """
    leaves, spec = tree_flatten(values)
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *PLAIN)):
            raise PlanError(
                f"what {where} hands on is no tree of tensors",
                given=type(leaf).__name__,
                allowed="tensors, numbers, strings and None, in tuples, lists and dicts",
                fix=f"hand on the tensors of the {type(leaf).__name__}, or cut the model elsewhere",
            )
    forms = tuple(
        TensorSpec(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    )
    return ValueSpec(spec, forms), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def fill(form: ValueSpec, tensors: Sequence[Tensor]) -> Any:
    """The tree of a form, with these tensors in it.

    >>> form, tensors = spec_of((torch.ones(2), 3), "chunk 0")
    >>> fill(form, tensors)
    (tensor([1., 1.]), 3)
    """
    given = iter(tensors)
    return tree_unflatten([next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in form.leaves], form.spec)


KEPT_KEYS = 256
"""The forms of so many keys are remembered, or of one list of actions that has more; those not used for longest go."""


@dataclass
class _Known:
    """What is known of one key: the form of each edge (from chunk, to chunk), and where the other side knows it too."""

    forms: dict[tuple[int, int], ValueSpec] = field(default_factory=dict)
    announced: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class P2P:
    """One stage's messages to and from the others, over the axis of the stages.

    All stages begin lists with the same keys in the same order, so they remember, and forget, the same forms.
    """

    axis: Axis
    _known: dict[object, _Known] = field(default_factory=dict)
    _by_number: dict[int, _Known] = field(default_factory=dict)
    _queues: dict[int, deque[StageMessage]] = field(default_factory=dict)
    _posted: dict[StageMessage, list[Pending[Tensor]]] = field(default_factory=dict)
    _from: dict[StageMessage, int] = field(default_factory=dict)
    _buffers: ReceiveBuffers = field(default_factory=ReceiveBuffers)

    def begin(self, arrivals: Mapping[int, Sequence[StageMessage]], keys: Sequence[object]) -> None:
        """A list of actions begins: these messages will come, in this order from each stage.

        ``keys[m]`` is that of microbatch m.
        """
        assert not self._posted, "every message of the last list was taken"
        self._queues = {stage: deque(messages) for stage, messages in arrivals.items()}
        self._from = {message: stage for stage, messages in arrivals.items() for message in messages}
        self._buffers.begin()
        self._by_number = {}
        for number, key in enumerate(keys):
            self._by_number[number] = self._known[key] = self._known.pop(key, _Known())
        for key in list(self._known)[: -max(KEPT_KEYS, len(keys))]:  # the last are those of this list
            del self._known[key]

    def knows(self, key: object) -> bool:
        """Whether a list with this key has begun, not too long ago."""
        return key in self._known

    def learn(self, key: object, edge: tuple[int, int], form: ValueSpec) -> None:
        """Values of this form will cross between these chunks, without being announced."""
        self._known.setdefault(key, _Known()).forms[edge] = form

    def form(self, message: StageMessage) -> ValueSpec:
        """The form of the values that crossed this edge."""
        return self._by_number[message.microbatch].forms[message.source, message.target]

    def remember(self, message: StageMessage, form: ValueSpec) -> None:
        """Values cross an edge between chunks of one stage: nothing is sent."""
        self._by_number[message.microbatch].forms[message.source, message.target] = form

    def send(self, message: StageMessage, form: ValueSpec, tensors: Sequence[Tensor], to: int) -> None:
        """Values forward; their form goes ahead when the other side does not know it."""
        known, edge = self._by_number[message.microbatch], (message.source, message.target)
        before = known.forms.setdefault(edge, form)
        if before != form:
            raise PlanError(
                f"what chunk {message.source} hands to chunk {message.target} has another form than before",
                given=f"{form.leaves}, before {before.leaves}",
                allowed="shapes that follow from those of the batch: the receiver knows no others",
                fix="keep shapes that depend on values inside one stage",
            )
        if edge not in known.announced:
            known.announced.add(edge)
            said = _said(form)
            data = torch.frombuffer(bytearray(said), dtype=torch.uint8).to(self.axis.device)
            forms = self.axis.for_strategy("core")
            forms.send(torch.tensor([data.numel()], device=self.axis.device), to)
            forms.send(data, to)
        for tensor in tensors:
            self.axis.send(tensor, to)

    def send_gradients(self, gradients: Sequence[Tensor], to: int) -> None:
        """Gradients back: the other side knows their shapes."""
        for gradient in gradients:
            self.axis.send(gradient, to)

    def post(self, messages: Sequence[StageMessage]) -> None:
        """Posts the receives of these messages, and of those that come before them, as far as their forms are known."""
        for message in messages:
            queue = self._queues.get(self._from.get(message, -1))
            while queue and message not in self._posted:
                first = queue[0]
                if (first.source, first.target) not in self._by_number[first.microbatch].forms:
                    break
                self._post(queue.popleft())

    def take(self, message: StageMessage) -> list[Tensor]:
        """The tensors of a message; waits for them."""
        stage = self._from[message]
        while message not in self._posted:
            first = self._queues[stage].popleft()
            forms, edge = self._by_number[first.microbatch].forms, (first.source, first.target)
            if edge not in forms:
                assert first.kind == "F", "values cross before their gradients do"
                forms[edge] = self._receive_form(stage)
            self._post(first)
        return [pending.wait() for pending in self._posted.pop(message)]

    def _receive_form(self, stage: int) -> ValueSpec:
        forms = self.axis.for_strategy("core")
        size = int(forms.receive((1,), torch.int64, stage))
        return _heard(bytes(forms.receive((size,), torch.uint8, stage).tolist()))

    def _post(self, message: StageMessage) -> None:
        form, stage = self.form(message), self._from[message]
        wanted = [leaf for leaf in form.tensors if message.kind == "F" or leaf.needs_gradient]
        found = []
        for leaf in wanted:
            into = self._buffers.take(leaf.shape, leaf.dtype, self.axis.device)
            found.append(self.axis.receive_async(leaf.shape, leaf.dtype, stage, into))
        self._posted[message] = found


def _said(form: ValueSpec) -> bytes:
    """A form as bytes: a tree of the same kind, with numbers in it, and the leaves."""
    return pickle.dumps((tree_unflatten(list(range(len(form.leaves))), form.spec), form.leaves))


def _heard(said: bytes) -> ValueSpec:
    tree, leaves = pickle.loads(said)
    return ValueSpec(tree_flatten(tree)[1], leaves)


def share_output(axis: Axis, output: Any, source: int) -> Any:
    """The model's output, which stage ``source`` has, on every stage.

    Traffic: one broadcast of its form and one of each tensor.
    """
    here = axis.index == source
    tensors: list[Tensor] = []
    said = b""
    if here:
        form, tensors = spec_of(output, "the last chunk")
        said = _said(form)
    forms = axis.for_strategy("core")
    size = int(forms.broadcast(torch.tensor([len(said)], device=axis.device), source))
    data = torch.frombuffer(bytearray(said or bytes(size)), dtype=torch.uint8).to(axis.device)
    form = _heard(bytes(forms.broadcast(data, source).tolist()))
    if not here:
        tensors = [torch.empty(leaf.shape, dtype=leaf.dtype, device=axis.device) for leaf in form.tensors]
    return fill(form, [forms.broadcast(tensor.contiguous(), source) for tensor in tensors])
