"""Finds the random numbers that a model draws in its forward, and which dim of each drawn tensor holds the samples.

The forward is recorded once on example inputs. A draw is identified by the module that runs, the number of the module's
call, and the number of the draw in that call. The samples may share a dim with other indices, as their slower or faster
factor::

    dropout of attention weights    [samples * heads, tokens, tokens]
    stochastic depth                [samples, 1, 1]
    dropout of positions            [1, tokens, features]              no samples: one mask for all
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple
from warnings import warn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.analysis.calls.checkpoint_calls import saved_by
from shardwright.analysis.calls.draw_calls import KEYED_FUNCTIONS, UNKEYED_FIX, DrawCall, draw_of, in_multihead
from shardwright.analysis.dims.run_axes import DimAxis, RunAxes, leaves, root
from shardwright.analysis.on_meta.meta_values import PACK, RANDOM
from shardwright.analysis.random_numbers.sample_loops import SampleLoop, sample_loops
from shardwright.analysis.recorded.recording import Recorded, Recording, TensorUse
from shardwright.analysis.samples.meetings import meetings
from shardwright.analysis.samples.sample_mixing import COUNTS, warn_of_meeting
from shardwright.analysis.samples.sample_selections import SampleFlow
from shardwright.analysis.traced.structure import is_inside, is_known
from shardwright.errors import PlanError


class SamplePlace(NamedTuple):
    """The dim, and the factor of that dim, in which a drawn tensor holds the samples of the batch.

    Dim ``dim`` is a product of up to three factors: ``outside`` is the number of elements of the factor that varies
    slower than the samples, and ``inside`` that of the factor that varies faster.
    """

    dim: int
    outside: int = 1
    inside: int = 1


MIXED = SamplePlace(-1)
"""Marks a drawn tensor whose samples are not one factor of one dim, so that it cannot be cut by samples."""

SELECTED = SamplePlace(-2)
"""Marks a drawn tensor whose rows code selects by values, as experts do: only a real run shows whose rows they are."""

ALONE = SamplePlace(-3)
"""Marks a drawn tensor that belongs to one sample and so has no dim of samples, as in a loop over the batch."""

FIRST = SamplePlace(0)
"""The place of samples in most drawn tensors: dim 0, with no other factor."""


DrawKey = tuple[str, int, int]
"""The module that draws, the number of its call in the forward, and the number of the draw in that call."""


class FoundDraw(NamedTuple):
    """A draw of a recorded run: its key, the drawn tensor, and the name of the torch function.

    ``generator`` is the generator that the code passed to the function, with its state at that time; None stands for
    torch's default generator. ``is_kept`` says that no checkpoint of the model's code repeats the draw in the backward.
    ``stop`` is the number of operators that were recorded before the draw. ``bounds`` are the plain numbers between
    which it draws, or their mean and deviation; they are empty for the most usual ones, -1, 0 and 1. ``together`` is
    the result of a draw without replacement, each of whose numbers depends on the others in the last dim.
    """

    key: DrawKey
    use: TensorUse
    function: str
    generator: tuple[torch.Generator, Tensor] | None = None
    is_kept: bool = True
    stop: int = 0
    bounds: tuple[float, ...] = ()
    together: TensorUse | None = None


@dataclass
class Draws:
    """The random draws of a model's forward, and in which dim each drawn tensor holds the samples of the batch.

    Keys of ``places``, ``num_dims`` (of the drawn tensor) and ``functions`` are (module, number of its call, number of
    the draw in the call). ``places`` has None for a tensor without samples, :data:`MIXED` for a tensor that cannot be
    cut by samples, and :data:`SELECTED` for rows that code selects. ``functions`` names the torch function of each
    draw. ``routing`` are the modules whose code selects by values. ``selecting`` are the ones among them that contain
    draws at :data:`SELECTED`.

    ``others`` names the random generators other than torch's from which the forward draws. ``seeded`` are those of them
    that the forward seeds itself, so that it draws the same numbers each time. ``across`` lists modules whose code
    combines the samples of a batch, with the function that combines them (:func:`meetings`). ``backwards`` names the
    user's autograd functions whose backward draws. ``seeds`` are the keys of the draws from a ``torch.Generator`` that
    the forward makes or seeds, so that every forward draws the same numbers there.
    """

    places: dict[tuple[str, int, int], SamplePlace | None] = field(default_factory=dict)
    num_dims: dict[tuple[str, int, int], int] = field(default_factory=dict)
    functions: dict[tuple[str, int, int], str] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    seeded: tuple[str, ...] = ()
    across: tuple[tuple[str, str], ...] = ()
    backwards: tuple[str, ...] = ()
    seeds: frozenset[DrawKey] = frozenset()
    unkeyed: tuple[tuple[str, str], ...] = ()
    """The modules that draw by operators whose numbers the library cannot compute, with the name of the operator."""
    selecting: frozenset[str] = frozenset()
    routing: frozenset[str] = frozenset()
    loops: dict[str, SampleLoop] = field(default_factory=dict)
    """By module, the loop over the samples in which the module draws.

    A module with draws at :data:`ALONE` and no entry here draws in a way that cannot be matched between batches of
    different sizes."""
    unfollowed: frozenset[str] = frozenset()
    """The modules that draw for some samples alone, but not for every sample."""
    counted: frozenset[str] = frozenset()
    """The modules that draw once for each sample, where nothing shows which draw is for which sample."""
    kept_outside: tuple[str, ...] = ()
    """The global variables and class attributes in which the forward leaves tensors, which ranks as threads share."""

    def is_seeded(self, module: str, function: str) -> bool:
        """Returns whether a module's code calls the drawing ``function`` with a generator that the forward seeds."""
        return any(path == module and self.functions[path, call, n] == function for path, call, n in self.seeds)

    def place(self, module: str, call: int, number: int) -> SamplePlace | None:
        """Returns where the drawn tensor of one draw holds the samples of the batch, or None if it holds none.

        For a call of the module that the example did not make, the same draw in the other calls gives the answer.

        Raises: KeyError: the module has no such draw, or the other calls give several answers.
        """
        key = (module, call, number)
        if key in self.places:
            return self.places[key]
        like = {place for (path, _, n), place in self.places.items() if (path, n) == (module, number)}
        if len(like) != 1:
            raise KeyError(key)
        return like.pop()

    @cached_property
    def in_calls(self) -> dict[str, dict[int, list[str]]]:
        """By module and by number of its call: the torch functions of the call's draws, in order."""
        calls = defaultdict[str, dict[int, list[str]]](dict)
        for path, call, number in sorted(self.functions):
            calls[path].setdefault(call, []).append(self.functions[path, call, number])
        return dict(calls)

    @property
    def alone(self) -> list[str]:
        """The modules that draw tensors which belong to one sample (:data:`ALONE`)."""
        return list(dict.fromkeys(path for (path, _, _), place in self.places.items() if place == ALONE))

    def drawn_for_each(self, modules: Collection[str], once: Collection[str] = (), num_samples: int = 0) -> Draws:
        """Returns the draws, with the draws without samples in ``modules`` marked as :data:`ALONE` and as in no loop.

        These modules were found to draw more often in a larger batch. The modules in ``once`` draw once for each of the
        ``num_samples`` samples, which is a loop.
        """
        places = {key: ALONE if key[0] in modules and place is None else place for key, place in self.places.items()}
        loops = {path: loop for path, loop in self.loops.items() if path not in modules}
        loops |= {path: SampleLoop(0, 1, 0, num_samples, in_call=True) for path in once}
        return replace(self, places=places, loops=loops, counted=frozenset(once))

    def in_modules(self) -> dict[str, set[SamplePlace | None]]:
        """Returns, by module name, where the module's drawn tensors hold the samples; None for one without samples."""
        by_module: dict[str, set[SamplePlace | None]] = {}
        for (path, _, _), place in self.places.items():
            by_module.setdefault(path, set()).add(place)
        return by_module

    def folds_of(self, path: str, num_heads: int) -> frozenset[tuple[int, int]]:
        """Returns how the rows of an attention's scores hold the samples: a set of pairs (outside, inside).

        The number of rows is the product of ``outside``, the number of samples, and ``inside``, slowest first. A pair
        (1, 1) means one row for each sample. Calls of the module may differ in their pair.
        """
        folds = set()
        for key, place in self.places.items():
            if key[0] == path and place not in (None, ALONE, MIXED, SELECTED) and place.dim == 0:
                # scores are (rows * heads, queries, keys), or have a dim for heads
                inside = place.inside // num_heads if self.num_dims[key] == 3 else place.inside
                folds.add((place.outside, inside))
        return frozenset(folds)

    def check(
        self, *, are_threads: bool, cuts: bool, cuts_samples: bool, cuts_batch: bool = True,
        cut_layers: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Raises PlanError if the model draws random numbers that would differ between layouts.

        Refused are draws in a backward; draws that mix samples, if the layout ``cuts_batch`` (by ranks or
        microbatches); draws for one sample alone inside of ``cut_layers``, layers whose activations are split over
        ranks; and draws from the generators of Python and NumPy. A forward may draw from generators of Python and NumPy
        that it seeds itself, unless ranks are threads, which share these generators, or the layout ``cuts`` the batch
        or the model's code: the seed and the number of draws may depend on the number of samples, or on code of another
        stage.

        A warning is given, if the layout ``cuts_samples``, for each function that combines samples (``across``): a rank
        would see only its own samples, so the result may differ from one device. If ranks are threads, a warning names
        the variables that they share (``kept_outside``).
        """
        places: dict[str, list[str]] = {}  # by function, so that a model of many layers gives one warning
        for path, function in self.across if cuts_samples else ():
            places.setdefault(function, []).append(f"'{path or 'the model'}'")
        for function, named in places.items():
            warn_of_meeting(named, function, stacklevel=2)
        if are_threads and self.kept_outside:
            warn(
                f"the forward leaves tensors outside of the model, in {', '.join(map(repr, self.kept_outside))}: ranks "
                "that are threads share that, so a rank may read what another has left. Write ranks='processes' in "
                "sw.launch or sw.verify",
                stacklevel=2,
            )
        self._check_kinds()
        self._check_others(are_threads=are_threads, cuts=cuts)
        if cut_layers:
            self._check_layers(cut_layers)
        if cuts_batch:
            self._check_samples()

    def _check_kinds(self) -> None:
        """Raises PlanError for draws whose numbers the library cannot compute: of other operators, or in a backward."""
        for path, name in self.unkeyed:
            raise PlanError(
                f"'{path or 'the model'}' draws random numbers that would depend on the layout",
                given=f"'{name}' under several ranks or microbatches",
                allowed=KEYED_FUNCTIONS,
                fix=UNKEYED_FIX,
            )
        if self.backwards:
            raise PlanError(
                "random numbers are drawn in a backward, where nothing makes them independent of the layout",
                given=f"the backward of {' and '.join(self.backwards)}, under several ranks or microbatches",
                allowed="random numbers that a forward draws; one rank and one microbatch",
                fix="draw them in the forward of the function, and keep them with ctx.save_for_backward",
            )

    def _check_others(self, *, are_threads: bool, cuts: bool) -> None:
        """Raises PlanError for draws from generators other than torch's that a layout would change."""
        unseeded = [name for name in self.others if are_threads or cuts or name not in self.seeded]
        if unseeded:
            names, is_shared = " and ".join(unseeded), not cuts and set(unseeded) <= {*self.seeded}
            raise PlanError(
                f"the forward draws random numbers from {names}",
                given=f"{names}, which the forward seeds, and which ranks that are threads share"
                if is_shared
                else f"{names} under a layout of several ranks or microbatches, which may draw other numbers",
                allowed="torch's random functions, whose numbers are the same under every layout; one rank"
                + ("; ranks that are processes" if is_shared else " and one microbatch"),
                fix=("launch with ranks='processes', " if is_shared else "")
                + "draw with torch.rand, or draw in the data loader",
            )

    def _check_layers(self, cut_layers: Collection[str]) -> None:
        """Raises PlanError for draws for one sample alone, inside of layers whose activations are split over ranks."""
        for path in self.alone:
            layer = next((layer for layer in cut_layers if is_inside(path, layer)), None)
            if layer is not None:
                raise PlanError(
                    f"'{path or 'the model'}' draws random numbers for one sample at a time, of which ranks have parts",
                    given=f"a loop over the samples of a batch, and '{layer or 'the model'}', which is cut inside",
                    allowed="such loops under dp, ZeRO and pp; draws for all samples at once",
                    fix="set the dropout's p to 0, compute all samples at once, or leave out tp",
                )

    def _check_samples(self) -> None:
        """Raises PlanError for draws that depend on which samples of a batch a rank or microbatch has.

        A warning is given for modules that draw as often as there are samples: their draws are taken to be in the order
        of the batch.
        """
        for path in sorted(self.counted):
            warn(
                f"{path or 'the model'!r} draws random numbers once for each sample, and nothing shows for which: they "
                "are taken to be in the order of the batch, which verify checks",
                stacklevel=4,
            )
        for key, place in self.places.items():
            path = key[0]
            if key in self.seeds and place is not None:
                raise PlanError(
                    f"'{path or 'the model'}' draws numbers for each sample from a generator that its forward seeds",
                    given=f"{self.functions[key]} with a seed, under a layout that cuts the batch, so that ranks or "
                    "microbatches would draw the same numbers for other samples",
                    allowed="draws from such a generator that have no samples; draws without a generator",
                    fix="leave out the seed, or draw in the data loader",
                )
            if place == ALONE and path not in self.loops:
                raise PlanError(
                    f"'{path or 'the model'}' draws random numbers more often the more samples there are, and not in a "
                    "loop that is followed",
                    given=f"{self.functions[key]}, under a layout that cuts the batch, so that ranks draw less often",
                    allowed="one loop over the samples in order, with as many draws for each, by functions of the "
                    "sample's tensor such as torch.rand_like; layouts of tp and pp without mb",
                    fix="draw for all samples at once, give each loop a dropout of its own, or set a dropout's p to 0",
                )
            if place == MIXED:
                function = next(name for (other, _, _), name in self.functions.items() if other == path)
                raise PlanError(
                    f"'{path or 'the model'}' draws random numbers that mix the samples of a batch, or for rows of "
                    "which it is not known whose they are",
                    given=f"{function}, under a layout that cuts the batch, so that no rank has all of it at once",
                    allowed="random numbers for each sample, or the same for all; layouts of tp and pp without mb",
                    fix="draw before samples are mixed or joined, join them by one torch.stack or torch.cat, mix "
                    "samples in the data loader, or, for dropout, set its p to 0",
                )


def draws_of(
    recording: Recording, axes: RunAxes, flow: SampleFlow, found: Iterable[FoundDraw], others: Iterable[str],
    seeded: Iterable[str] = (), seeds: Iterable[DrawKey] = (),
) -> Draws:  # fmt: skip
    """Returns the random draws of a recorded run, and where each drawn tensor holds the samples of the batch.

    ``flow`` says which samples values were computed from (:func:`follow_samples`). ``found`` lists the draws that
    :class:`FindsDraws` noted in the run. ``others``, ``seeded`` and ``seeds`` are as in :class:`Draws`.
    """
    backwards = tuple(sorted({name.removesuffix("Backward") for name in recording.drawing_backwards}))
    draws = Draws(
        others=tuple(others), seeded=tuple(seeded), across=tuple(meetings(recording, axes, flow)), backwards=backwards,
        seeds=frozenset(seeds), routing=frozenset(recording.selecting), kept_outside=recording.kept_outside,
    )  # fmt: skip
    draws.unkeyed = tuple(dict.fromkeys((call.module, call.name) for call in recording.calls if call.name in UNKEYED))
    found = list(found)
    drawing = {draw.key[0] for draw in found}
    by_rows = {
        module
        for module in recording.selecting
        if any(is_inside(path, module) for path in drawing) and _selects_rows(module, recording, axes)
    }
    packed = _packed_rows(recording)
    places = {
        draw.key: MIXED if draw.use in packed or flow.permutes(draw.use) else _place(draw.use, recording, axes)
        for draw in found
    }
    alone = _drawn_alone(found, flow, places)
    loops = sample_loops(alone, recording.num_samples)
    for path, call, number in places:
        if path in loops and alone[path][call][number] is not None:
            places[path, call, number] = ALONE
    elsewhere = {path for (path, _, _), place in places.items() if place not in (None, MIXED, ALONE)}
    for_rows = _drawing_for_rows(found) - elsewhere
    for draw in found:
        key, function = draw.key, draw.function
        place, draws.num_dims[key] = places[key], len(draw.use.shape)
        # a draw before the module selects is not for selected rows; a model's own loss may select labels at the end
        around = [path for path, first in recording.selecting.items() if first < draw.stop and is_inside(key[0], path)]
        if around and place in (None, MIXED, ALONE):  # the draw may be for samples that only a real run selects
            loops[key[0]] = None
            is_of_rows = by_rows.issuperset(around) and key[0] in for_rows
            place = SELECTED if is_of_rows else MIXED
        across = draw.together is not None and _joins_samples(draw.together, _place(draw.together, recording, axes))
        draws.places[key] = MIXED if across or (function == "randperm" and place is not None) else place
        draws.functions[key] = function
    draws.loops = {path: loop for path, loop in loops.items() if loop is not None}
    drawn_alone = {
        path
        for path, calls in alone.items()
        if any(sample is not None for samples in calls.values() for sample in samples)
    }
    draws.unfollowed = frozenset(drawn_alone - loops.keys())
    selected = [path for (path, _, _), place in draws.places.items() if place == SELECTED]
    draws.selecting = frozenset(module for module in by_rows if any(is_inside(path, module) for path in selected))
    return draws


def _joins_samples(together: TensorUse, place: SamplePlace | None) -> bool:
    """Returns whether samples lie along the last dim of a tensor, whose numbers there depend on each other."""
    return place is not None and (place == MIXED or place.dim == len(together.shape) - 1)


UNKEYED = RANDOM - {"native_dropout"}
"""The random operators that a recorded forward runs only by calls that ``draw_calls.py`` does not describe."""

OF_ROWS = frozenset(("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "rand_like", "randn_like"))
"""The functions that draw numbers for the rows of a tensor: it is enough to know whose rows these are."""

MOST_INSIDE = 0.5
"""The largest share of a model's parameters in a module whose selected rows are followed.

Pipeline stages do not cut such a module inside, so a module that holds most of the model would fill one stage.
"""


def _drawn_alone(
    draws: Iterable[FoundDraw], flow: SampleFlow, places: Mapping[DrawKey, SamplePlace | None]
) -> dict[str, dict[int, list[int | None]]]:
    """Returns, by module and call number, the one sample that each draw is for; None for a draw for several or none.

    ``places`` says which drawn tensors have a dim of samples: such a draw is for all samples of the dim.
    """
    samples: dict[str, dict[int, list[int | None]]] = {}
    for key, use, *_ in draws:
        path, call, _ = key
        sample = flow.sample_of(use) if places[key] in (None, MIXED) else None
        samples.setdefault(path, {}).setdefault(call, []).append(sample)
    return samples


def _drawing_for_rows(draws: Sequence[FoundDraw]) -> set[str]:
    """Returns the modules that draw only for the rows of a tensor, in code that no checkpoint of the model's repeats.

    Code often skips experts without rows. A loop over experts, or a dropout that several experts share, then draws less
    often than in the record. So random numbers for rows are counted by row, and those of other draws by call. A module
    that draws in both ways is left out, because skipped calls would shift its counts by call.
    """
    others = {draw.key[0] for draw in draws if draw.function not in OF_ROWS or not draw.is_kept}
    return {draw.key[0] for draw in draws} - others


def _selects_rows(module: str, recording: Recording, axes: RunAxes) -> bool:
    """Returns whether each tensor from which a module's code selects rows by values has whole samples in dim 0.

    Dim 0 may be samples times tokens, but not tokens times samples. The result is False for a module that is called
    several times, and for one with more than :data:`MOST_INSIDE` of the parameters.
    """
    inside = [prod(use.shape) for name, use in recording.parameters.items() if name.startswith(f"{module}.")]
    if not module or sum(inside) > MOST_INSIDE * sum(prod(use.shape) for use in recording.parameters.values()):
        return False
    selected = False
    for call in recording.calls:
        if call.number and call.module == module:
            return False
        if call.name not in ("index", "index_select") or not is_inside(call.module, module):
            continue
        places = [_place(use, recording, axes) for use in (*call.operands, *call.results)]
        if all(place is None for place in places[1:]) or places[-1] not in (None, MIXED):
            continue  # the call selects by known numbers, or selects no samples
        place = places[0]
        if place is None or place == MIXED or place.outside > 1 or prod(call.operands[0].shape[: place.dim]) > 1:
            return False
        selected = True
    return selected


def draws_as_known(module: nn.Module) -> bool:
    """Returns whether a module of torch or of this library draws no random numbers, or only those of plain dropout.

    Plain dropout is ``nn.Dropout`` and dropout inside attention. A user's class, a module whose forward was replaced,
    any other dropout, ``nn.RReLU``, fractional pooling and a recurrent network give False. A model whose modules all
    give True needs no recorded run.
    """
    return is_known(module) and "forward" not in vars(module) and not isinstance(module, _DRAWING)


_DRAWING = (
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU, nn.RNNBase,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip


def _packed_rows(recording: Recording) -> set[TensorUse]:
    """Returns the tensors whose rows are the steps of packed sequences, up to where code pads these again.

    The rows are in the order of the steps, and a sample has as many as its sequence is long. The axes of what a
    recurrent layer computes from them do not show this, since it joins a part for each step.
    """
    number: dict[TensorUse, int] = {}  # by value that is computed from packed rows: how many rows these are
    for call in recording.calls:
        if call.name == PACK:
            number[call.results[0]] = call.results[0].shape[0]
        elif call.name != "_pad_packed_sequence":
            rows = next((number[use] for use in call.operands if use in number), None)
            if rows is not None:
                number.update(dict.fromkeys((*call.results, *call.written), rows))
    return {use for use, rows in number.items() if use.shape[:1] == (rows,)}


def _place(use: TensorUse, recording: Recording, axes: RunAxes) -> SamplePlace | None:
    batch = axes.of_samples(recording.inputs)
    count = recording.num_samples
    dims = axes.of(use)
    at = [dim for dim, axis in enumerate(dims) if batch & set(leaves(axis))]
    if not at and axes.of_samples(recording.packed_inputs) & {leaf for axis in dims for leaf in leaves(axis)}:
        return MIXED  # packed rows: ranks hold different numbers of them, so the tensor cannot be cut by samples
    if not at and count in COUNTS:  # no axis shows samples, as after an operator without a rule: the sizes may
        batch = {leaf for axis in dims for leaf in leaves(axis) if leaf.size == count}
        at = [dim for dim, axis in enumerate(dims) if batch & set(leaves(axis))]
        if not at and any(size % count == 0 for size in use.shape):
            return MIXED
    if not at:
        return None
    around = _around(dims[at[0]], batch)
    if len(at) > 1 or around is None or (count in COUNTS and any(size % count == 0 for size in around)):
        return MIXED  # also if another factor equals the number of samples, as in scores of all samples with all
    return SamplePlace(at[0], *around)


def _around(axis: DimAxis, batch: set[DimAxis]) -> tuple[int, int] | None:
    """Returns the sizes of the factors of a dim that vary slower and faster than its samples.

    ``axis`` is the dim's :class:`DimAxis`, and ``batch`` has the axes of the samples. The result is None if the samples
    are not one factor of the dim.
    """
    axis = root(axis)
    if axis.is_leaf:
        return (1, 1) if axis in batch else None
    factors = [_around(inner, batch) for inner in axis.inner]
    if axis.parts is not None:  # several batches, end to end
        first = factors[0]
        same = first is not None and all(factor == first for factor in factors)
        return (len(factors) * first[0], first[1]) if same and first is not None else None
    holding = [number for number, inner in enumerate(axis.inner) if batch & set(leaves(inner))]
    around = factors[holding[0]] if len(holding) == 1 else None
    if around is None:
        return None
    sizes = [root(inner).size for inner in axis.inner]
    return prod(sizes[: holding[0]]) * around[0], around[1] * prod(sizes[holding[0] + 1 :])


class FindsDraws(TorchFunctionMode):
    """A torch mode that notes each random draw of a recorded forward in ``found``, without drawing the numbers."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__()
        self.found: list[FoundDraw] = []
        self._recorded = recorded
        self._numbers: dict[tuple[str, int], int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.multi_head_attention_forward:
            with self:
                return in_multihead(*args, **named)
        call = draw_of(func, args, named)
        if call is None:
            return func(*args, **named)
        result = call.without_numbers()
        use = self._recorded.use(call.numbered(result))
        if not isinstance(result, Tensor) or result.numel() != 1:
            # a single drawn number stays a constant, with a value: code that skips layers at random reads it
            for tensor_use in (use, *(self._recorded.use(x) for x in (result,) if isinstance(x, Tensor))):
                tensor_use.kind = "" if tensor_use.kind == "constant" else tensor_use.kind
        where = self._recorded.where()
        number = self._numbers.get(where, 0)
        self._numbers[where] = number + 1
        generator = call.get("generator")
        state = (
            None if generator is None or generator is torch.default_generator else (generator, generator.get_state())
        )
        is_kept = saved_by() is None and torch.is_grad_enabled()
        stop = len(self._recorded.recording.calls)
        together = None if (last := call.drawn_together(result)) is None else self._recorded.use(last)
        self.found.append(FoundDraw((*where, number), use, call.name, state, is_kept, stop, _bounds(call), together))
        return result


_BOUNDS = ("from", "to", "mean", "std", "lambd", "low", "high")
"""The arguments of random functions that scale what they draw."""


def _bounds(call: DrawCall) -> tuple[float, ...]:
    values = (call.get(name) for name in _BOUNDS)
    numbers = tuple(value for value in values if type(value) in (int, float))
    return () if {-1, 0, 1}.issuperset(numbers) else numbers


@contextmanager
def moved_on(draws: Sequence[FoundDraw]) -> Iterator[None]:
    """Returns a context in which the generators of ``draws`` are advanced by a few numbers; at its end they are reset.

    A forward that makes or seeds a generator itself draws the same numbers inside the context (:func:`seeded_draws`).
    """
    generators = {id(draw.generator[0]): draw.generator[0] for draw in draws if draw.generator is not None}
    before = [generator.get_state() for generator in generators.values()]
    for generator in generators.values():
        torch.rand(3, generator=generator, device=generator.device)
    try:
        yield
    finally:
        for generator, state in zip(generators.values(), before, strict=True):
            generator.set_state(state)


def seeded_draws(first: Sequence[FoundDraw], again: Sequence[FoundDraw]) -> list[DrawKey]:
    """Returns the keys of draws from generators that a forward makes or seeds: two runs draw from equal states.

    ``first`` are the draws of one run, and ``again`` those of a run inside of :func:`moved_on`. In the second run, a
    generator that the model keeps has another state, unless the forward has seeded it.
    """
    states = {draw.key: draw.generator[1] for draw in again if draw.generator is not None}
    alike = (
        draw.key
        for draw in first
        if draw.generator is not None and draw.key in states and torch.equal(draw.generator[1], states[draw.key])
    )
    return list(alike)
