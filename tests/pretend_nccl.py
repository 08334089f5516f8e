"""What ``torch.distributed`` is to the library's own transport, over the rules of NCCL (``nccl_rules.py``).

Ranks are threads, and no card is there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as real
from torch import Tensor

from nccl_rules import Call, Group, Nccl, NcclRuleError, Part, Variant
from shardwright.comm import launch
from shardwright.comm.backends import group_channel, process_groups
from shardwright.comm.backends import nccl as nccl_channel
from shardwright.comm.backends.process_groups import ProcessTransport
from shardwright.comm.backends.threads import ThreadWorld
from shardwright.comm.recorder import Recorder

# ---- what the library calls


class PretendDistributed:
    """The part of ``torch.distributed`` that the library's transport and its channels over NCCL use."""

    ReduceOp = real.ReduceOp

    def __init__(self, nccl: Nccl) -> None:
        self.nccl = nccl
        self._here = threading.local()
        self.group = SimpleNamespace(WORLD=Group(tuple(range(nccl.num_ranks)), ""))

    def start(self, rank: int) -> None:
        """Makes this thread a rank."""
        self._here.rank, self._here.together = rank, None
        self._here.c10d = SimpleNamespace(
            _hash_ranks_to_str=lambda ranks: "-".join(map(str, ranks)), _coalescing_manager=self._coalescing_manager
        )

    @property
    def distributed_c10d(self) -> Any:
        """The private part that names groups and joins calls; a rank's own, since the library changes it."""
        return self._here.c10d

    def get_backend(self, group: Group | None = None) -> str:
        """NCCL, whatever the group."""
        return "nccl"

    def new_group(self, ranks: list[int], timeout: object, use_local_synchronization: bool) -> Group:
        """A group of these ranks, under the name that the library gives it."""
        assert use_local_synchronization, "ranks outside of the group do not come"
        return Group(tuple(ranks), self.distributed_c10d._hash_ranks_to_str(ranks))

    # ---- collectives

    def all_reduce(
        self, tensor: Tensor, op: Any = real.ReduceOp.SUM, group: Group | None = None, async_op: bool = False
    ) -> Any:
        """An all-reduce in place; inside of a coalescing manager, one of several."""
        if self._here.together is not None:
            return self._here.together.append((tensor, op))
        return self._all_reduce([tensor], op, group, async_op)

    def _all_reduce(self, tensors: list[Tensor], op: Any, group: Group | None, async_op: bool) -> Any:
        def run(calls: list[Call]) -> None:
            for place in range(len(tensors)):
                given = [call.results[place] for call in calls]
                total = given[0].clone()
                for other in given[1:]:
                    total = total + other if op == real.ReduceOp.SUM else torch.maximum(total, other)
                for call in calls:
                    call.results[place] = total.to(given[0].dtype)

        sizes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        return self._collective("all_reduce", group, (sizes, str(op)), [], tensors, run, async_op)

    @contextmanager
    def _coalescing_manager(self, group: Group, async_ops: bool) -> Iterator[Any]:
        manager = SimpleNamespace(works=[])
        self._here.together = []
        yield manager
        together, self._here.together = self._here.together, None
        manager.works.append(self._all_reduce([tensor for tensor, _ in together], together[0][1], group, async_ops))

    def all_gather_single(self, whole: Tensor, part: Tensor, group: Group | None, async_op: bool) -> Any:
        """An all-gather into equal parts of one tensor; a rank's own may be among them."""
        group = group or self.group.WORLD
        parts = list(whole.view(-1).split(part.numel()))
        assert len(parts) == len(group.ranks), "one part for each rank"
        return self._gather("all_gather_single", parts, part, group, async_op)

    def all_gather(self, parts: list[Tensor], part: Tensor, group: Group | None, async_op: bool) -> Any:
        """An all-gather into separate tensors."""
        return self._gather("all_gather", parts, part, group or self.group.WORLD, async_op)

    def _gather(self, kind: str, parts: list[Tensor], part: Tensor, group: Group, async_op: bool) -> Any:
        place = group.ranks.index(self._here.rank)
        own = parts[place].data_ptr() == part.data_ptr() and part.numel()
        outs = [each for i, each in enumerate(parts) if not (own and i == place)]
        kept = [i for i in range(len(parts)) if not (own and i == place)]

        def run(calls: list[Call]) -> None:
            for call in calls:
                for index, i in enumerate(call.members):
                    call.results[index] = calls[i].inputs[0].clone().view(call.results[index].shape)

        sizes = [(each.numel(), each.dtype) for each in parts]
        return self._collective(kind, group, (sizes,), [part], outs, run, async_op, places=kept)

    def reduce_scatter_single(self, out: Tensor, whole: Tensor, group: Group | None, async_op: bool) -> Any:
        """A reduce-scatter of equal parts of one tensor."""
        group = group or self.group.WORLD
        parts = list(whole.view(-1).split(out.numel()))
        return self._scatter("reduce_scatter_single", out, parts, group, async_op)

    def reduce_scatter(self, out: Tensor, parts: list[Tensor], group: Group | None, async_op: bool) -> Any:
        """A reduce-scatter of separate tensors."""
        return self._scatter("reduce_scatter", out, parts, group or self.group.WORLD, async_op)

    def _scatter(self, kind: str, out: Tensor, parts: list[Tensor], group: Group, async_op: bool) -> Any:
        assert len(parts) == len(group.ranks), "one part for each rank"

        def run(calls: list[Call]) -> None:
            for i, call in enumerate(calls):
                total = calls[0].inputs[i].clone()
                for other in calls[1:]:
                    total += other.inputs[i]
                call.results[0] = total.view(call.results[0].shape)

        sizes = [(each.numel(), each.dtype) for each in parts]
        return self._collective(kind, group, (sizes,), parts, [out], run, async_op)

    def all_to_all(self, outs: list[Tensor], parts: list[Tensor], group: Group | None, async_op: bool) -> Any:
        """An all-to-all of parts of any size."""

        def run(calls: list[Call]) -> None:
            for i, call in enumerate(calls):
                for j, other in enumerate(calls):
                    if call.results[j].numel() != other.inputs[i].numel():
                        raise NcclRuleError(f"{call.what}: rank {call.rank} takes another size than {other.rank} gives")
                    call.results[j] = other.inputs[i].clone().view(call.results[j].shape)

        return self._collective("all_to_all", group, (outs[0].dtype,), parts, outs, run, async_op)

    def broadcast(self, tensor: Tensor, group: Group | None, group_src: int, async_op: bool) -> Any:
        """A broadcast from a place of the group."""
        group = group or self.group.WORLD
        gives = group.ranks[group_src] == self._here.rank

        def run(calls: list[Call]) -> None:
            for call in calls:
                if call is not calls[group_src]:
                    call.results[0] = calls[group_src].inputs[0].clone()

        given, outs = ([tensor], []) if gives else ([], [tensor])
        signature = (tensor.numel(), tensor.dtype, group_src)
        return self._collective("broadcast", group, signature, given, outs, run, async_op)

    def _collective(
        self, kind: str, group: Group | None, signature: tuple[Any, ...], inputs: list[Tensor], outputs: list[Tensor],
        run: Callable[[list[Call]], None], async_op: bool, places: list[int] | None = None,
    ) -> Any:  # fmt: skip
        group = group or self.group.WORLD
        key = f"group {group.name or 'of all'}"
        what = f"{kind} over {key}"
        call = Call(self.nccl, self._here.rank, what, key, (kind, *signature), inputs, outputs, run=run)
        call.members = places or []
        self.nccl.enter((key, group.ranks), group.ranks, call)
        return call if async_op else call.wait()

    # ---- messages

    def isend(self, tensor: Tensor, group: Group, group_dst: int, tag: int = 0) -> Call:
        """A send over the communicator of the two ranks."""
        return self._single(group, self._part(True, tensor, group, group_dst))

    def irecv(self, tensor: Tensor, group: Group, group_src: int, tag: int = 0) -> Call:
        """A receive over the communicator of the two ranks."""
        return self._single(group, self._part(False, tensor, group, group_src))

    def send(self, tensor: Tensor, group: Group, group_dst: int) -> None:
        """A send that is waited for."""
        self.isend(tensor, group, group_dst).wait()

    def recv(self, tensor: Tensor, group: Group, group_src: int) -> None:
        """A receive that is waited for."""
        self.irecv(tensor, group, group_src).wait()

    @property
    def P2POp(self) -> Any:
        """What makes one message of a group of them."""
        return self._operation

    def _operation(self, op: Any, tensor: Tensor, group: Group, group_peer: int) -> Any:
        return SimpleNamespace(sends=op == self.isend, tensor=tensor, group=group, peer=group_peer)

    def batch_isend_irecv(self, operations: list[Any]) -> list[Call]:
        """Several messages as one call of the group's own communicator."""
        group = operations[0].group or self.group.WORLD
        parts = [self._part(each.sends, each.tensor, group, each.peer) for each in operations]
        return [self._messages(f"group {group.name or 'of all'}", group.ranks, parts)]

    def _part(self, sends: bool, tensor: Tensor, group: Group | None, peer: int) -> Part:
        ranks = (group or self.group.WORLD).ranks
        return Part(sends, ranks[peer], tensor, tensor.clone() if sends else None)

    def _single(self, group: Group | None, part: Part) -> Call:
        group = group or self.group.WORLD
        pair = tuple(sorted((self._here.rank, part.peer)))
        return self._messages(f"pair {pair[0]}-{pair[1]} of group {group.name or 'of all'}", pair, [part])

    def _messages(self, key: str, members: tuple[int, ...], parts: list[Part]) -> Call:
        names = [
            f"{'send to' if part.sends else 'receive from'} {part.peer} of {tuple(part.tensor.shape)}" for part in parts
        ]
        outs = [part.tensor for part in parts if not part.sends]
        call = Call(self.nccl, self._here.rank, " and ".join(names), key, outputs=outs, parts=parts)
        return self.nccl.enter((key, members), members, call)


# ---- ranks as threads, over it


class _OfThread:
    """The pretend ``torch.distributed`` of the rank that asks: several runs may follow each other, or be nested."""

    def __init__(self) -> None:
        self._here = threading.local()

    def enter(self, pretend: PretendDistributed) -> None:
        self._here.pretend = pretend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._here.pretend, name)


class PretendTransport(ProcessTransport):
    """The library's own transport over NCCL's rules; a rank that fails ends the others as threads do."""

    def __init__(self, hub: ThreadWorld, nccl: Nccl, rank: int, recorder: Recorder) -> None:
        limit = timedelta(seconds=600)
        super().__init__(rank, nccl.num_ranks, recorder, limit, None, "auto", device=nccl.device)
        self.hub, self.nccl = hub, nccl

    def abandon(self, failure: BaseException) -> None:
        """Makes every other rank end with an error."""
        self.hub.fail(self.rank, self.nccl.failure or failure)
        self.nccl.fail(failure)

    def close(self) -> None:
        """Notes that this rank has ended."""
        self.disconnect()
        self.hub.leave(self.rank)
        self.nccl.leave(self.rank)


@contextmanager
def over_nccl(variant: Variant, device: torch.device | str = "cpu") -> Iterator[None]:
    """Runs ranks that are threads over NCCL's rules; raises at the end where something is left in flight.

    ``device`` is that of the ranks: NCCL takes no tensor of another.
    """
    here, runs = _OfThread(), {}
    lock = threading.Lock()

    def transport(hub: ThreadWorld, rank: int, recorder: Recorder) -> PretendTransport:
        with lock:
            if id(hub) not in runs:
                nccl = Nccl(len(hub.live), variant, torch.device(device))
                runs[id(hub)] = hub, nccl, PretendDistributed(nccl)
        _, nccl, pretend = runs[id(hub)]
        pretend.start(rank)
        here.enter(pretend)
        return PretendTransport(hub, nccl, rank, recorder)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(launch, "ThreadTransport", transport))
        for module in (process_groups, group_channel, nccl_channel):
            patches.enter_context(mock.patch.object(module, "dist", here))
        try:
            yield
        except Exception as failure:
            broken = [nccl.failure for _, nccl, _ in runs.values() if isinstance(nccl.failure, NcclRuleError)]
            raise broken[0] if broken else failure from failure
    for _, nccl, _ in runs.values():
        if nccl.failure is None:
            nccl.check_all_done()
