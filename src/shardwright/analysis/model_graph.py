"""One recorded run of a model, which all that plan it look at: its operators, their axes, and the numbers it draws."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.copying import copied
from shardwright.analysis.device_moves import IgnoresDeviceMoves
from shardwright.analysis.draws import COUNTS, Draws, FindsDraws, draws_as_known, draws_of, other_generators
from shardwright.analysis.recording import Recorded, Recording, record_forward
from shardwright.analysis.run_axes import RunAxes, axes_of


@dataclass(frozen=True)
class RecordedRun:
    """The operators of a run in training on the meta device, the axes of its tensors, and the numbers that it draws."""

    recording: Recording
    axes: RunAxes
    draws: Draws


@dataclass
class ModelGraph:
    """What a run of a plain model on inputs like ``example`` does; recorded once, when it is first asked for.

    The number of samples is a prime unlike all other sizes, so that no other dim is taken for the samples; code that
    takes no such number runs on as many as the example has.

    >>> graph = ModelGraph(nn.Linear(3, 4), torch.empty(2, 3))
    >>> [call.name for call in graph.run.recording.calls], graph.run.recording.calls[0].results[0].shape
    (['linear'], (23, 4))
    >>> class Dropping(nn.Module):
    ...     def forward(self, x):
    ...         return nn.functional.dropout(x.transpose(0, 1), 0.1)
    >>> ModelGraph(Dropping(), torch.zeros(4, 3)).draws.places
    {('', 0, 0): SamplePlace(dim=1, outside=1, inside=1)}
    """

    model: nn.Module
    example: Any
    _failure: Exception | None = field(default=None, init=False, repr=False)

    @property
    def run(self) -> RecordedRun:
        """The recorded run. Raises what the model's code does, where it does not run on the meta device."""
        if self._failure is None:
            try:
                return self._run
            except Exception as failure:  # whatever anybody's code raises on tensors without values
                self._failure = failure
        raise self._failure

    @property
    def draws(self) -> Draws | None:
        """The random numbers that the model draws in training; None where it does not run on the meta device.

        None too for models of torch's and our own layers that draw nothing but what ``nn.Dropout`` and attention drop:
        these are keyed without a record.
        """
        if all(map(draws_as_known, self.model.modules())):
            return None
        try:
            return self.run.draws
        except Exception:  # as above
            return None

    @cached_property
    def _run(self) -> RecordedRun:
        examples = list(_examples(self.model, self.example))
        for inputs in examples[:-1]:
            try:
                return _recorded(self.model, inputs)
            except Exception:  # as above
                continue
        return _recorded(self.model, examples[-1])


def _examples(model: nn.Module, example: Any) -> Iterator[Any]:
    """The example with a number of samples that no other dim has, and as it is, for code that takes no such number."""
    given = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    sizes = {size for t in (*given, *model.parameters(), *model.buffers()) for size in t.shape}
    sizes |= {2 * size for size in sizes}  # as many relative positions, but one, as tokens twice
    count = next((each for each in COUNTS if sizes.isdisjoint((each - 1, each, each + 1))), COUNTS[0])
    for number in (count, None):
        yield tree_map_only(Tensor, partial(_of_samples, number), example)


def _of_samples(number: int | None, tensor: Tensor) -> Tensor:
    shape = tensor.shape if number is None or not tensor.dim() else (number, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _recorded(model: nn.Module, inputs: Any) -> RecordedRun:
    """Returns the record of a copy of the model, in training, on the meta device."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
    memo.update({id(b): b.detach().to("meta") for b in model.buffers()})
    on_meta = copied(model, memo)
    finds: dict[int, FindsDraws] = {}  # of each run that was tried

    @contextmanager
    def within(recorded: Recorded) -> Iterator[None]:
        mode = finds[id(recorded.recording)] = FindsDraws(recorded)
        with IgnoresDeviceMoves(torch.device("meta")), mode:
            yield

    with other_generators() as others:
        recording = record_forward(on_meta if on_meta.training else on_meta.train(), inputs, within)
    axes = axes_of(recording)
    return RecordedRun(recording, axes, draws_of(recording, axes, finds[id(recording)].found, others))
