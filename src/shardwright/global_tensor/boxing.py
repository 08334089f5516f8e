"""Boxing, carried out: a route's legs between local tensors. What is sent, is sent through ``comm``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from shardwright.comm.axis import Pending
from shardwright.comm.current_world import axis_here, everyone_here, here
from shardwright.global_tensor.boxing_plan import BoxingStep, route
from shardwright.global_tensor.geometry import GlobalLayout, boxes, chunk, is_partial, local_shape
from shardwright.sharding.box import read
from shardwright.sharding.transfer import BoxMessage, Transfer, deliver


def move(local: Tensor, shape: tuple[int, ...], source: GlobalLayout, destination: GlobalLayout) -> Tensor:
    """This rank's local tensor of the destination, from its local tensor of the source: contiguous.

    Every rank of either placement calls it; the others may. It is ``local`` itself where nothing changes.
    """
    if source == destination:
        return local
    local = resolved(local)
    for leg in route(shape, source, destination).legs:
        local = _move(local, leg)
    return local


def resolved(local: Tensor) -> Tensor:
    """The numbers themselves, where torch only notes that they are conjugate or negative: bytes are what is sent."""
    return local.resolve_conj().resolve_neg()


def _move(local: Tensor, leg: BoxingStep) -> Tensor:
    if leg.kind == "messages":
        kept = leg.kept.get(here().rank)
        if kept is not None:
            return local[kept].clone(memory_format=torch.contiguous_format)
        shape = local_shape(leg.shape, leg.destination, here().rank)
        return carry(leg.transfer, local, shape, zeros=is_partial(leg.destination))
    if here().rank not in leg.source.placement:
        return local
    return _collective(local, leg)


def _collective(local: Tensor, leg: BoxingStep) -> Tensor:
    axis = axis_here(leg.source.placement.group(leg.axis, here().rank))
    if leg.kind == "all_reduce":
        return axis.all_reduce(local.clone(memory_format=torch.contiguous_format))
    before, after = leg.dims
    sizes = [b - a for a, b in (chunk(leg.shape[after], axis.size, i) for i in range(axis.size))]
    if leg.kind == "reduce_scatter":
        return axis.reduce_scatter(local, after, sizes).contiguous()
    if leg.kind == "all_gather":
        return axis.all_gather(local, before, sizes).contiguous()
    held = boxes(leg.shape, leg.source)
    shapes = [list(held[rank].shape) for rank in axis.ranks]
    for each in shapes:
        each[after] = sizes[axis.index]
    return torch.cat(axis.all_to_all(local.split(sizes, after), shapes), before)


def carry(transfer: Transfer, local: Tensor, shape: tuple[int, ...], *, zeros: bool) -> Tensor:
    """Sends what this rank shall send, and returns a new tensor of ``shape`` with what it got and kept.

    Everything for one rank goes as one message, so a transfer costs each rank at most one message to each other.
    """
    rank, local = here().rank, resolved(local)
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
        for message in transfer.messages_to(rank):
            if message.source == rank:
                deliver(message, out, read(local, message.source_piece, message.box))
            else:
                deliver(message, out, next(values[message.source]).view(message.box.shape))
    return out


def _exchange(
    local: Tensor, sent: Mapping[int, list[Tensor]], expected: Mapping[int, list[BoxMessage]]
) -> dict[int, Iterator[Tensor]]:
    """Sends all, then waits for all: what each rank sent, in the order of its messages."""
    axis = everyone_here()
    under_way: list[Pending[None]] = []
    for to, parts in sent.items():  # a sender never waits for the receiver to ask
        whole = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
        under_way.append(axis.send_async(whole.reshape(-1), to))
    received = {
        source: axis.receive_async((sum(message.box.size for message in messages),), local.dtype, source)
        for source, messages in expected.items()
    }
    values = {
        source: iter(received[source].wait().split([message.box.size for message in messages]))
        for source, messages in expected.items()
    }
    for each in under_way:
        each.wait()
    return values
