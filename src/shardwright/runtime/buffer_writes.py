"""Raises an error for models whose forward changes a buffer at every call.

With microbatches such a buffer would change several times in a step, and depend on their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.analysis.traced.batch_norms import is_frozen
from shardwright.errors import PlanError
from shardwright.tensor_bytes import bytes_of


class BufferWrites:
    """Raises PlanError for a buffer that every microbatch changes, so that its value depends on ``mb``.

    The first two microbatches of each chunk are watched: a buffer that the first writes, as torch's version counters
    show, must keep its values in the second. A buffer that is written once, like a table that is filled at its first
    use, is allowed. BatchNorms in training are refused elsewhere, by their type, before anything runs; a BatchNorm that
    was frozen at that time must stay frozen.

    >>> model = nn.BatchNorm1d(2)
    >>> written = BufferWrites(model)
    >>> for _ in range(2):
    ...     with written.watching(chunk=0, num_microbatches=2):
    ...         y = model(torch.ones(3, 2))
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'num_batches_tracked' changes with every call, and 'mb' makes several calls a step
      given:   a buffer that BatchNorm1d writes into
      allowed: buffers that a second call leaves as they are; under mb2/own-statistics each microbatch may change them
      fix:     write mb2/own-statistics, or leave out mb
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._frozen = {name: module for name, module in model.named_modules() if is_frozen(module)}
        self._by_chunk: dict[int, tuple[str, ...]] = {}

    @contextmanager
    def watching(self, chunk: int, num_microbatches: int) -> Iterator[None]:
        """Returns a context around one microbatch's training forward of ``chunk``, which checks it for buffer writes.

        Leaving the context makes the check. ``num_microbatches`` is named in the error.

        Raises: PlanError: the second microbatch changes a buffer that the first one has written; or a layer that was
        frozen at first would compute statistics of a microbatch.
        """
        own = f"mb{num_microbatches}/own-statistics"
        for name, module in self._frozen.items():
            if not is_frozen(module):
                raise PlanError(
                    f"'{name}' computes statistics over the batch, which 'mb' cuts",
                    given=f"{type(module).__name__} that was in eval mode when the layout was planned, and trains now",
                    allowed=f"one that stays in eval mode; under {own} each microbatch has its own statistics",
                    fix=f"call run.model.get_submodule('{name}').eval() after run.model.train(), or write {own}",
                )
        names = self._by_chunk.get(chunk)
        if names == ():  # both microbatches were checked, or the first one wrote nothing
            yield
            return
        before = {name: (buffer, buffer._version) for name, buffer in self.model.named_buffers()}
        values = {name: before[name][0].clone() for name in names or () if name in before}
        yield
        after = dict(self.model.named_buffers())
        if names is None:  # the first microbatch: version counters show what was written, without copies
            self._by_chunk[chunk] = tuple(
                name
                for name, (buffer, version) in before.items()
                if after.get(name) is not buffer or buffer._version != version
            )
            return
        self._by_chunk[chunk] = ()
        unchanged = "buffers that a second call leaves as they are"
        for name, value in values.items():
            now = after.get(name)
            if not value.is_meta and (now is None or not torch.equal(bytes_of(value), bytes_of(now))):  # NaN is NaN
                owner = self.model.get_submodule(name.rpartition(".")[0])
                raise PlanError(
                    f"'{name}' changes with every call, and 'mb' makes several calls a step",
                    given=f"a buffer that {type(owner).__name__} writes into",
                    allowed=f"{unchanged}; under {own} each microbatch may change them",
                    fix=f"write {own}, or leave out mb",
                )
