"""Alike blocks of a model: which of its children repeat, and the same model with fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from torch import nn

from shardwright.analysis.alike import likeness
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
    """Returns the run of alike blocks in a list or sequence of modules with the most parameters; None if there is none.

    Of lists inside of one another, such as the experts of each layer, the outermost is taken.
    """
    best, most = None, -1
    for path, module in model.named_modules():
        if type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        number = 0
        for _, run in groupby(module, likeness):
            blocks = list(run)
            held = num_parameters(blocks)
            if len(blocks) > 1 and held > most:
                best, most = AlikeBlocks(path, number, len(blocks)), held
            number += len(blocks)
    return best


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Returns the number of elements of all parameters of modules."""
    return sum(p.numel() for module in modules for p in module.parameters())


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
