"""Records one run of a model for all analyses that planning needs: operators, relations of dims, random numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves

from shardwright.analysis.dims.run_axes import RunAxes, axes_of
from shardwright.analysis.dims.sample_dims import layers_without_samples_first
from shardwright.analysis.objects.held_parameters import AttributeOf, parameter_lists, unread_lists
from shardwright.analysis.objects.marked_inputs import map_samples, marks_in, sample_tensors
from shardwright.analysis.on_meta.device_moves import IgnoresDeviceMoves
from shardwright.analysis.on_meta.meta_device import meta_copy, on_meta
from shardwright.analysis.on_meta.module_calls import call_model, may_read_values
from shardwright.analysis.on_meta.operator_results import cloned
from shardwright.analysis.random_numbers.draws import (
    DrawKey,
    Draws,
    FindsDraws,
    FoundDraw,
    draws_as_known,
    draws_of,
    moved_on,
    seeded_draws,
)
from shardwright.analysis.random_numbers.other_generators import every_start, other_generators
from shardwright.analysis.recorded.parameter_writes import written_parameters
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.analysis.recorded.recording import Recorded, RecordedCall, Recording
from shardwright.analysis.samples.sample_counts import calls_by_place, calls_with_counts, differ
from shardwright.analysis.samples.sample_mixing import BATCH_NORM_CALLS, COUNTS, mixing_call, norms_without_samples
from shardwright.analysis.samples.sample_selections import SampleFlow, follow_samples, parameters_by_sample
from shardwright.analysis.traced.batch_norms import ONE_VALUE
from shardwright.errors import PlanError

RECORDABLE = "code that runs on tensors without values, or on the values of the example, which is then a real batch"
"""What a forward must be to be recorded, for errors."""


@dataclass(frozen=True)
class RecordedRun:
    """A recorded training forward on the meta device: its operators, and the random numbers that it draws.

    ``found`` lists the draws. ``others`` names the random generators other than torch's from which the forward drew,
    and ``seeded`` those of them that the forward seeds itself. ``seeds`` are the keys of draws from a
    ``torch.Generator`` that the forward makes or seeds. ``other_branch`` is the run with the other answer to conditions
    on values that only a real run has (:attr:`Recording.other_branch`).
    """

    recording: Recording
    found: Sequence[FoundDraw]
    others: Sequence[str]
    seeded: Sequence[str] = ()
    seeds: Sequence[DrawKey] = ()
    other_branch: RecordedRun | None = None

    @cached_property
    def axes(self) -> RunAxes:
        """Which dims of the run's tensors must be sharded alike (:class:`RunAxes`)."""
        return self._followed[0]

    @cached_property
    def written(self) -> dict[str, str]:
        """Maps the name of each parameter that the forward may write to, to the module whose code writes."""
        other = {} if self.other_branch is None else self.other_branch.written
        return {**other, **written_parameters(self.recording)}

    @cached_property
    def draws(self) -> Draws:
        """The run's calls that draw random numbers, such as dropout, and which dim of each result holds the samples.

        Code that combines samples is found in the other branch too.
        """
        draws = draws_of(self.recording, *self._followed, self.found, self.others, self.seeded, self.seeds)
        other = self.other_branch
        if other is None:
            return draws
        norms = {call.module for call in other.recording.calls if call.name in BATCH_NORM_CALLS}
        call = mixing_call(other.recording, other.axes, norms, other._followed[1])
        mixing = [] if call is None else [(call.module, call.name)]
        return replace(draws, across=tuple(dict.fromkeys((*draws.across, *mixing, *other.draws.across))))

    @cached_property
    def parameters_by_sample(self) -> set[str]:
        """The names of parameters that code reads for each sample alone (:func:`parameters_by_sample`)."""
        return parameters_by_sample(self.recording, self._followed[1])

    @cached_property
    def without_samples_first(self) -> set[str]:
        """The layers that are called with samples elsewhere than in dim 0 (:func:`layers_without_samples_first`)."""
        return layers_without_samples_first(self.recording, self.axes)

    @cached_property
    def _followed(self) -> tuple[RunAxes, SampleFlow]:
        axes = axes_of(self.recording)
        return axes, follow_samples(self.recording, axes)

    def draws_once_a_sample(self, path: str) -> bool:
        """Returns whether the module's first call alone draws random numbers, once per sample of the recorded batch.

        All these draws must be by the same function, with the same shape and dtype.
        """
        draws = [draw for draw in self.found if draw.key[0] == path]
        kinds = {(draw.key[1], draw.function, draw.use.shape, draw.use.dtype) for draw in draws}
        return len(kinds) == 1 and next(iter(kinds))[0] == 0 and len(draws) == self.recording.num_samples


class RecordStore:
    """Recorded forwards that graphs share, if their model is one and their examples have samples of the same shapes."""

    def __init__(self) -> None:
        self._runs: dict[tuple[object, ...], dict[int | None, RecordedRun | str]] = {}
        self._models: dict[int, nn.Module] = {}  # kept, so that no other model gets the id of one of them

    def of(self, model: nn.Module, example: Any) -> dict[int | None, RecordedRun | str]:
        """Returns the runs of a model by number of samples, all of samples without values, like those of ``example``.

        Those of examples with marked inputs are not shared, since marks may hold more than samples.
        """
        if marks_in(example):
            return {}
        leaves, structure = tree_flatten(example)
        samples = tuple((leaf.shape[1:], leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        self._models[id(model)] = model
        return self._runs.setdefault((id(model), structure, samples), {})


SEVERAL = (3, 2)
"""The numbers of samples that a record is tried with if the example has one sample and other numbers failed."""


@dataclass
class ModelGraph:
    """A model and example inputs, with a recorded forward that is made when it is first needed.

    The recorded batch has a prime number of samples that differs from all other sizes, so that the dim of the samples
    is told from other dims. If the model's code does not take that number, the number of samples in ``example`` is
    used. ``example`` is on the meta device. ``values`` are the same inputs on the CPU. The forward is recorded on them,
    repeated up to the number of samples, only if the model's code does not run without values (:attr:`reads_values`).
    A model in evaluation mode is recorded in training mode, unless ``is_as_trained`` says that its steps run in the
    modes that its modules have.

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
    values: Any = None
    is_as_trained: bool = False
    kept: RecordStore = field(default_factory=RecordStore, repr=False, compare=False)
    """Where forwards on samples without values are kept; graphs that are given the same one share them."""
    _by_values: dict[int | None, RecordedRun | str] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def run(self) -> RecordedRun:
        """The recorded forward of the model.

        Raises: PlanError: the model's code does not run on the meta device; the error quotes what the code raised.
        """
        trial = self._first
        if isinstance(trial, RecordedRun):
            return trial
        raise PlanError(
            f"the forward of {type(self.model).__name__} cannot be recorded",
            given=trial,
            allowed=RECORDABLE,
            fix="leave out what needs a record, such as tp for layers that are not known",
        )

    @property
    def failure(self) -> str:
        """The exception, as text, that the model's code raised when its forward was recorded; "" if it raised none."""
        return "" if isinstance(self._first, RecordedRun) else self._first

    @property
    def _first(self) -> RecordedRun | str:
        if isinstance(self._of_prime, RecordedRun):
            return self._of_prime
        # an example of one sample, as a rank may have it: the dim of samples looks like any other dim of size 1, so
        # several samples are recorded
        is_one = any(tensor.dim() and len(tensor) == 1 for tensor in sample_tensors(self.example))
        several = (self._tried(number, self.reads_values) for number in SEVERAL if is_one)
        return next((run for run in several if isinstance(run, RecordedRun)), self._as_given)

    @cached_property
    def reads_values(self) -> bool:
        """Whether the forward is recorded on the example's values, because the model's code reads values of its inputs.

        The forward of a model of images and text, for example, looks for the tokens that stand for images. The result
        is True for code that runs on inputs with values only, and for code that would otherwise read more numbers that
        only a real run has.
        """
        if self.values is None or not may_read_values(self.model):
            return False
        without = self._num_unknown(by_values=False)
        return without > 0 and self._num_unknown(by_values=True) < without

    @cached_property
    def selects_by_values(self) -> bool:
        """Whether the model's code selects by masks among its inputs, so that its shapes follow the example's values.

        An example is an autoencoder that embeds only the pixels that a mask keeps. The record selects every element. A
        rehearsal runs one given batch, and reads the masks of that batch.
        """
        if self.values is None or self._needs_no_record or self.reads_values:
            return False
        without = self._first
        if isinstance(without, str) or not without.recording.num_masks:
            return False
        with_values = self._tried(self._prime if without is self._of_prime else None, by_values=True)
        return isinstance(with_values, RecordedRun) and with_values.recording.num_masks < without.recording.num_masks

    @cached_property
    def needs_constants(self) -> bool:
        """Whether the forward fails on meta tensors without values, as one does that calls ``item()`` on a constant.

        The result is False if the forward was not recorded (:attr:`draws` says when).
        """
        run = self._of_own_code
        if run is None or not run.recording.reads_values:
            return False
        model = meta_copy(self.model).eval()  # where nothing is drawn
        try:
            with torch.no_grad(), on_meta(model, values=False):
                call_model(model, cloned(self.example))
        except Exception:  # whatever the user's code raises, values are what it lacks: with values it was recorded
            return True
        return False

    @cached_property
    def unread_lists(self) -> tuple[AttributeOf, ...]:
        """The attributes that hold parameters in lists or the like which no forward reads, in training or evaluation.

        It is empty if the training forward cannot be recorded.
        """

        def fails(model: nn.Module) -> str:
            training = replace(self, model=model, kept=RecordStore()).failure
            _ = replace(self, model=model.eval(), is_as_trained=True, kept=RecordStore()).failure  # reads more, perhaps
            return training

        return unread_lists(self.model, fails, parameter_lists(self.model))

    @property
    def refrozen(self) -> Mapping[str, bool]:
        """The parameters whose ``requires_grad`` the forward changes (:attr:`Recording.refrozen`); none if unknown."""
        run = self._of_own_code
        return {} if run is None else run.recording.refrozen

    @property
    def in_other_modes(self) -> Sequence[str]:
        """The modules that are called in several modes (:attr:`Recording.in_other_modes`); none if that is unknown."""
        run = self._of_own_code
        return () if run is None else run.recording.in_other_modes

    @property
    def guess(self) -> bool | None:
        """The answer that the record gave to conditions on values that only a real run has; None if it met none."""
        run = self._of_own_code
        return None if run is None else run.recording.guess

    @property
    def every_run(self) -> tuple[RecordedRun, ...]:
        """The recorded forward :attr:`run`, and a second one with as many samples as the example has.

        The model's code may take another branch for that number of samples.

        Raises: PlanError: the code does not run on the meta device with the example's number of samples.
        """
        if isinstance(self._as_given, RecordedRun):
            return (self.run, self._as_given)
        raise PlanError(
            f"the forward of {type(self.model).__name__} cannot be recorded with the example's samples",
            given=self._as_given,
            allowed=RECORDABLE,
            fix="give an example like the batches",
        )

    @property
    def draws(self) -> Draws | None:
        """The model's calls that draw random numbers in training, or None if its forward was not recorded.

        The forward is not recorded if it does not run on the meta device. A model made only of layers of torch and of
        this library needs no record, if these draw nothing or only plain dropout: its forward is not recorded either.
        """
        run = self._of_own_code
        return None if run is None else self._draws

    @cached_property
    def _draws(self) -> Draws:
        """The draws of the recorded forward; marked are those whose number grows with the number of samples.

        If a module draws at least as many tensors without samples as there are samples, or draws for some samples
        alone, the forward is recorded again with another number of samples. If the module then draws another number of
        times, it loops over the samples in a way that is not followed. But if in both records one call of the module
        draws once for each sample, the module is taken to loop over the samples in order.
        """
        run = self.run
        without = Counter(path for (path, _, _), place in run.draws.places.items() if place is None)
        often = {path for path, number in without.items() if number >= run.recording.num_samples} | run.draws.unfollowed
        counts = (None, *(count for count in COUNTS if count != run.recording.num_samples)) if often else ()
        tried = (self._tried(count, self.reads_values) for count in counts[:2])
        runs = (trial for trial in tried if isinstance(trial, RecordedRun))
        other = next((record for record in runs if record.recording.num_samples != run.recording.num_samples), None)
        if other is None:
            return run.draws
        here, there = (Counter(draw.key[0] for draw in each_run.found) for each_run in (run, other))
        more = {path for path in often if here[path] != there[path]}
        once = {path for path in more if run.draws_once_a_sample(path) and other.draws_once_a_sample(path)}
        return run.draws.drawn_for_each(more, once, run.recording.num_samples)

    def written_parameters(self, *, replaced_only: bool = False, converted: bool = False) -> Mapping[str, str]:
        """Returns the parameters that the model's own code writes to, each with the module whose code writes.

        With ``replaced_only`` only parameters are returned that code replaces by ``parameter.data = ...``. With
        ``converted`` also parameters are returned that code converts to the dtype that they have now, as
        ``module.to(torch.float32)`` does. The result is empty if the forward was not recorded, as for :attr:`draws`.
        """
        run = self._of_own_code
        if run is None:
            return {}
        written = run.recording.replaced if replaced_only else run.written
        return {**run.recording.converted, **written} if converted else written

    def mixing_call(self, shared: Collection[str] = ()) -> RecordedCall | None:
        """Returns the first operator in the model's own code that mixes the samples of a batch, or None.

        The result is None too if the forward was not recorded (:attr:`draws` says when). ``shared`` names the
        BatchNorms that may mix samples, because ranks add up their statistics.
        """
        run = self._of_own_code
        return None if run is None else mixing_call(run.recording, run.axes, shared, run._followed[1])

    @property
    def norms_without_samples(self) -> set[str]:
        """The BatchNorms of tensors that nothing of the samples leads to (:func:`norms_without_samples`)."""
        run = self._of_own_code
        return set() if run is None else norms_without_samples(run.recording)

    def calls_with_counts(self) -> list[RecordedCall]:
        """Returns the operators that compute values of samples with the number of samples, as ``x / len(x)`` does.

        The result is empty if the forward was not recorded (:attr:`draws` says when), or was recorded with one number
        of samples only.
        """
        return [
            recording.calls[index]
            for recording, again, suspects in self._suspects(calls_with_counts)
            for index in suspects
            if differ(recording.calls[index], again.calls[index])
        ]

    def draws_with_counts(self) -> list[FoundDraw]:
        """Returns the draws whose bounds depend on the number of samples, as those of ``init.xavier_uniform_`` do.

        The result is empty where a second record is lacking, as in :meth:`calls_with_counts`.
        """
        run = self._of_own_code
        if run is None or not any(draw.bounds for draw in run.found):
            return []
        there = {draw.key: draw.bounds for draw in (() if self._other_samples is None else self._other_samples.found)}
        return [draw for draw in run.found if there.get(draw.key, draw.bounds) != draw.bounds]

    def calls_by_place(self) -> list[RecordedCall]:
        """Returns the operators that compute samples' values from their places in the batch, as ``x + arange(len(x))``.

        The result is empty where a second record is lacking, as in :meth:`calls_with_counts`.
        """
        return [
            recording.calls[index]
            for recording, again, suspects in self._suspects(calls_by_place)
            for index in sorted({*suspects}.intersection(calls_by_place(again)))
        ]

    def _suspects(
        self, suspects_in: Callable[[Recording], list[int]]
    ) -> Iterator[tuple[Recording, Recording, list[int]]]:
        """Yields each branch of the recorded forward, the same one on another number of samples, and its suspects.

        Suspects are the numbers of calls that ``suspects_in`` finds. A branch without any is left out, and so is one
        that makes another number of calls for another number of samples.
        """
        run = self._of_own_code
        for recording in () if run is None else run.recording.branches:
            suspects = suspects_in(recording)
            for again in self._other_samples.recording.branches if suspects and self._other_samples else ():
                if again.guess == recording.guess and len(again.calls) == len(recording.calls):
                    yield recording, again, suspects

    @cached_property
    def _other_samples(self) -> RecordedRun | None:
        """The forward recorded on another number of samples than :attr:`run`; None if it cannot be."""
        run = self._of_own_code
        numbers = (number for number in (*COUNTS, None) if run is not None and number != run.recording.num_samples)
        others = (self._tried(number, self.reads_values) for number in numbers)
        return next((trial for trial in others if isinstance(trial, RecordedRun)), None)

    def normalises_once(self, path: str) -> bool:
        """Returns whether the recorded forward calls a module, and each call computes one batch norm in its own code.

        Such a module may run more code around the batch norm, such as an activation.
        """
        run = self._of_own_code
        calls = [] if run is None else [call for call in run.recording.calls if call.module == path]
        norms = [call.number for call in calls if call.name in BATCH_NORM_CALLS]
        return bool(calls) and sorted(norms) == sorted({call.number for call in calls})

    @property
    def failure_of_own_code(self) -> str:
        """The exception, as text, that kept the forward from being recorded, so that its code could not be checked.

        It is empty if the forward was recorded, and for a model made only of torch's and this library's layers.
        """
        return "" if self._needs_no_record else self.failure

    @property
    def _of_own_code(self) -> RecordedRun | None:
        """The recorded run; None for a model of only torch's and this library's layers, or if it cannot run on meta."""
        if self._needs_no_record:
            return None
        return self._first if isinstance(self._first, RecordedRun) else None

    @property
    def _needs_no_record(self) -> bool:
        return all(map(draws_as_known, self.model.modules())) and not marks_in(self.example)

    @property
    def _of_prime(self) -> RecordedRun | str:
        return self._tried(self._prime, self.reads_values)

    @property
    def _as_given(self) -> RecordedRun | str:
        trial = self._tried(None, self.reads_values)
        # ranks may have one sample each and sum a batch norm's statistics, but torch refuses one value per channel
        return self._tried(SEVERAL[-1], self.reads_values) if isinstance(trial, str) and ONE_VALUE in trial else trial

    @cached_property
    def _prime(self) -> int:
        tensors = [leaf for leaf in tree_leaves(self.example) if isinstance(leaf, Tensor)]
        sizes = {size for t in (*tensors, *self.model.parameters(), *self.model.buffers()) for size in t.shape}
        sizes |= {2 * size for size in sizes}  # relative positions are one less than twice as many as tokens
        return next((count for count in COUNTS if sizes.isdisjoint((count - 1, count, count + 1))), COUNTS[0])

    def _num_unknown(self, *, by_values: bool) -> float:
        """Returns how many numbers that only a real run has the code reads; infinite if the code cannot be recorded.

        The forward is recorded on the example's values if ``by_values``, else on tensors without values.
        """
        tried = (self._tried(count, by_values) for count in (self._prime, None))
        return next((run.recording.num_numbers for run in tried if isinstance(run, RecordedRun)), float("inf"))

    def _tried(self, number: int | None, by_values: bool) -> RecordedRun | str:
        """Returns the recorded run on ``number`` samples (None: the example's number), or what its code raised; cached.

        The forward is recorded on the example's values if ``by_values``, else on tensors without values.
        """
        key, tries = self._num_samples if number is None else number, self._by_values if by_values else self._tries
        if key not in tries:
            inputs = self.values if by_values else self.example
            samples = map_samples(cloned(inputs), partial(_of_samples, number))
            tries[key] = _run_or_failure(self.model, samples, self.is_as_trained)
        return tries[key]

    @cached_property
    def _tries(self) -> dict[int | None, RecordedRun | str]:
        return {} if self.is_as_trained else self.kept.of(self.model, self.example)

    @cached_property
    def _num_samples(self) -> int | None:
        """The number of samples of the example; None for one with marked inputs, or without samples."""
        tensors = [] if marks_in(self.example) else [x for x in sample_tensors(self.example) if x.dim()]
        return len(tensors[0]) if tensors and len({len(x) for x in tensors}) == 1 else None


def _of_samples(number: int | None, tensor: Tensor) -> Tensor:
    return tensor if number is None or not tensor.dim() else tensor[torch.arange(number) % len(tensor)]


def _run_or_failure(model: nn.Module, inputs: Any, as_is: bool) -> RecordedRun | str:
    """Returns the recorded run, or the text of the exception that the model's code raised on the meta device."""
    try:
        return _recorded(model, inputs, as_is)
    except Exception as failure:  # the user's code may raise anything
        return f"{type(failure).__name__}: {failure}"


def _recorded(model: nn.Module, inputs: Any, as_is: bool) -> RecordedRun:
    """Returns the record of a copy of the model on the meta device, in training or in the modes that it has."""
    copy = meta_copy(model)
    finds: dict[int, FindsDraws] = {}  # by the id of the recording, for each run that was tried

    @contextmanager
    def within(recorded: Recorded) -> Iterator[None]:
        recorded.give_kept(copy.buffers())
        mode = finds[id(recorded.recording)] = FindsDraws(recorded)
        with IgnoresDeviceMoves(torch.device("meta")), mode:
            yield

    copy = copy if copy.training or as_is else copy.train()
    with other_generators() as others:
        recording = record_forward(copy, cloned(inputs), within)
    draws, seeds = finds[id(recording)].found, list[DrawKey]()
    if any(draw.generator is not None for draw in draws):
        with other_generators(), moved_on(draws):
            seeds = seeded_draws(draws, finds[id(record_forward(copy, cloned(inputs), within))].found)
    again: dict[str, Any] = {}
    if others:  # a forward that seeds a generator itself leaves it in the same state from any start
        with other_generators(1) as again:
            record_forward(copy, inputs, within)
    seeded = [name for name, state in others.items() if again.get(name) == state]
    used: Collection[str] = others
    if others and not seeded:  # numbers after a seed are equal from every start, so other starts would show nothing
        with suppress(Exception):  # other numbers may lead the user's code to a path that raises
            used = () if _runs_alike(model, inputs, as_is) else others
    other, branch = recording.other_branch, None
    if other is not None:
        branch = RecordedRun(other, finds[id(other)].found, tuple(used), seeded)
    return RecordedRun(recording, draws, tuple(used), seeded, seeds, branch)


def _runs_alike(model: nn.Module, inputs: Any, as_is: bool) -> bool:
    """Returns whether forwards run the same operators on the same tensors, whatever they draw from Python and NumPy.

    Draws that change no operator make no difference, such as those of a type check that picks at random what to check.
    """
    first: list[str] | None = None
    for start in every_start():
        copy, recordings = meta_copy(model), list[Recorded]()
        copy = copy if copy.training or as_is else copy.train()

        def within(recorded: Recorded, runs: list[Recorded] = recordings) -> AbstractContextManager[Any]:
            recorded.digest = sha256()
            runs.append(recorded)
            return IgnoresDeviceMoves(torch.device("meta"))

        with start:
            before = _attributes(copy)
            record_forward(copy, cloned(inputs), within)
            if _attributes(copy) != before:  # the code has stored something, which may change the next forward
                record_forward(copy, cloned(inputs), within)
        digests = [recorded.digest.hexdigest() for recorded in recordings]
        if digests != (first := digests if first is None else first):
            return False
    return True


def _attributes(model: nn.Module) -> list[tuple[int, int]]:
    """Returns the ids of the attributes and buffers of a model's modules, and the lengths of containers among them.

    Two results differ if a forward in between has stored something.
    """
    values = (value for module in model.modules() for value in (*vars(module).values(), *module._buffers.values()))
    return [(id(value), len(value) if isinstance(value, dict | list | set) else 0) for value in values]
