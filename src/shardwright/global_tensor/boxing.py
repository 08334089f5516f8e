"""Redistributes global tensors ("boxing"): runs a plan's collectives and point-to-point messages on local tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardwright.comm.current_world import axis_here, current_world, everyone_here
from shardwright.global_tensor.boxing_plan import BoxingStep, cheapest_plan
from shardwright.global_tensor.geometry import GlobalLayout, boxes, chunk, is_partial, local_shape
from shardwright.sharding.box import read
from shardwright.sharding.transfer import BoxMessage, TensorTransfer, deliver


def redistribute_local(
    local: Tensor, shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout
) -> Tensor:  # fmt: skip
    """Returns this rank's local tensor of a global tensor, redistributed from the layout ``source`` to ``destination``.

    ``local`` is this rank's local tensor under ``source``, and ``shape`` is the global shape. The result is contiguous,
    and empty on a rank outside of ``destination``. If the layouts are equal, ``local`` itself is returned. Every rank
    of either placement must call this function; other ranks may.

    Traffic: that of the plan that :func:`cheapest_plan` returns.
    """
    if source == destination:
        return local
    local = materialized(local)
    for step in cheapest_plan(shape, source, destination).steps:
        local = _run_step(local, step)
    return local


def materialized(local: Tensor) -> Tensor:
    """Returns a tensor whose memory has the real values: torch's lazy conjugation and negation are carried out.

    Messages carry raw bytes, so this is done before a tensor is sent. A tensor without such lazy operations is returned
    itself.
    """
    return local.resolve_conj().resolve_neg()


def _run_step(local: Tensor, step: BoxingStep) -> Tensor:
    if step.kind == "messages":
        kept = step.kept.get(current_world().rank)
        if kept is not None:
            return local[kept].clone(memory_format=torch.contiguous_format)
        shape = local_shape(step.shape, step.destination, current_world().rank)
        return run_transfer(step.transfer, local, shape, zeros=is_partial(step.destination))
    if current_world().rank not in step.source.placement:
        return local
    return _run_collective(local, step)


def _run_collective(local: Tensor, step: BoxingStep) -> Tensor:
    axis = axis_here(step.source.placement.group(step.axis, current_world().rank))
    if step.kind == "all_reduce":
        return axis.all_reduce(local.clone(memory_format=torch.contiguous_format))
    before, after = step.dims
    sizes = [b - a for a, b in (chunk(step.shape[after], axis.size, i) for i in range(axis.size))]
    if step.kind == "reduce_scatter":
        return axis.reduce_scatter(local, after, sizes).contiguous()
    if step.kind == "all_gather":
        return axis.all_gather(local, before, sizes).contiguous()
    box_of = boxes(step.shape, step.source)
    # each member sends its slice of ``before``, cut along ``after`` to this rank's size
    shapes = [list(box_of[rank].shape) for rank in axis.ranks]
    for shape in shapes:
        shape[after] = sizes[axis.index]
    return torch.cat(axis.all_to_all(local.split(sizes, after), shapes), before)


def run_transfer(transfer: TensorTransfer, local: Tensor, shape: tuple[int, ...], *, zeros: bool) -> Tensor:
    """Sends and receives this rank's messages of a redistribution, and returns its new local tensor of shape ``shape``.

    ``transfer`` has the messages of all ranks, and ``local`` is this rank's old local tensor. All messages from one
    rank to another are sent as one. Elements that no message fills are zero with ``zeros``, which partial sums need,
    and uninitialized without it. Autograd does not record the call.
    """
    rank, local = current_world().rank, materialized(local)
    with torch.no_grad():
        out = local.new_zeros(shape) if zeros else local.new_empty(shape)
        sent: defaultdict[int, list[Tensor]] = defaultdict(list)
        for message in transfer.messages_from(rank):
            if message.destination != rank:
                sent[message.destination].append(read(local, message.source_piece, message.box))
        expected: defaultdict[int, list[BoxMessage]] = defaultdict(list)
        for message in transfer.messages_to(rank):
            if message.source != rank:
                expected[message.source].append(message)
        values = _exchange(local, sent, expected) if sent or expected else {}
        # delivered in the plan's order, not by sender: terms are added in the same order on every run
        for message in transfer.messages_to(rank):
            if message.source == rank:
                deliver(message, out, read(local, message.source_piece, message.box))
            else:
                deliver(message, out, next(values[message.source]).view(message.box.shape))
    return out


def _exchange(
    local: Tensor, sent: Mapping[int, list[Tensor]], expected: Mapping[int, list[BoxMessage]]
) -> dict[int, Iterator[Tensor]]:
    """Sends and receives all messages at once; returns each source's tensors in the order of its messages."""
    joined = {
        to: (parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])).reshape(-1)
        for to, parts in sent.items()
    }
    sizes = {source: [message.box.size for message in messages] for source, messages in expected.items()}
    shapes = {source: (sum(message_sizes),) for source, message_sizes in sizes.items()}
    received = everyone_here().send_and_receive_async(joined, shapes, local.dtype).wait()
    return {source: iter(tensor.split(sizes[source])) for source, tensor in received.items()}
