"""Finds the repeated blocks of a model, such as its transformer layers, and copies the model with fewer of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

from torch import nn

from shardwright.analysis.objects.alike import counters, likeness
from shardwright.parallelize.planning import without_storage


class AlikeBlocks(NamedTuple):
    """A run of consecutive blocks of a model with the same code, sizes and settings, such as its transformer layers.

    They are the ``number`` children from index ``first`` on of the list at ``path`` ("" is the model itself). ``keys``
    has the blocks' names in that list where these are not their indices, as in an ``nn.Sequential`` of named children.

    >>> alike_blocks(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)))
    AlikeBlocks(path='', first=1, number=2, keys=())
    """

    path: str
    first: int
    number: int
    keys: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks in the model, in order."""
        keys = self.keys or tuple(str(self.first + i) for i in range(self.number))
        return tuple(f"{self.path}.{key}".lstrip(".") for key in keys[: self.number])

    def shortened(self, model: nn.Module, number: int) -> nn.Module:
        """Returns a copy of the model on the meta device that has only the first ``number`` of these blocks.

        All other modules keep their names, except that where the blocks are a part of a longer ``nn.Sequential`` or
        ``nn.ModuleList``, the children after them are renumbered.
        """
        copy = without_storage(model)
        blocks: Any = copy.get_submodule(self.path)
        if not self.keys:
            del blocks[self.first + number : self.first + self.number]
        for key in self.keys[number : self.number]:
            del blocks._modules[key]  # deleting from an nn.Sequential by index would number its children anew
        return copy


def alike_blocks(model: nn.Module) -> AlikeBlocks | None:
    """Returns the run of two or more alike blocks that has the most parameters, or None if no blocks are alike.

    Only children of an ``nn.Sequential`` or ``nn.ModuleList`` are looked at, not those of a subclass, nor those of a
    list in which a place is empty (None). A setting that counts the children, such as the ``layer_idx`` of a
    transformer layer, may differ. Of runs with as many parameters, the first in the order of ``named_modules`` is
    returned: of nested ones, the outermost.
    """
    best, most = None, -1
    for path, module in model.named_modules():
        if type(module) not in (nn.ModuleList, nn.Sequential) or None in module._modules.values():
            continue
        number = 0
        for _, run in groupby(module, partial(likeness, counters=counters(module))):
            blocks = list(run)
            held = num_parameters(blocks)
            if len(blocks) > 1 and held > most:
                keys = tuple(islice(module._modules, number, number + len(blocks)))
                is_numbered = keys == tuple(str(number + i) for i in range(len(blocks)))
                best, most = AlikeBlocks(path, number, len(blocks), () if is_numbered else keys), held
            number += len(blocks)
    return best


def num_parameters(modules: Sequence[nn.Module]) -> int:
    """Returns the number of elements of all parameters of ``modules``; one that two of them share counts twice."""
    return sum(p.numel() for module in modules for p in module.parameters())


def counts_of(blocks: AlikeBlocks, calls: Sequence[str]) -> tuple[int, tuple[str, ...]] | None:
    """Returns how many of the blocks a pipeline chunk calls, and the chunk's other calls.

    It returns None if the chunk calls modules inside a block. ``calls`` are the names of the modules that the chunk
    calls.

    >>> counts_of(AlikeBlocks("blocks", 0, 3), ["token", "blocks.0", "blocks.1"])
    (2, ('token',))
    """
    names = set(blocks.names)
    others = tuple(call for call in calls if call not in names)
    if any(f"{call}.".startswith(f"{name}.") for call in others for name in names):
        return None
    return sum(call in names for call in calls), others
