"""Alike blocks of a model: which of its children repeat, and the same model with fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from shardwright.analysis.alike import signature
from shardwright.parallelize.planning import without_storage


class AlikeBlocks(NamedTuple):
    """Children ``first`` to ``first + number`` of the list at ``path``, which have the same code, sizes and settings.

    >>> alike_blocks(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)))
    AlikeBlocks(path='', first=1, number=2)
    """

    path: str
    first: int
    number: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks, in order."""
        return tuple(f"{self.path}.{self.first + i}".lstrip(".") for i in range(self.number))

    def shortened(self, model: nn.Module, number: int) -> nn.Module:
        """Returns a copy of the model, on the meta device, with only so many of these blocks."""
        found = without_storage(model)
        blocks: Any = found.get_submodule(self.path)
        del blocks[self.first + number : self.first + self.number]
        return found


def alike_blocks(model: nn.Module) -> AlikeBlocks | None:
    """Returns the longest run of alike blocks in a list or sequence of modules; None if no two are alike."""
    best: AlikeBlocks | None = None
    for path, module in model.named_modules():
        if type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        number = 0
        for _, run in groupby(signature(child) for child in module):
            size = len(list(run))
            if size > max(1, best.number if best else 1):
                best = AlikeBlocks(path, number, size)
            number += size
    return best


def counts_of(blocks: AlikeBlocks, calls: Sequence[str]) -> tuple[int, tuple[str, ...]] | None:
    """Returns how many blocks a chunk calls, and its other calls; None if it calls parts of a block.

    >>> counts_of(AlikeBlocks("blocks", 0, 3), ["token", "blocks.0", "blocks.1"])
    (2, ('token',))
    """
    names = set(blocks.names)
    others = tuple(call for call in calls if call not in names)
    if any(f"{call}.".startswith(f"{name}.") for call in others for name in names):
        return None
    return sum(call in names for call in calls), others
