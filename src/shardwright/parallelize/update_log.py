"""Notes the steps, learning rates and options of a run's optimizers as text, which ranks compare with each other."""

from __future__ import annotations

import itertools
from typing import Any
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor


class UpdateLog:
    """Counts the steps of the optimizers given to :meth:`add`, and records the learning rates and options.

    The same code gives the same text on all ranks. The value of a learning rate or option that is a tensor is not read.

    >>> log, weight = UpdateLog(), torch.nn.Parameter(torch.ones(1))
    >>> log.add(torch.optim.SGD([weight], lr=0.5))
    >>> lines = log.lines()
    >>> lines["number of updates"], lines["learning rates"]
    ('1', '[0.5]')
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._past = 0  # a digest of all steps, so that a difference between two comparisons of ranks is found too
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._count = itertools.count()
        # (rates, options) of each optimizer that has made a step since lines() was called last, by its number
        self._recent: dict[int, tuple[str, str]] = {}

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Records one step of an optimizer, with its class and the learning rates and options of its groups."""
        self.num_updates += 1
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._count)
        self._recent[self._numbers[optimizer]] = texts = _rates_of(optimizer), _options_of(optimizer)
        self._past = crc32("".join(texts).encode(), self._past)

    def lines(self) -> dict[str, str]:
        """Returns texts by name: the number of steps so far, rates, options, and a digest of all of these so far.

        Rates and options are the latest of each optimizer that has made a step since the last call.
        """
        recent, self._recent = sorted(self._recent.values()), {}
        return {
            "number of updates": str(self.num_updates),
            "learning rates": " ".join(rates for rates, _ in recent),
            "options": " ".join(options for _, options in recent),
            "rates of all updates": f"rates and options of digest {self._past:08x}",
        }


def _rates_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the learning rates as text; one that is a tensor is not read, which would wait for its device."""
    rates = (group.get("lr", 0) for group in optimizer.param_groups)
    return str(["a tensor" if isinstance(rate, Tensor) else float(rate) for rate in rates])


def _options_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the class of an optimizer and the options of its groups, such as weight decay and betas, as text."""
    texts = []
    for group in optimizer.param_groups:
        plain = {key: value for key, value in group.items() if key not in ("lr", "params") and _is_plain(value)}
        texts.append(str(sorted(plain.items())))
    return f"{type(optimizer).__name__} {' '.join(texts)}"


def _is_plain(value: Any) -> bool:
    """Returns whether equal values have equal text on all ranks; False for a tensor, whose text needs its values."""
    inside = [*value, *value.values()] if isinstance(value, dict) else value
    return isinstance(value, int | float | str | None) or (
        isinstance(value, tuple | list | dict) and all(map(_is_plain, inside))
    )
