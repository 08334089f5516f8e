"""Refuses a loss under ``pp`` that calls a collective of ``torch.distributed`` over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwright.dispatch_mode import DispatchMode, is_collective
from shardwright.errors import PlanError


class RefusesCollective(DispatchMode):
    """A context that raises PlanError where code calls a collective over all ranks, before anything is sent.

    It is for the first call of the loss under ``pp``. Only the ranks of the last stage run the loss, so in such a
    collective they would wait for the others. If ``torch.compile`` has wrapped the loss, it compiles inside of this
    context too.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if is_collective(func) and any(_has_all_ranks(argument) for argument in args):
            raise PlanError(
                f"the loss calls '{func.overloadpacket.__name__}' of torch.distributed over all ranks",
                given="a loss under pp, which the ranks of the last stage alone run, so that they would wait for ever",
                allowed="collectives over a group of the ranks that run the loss; under dp and tp all ranks do",
                fix="compute the loss alone, and sum metrics after run.step, where all ranks are",
            )
        return func(*args, **(kwargs or {}))


def _has_all_ranks(value: Any) -> bool:
    try:
        if isinstance(value, str):  # functional collectives get a group's name, for which torch has no public function
            group = distributed_c10d._resolve_process_group(value)  # type: ignore[attr-defined,arg-type]
        else:
            group = dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError, LookupError):  # the argument is no process group
        return False
    return bool(group.size() == dist.get_world_size())
