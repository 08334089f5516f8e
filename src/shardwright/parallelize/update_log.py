"""Notes the steps and learning rates of a run's optimizers as text, which ranks compare with each other."""

from __future__ import annotations

import itertools
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from torch import Tensor


class UpdateLog:
    """Counts the steps of the optimizers given to :meth:`add`, and records the learning rates of each step.

    Optimizers are numbered in the order of their first steps, so that the same code gives the same text on all ranks.
    The value of a learning rate that is a tensor is not read.

    >>> log, weight = UpdateLog(), torch.nn.Parameter(torch.ones(1))
    >>> log.add(torch.optim.SGD([weight], lr=0.5))
    >>> log.lines()["number of updates"], log.lines()["learning rates"]
    ('1', '')
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self._past_rates = 0  # a digest: what differed between two comparisons of the ranks counts
        self._numbers: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._count = itertools.count()
        self._recent_rates: dict[int, str] = {}  # by number, of each optimizer that has made a step since lines()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """Records one step of an optimizer, with the learning rates of its groups."""
        self.num_updates += 1
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._count)
        self._recent_rates[self._numbers[optimizer]] = rates = _rates_of(optimizer)
        self._past_rates = crc32(rates.encode(), self._past_rates)

    def lines(self) -> dict[str, str]:
        """Returns three texts by name: the number of steps so far, learning rates, and a digest of all rates so far.

        The learning rates are the latest of each optimizer that has made a step since the last call.
        """
        rates, self._recent_rates = " ".join(sorted(self._recent_rates.values())), {}
        past = f"rates of digest {self._past_rates:08x}"
        return {"number of updates": str(self.num_updates), "learning rates": rates, "rates of all updates": past}


def _rates_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the learning rates as text; one that is a tensor is not read, which would wait for its device."""
    rates = (group.get("lr", 0) for group in optimizer.param_groups)
    return str(["a tensor" if isinstance(rate, Tensor) else float(rate) for rate in rates])
