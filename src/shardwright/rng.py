"""Makes random numbers independent of the layout: they are computed from keys instead of drawn from a stream.

A number depends on the seed, the step, the sample, the layer, the number of the layer's call in the forward, and the
element's index in the whole tensor; not on which rank computes it, nor on how the batch is cut into microbatches.
``RngTracker`` keeps the seed, step, samples and calls; ``keyed_dropout.py`` computes masks from them, and
``runtime/keyed_numbers.py`` the numbers of other random functions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _current_graph_task_id

from shardwright.element_hash import HeldDim
from shardwright.errors import PlanError
from shardwright.row_numbers import equal_before


@dataclass(frozen=True)
class DimSlice:
    """The elements that this rank holds of a sharded activation along ``dim``, whose whole size is ``size``.

    ``ranges`` are pairs (start, stop) of indices in the whole dim.
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]


class _Checkpoint(Protocol):
    """A running checkpoint (``CheckpointCall``), which keeps objects from its forward for its backward."""

    def kept(self, name: str, kind: Any, within: Any) -> Any:
        """Returns the object kept under ``name``; the checkpoint's backward runs inside of ``within(object)``."""


_COUNTED = "_shardwright_counted"
"""The attribute of a function that a checkpoint will run again, under which the calls of layers in it are kept."""

ShardOf = Callable[[Tensor], tuple[tuple[DimSlice, ...], Callable[[Tensor], None]] | None]
"""A function that returns a tensor's slices of the whole, and a function that marks another tensor as the same part.

It returns None for a tensor that is whole.
"""


def _of_whole(_: Tensor) -> None:
    """Returns None: the ``shard_of`` of runs in which every tensor is whole."""


class RngTracker:
    """The state from which dropout masks are computed: seed, step, samples of the microbatch, and calls of each layer.

    The code that runs the steps sets ``step`` for each step, and ``samples`` for each forward. Equal states give equal
    numbers under every layout. ``layers`` are the names of the model's modules, for :meth:`repeat`.
    """

    def __init__(self, seed: int = 0, step: int = 0, samples: Sequence[int] = range(0)) -> None:
        self._seed, self.step = seed, step
        self.samples = samples
        self.layers: set[str] = set()
        # for each checkpoint that a backward runs again now: the numbers of each layer's calls that are still to come
        self._repeated: list[Mapping[str, Iterator[int]]] = []
        self.unrecorded = ""  # the error of the model's code, if its forward could not be recorded
        self.shard_of: ShardOf = _of_whole  # if the model runs on shards, tells which shard a tensor is
        self.draw: Callable[..., Tensor] | None = None  # set by key_draws: a draw by its key, without counting it
        self.checkpoints: Callable[[], Sequence[_Checkpoint]] = tuple  # set by key_draws: those around the running code
        self.forward_ended: Callable[[], None] | None = None  # set by key_draws: checks how often modules were called

    def fix_for_samples(self, otherwise: str) -> str:
        """Returns what to do where a draw does not have the samples in dim 0: ``otherwise``, if there is no record."""
        if not self.unrecorded:
            return otherwise
        return (
            "put the samples in dim 0 where random numbers are drawn; or let the forward run on tensors without "
            f"values, for which it could not be recorded: {self.unrecorded.splitlines()[0]}"
        )

    @property
    def seed(self) -> int:
        """The random seed of the run."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self.step = self._step

    @property
    def step(self) -> int:
        """The number of the current optimizer step; random numbers differ from step to step."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        # a tensor, since torch.compile takes a number for a constant and would compile anew at each step
        self._moment = torch.tensor(_word(f"{self._seed}/{step}"), device="cpu")

    @property
    def samples(self) -> Sequence[int]:
        """The indices of this microbatch's samples in the global batch.

        Setting them starts a new forward, in which the calls of each layer are counted from 0.
        """
        return self._samples

    @samples.setter
    def samples(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._calls: Counter[str] = Counter()  # the number of calls of each layer in this forward
        self._first: dict[str, int] = {}  # the number of each layer's first call by this rank
        self._rows: dict[str, Tensor] = {}  # the numbers of the rows for which each layer has drawn in this forward
        self._backward = _current_graph_task_id()  # autograd's backward that runs now, -1 for none

    def call(self, layer: str) -> str:
        """Counts a call of a layer in this forward, and returns the key of the call's dropout mask, as text.

        The key is the layer's name and, after the first call, the call's number.

        Raises: PlanError: the call is a recomputation, and :meth:`count` cannot find the call that it repeats.
        """
        number = self.count(layer)
        return f"{layer}#{number}" if number else layer

    def count(self, layer: str) -> int:
        """Counts a call of a layer in this forward, and returns the call's number, from 0.

        A call from inside a backward in which no :meth:`snapshot` was restored is taken for a recomputation, as by
        ``torch.utils.checkpoint``: it is not counted, and gets the number of the call that the checkpoint repeats or,
        if that is not known, the number of the layer's first call.

        Raises: PlanError: the repeated call is not known, and the layer was called several times in the forward.
        """
        number = self._count(layer)
        if not torch.compiler.is_dynamo_compiling():
            for checkpoint in self.checkpoints():
                counted = checkpoint.kept(_COUNTED, dict[str, list[int]], self._repeating)
                counted.setdefault(layer, []).append(number)
        return number

    @contextmanager
    def _repeating(self, counted: Mapping[str, list[int]]) -> Iterator[None]:
        """Returns a context in which a backward repeats calls; ``counted`` has their numbers, in order, by layer."""
        self._repeated.append({layer: iter(numbers) for layer, numbers in counted.items()})
        try:
            yield
        finally:
            self._repeated.pop()

    def _count(self, layer: str) -> int:
        known = self._repeated[-1].get(layer) if self._repeated and self.repeats else None
        if known is not None and (repeated := next(known, None)) is not None:
            return repeated
        number = self._calls[layer]
        if self.repeats and layer in self._first:
            if number > self._first[layer] + 1:
                raise PlanError(
                    f"which of its calls dropout '{layer}' repeats in the backward cannot be known",
                    given=f"{number - self._first[layer]} calls in one forward, and one more by torch.utils.checkpoint",
                    allowed="inside torch.utils.checkpoint, dropout that is called once in a forward",
                    fix="write recompute:full or recompute:PATTERN in the layout, in place of torch.utils.checkpoint",
                )
            number = self._first[layer]
        else:
            self._first.setdefault(layer, number)
            self._calls[layer] += 1
        return number

    def num_calls(self, layer: str) -> int:
        """Returns how often a layer was called in this forward."""
        return self._calls[layer]

    def draws_before(self, layer: str, rows: Tensor) -> Tensor:
        """Returns how often a layer has drawn for each of ``rows`` in this forward already, and counts this draw too.

        Shapes: ``rows`` (..., 1) has the numbers of the rows (``row_numbers.py``); returns (count of rows,).

        >>> rng = RngTracker()
        >>> rng.draws_before("drop", torch.tensor([[7], [3], [7]])).tolist()
        [0, 0, 1]
        >>> rng.draws_before("drop", torch.tensor([[3], [5], [7]])).tolist()
        [1, 0, 2]
        """
        with torch._C.DisableTorchFunction():
            before = self._rows.get(layer, rows.new_empty(0))
            self._rows[layer] = drawn = torch.cat([before, rows.flatten()])
            return equal_before(drawn)[len(before) :]

    @property
    def repeats(self) -> bool:
        """Whether the user's code now runs a part of the forward again in a backward, as reentrant checkpointing does.

        A recomputation by the library restores a snapshot first, and does not count.
        """
        return not torch.compiler.is_dynamo_compiling() and _current_graph_task_id() != self._backward

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the tracker's step, samples and counts to what they are now.

        Activation checkpointing calls that function before it recomputes a forward, so that the same elements are
        dropped.
        """
        step, moment = self._step, self._moment
        samples, calls, first, rows = self._samples, Counter(self._calls), dict(self._first), dict(self._rows)
        repeats, backward = self.repeats, self._backward

        def restore() -> None:
            self._step, self._moment = step, moment
            self._samples, self._calls, self._first, self._rows = samples, Counter(calls), dict(first), dict(rows)
            # a recomputation counts its calls as the forward did, though it runs inside a backward
            self._backward = backward if repeats else _current_graph_task_id()

        return restore

    def repeat(self, layer: str, times: int) -> None:
        """Sets to ``times`` how often ``layer`` and the layers inside it count as called in this forward.

        A pipeline chunk uses it to count on from the calls that earlier chunks of the model made on other ranks.
        """
        for name in (layer, *(inner_layer for inner_layer in self.layers if inner_layer.startswith(f"{layer}."))):
            self._calls[name] = times

    def words(self, layer: str) -> tuple[int | Tensor, int]:
        """Returns the key of a layer's random numbers: a 64-bit hash of seed and step, and one of the layer's name.

        In code that ``torch.compile`` traces, the first is a tensor, so that a new step does not recompile the code.
        """
        return self._moment if torch.compiler.is_dynamo_compiling() else _word(f"{self.seed}/{self.step}"), _word(layer)


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


_word._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result says, which imports much


def sample_indices(samples: Sequence[int], device: torch.device) -> Tensor:
    """Returns ``samples`` (indices) as an int64 tensor that is computed on ``device``, without a copy from the host.

    >>> sample_indices((0, 1, 2, 7, 4), torch.device("cpu"))
    tensor([0, 1, 2, 7, 4])
    """
    if isinstance(samples, range) and samples.step == 1:
        return torch.arange(samples.start, samples.stop, device=device)
    ends = [i for i in range(1, len(samples)) if samples[i] != samples[i - 1] + 1]
    runs = [(samples[a], samples[b - 1] + 1) for a, b in pairwise((0, *ends, len(samples))) if b]
    return HeldDim(runs, 0).indices(torch.empty(0, dtype=torch.int64, device=device))


def held_of(shape: Sequence[int], cuts: Sequence[DimSlice]) -> list[HeldDim]:
    """Returns, for each dim of a tensor with local ``shape``, the elements of the whole dim that this rank holds.

    These are given by the dim's entry in ``cuts``; a dim without one is held whole.
    """
    held = {cut.dim % len(shape): HeldDim(cut.ranges, cut.size) for cut in cuts}
    return [held.get(dim) or HeldDim(((0, size),), size) for dim, size in enumerate(shape)]


def least_kept(p: float) -> int:
    """Returns the smallest random int32 for which dropout of probability ``p`` keeps an element."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31
