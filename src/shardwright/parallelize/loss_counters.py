"""Warns of losses that count their calls, since microbatches make several calls a step, or that change buffers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from shardwright.analysis.objects.reached import attributes
from shardwright.errors import explain
from shardwright.layout import Layout
from shardwright.parallelize.loss_settings import MOST_ENTRIES, entries_of, settings_of
from shardwright.parallelize.loss_watch import objects_of_loss


def counters_of(loss: nn.Module) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Returns what a loss may count with: whole numbers among its attributes, and how often its buffers were written.

    Keys are (module name, attribute name), and values are (kind, value). Kind 0 is a number that a module has as an
    attribute, and kind 1 a buffer, whose value is its number of writes. Kind 2 is a number in another object, dict or
    list that the loss refers to, as a closure does; the path to that object stands in place of the module name.

    >>> counters_of(nn.CrossEntropyLoss())
    {('', 'ignore_index'): (0, -100)}
    """
    counters: dict[tuple[str, str], tuple[int, int]] = {}
    for path, module in loss.named_modules():
        counters |= {(path, name): (0, value) for name, value in vars(module).items() if type(value) is int}
        buffers = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
        counters |= {(path, name): (1, buffer._version) for name, buffer in buffers if not buffer.is_inference()}
    for path, holder in objects_of_loss(loss):
        if not isinstance(holder, nn.Module):
            counters |= {(path, name): (2, value) for name, value in _entries(holder) if type(value) is int}
    return counters


def _entries(holder: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of an object, and its entries if it is a dict or list that is no table."""
    entries: list[tuple[Any, Any]] = list(attributes(holder).items())
    if isinstance(holder, dict | list) and len(holder) <= MOST_ENTRIES:
        entries += entries_of(holder)
    return [(str(name), value) for name, value in entries]


def warn_of_counters(
    loss: nn.Module, before: Mapping[tuple[str, str], tuple[int, int]], layout: Layout, stacklevel: int
) -> None:
    """Warns if a call of a loss has changed one of the counters that it had ``before``, and a step makes several."""
    now = counters_of(loss)
    for (path, name), value in before.items():
        other = now.get((path, name), value)
        # objects may also note sizes and sums, as meters do: there only a number that grew by 1 counts calls
        if other != value and (value[0] < 2 or other[1] == value[1] + 1):
            number, counter = layout.num_microbatches, f"{path}.{name}".lstrip(".")
            warn(
                f"the loss changes '{counter}' in each call, and mb{number} makes {number} calls a step: a schedule by "
                "it runs faster than on one device. Count steps in the training loop, and set what "
                "follows from them there",
                stacklevel=stacklevel + 1,
            )
            return


class LossBuffers:
    """Notes the persistent buffers of a loss as they are now, so that :meth:`warn_if_changed` finds later changes."""

    def __init__(self, loss: nn.Module) -> None:
        self._loss = loss
        self._before = {name: (buffer, _version_of(buffer)) for name, buffer in self._buffers()}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, module in self._loss.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}".lstrip("."), buffer

    def warn_if_changed(self, kept: Collection[str] = (), stacklevel: int = 1) -> None:
        """Warns that a checkpoint does not have the buffers of the loss, if a step has changed any of them.

        A buffer that the loss makes when it is first called does not count. Neither do buffers that the user saves;
        ``kept`` has their names, without the names of their modules.
        """
        settings = settings_of(self._loss)  # buffers that the training loop has set are not changes by the loss
        kept = {*kept, *(settings.renewed if settings is not None else ())}
        now = {name: buffer for name, buffer in self._buffers() if name.rpartition(".")[2] not in kept}
        names = [name for name, before in self._before.items() if name in now and _differs(now[name], *before)]
        if names:
            warn(
                explain(
                    "a checkpoint does not keep what a loss changes",
                    given=f"{type(self._loss).__name__}, whose buffers {', '.join(names)} were changed by its calls",
                    allowed="losses that start with the same values when a run resumes",
                    fix="make them buffers of the model, which returns them with its output, or save those of run.loss "
                    f"yourself, as in sw.save(..., extra={{'{names[0].rpartition('.')[2]}': ...tolist()}})",
                ),
                stacklevel=stacklevel + 1,
            )


def _version_of(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version


def _differs(now: Tensor, before: Tensor, version: int) -> bool:
    """Returns whether a buffer was written to, or replaced by another one of other values."""
    if now is before or _version_of(before) != version:
        return _version_of(before) != version
    return now.shape != before.shape or not torch.equal(now.detach().to(before), before)
