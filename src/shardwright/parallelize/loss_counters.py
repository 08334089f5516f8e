"""Warns of losses that count their calls, of which microbatches make several in one step."""

from __future__ import annotations

from collections.abc import Mapping
from warnings import warn

from torch import nn

from shardwright.layout import Layout


def counters_of(loss: nn.Module) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Returns what a loss may count with: whole numbers among its attributes, and how often its buffers were written.

    Each is by module and attribute name, as its kind (0: a number, 1: a buffer) and its value.

    >>> counters_of(nn.CrossEntropyLoss())
    {('', 'ignore_index'): (0, -100)}
    """
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for path, module in loss.named_modules():
        found |= {(path, name): (0, value) for name, value in vars(module).items() if type(value) is int}
        buffers = ((name, each) for name, each in module._buffers.items() if each is not None)
        found |= {(path, name): (1, each._version) for name, each in buffers if not each.is_inference()}
    return found


def warn_of_counters(
    loss: nn.Module, before: Mapping[tuple[str, str], tuple[int, int]], layout: Layout, stacklevel: int
) -> None:
    """Warns if a call of a loss has changed one of the counters that it had ``before``, and a step makes several."""
    now = counters_of(loss)
    for (path, name), value in before.items():
        if now.get((path, name), value) != value:
            number, counter = layout.num_microbatches, f"{path}.{name}".lstrip(".")
            warn(
                f"the loss changes '{counter}' in each call, and mb{number} makes {number} calls a step: a schedule by "
                "it runs faster than on one device. Count steps in the training loop, and set what "
                "follows from them there",
                stacklevel=stacklevel + 1,
            )
            return
