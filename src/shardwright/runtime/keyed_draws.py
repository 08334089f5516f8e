"""Makes the random numbers that a model's own code draws (dropout, ``torch.rand``) independent of the layout.

Functions that draw (``functional.dropout``, attention with ``dropout_p``, ``torch.rand``, ...) run under
:class:`KeyedDraws`, which computes each number from the seed, the step, the module and the number of its call, the
number of the draw in that call, the sample, and the element's index within the sample. Where a tensor has its samples
is known from the recorded run (``analysis/random_numbers/draws.py``). Only the modules that draw run under it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode, handle_torch_function

from shardwright.analysis.calls.checkpoint_calls import checkpoint_call, checkpoints_around, saved_by
from shardwright.analysis.calls.draw_calls import DrawCall, draw_of, in_multihead
from shardwright.analysis.random_numbers.draws import ALONE, FIRST, MIXED, SELECTED, Draws, SamplePlace
from shardwright.analysis.traced.structure import is_inside
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.keyed_dropout import KEYED, key_dropout, with_samples_in_dim_1
from shardwright.plan.stages import DROPOUTS
from shardwright.rng import DimSlice, RngTracker
from shardwright.row_numbers import rows_of
from shardwright.runtime.keyed_functions import KEYED_RESULTS
from shardwright.runtime.keyed_numbers import KeyedNumbers, RowNumbers, Tokens
from shardwright.runtime.selected_rows import RowsForward

SamplesOfCall = Callable[[], Sequence[int]]

ForwardDraw = tuple[str, Callable[[torch.device], KeyedNumbers] | None]
"""A draw of a forward: the name of the torch function that drew, and a function that returns its numbers for a device.

The second is None for a draw from a generator that the forward seeds, since torch draws the same numbers again.
"""

_DRAWN = "_shardwright_drawn"
"""The attribute of a function that a checkpoint will run again, under which the draws of its forward are kept."""


class _ModuleDraws:
    """A context around one call of a module, in which :class:`KeyedDraws` is on; counts the call's draws."""

    __slots__ = ("around", "call", "cuts", "keyed", "number", "path", "rows", "tokens")

    def __init__(
        self,
        keyed: KeyedDraws,
        path: str,
        rows: SamplesOfCall | None,
        tokens: Tokens | None,
        cuts: tuple[DimSlice, ...],
    ) -> None:
        self.keyed, self.path, self.rows, self.tokens, self.cuts = keyed, path, rows, tokens, cuts
        self.number = 0

    def __enter__(self) -> _ModuleDraws:
        try:
            self.call: int | PlanError = self.keyed.rng.count(self.path)
        except PlanError as error:  # it matters only if the call draws
            self.call = error
        self.around = saved_by(), torch.is_grad_enabled()
        if not self.keyed.running:
            self.keyed.__enter__()
        self.keyed.running.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        self.keyed.running.pop()
        if not self.keyed.running:
            self.keyed.__exit__(*error)
        if error[0] is None and self.number and self.path in self.keyed.counted:
            self.keyed.check_loop(self.path, self.number, self.samples, in_call=True)

    @property
    def samples(self) -> Sequence[int]:
        """The indices of the call's samples in the global batch."""
        return self.keyed.rng.samples if self.rows is None else self.rows()

    def leave_out(self, name: str) -> None:
        """Counts a draw by the function ``name`` that takes its numbers from a generator with a seed."""
        if isinstance(self.call, int):
            self._recorded(self.call, name)
        self.number += 1
        self._keep(name, None)

    def _recorded(self, call: int, name: str) -> int:
        """Returns the number that the next draw, by the function ``name``, has in the record of this ``call``."""
        drawn = self.keyed.drawn.setdefault((self.path, call), [])
        if not self.keyed.rng.repeats:
            after = drawn[self.number - 1].recorded + 1 if 0 < self.number <= len(drawn) else self.number
            drawn[self.number :] = [_CallDraw(name, self.keyed.recorded(self.path, call, after, name))]
        return drawn[self.number].recorded if self.number < len(drawn) else self.number

    def _keep(self, name: str, numbers: Callable[[torch.device], KeyedNumbers] | None) -> None:
        """Keeps a draw of random numbers for the backward if code under ``torch.utils.checkpoint`` makes it."""
        if self.around != (saved_by(), torch.is_grad_enabled()):
            code = checkpoint_call(_KeyedForward.__call__.__code__)
            if code is not None:
                code.kept(_DRAWN, list[ForwardDraw], _CheckpointDraws).append((name, numbers))

    def next(self, name: str, device: torch.device, x: Any = None) -> KeyedNumbers:
        """Returns the random numbers of the next draw in this call, for tensors on ``device``.

        ``name`` is the function that draws, and ``x`` the tensor for which it draws, if there is one. Code that a
        backward runs again may leave out draws whose results it has kept. A draw in a backward therefore repeats the
        next draw of the same function in the forward.
        """
        if isinstance(self.call, PlanError):
            raise self.call
        drawn = self.keyed.drawn.setdefault((self.path, self.call), [])
        if self.keyed.rng.repeats:
            rest = [place for place in range(self.number, len(drawn)) if drawn[place].function == name]
            if rest and rest[0] > self.number:  # draws were left out, so one of several may be meant
                if len(rest) > 1:
                    raise PlanError(
                        f"a backward repeats one of several calls of '{name}' in '{self.path}' without those before",
                        given=f"{len(rest)} such calls in the forward",
                        allowed="all random calls of the module, or one whose function is called once",
                        fix="call the function in a module of its own, such as nn.Dropout",
                    )
                self.number = rest[0]
        samples, recorded = self.samples, self._recorded(self.call, name)
        self.number += 1
        draw = self.path, self.call, self.number - 1
        numbers: Callable[[torch.device], KeyedNumbers] | None = None
        if self.path in self.keyed.for_rows:
            numbers = self.keyed.numbers_of_rows(self.path, name, x, samples, self.tokens, self.cuts)
        if numbers is None:
            numbers = partial(self.keyed.numbers, *draw, samples, tokens=self.tokens, cuts=self.cuts, recorded=recorded)
        self._keep(name, numbers)
        return numbers(device)


class _CallDraw(NamedTuple):
    """A draw in one call of a module: the name of the function, and the number of the draw in the call's record."""

    function: str
    recorded: int


class _CheckpointDraws(TorchFunctionMode):
    """A torch function mode in which the draws of code that a backward repeats get the numbers of the forward.

    It is for code that a module passes to ``torch.utils.checkpoint``. If a backward calls a whole module again, this
    mode is not needed: the module counts its draws itself, under :class:`KeyedDraws`. ``drawn`` are the draws of the
    forward, in order: the name of the function, and a function that returns its numbers for a device.
    """

    def __init__(self, drawn: Sequence[ForwardDraw]) -> None:
        super().__init__()
        self._drawn, self._number = drawn, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:
                return in_multihead(*args, **named)
        call = draw_of(func, args, named)
        if call is None:
            return func(*args, **named)
        numbers = self._next(call.name)
        if numbers is None:
            with torch._C.DisableTorchFunction():
                return func(*args, **named)
        return _result(func, call, args, named, numbers(call.device))

    def _next(self, name: str) -> Callable[[torch.device], KeyedNumbers] | None:
        if self._number >= len(self._drawn) or self._drawn[self._number][0] != name:
            names = ", ".join(draw_name for draw_name, _ in self._drawn)
            raise PlanError(
                f"a backward draws by '{name}' in code of a checkpoint, and what it repeats cannot be known",
                given=f"draws of the forward there: {names}",
                allowed="code that draws the same again in the backward; one checkpoint, and not several in each other",
                fix="draw in a module of its own, such as nn.Dropout, or leave out torch.utils.checkpoint",
            )
        self._number += 1
        return self._drawn[self._number - 1][1]


class KeyedDraws(TorchFunctionMode):
    """A torch function mode in which random functions give the same numbers under every layout.

    Each number is hashed from the seed, the step, the call of the random function, the sample and the element's index,
    instead of taken from a generator's sequence.

    >>> model, rng = nn.Sequential(nn.AlphaDropout(0.5)), RngTracker(seed=3, samples=range(2))
    >>> key_draws(model, rng, None)
    >>> whole = model(torch.ones(2, 8))
    >>> rng.samples = range(1, 2)  # a rank that has the second sample only
    >>> torch.equal(model(torch.ones(1, 8)), whole[1:])
    True
    """

    def __init__(
        self, rng: RngTracker, draws: Draws | None, shared: Mapping[str, Sequence[str]] = MappingProxyType({}),
        *, cuts_batch: bool = False, cuts_code: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.rng, self.draws, self.shared = rng, draws, shared
        self.cuts_batch, self.cuts_code = cuts_batch, cuts_code
        self.for_rows = {path for path, places in draws.in_modules().items() if SELECTED in places} if draws else set()
        self.running: list[_ModuleDraws] = []
        # modules that draw for one sample after another, and must draw as often for each as in the record
        self.counted: dict[str, nn.Module] = {}
        self.drawn: dict[tuple[str, int], list[_CallDraw]] = {}  # what drew in each call of a module

    def numbers(
        self, path: str, call: int, number: int, samples: Sequence[int], device: torch.device, tokens: Tokens | None,
        cuts: tuple[DimSlice, ...] = (), recorded: int | None = None,
    ) -> KeyedNumbers:  # fmt: skip
        """Returns the random number generator of one draw, for tensors on ``device``.

        Its key is the name ``path`` of the module, the number ``call`` of the module's call in the forward, and the
        ``number`` of the draw in that call. ``samples`` are the indices, in the global batch, of the samples in the
        drawn tensor. Where sequences are sharded, ``tokens(shape)`` returns which slice of the whole tensor a drawn
        tensor of this shape is, and ``cuts`` are slices of other dims. ``recorded`` is the number that the draw has in
        the record of the call, if that is another one; the record shows where the tensor has its samples.
        """
        loop, sample = None if self.draws is None else self.draws.loops.get(path), None
        if loop is not None and loop.in_call:
            number, sample = loop.recorded(number, len(samples))
        elif loop is not None:
            call, sample = loop.recorded(call, len(samples))
        key = f"{path}#{call}/{number}"
        if sample is not None:
            return KeyedNumbers(self.rng, key, ALONE, samples[sample : sample + 1], device)
        place = self.place(path, call, number if recorded is None or loop is not None else recorded)
        if place == MIXED and path in self.shared and self.cuts_code:
            raise PlanError(
                f"'{path or 'the model'}' draws random numbers in code that selects samples by values",
                given=f"a module that is also '{self.shared[path][-1]}', under a layout that has stages: another one "
                "of them may have drawn more or less often than in the recorded forward",
                allowed="a module that one stage has; layouts of tp without mb",
                fix="give each module that selects rows a dropout of its own",
            )
        if place in (ALONE, MIXED, SELECTED):  # the numbers do not depend on samples: one rank has all
            place = None
        return KeyedNumbers(self.rng, key, place, samples, device, tokens if place == FIRST else None, cuts)

    def check_loop(self, path: str, turns: int, samples: Sequence[int], *, in_call: bool) -> None:
        """Raises PlanError if a module drew more or less often for some sample than for others, in a training forward.

        ``turns`` counts the module's draws in one call (``in_call``), or its calls in the forward. Nothing is checked
        while a backward repeats code, since it may repeat only some of them.
        """
        assert self.draws is not None, "it has the loops"
        loop = self.draws.loops[path]
        if loop.in_call is not in_call or self.rng.repeats or not self.counted[path].training:
            return
        if turns != loop.total(len(samples)):
            raise PlanError(
                f"'{path or 'the model'}' draws random numbers for one sample after another, and not equally often",
                given=f"{turns} {'draws' if in_call else 'calls'} for {len(samples)} samples, where the record has "
                f"{loop.every} for each",
                allowed="code that draws as often for each sample, whatever its values and its length",
                fix="draw once for all that a sample has, draw also where nothing is to be dropped, or set the "
                "dropout's p to 0",
            )

    def check_calls(self, rows: Mapping[str, SamplesOfCall]) -> None:
        """Raises PlanError if code that loops over samples has called a module more or less often than in the record.

        It is called after each forward. ``rows`` gives the samples of modules whose samples are not the microbatch's.
        """
        for path in self.counted:
            samples = rows[path]() if path in rows else self.rng.samples
            self.check_loop(path, self.rng.num_calls(path), samples, in_call=False)

    def recorded(self, path: str, call: int, after: int, name: str) -> int:
        """Returns the number of the recorded draw that a draw by the function ``name`` is, the first from ``after`` on.

        They differ where code leaves out draws, as one does that skips layers by a number that it has drawn.
        """
        calls = None if self.draws is None or path in self.draws.loops else self.draws.in_calls.get(path)
        if not calls:
            return after
        names = calls.get(call) or calls[max(calls)]
        if after < len(names) and names[after] == name:
            return after
        same = [number for number, other in enumerate(names) if other == name]
        return next((number for number in same if number > after), same[-1] if same else after)

    def place(self, path: str, call: int, number: int) -> SamplePlace | None:
        """Returns where the tensor of one draw has its samples: dim 0, if the recorded forward made no such draw."""
        if self.draws is not None:
            with suppress(KeyError):
                return self.draws.place(path, call, number)
        return FIRST

    def numbers_of_rows(
        self, path: str, name: str, x: Any, samples: Sequence[int], tokens: Tokens | None, cuts: tuple[DimSlice, ...]
    ) -> Callable[[torch.device], RowNumbers] | None:
        """Returns a function that makes the numbers of a draw for ``x``, whose rows code has selected by values.

        The module at ``path`` draws by the function ``name``. The key of a number is ``path``, the row, and how many
        draws of the module for this row came before. The number of the module's call would not do as a key: which
        experts have rows, and so how often the module draws, differs between ranks. Returns None if the rows are not
        known and every rank has all samples.

        Raises: PlanError: the rows are not known and the layout cuts the batch, or a backward repeats the draw.
        """
        rows, why, fix = rows_of(x), "", "set the dropout's p to 0, or drop before the rows are selected"
        if self.rng.repeats:
            why = "again in a backward"
        elif path in self.shared and (self.cuts_batch or self.cuts_code):
            why = (
                f"by a module that is also '{self.shared[path][-1]}', under a layout that cuts the batch or has stages"
            )
            fix = "give each module that selects rows a dropout of its own"
        elif self.cuts_batch and tokens is not None:
            why = "where sequences are cut"
        elif self.cuts_batch and rows is None:
            why = "of rows that are not known under a layout that cuts the batch"
        if why:
            raise PlanError(
                f"'{path or 'the model'}' draws random numbers for rows that code selects by values",
                given=f"{name}, {why}",
                allowed="rows of samples that x[mask], x[indices] or index_select give, then computed row by row; "
                "layouts of tp and pp without mb; recompute:full in place of torch.utils.checkpoint",
                fix=fix,
            )
        if rows is None:
            return None
        before = self.rng.draws_before(path, rows)
        return lambda device: RowNumbers(
            self.rng, f"{path}#rows", None, samples, device, None, cuts, rows=rows, draws_before=before
        )

    def draw(self, path: str, call: int, number: int, draw: DrawCall) -> Tensor:
        """Returns the result of one random function call that a recorded forward has made, computed on the CPU.

        ``draw`` is that call. The key of its numbers is the name ``path`` of the module, the number ``call`` of the
        module's call in the forward, and the ``number`` of the draw in that call. No counter of calls changes.
        """
        recorded = self.recorded(path, call, number, draw.name)
        numbers = self.numbers(path, call, number, self.rng.samples, torch.device("cpu"), None, recorded=recorded)
        drawn: Tensor = KEYED_RESULTS[draw.kind](draw, draw.drawn(None), numbers)
        return drawn

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._attend(func, args, named)
        call = draw_of(func, args, named)
        if call is None:
            return func(*args, **named)
        x, device = call.drawn(None), call.device
        mine = self.running[-1]
        is_own = call.get("generator") is not None and device.type != "meta"
        if is_own and self.draws is not None and self.draws.is_seeded(mine.path, call.name):
            mine.leave_out(call.name)
            return _seeded(func, args, named, x, self.rng)
        return _result(func, call, args, named, mine.next(call.name, device, x))

    def _attend(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Runs torch's attention with a keyed dropout; a torch function mode below this one sees it as one function."""
        mine, first = self.running[-1], self.running[-1].number

        @wraps(func)
        def attended(*args: Any, **named: Any) -> Any:
            mine.number = first
            with self:
                return in_multihead(*args, **named)

        if not getattr(_get_current_function_mode(), "takes_draws", False):
            return attended(*args, **named)
        result = handle_torch_function(attended, args[:1], *args, **named)
        arguments = _MULTIHEAD.bind(*args, **named).arguments
        # counts the draw of torch's attention even if a mode below answered the call without running it
        mine.number = first + bool(arguments.get("training", True) and arguments["dropout_p"] > 0)
        return result


def key_draws(
    model: nn.Module,
    rng: RngTracker,
    draws: Draws | None,
    cuts: Mapping[str, tuple[DimSlice, ...]] | None = None,
    rows: Mapping[str, SamplesOfCall] | None = None,
    tokens: Mapping[str, Tokens] | None = None,
    *,
    cuts_batch: bool = False,
    cuts_code: bool = False,
) -> None:
    """Makes the random numbers of a model's forward depend on seed, step, layer and sample, and not on the layout.

    ``draws`` are the random function calls that a recorded forward has made. If ``draws`` is None, every module whose
    code may draw runs under :class:`KeyedDraws`, and drawn tensors are taken to have the samples in dim 0.

    Three arguments have entries by module name. ``cuts`` says which slices of a whole activation the module sees on
    this rank. ``rows`` has a function that returns the indices of the module's samples in the global batch, for modules
    whose samples are not the microbatch's. ``tokens`` has a function from a shape to the slices that hold this rank's
    tokens. ``cuts_batch`` says that ranks or microbatches have only some of the samples, and ``cuts_code`` that ranks
    run only some of the modules.

    The model's modules are wrapped in place, dropout layers as by :func:`key_dropout`. ``rng.draw`` is set to
    :meth:`KeyedDraws.draw`, and ``rng.checkpoints`` to :func:`checkpoints_around`.
    """
    shared = {} if draws is None else _shared(model, draws.routing)
    keyed = KeyedDraws(rng, draws, shared, cuts_batch=cuts_batch, cuts_code=cuts_code)
    rng.draw, rng.checkpoints = keyed.draw, checkpoints_around
    drawing = None if draws is None else draws.in_modules()
    of_layer = {*with_samples_in_dim_1(model)}
    of_cut = {*(cuts or {})}
    others, folded = set(), dict[str, frozenset[tuple[int, int]]]()
    for path, module in model.named_modules():
        places = {FIRST} if drawing is None else drawing.get(path, {FIRST})
        # key_dropout finds the samples of a dropout layer itself; if the record has them in other dims, the layer draws
        # under KeyedDraws instead, by the record
        known_by_layer = path in of_layer and places.isdisjoint((ALONE, MIXED, SELECTED))
        known_by_layer &= all(place is None or place.outside == place.inside == 1 for place in places)
        if type(module) is nn.MultiheadAttention and "forward" not in vars(module) and ALONE not in places:
            folds = frozenset() if draws is None else draws.folds_of(path, module.num_heads)
            folded.update({path: folds} if folds - {(1, 1)} else {})
            continue  # the layer itself is keyed
        if type(module) in KEYED and (
            known_by_layer or places == {FIRST} or (path in of_cut and places <= {FIRST, None})
        ):
            continue
        draws_itself = _may_draw(module) if drawing is None else path in drawing
        selects = draws is not None and path in draws.selecting
        if draws_itself or selects:
            own = (rows or {}).get(path), (tokens or {}).get(path), (cuts or {}).get(path, ())
            around = _around(keyed, module, path, own, follows=selects, draws=draws_itself)
            name = "random numbers from the seed, the step and the sample" if draws_itself else "rows that it selects"
            wrap(module, Rung.DRAWS, name, by="core", around=around)
        if draws_itself:
            others.add(path)
        if draws is not None and path in draws.loops and cuts_batch and not cuts_code:
            keyed.counted[path] = module
    if keyed.counted:
        rng.forward_ended = partial(keyed.check_calls, rows or {})
    key_dropout(model, rng, cuts, rows, tokens, but=others, folded=folded)


def _shared(model: nn.Module, routing: Collection[str]) -> dict[str, list[str]]:
    """Returns the modules that are both inside of a ``routing`` module and outside of it: all names, by the first name.

    How often such a module draws in the routing module depends on values, which another stage does not know.
    """
    if not routing:
        return {}
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(path)
    shared: dict[str, list[str]] = {}
    for aliases in (paths for paths in names.values() if len(paths) > 1):
        inside = [sum(is_inside(name, around) for name in aliases) for around in routing]
        if any(inside) and len(aliases) not in inside:
            shared[aliases[0]] = aliases
    return shared


def _may_draw(module: nn.Module) -> bool:
    """Returns whether a module's own code may draw: it is a random layer of torch, or a user's module."""
    known = type(module).__module__.startswith(("torch.nn.", "shardwright."))
    return not known or isinstance(module, DROPOUTS | nn.RNNBase | nn.RReLU)


_MULTIHEAD = signature(functional.multi_head_attention_forward)


_Place = tuple[SamplesOfCall | None, Tokens | None, tuple[DimSlice, ...]]
"""What this rank has of a module's input: samples, tokens and slices of other dims, as for :func:`key_draws`."""


def _around(
    keyed: KeyedDraws, module: nn.Module, path: str, own: _Place, *, follows: bool, draws: bool
) -> Callable[[Forward], Forward]:
    """Returns what wraps a module that ``draws``, or whose code selects rows that it ``follows``."""

    def around(forward: Forward) -> Forward:
        inner = _KeyedForward(keyed, module, path, own, forward) if draws else forward
        return RowsForward(own[0] or partial(getattr, keyed.rng, "samples"), inner) if follows else inner

    return around


class _KeyedForward:
    """A module's forward that runs under :class:`KeyedDraws`; a copy of the module has a copy of it."""

    def __init__(self, keyed: KeyedDraws, module: nn.Module, path: str, own: _Place, inner: Forward) -> None:
        self.keyed, self.module, self.own, self.inner = keyed, module, (path, *own), inner
        self.idle = False
        self.__wrapped__ = inner  # for inspect.signature

    def __call__(self, *args: Any, **named: Any) -> Any:
        if self.idle:
            return self.inner(*args, **named)
        with _ModuleDraws(self.keyed, *self.own) as draws:
            result = self.inner(*args, **named)
        self.idle = self.keyed.draws is None and self.module.training and not draws.number  # no draw in a training call
        return result


def _seeded(func: Any, args: tuple[Any, ...], named: Mapping[str, Any], x: Any, rng: RngTracker) -> Any:
    """Returns what a function draws from a generator that the forward has seeded: the same as on one device.

    Raises: PlanError: it draws for a tensor ``x`` of which ranks hold parts.
    """
    if isinstance(x, Tensor) and rng.shard_of(x) is not None:
        raise PlanError(
            f"'{func.__name__}' draws from a generator with a seed, for a tensor of which each rank holds a part",
            given="a generator that the forward seeds, under tp",
            allowed="torch.randn(shape, generator=...) and the like, which draw a whole tensor",
            fix="draw the whole tensor by its shape, leave out the seed, or leave out tp",
        )
    with torch._C.DisableTorchFunction():  # a mode below refuses draws without a key
        return func(*args, **named)


def _result(
    func: Any, call: DrawCall, args: tuple[Any, ...], named: Mapping[str, Any], numbers: KeyedNumbers
) -> Any:  # fmt: skip
    """Returns the result of a random function, by ``numbers``; a torch function mode below sees it as one call."""
    x = call.drawn(None)
    if not getattr(_get_current_function_mode(), "takes_draws", False):
        return KEYED_RESULTS[call.kind](call, x, numbers)

    @wraps(func)
    def drawn(*args: Any, **named: Any) -> Any:  # the mode below runs it, perhaps on other tensors, or not at all
        again = draw_of(func, args, named)
        assert again is not None, "the same function, with tensors in place of tensors"
        return KEYED_RESULTS[again.kind](again, again.drawn(None), numbers)

    return handle_torch_function(drawn, (x,), *args, **named)
