"""Fills a run's parameters and buffers with given values: each rank reads the boxes of each tensor that it stores.

The values come from a :class:`WeightStore`: files, or tensors in memory. Every check of names, shapes and dtypes comes
before anything of the run is changed, and all ranks raise together::

    open the store --> match names, shapes, dtypes --> all ranks agree --> read and write, box by box --> all agree
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shardwright.analysis.traced.structure import owners
from shardwright.comm.agreement import check_agreement, first_problem, gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import CheckpointError, aligned
from shardwright.formatting import first_line
from shardwright.parallelize.rank_state import RankState
from shardwright.parallelize.whole_state import part_of_state
from shardwright.sharding.box import Box, write
from shardwright.sharding.tensor_layout import TensorLayout
from shardwright.tensor_bytes import bytes_of

Names = str | Mapping[str, str | None] | Callable[[str], str | None] | None
"""How the names of a plain model are turned into those of a file; :func:`renamed` says how each kind is read."""

StateTable = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""The dtype and the shape of each tensor, by name."""


MOST_SLAB_BYTES = 2**24
"""The most bytes of a tensor that are read at a time, unless one row of it has more."""


class WeightStore(Protocol):
    """A source of whole tensors by name, from which single boxes of a tensor can be read."""

    @property
    def tensors(self) -> StateTable:
        """The dtype and the shape of every tensor that can be read, by its name in the store."""
        ...

    def begin(self, name: str) -> None:
        """Prepares to read a tensor; all ranks call it for the same tensors, in the same order."""
        ...

    def place(self, name: str) -> object:
        """Returns a key that is equal for two names if they are one stored tensor, so that it is read once."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """Returns the values of one box of a tensor, in the dtype of the store and in host memory.

        Raises: CheckpointError or OSError: the values cannot be read.
        """
        ...

    def end(self) -> None:
        """Raises CheckpointError if the store has changed since it was opened."""
        ...


class LoadedWeights(NamedTuple):
    """The outcome of loading weights: names of tensors of the plain model, and of the source.

    ``loaded`` are the tensors of the model that were given values, and ``missing`` those that were not; a tied tensor
    is under its first name. ``unexpected`` are names of the source that no tensor of the model has.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class WholeWeights:
    """A :class:`WeightStore` of tensors in memory, such as a plain model's ``state_dict``."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        for name, value in given.items():
            if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter) or value.is_meta:
                kind = "a tensor on the meta device" if isinstance(value, Tensor) and value.is_meta else type(value)
                raise CheckpointError(
                    f"{name!r:.80} of the state dict has no plain values",
                    given=kind if isinstance(kind, str) else kind.__name__,
                    allowed="whole tensors with values, by name",
                    fix="give tensor.full_tensor() of a DTensor, and leave out what is no tensor",
                )
        self._given: Mapping[str, Tensor] = dict(given)
        self.tensors: StateTable = {name: (value.dtype, tuple(value.shape)) for name, value in given.items()}

    def begin(self, name: str) -> None:
        """Does nothing: the tensors are there."""

    def place(self, name: str) -> object:
        """Returns the memory, shape and strides of a tensor as a key, which is equal for tied tensors."""
        tensor = self._given[name]
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a view of a box of a tensor."""
        return self._given[name].detach()[box.slices]

    def end(self) -> None:
        """Does nothing: tensors in memory do not change by themselves."""


class ReceivedWeights:
    """A :class:`WeightStore` of tensors that one rank has, and sends to all ranks one after the other.

    All ranks make it together.

    Traffic: a gather of names, shapes and dtypes as text; each tensor that is loaded, in one broadcast.
    """

    def __init__(self, everyone: Axis, own: WholeWeights | None, sender: int) -> None:
        tables = {name: [str(d).removeprefix("torch."), s] for name, (d, s) in own.tensors.items()} if own else {}
        table = gather_json(everyone, tables)[sender]
        self.tensors: StateTable = {
            name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in table.items()
        }
        self._everyone, self._own, self._sender = everyone, own, sender
        self._now = ("", torch.empty(0))

    def begin(self, name: str) -> None:
        """Broadcasts a tensor to all ranks, as bytes."""
        self._now = ("", torch.empty(0))  # freed before the next one comes
        dtype, shape = self.tensors[name]
        size = Box.of(shape).size * dtype.itemsize
        if self._everyone.index == self._sender and self._own is not None:
            values = bytes_of(self._own.read(name, Box.of(shape)).contiguous()).to(self._everyone.device)
        else:
            values = torch.empty(size, dtype=torch.uint8, device=self._everyone.device)
        if size:
            values = self._everyone.broadcast(values, self._sender)
        self._now = (name, values.view(dtype).view(shape))

    def place(self, name: str) -> object:
        """Returns None for every name, so that all names of a tied tensor count as one: only the first one is sent."""
        return None

    def read(self, name: str, box: Box) -> Tensor:
        """Returns a view of a box of the tensor that was sent last."""
        assert self._now[0] == name, f"{name} was not sent last"
        return self._now[1][box.slices]

    def end(self) -> None:
        """Does nothing: what was sent does not change."""


class StateTensor(NamedTuple):
    """A parameter or persistent buffer of the plain model: all its names, and where the ranks store it.

    ``first`` is the first rank that stores a part, and ``local`` this rank's part, None without one.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    layout: TensorLayout
    first: int
    local: Tensor | None


class _FoundWeights(NamedTuple):
    """The names in the store of each tensor that is loaded, by its first name in the model, and what does not match."""

    sources: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def fill(
    run: RankState, open_store: Callable[[], WeightStore], what: str, names: Names = None, *, strict: bool = True,
    find_names: Callable[[Collection[str], Collection[str]], Names] | None = None,
) -> LoadedWeights:  # fmt: skip
    """Writes the values of a store into the run's parameters and persistent buffers; all ranks call it.

    ``open_store`` returns the store on each rank, and ``what`` is its description in errors. ``names`` turns names of
    the plain model into those of the store. If it is None or "", ``find_names`` may choose it; it is called with the
    names of the model and of the store. With ``strict``, every tensor of the model must be in the store and every
    tensor of the store in the model.

    Traffic: gathers of names and shapes, and of error texts, as text; one all-reduce of two numbers.
    Raises: CheckpointError, on every rank: the store cannot be opened, does not fit the model, or differs between
        ranks (nothing is changed then); or it could not be read to its end (values are partly overwritten then).
    """
    everyone = run.axes["world"].for_strategy("state")
    targets, passed_over = state_tensors(run, everyone)
    problem, store, match = "", None, _FoundWeights({}, (), ())
    try:
        store = open_store()
        if not names and find_names is not None:
            plain = {name for target in targets for name in target.names} | passed_over
            names = find_names(plain, store.tensors.keys())
        match = _matched(targets, passed_over, store, what, names, strict=strict)
        _check_ties(run, targets, store, match, what)
    except CheckpointError as failure:
        problem = str(failure)
    except Exception as failure:  # any code may run here: of files, of a user's function
        problem = str(_unreadable(what, failure, "nothing was changed"))
    if rank_problem := first_problem(everyone, problem):
        raise CheckpointError(rank_problem[1])
    assert store is not None
    tables = [f"{name} from {sources} {store.tensors[sources[0]]}" for name, sources in match.sources.items()]
    check_agreement(everyone, [*tables, *match.missing, *match.unexpected], _different(what))
    problem = ""
    for target in targets:
        if not (sources := match.sources.get(target.names[0])):
            continue
        try:
            store.begin(sources[0])  # on every rank, also after an error, since it may be a collective
            if not problem:
                _write_parts(run, target, store, sources[0])
        except Exception as failure:  # any error again: a file may vanish at any time
            problem = problem or str(_unreadable(what, failure, "values of the run are partly overwritten"))
    try:
        store.end()
    except CheckpointError as failure:
        problem = problem or str(failure)
    run.changed()
    if rank_problem := first_problem(everyone, problem):
        raise CheckpointError(rank_problem[1])
    return LoadedWeights(tuple(match.sources), match.missing, match.unexpected)


def fill_whole(
    run: RankState, state: Mapping[str, Any], *, strict: bool = True, from_rank: int | None = None
) -> LoadedWeights:
    """Writes whole tensors, by their names in the plain model, into a run: each rank's own, or those of ``from_rank``.

    Traffic: as :func:`fill`; with ``from_rank`` also a gather of names and shapes, and one broadcast of each tensor.
    Raises: CheckpointError, on every rank: as :func:`fill`.
    """
    everyone = run.axes["world"].for_strategy("state")
    what, weights, problem = "the state dict", None, ""
    try:
        if from_rank is not None and not (isinstance(from_rank, int) and 0 <= from_rank < run.world.size):
            raise CheckpointError(
                "no such rank",
                given=from_rank,
                allowed=f"0 to {run.world.size - 1}, or None if every rank has the tensors",
                fix="set from_rank=0",
            )
        if from_rank in (None, run.world.rank):
            weights = WholeWeights(state)
    except CheckpointError as failure:
        problem = str(failure)
    if rank_problem := first_problem(everyone, problem):
        raise CheckpointError(rank_problem[1])
    if from_rank is None:
        assert weights is not None
        return fill(run, lambda: weights, what, strict=strict)
    sent = ReceivedWeights(everyone, weights, from_rank)
    return fill(run, lambda: sent, what, strict=strict)


def fill_parts(run: RankState, state: Mapping[str, Any], *, strict: bool = True) -> LoadedWeights:
    """Writes this rank's own parts of tensors, as ``run.state_dict(full=False)`` returns them; all ranks call it.

    Traffic: a gather of error texts.
    Raises: CheckpointError, on every rank: a part has another name, shape or kind of dtype than the run's, and nothing
        is changed.
    """
    everyone = run.axes["world"].for_strategy("state")
    parts = part_of_state(run)
    missing, unexpected = [n for n in parts if n not in state], [n for n in state if n not in parts]
    wrong = [f"no '{name}'" for name in missing if strict] + [f"'{n}' is unknown" for n in unexpected if strict]
    for name in (name for name in parts if name in state):
        value = state[name]
        if not isinstance(value, Tensor) or value.is_meta or value.shape != parts[name].shape:
            wrong.append(f"'{name}' {_shape_of(value)} instead of {list(parts[name].shape)}")
        elif not _casts(value.dtype, parts[name].dtype):
            wrong.append(f"'{name}' {value.dtype} instead of {parts[name].dtype}")
    problem = ""
    if wrong:
        problem = str(
            CheckpointError(
                f"the parts of tensors are not those of rank {run.world.rank}",
                given=aligned([*wrong[:3], *([f"and {len(wrong) - 3} more"] if len(wrong) > 3 else [])]),
                allowed="what run.state_dict(full=False) returns under this layout, on this rank",
                fix="give whole tensors, with full=True, if they come from another layout",
            )
        )
    if rank_problem := first_problem(everyone, problem):
        raise CheckpointError(rank_problem[1])
    with torch.no_grad():
        for name, local in parts.items():
            if name in state:
                local.copy_(state[name])
    run.changed()
    return LoadedWeights(tuple(n for n in parts if n in state), tuple(missing), tuple(unexpected))


def renamed(name: str, names: Names) -> str | None:
    """Returns the name in a file of the tensor that the plain model calls ``name``; None for a tensor to leave out.

    ``names`` is None (names are alike), a prefix, a mapping (names that it lacks stay) or a function.

    >>> renamed("a.weight", "model."), renamed("a.weight", {"a.weight": "b"}), renamed("c", {"a.weight": "b"})
    ('model.a.weight', 'b', 'c')
    """
    if names is None or isinstance(names, str):
        return f"{names or ''}{name}"
    source_name = names.get(name, name) if isinstance(names, Mapping) else names(name)
    if not isinstance(source_name, str | None):
        raise CheckpointError(
            f"'names' gives no name for '{name}'",
            given=f"a {type(source_name).__name__}",
            allowed="a text, or None to leave the tensor as it is",
            fix="return the name of the tensor in the source",
        )
    return source_name


def check_names(names: Names, known: Sequence[str]) -> None:
    """Raises CheckpointError if a mapping names tensors that the plain model does not have."""
    strange = sorted(set(names) - set(known)) if isinstance(names, Mapping) else []
    if strange:
        raise CheckpointError(
            "'names' has names that the model does not have",
            given=", ".join(map(repr, strange[:3])),
            allowed="names of the plain model as keys, names of the source as values",
            fix="turn the mapping round, if its keys are names of the source",
        )


def state_tensors(run: RankState, everyone: Axis) -> tuple[list[StateTensor], set[str]]:
    """Returns the tensors of the plain model's state, in one order on all ranks, and names of buffers outside of it.

    All ranks call it. The buffers outside of the state are those that are not persistent.

    Traffic: a gather of names and shapes as text.
    """
    own, passing = _own_tensors(run)
    locals_ = {names[0]: tensor for names, tensor in own}
    described = {
        names[0]: [list(names), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for names, tensor in own
    }
    names: dict[str, list[str]] = {}
    first: dict[str, tuple[str, list[int], int]] = {}
    passed_over: set[str] = set()
    for index, (tables, passing_there) in enumerate(gather_json(everyone, [described, sorted(passing)])):
        passed_over.update(passing_there)
        for name, (every, dtype, shape) in tables.items():
            first.setdefault(name, (dtype, shape, index))
            aliases = names.setdefault(name, [])
            aliases += [alias for alias in every if alias not in aliases]
    tensors = []
    for name, (dtype, shape, index) in first.items():
        if name in run.plan.state:
            layout = run.plan.state[name].parameter
        else:
            layout = run.plan.buffers.get(name, TensorLayout.whole(shape))
        tensors.append(StateTensor(tuple(names[name]), getattr(torch, dtype), layout, index, locals_.get(name)))
    return tensors, passed_over


def _own_tensors(run: RankState) -> tuple[list[tuple[list[str], Tensor]], list[str]]:
    """Returns (names, stored tensor) of this rank's parameters and buffers, and the buffers that are not persistent."""
    parameters: dict[str, list[str]] = {}
    for path, _, own, name in owners(run.model, every_path=True):
        if name in run.parameters and name in run.plan.state:
            parameters.setdefault(name, [name])
            parameters[name] += [key for key in [f"{path}.{own}".lstrip(".")] if key != name]
    buffers: dict[int, tuple[list[str], Tensor]] = {}
    passing = []
    for path, module in run.model.named_modules(remove_duplicate=False):
        for own, buffer in module._buffers.items():
            key = f"{path}.{own}".lstrip(".")
            if own in module._non_persistent_buffers_set:
                passing.append(key)
            elif buffer is not None and not buffer.is_meta:  # a buffer of another stage may have no values here
                buffers.setdefault(id(buffer), ([], buffer))[0].append(key)
    pairs: list[tuple[list[str], Tensor]] = [(names, run.parameters[name]) for name, names in parameters.items()]
    return [*pairs, *buffers.values()], passing


def _matched(
    targets: Sequence[StateTensor], passed_over: set[str], store: WeightStore, what: str, names: Names, *, strict: bool
) -> _FoundWeights:
    """Finds each tensor of the model in the store; raises CheckpointError if they do not fit."""
    check_names(names, [*(name for target in targets for name in target.names), *passed_over])
    sources: dict[str, tuple[str, ...]] = {}
    missing, wrong = [], []
    for target in targets:
        wanted = [source_name for name in target.names if (source_name := renamed(name, names)) is not None]
        present = tuple(dict.fromkeys(name for name in wanted if name in store.tensors))
        if present:
            sources[target.names[0]] = present
        elif wanted and 0 not in target.layout.shape:
            missing.append(target.names[0] if wanted[0] == target.names[0] else f"{target.names[0]} ({wanted[0]})")
        for name in present:
            dtype, shape = store.tensors[name]
            if shape != target.layout.shape:
                wrong.append(f"'{name}' has shape {list(shape)}, and the model's {list(target.layout.shape)}")
            elif not _casts(dtype, target.dtype):
                wrong.append(f"'{name}' is {dtype}, and the model's {target.dtype}")
    used = {name for every in sources.values() for name in every} | {renamed(name, names) for name in passed_over}
    prefix = names if isinstance(names, str) else ""
    unexpected = sorted(name for name in store.tensors if name not in used and name.startswith(prefix))
    lines = [*_lines(wrong, "tensors of another shape or dtype")]
    if strict:
        lines += _lines([f"'{name}' is missing" for name in missing], "missing tensors")
        lines += _lines([f"'{name}' is unknown to the model" for name in unexpected], "unknown tensors")
    if lines or not sources:
        text = aligned(lines or [f"none of {len(store.tensors)} names, such as {next(iter(store.tensors), 'none')!r}"])
        raise CheckpointError(
            f"the weights of {what} do not fit the model",
            given=text,
            allowed="the names and shapes of the plain model; floating-point values of any width",
            fix="give a prefix, a mapping or a function as names=, or load what fits with strict=False; the command "
            "takes a prefix, --weights-prefix",
        )
    return _FoundWeights(sources, tuple(name.partition(" (")[0] for name in missing), tuple(unexpected))


def _lines(errors: Sequence[str], kind: str) -> Iterator[str]:
    """Yields the first three of several errors, and a line with the number of the others."""
    yield from errors[:3]
    if len(errors) > 3:
        yield f"and {len(errors) - 3} more {kind}"


def _casts(dtype: torch.dtype, to: torch.dtype) -> bool:
    return dtype == to or (dtype.is_floating_point and to.is_floating_point)


def _check_ties(
    run: RankState, targets: Sequence[StateTensor], store: WeightStore, match: _FoundWeights, what: str
) -> None:
    """Raises CheckpointError if the store has a tied tensor under several names, and their values differ.

    Each rank compares the values of the part of the tensor that it stores.
    """
    for target in targets:
        first, *others = match.sources.get(target.names[0], ("",))
        for other in others if target.local is not None else ():
            if store.place(other) == store.place(first):
                continue
            for box in (b for piece in target.layout.pieces(run.coord) for b in _slabs(piece.whole, target.dtype)):
                one, two = store.read(first, box), store.read(other, box)
                if one.dtype != two.dtype or not torch.equal(bytes_of(one), bytes_of(two)):
                    raise CheckpointError(
                        f"{what} has two values for one tensor of the model",
                        given=f"'{first}' and '{other}', whose values differ",
                        allowed=f"equal values: the model ties {', '.join(target.names)}",
                        fix=f"leave out one with names={{'{target.names[-1]}': None}}, or do not tie them",
                    )


def _write_parts(run: RankState, target: StateTensor, store: WeightStore, source: str) -> None:
    """Reads this rank's boxes of one tensor in slabs, and writes each slab into the run's tensor before the next."""
    if target.local is None or target.local.is_meta:
        return
    for piece in target.layout.pieces(run.coord):
        for box in _slabs(piece.whole, target.dtype):
            write(target.local.detach(), piece, box, store.read(source, box))


def _slabs(box: Box, dtype: torch.dtype) -> Iterator[Box]:
    """Yields a box in slabs of up to ``MOST_SLAB_BYTES``, cut along its first dim of more than one element."""
    dim = next((d for d, size in enumerate(box.shape) if size > 1), None)
    if dim is None:
        yield box
        return
    step = max(1, MOST_SLAB_BYTES * box.shape[dim] // max(1, box.size * dtype.itemsize))
    for start in range(box.start[dim], box.stop[dim], step):
        stop = min(start + step, box.stop[dim])
        yield Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))


def _shape_of(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _unreadable(what: str, failure: Exception, then: str) -> CheckpointError:
    why = f": {failure.given}" if isinstance(failure, CheckpointError) else ""
    return CheckpointError(
        f"the weights of {what} could not be read; {then}",
        given=f"{type(failure).__name__}: {first_line(failure)}{why}",
        allowed="files that can be read as they were written, and room for their content",
        fix="mend what is given, then load again",
    )


def _different(what: str) -> Callable[[Any], CheckpointError]:
    def error(difference: Any) -> CheckpointError:
        return CheckpointError(
            f"ranks were given different weights of {what}; nothing was changed",
            given=difference,
            allowed="the same tensors and the same names on every rank",
            fix="give the same source to all ranks; on several machines compare their copies of it",
        )

    return error
