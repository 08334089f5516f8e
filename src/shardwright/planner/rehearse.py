"""Rehearses one rank's step on the meta device, and records its operators, messages and memory for each action."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.analysis.calls.flops import flop_formula
from shardwright.analysis.on_meta.operator_results import run_on_meta, tensors_of
from shardwright.comm.collective_call import CollectiveCall
from shardwright.cost.operators import OperatorRecord
from shardwright.devices import HOST
from shardwright.ledger.account import JobPlan, measure_memory, rehearsal_errors_explained, rehearsed
from shardwright.operator_schemas import written_arguments
from shardwright.plan.event_stages import EventStages
from shardwright.plan.plan import Job, Plan
from shardwright.plan.schedule import Action
from shardwright.runtime.executor import Events
from shardwright.strategies.tensor_parallel.note import notes_of

P2P = ("send", "receive")
"""The kinds of messages between pipeline stages."""

PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class MessageRecord(NamedTuple):
    """A collective or p2p message that a rank began: its kind, mesh axis, strategy, payload, and its group's ranks.

    ``axis`` may be several joined names, such as "dp+tp". ``source`` is the strategy, or "core" or "loss".
    """

    kind: str
    axis: str
    source: str
    num_bytes: int
    ranks: tuple[int, ...]


class WaitRecord(NamedTuple):
    """A wait of a rank for a message that it started before, at this point of a pipeline action.

    ``began`` is the index of the message's :class:`MessageRecord` among the records of the same action.
    """

    began: int


StepRecord = OperatorRecord | MessageRecord | WaitRecord


@dataclass
class ActionRecord:
    """What one action of a schedule does on a rank: operators, messages and waits in program order, and bytes held."""

    records: list[StepRecord] = field(default_factory=list)
    moments: list[tuple[int, ...]] = field(default_factory=list)
    """The bytes of each kind of memory, in the order of :data:`shardwright.ledger.tracking.KINDS`, after each operator
    that allocates memory and at the end of the action."""


class RankRecord(NamedTuple):
    """The operators, messages and memory of one rank's step on the meta device, by the name of the schedule's action.

    "begin" is what comes before the actions, and "optimizer" is what follows them: the end of the gradient sync, and
    the optimizer's step. ``beside`` are the bytes that the device holds beside tensors, by purpose, and
    ``offloaded_bytes`` those of state in host memory or on disk.
    """

    by_action: Mapping[str, ActionRecord]
    beside: Mapping[str, int]
    offloaded_bytes: int = 0


def rehearse(
    job: Job, planned: JobPlan, rank: int, batch: tuple[Any, Any], device_type: str, optimizer: Any
) -> RankRecord:
    """Returns the operators, messages and memory of one rank's second training step, run on the meta device.

    The step is the second so that optimizer state exists. ``batch`` is the global batch, ``device_type`` the type of
    the device to predict memory for, and ``optimizer`` a class, as in
    :func:`shardwright.ledger.account.predict_memory`.

    Raises: PlanError: the model's own code, or the loss, does not run without values.
    """
    if not _begins_anew(planned.plan, device_type):
        record = _rehearsed(job, planned, rank, batch, device_type, optimizer, first_step=False)
        if record is not None:
            return record
    record = _rehearsed(job, planned, rank, batch, device_type, optimizer, first_step=True)
    assert record is not None, "a first step leaves state where gradients are"
    return record


def _begins_anew(plan: Plan, device_type: str) -> bool:
    """Returns whether a rank's first step does other things than its second, beside making optimizer state.

    Weights that are gathered before use, by ZeRO-3 or for tensor-parallel products, are prefetched in the order of the
    step before, which the first step lacks. In the first step ranks on a CPU allocate blocks of shared memory, and
    stages of a recorded forward compare records.
    """
    fetches = any(axes for _, note in notes_of(plan) for _, axes in note.fetched())
    is_recorded = isinstance(plan.stages, EventStages)
    return device_type in HOST or is_recorded or fetches or bool(plan.unsharded_on_use)


def _rehearsed(
    job: Job, planned: JobPlan, rank: int, batch: tuple[Any, Any], device_type: str, optimizer: Any, *,
    first_step: bool,
) -> RankRecord | None:  # fmt: skip
    """Returns the record of a rank's second step, or None if the step that was recorded does not stand for it.

    With ``first_step`` a whole step is taken before, and the result is never None. Without it the recorded step is the
    first one, for which all trained parameters were given optimizer state. It does not stand for a second step if a
    trained parameter gets no gradient, and so would have no state, or if the model's code keeps what its first forward
    makes, such as a table of positions.
    """
    layout, options = planned.plan.layout, {"optimizer": optimizer, "device": device_type, "first_step": first_step}
    with rehearsed(job, layout, rank, batch, planned=planned, **options) as (run, microbatch, steps):
        before = _kept_by_code(run.model)
        by_action: dict[str, ActionRecord] = {}
        needs_constants = job.graph is not None and job.graph.needs_constants
        follower = _Follower(by_action, planned.plan.reads_values or needs_constants)
        recorder = run.world.recorder
        recorder.follower = follower
        try:
            events = Events(before_action=follower.begin, before_sync=follower.sync)
            with rehearsal_errors_explained(), run.observed(events):
                account = measure_memory(run, microbatch, steps, device_type, follower.run)
        finally:
            recorder.follower = None
        if not first_step:
            without = any(p.grad is None for p in run.parameters.values() if p.requires_grad)
            if without or _kept_by_code(run.model) != before:
                return None
    for moment in account.moments:
        by_action.setdefault(moment.action, ActionRecord()).moments.append(moment.held)
    _move_update(by_action)
    return RankRecord(by_action, account.beside, sum(account.elsewhere.values()))


def _kept_by_code(model: nn.Module) -> dict[tuple[str, str], tuple[int, int]]:
    """Returns the id of each attribute and buffer of all modules, and the length of containers, to see changes by."""
    return {
        (path, name): (id(value), len(value) if isinstance(value, dict | list | set) else 0)
        for path, module in model.named_modules()
        for name, value in chain(vars(module).items(), module._buffers.items())
    }


def _move_update(by_action: dict[str, ActionRecord]) -> None:
    """Moves the records since the gradient sync, the optimizer's step among them, to "optimizer".

    No event marks where the optimizer's step begins.
    """
    after = by_action.pop("sync", ActionRecord())
    update = by_action.setdefault("optimizer", ActionRecord())
    update.records = [*after.records, *update.records]


class _Follower:
    """Notes each operator, and each message that begins or is waited for, under the action that is running."""

    def __init__(self, by_action: dict[str, ActionRecord], has_values: bool) -> None:
        self._by_action, self._has_values = by_action, has_values
        self._now = by_action.setdefault("begin", ActionRecord())
        self._records: dict[Hashable, OperatorRecord | None] = {}
        self._under_way: dict[int, tuple[CollectiveCall, ActionRecord, int]] = {}

    def begin(self, action: Action) -> None:
        self._now = self._by_action.setdefault(str(action), ActionRecord())

    def sync(self) -> None:
        self._now = self._by_action.setdefault("sync", ActionRecord())

    def began(self, call: CollectiveCall, num_bytes: int, ranks: tuple[int, ...]) -> None:
        self._under_way[id(call)] = (call, self._now, len(self._now.records))
        self._now.records.append(MessageRecord(call.kind, call.axis, call.source, num_bytes, ranks))

    def awaited(self, call: CollectiveCall) -> None:
        _, action, number = self._under_way.pop(id(call))
        # a message that an earlier action began is taken to be complete by now, so that no time is spent waiting
        if action is self._now:
            action.records.append(WaitRecord(number))

    def run(self, function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Runs an operator on the meta device and records it."""
        if function.is_view and not self._has_values and type(args[0]) in (Tensor, nn.Parameter):  # it moves no bytes
            with torch._C._DisableTorchDispatch():  # the mode below would do the same
                return function(*args, **named)
        seen: list[Hashable] = []
        # a meta kernel is slow, so it runs once for equal calls; where values are kept, the mode below sees to that
        out = function(*args, **named) if self._has_values else run_on_meta(function, args, named, seen)
        if seen and seen[0] in self._records:
            record = self._records[seen[0]]
        else:
            record = operator_record(function, args, named, out)
            self._records.update((key, record) for key in seen)
        if record is not None:
            self._now.records.append(record)
        return out


def operator_record(function: Any, args: Any, named: Mapping[str, Any], out: Any) -> OperatorRecord | None:
    """Returns the FLOPs, bytes and dims of one call of an operator, from the shapes of the tensors it reads and writes.

    It returns None for a view and any other operator that moves no bytes.
    """
    packet = function._overloadpacket
    if function.is_view or packet in _FREE:
        return None
    operands, results = tensors_of((args, named)), tensors_of(out)
    written = {id(tensor) for tensor in operands}
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in operands)
    num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in results if id(tensor) not in written)
    if function._schema.is_mutable and not function._schema.name.endswith("_out"):
        changed = results or written_arguments(function, args, named, Tensor)  # foreach operators return nothing
        num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in changed)
    attention, name, precision = _ATTENTION.get(packet), packet._qualified_op_name, _precision(operands)
    if attention is not None:
        return OperatorRecord("attention", attention(*args, **named), num_bytes, precision, name=name)
    count = flop_formula(packet) or flop_formula(_not_in_place(packet))
    if count is None:
        return OperatorRecord("memory", 0, num_bytes, precision, name=name) if num_bytes else None
    flops = int(count(*args, **named, out_val=out))
    offsets = args[2] if packet is _aten._grouped_mm and len(args) > 2 else None
    groups = 1 if offsets is None else len(offsets)
    return OperatorRecord("matmul", flops, num_bytes, precision, _dims(operands, results, flops, groups), name=name)


def _not_in_place(packet: Any) -> Any:
    """Returns the operator that computes the same as an in-place one, such as ``addmm`` for ``addmm_``, or None."""
    name = packet._qualified_op_name.partition("::")[2]
    return getattr(_aten, name.removesuffix("_"), None)


def _dims(operands: Sequence[Tensor], results: Sequence[Tensor], flops: int, groups: int) -> tuple[int, int, int, int]:
    """Returns the dims (batch, m, n, k) of a matrix product; for a convolution, those of the product that it equals.

    ``groups`` is the number of groups of a grouped product, which are taken to have equally many rows.
    """
    shape = results[0].shape
    if groups > 1 and len(shape) == len(operands[0].shape) == 2:  # of rows times the weights of their group
        shape = torch.Size((groups, -(-shape[0] // groups), shape[1]))
    *batch, m, n = shape if len(shape) in (2, 3) else (1, shape[0] * shape[2:].numel(), shape[1])
    size = max(1, m * n * (batch[0] if batch else 1))
    return (batch[0] if batch else 1, m, n, max(1, flops // (2 * size)))


def _precision(operands: Sequence[Tensor]) -> str:
    floats = [tensor.dtype for tensor in operands if tensor.dtype.is_floating_point]
    return PRECISIONS.get(floats[0], "fp32") if floats else "fp32"


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> int:
    *outer, tokens, width = query.shape
    pairs = tokens * key.shape[-2]
    flops = 2 * torch.Size(outer).numel() * pairs * (width + value.shape[-1])
    return flops // 2 if is_causal else flops


def _forward_flops(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
                   **_: Any) -> int:  # fmt: skip
    return _attention_flops(query, key, value, is_causal)


def _backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sums: Tensor,
                    dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> int:  # fmt: skip
    return 5 * _attention_flops(query, key, value, is_causal) // 2  # five products where the forward has two


_aten = torch.ops.aten
_ATTENTION: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
"""The fused attention that a rehearsal runs: torch's table of FLOPs lacks it."""

_FREE = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided, _aten.detach,
         _aten.set_, _aten.resize_, _aten.lift_fresh, _aten.is_same_size, _aten._unsafe_view, _aten.alias}  # fmt: skip
"""Operators that move no bytes, though torch does not call them views."""
