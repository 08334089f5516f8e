"""Buffers that a model's own code changes: with microbatches several times a step, where one device does so once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwright.errors import PlanError


class BufferWrites:
    """Looks at the first two microbatches of each chunk: what both change depends on how many there are.

    What is written once, like a table that is filled when it is first needed, may be. Seen is what torch counts as a
    write: BatchNorms are refused by their kind, before anything runs.

    >>> model = nn.BatchNorm1d(2)
    >>> written = BufferWrites(model)
    >>> for _ in range(2):
    ...     with written.watching(chunk=0, num_microbatches=2):
    ...         y = model(torch.ones(3, 2))
    Traceback (most recent call last):
    shardwright.errors.PlanError: 'num_batches_tracked' changes with every call, and 'mb' makes several of one
      given:   a buffer that BatchNorm1d writes into
      allowed: buffers that a second call leaves as they are; under mb2/own-statistics each microbatch may change them
      fix:     write mb2/own-statistics, or leave out mb
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._by_chunk: dict[int, tuple[str, ...]] = {}

    def is_done(self, chunk: int) -> bool:
        """Whether there is nothing more to look for."""
        return self._by_chunk.get(chunk) == ()

    @contextmanager
    def watching(self, chunk: int, num_microbatches: int) -> Iterator[None]:
        """A forward of one microbatch in training. Raises: PlanError: a buffer that the one before changed too."""
        buffers = dict(self.model.named_buffers())
        names = self._by_chunk.get(chunk)
        before = {name: (buffer, buffer._version) for name, buffer in buffers.items()}
        values = {name: buffers[name].clone() for name in names or ()}
        yield
        after = dict(self.model.named_buffers())
        if names is None:
            self._by_chunk[chunk] = tuple(name for name, seen in before.items() if _seen(after[name]) != _seen(*seen))
            return
        self._by_chunk[chunk] = ()
        for name, value in values.items():
            if not (value.is_meta or torch.equal(value, after[name])):
                raise self._refused(name, num_microbatches)

    def _refused(self, name: str, num_microbatches: int) -> PlanError:
        owner = self.model.get_submodule(name.rpartition(".")[0])
        own = f"mb{num_microbatches}/own-statistics"
        return PlanError(
            f"'{name}' changes with every call, and 'mb' makes several of one",
            given=f"a buffer that {type(owner).__name__} writes into",
            allowed=f"buffers that a second call leaves as they are; under {own} each microbatch may change them",
            fix=f"write {own}, or leave out mb",
        )


def _seen(buffer: Tensor, version: int | None = None) -> tuple[int, int]:
    """Which tensor it is, and how often it was written into."""
    return id(buffer), buffer._version if version is None else version
