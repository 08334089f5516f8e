"""``save_weights``: writes the weights of a run, or of files, for programs without shardwright."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from shardwright.analysis.traced.structure import owners
from shardwright.comm.agreement import first_problem, gather_json
from shardwright.comm.axis import Axis
from shardwright.errors import CheckpointError, PlanError, fix_for
from shardwright.formatting import first_line
from shardwright.parallelize.filling import Names, StateTensor, WeightStore, check_names, renamed, state_tensors
from shardwright.parallelize.run import Run, check_run
from shardwright.parallelize.whole_state import gather_whole, warn_of_extra_state
from shardwright.sharding.box import Box
from shardwright.weights.adapters import ADAPTER, adapter_files, adapter_in, adapter_names, check_found, check_unwrapped
from shardwright.weights.configs import files_beside
from shardwright.weights.safetensors_file import header_of
from shardwright.weights.stores import WHOLE, open_store
from shardwright.weights.targets import (
    WeightEntry,
    check_replaces,
    check_target,
    prepare,
    write_folder,
    write_safetensors,
    write_torch,
    write_torch_folder,
)

Format = Literal["safetensors", "transformers", "pt", "dcp"]
"""The kinds of files that are written; :func:`save_weights` describes each."""

SUFFIXES = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt", ".bin": "pt"}
"""The suffixes of files that stand for a format."""

MOST_FILE_BYTES = 5 * 10**9
"""The most bytes of tensors in one file of a folder, unless one tensor is larger."""


class SavedWeights(NamedTuple):
    """What was written: the files, the names of the tensors in them, and the bytes of the tensors."""

    files: tuple[Path, ...]
    names: tuple[str, ...]
    num_bytes: int


def save_weights(
    source: Run | str | Path, to: str | Path, *, format: Format | None = None, names: Names = None,
    dtype: torch.dtype | None = None, config: Any = None, model: nn.Module | None = None,
    max_file_bytes: int = MOST_FILE_BYTES, averages: bool = False, force: bool = False, check_only: bool = False,
) -> SavedWeights:  # fmt: skip
    """Writes a model's parameters and persistent buffers, whole, for programs without shardwright.

    ``source`` is a run, under any layout, of which all ranks call this function and rank 0 writes; or the path of a
    checkpoint or of other weights, as :func:`shardwright.load_weights` takes it, which one process alone reads. The
    formats:

    - "safetensors": one file if ``to`` ends in ``.safetensors``, else a folder of files of up to ``max_file_bytes``,
      with an index if there are several. A tied tensor is written once, under the first of its names.
    - "transformers": such a folder with the model's ``config.json``, and ``generation_config.json`` if it can generate,
      as ``save_pretrained`` writes them and ``from_pretrained`` reads them. Of a model wrapped by peft, without
      ``names``, it is the folder of its adapter, which ``PeftModel.from_pretrained(base, folder)`` reads, and which
      ``merge_and_unload()`` there adds to the base model.
    - "pt": one file by ``torch.save``, for ``model.load_state_dict``: a tied tensor is one under each of its names.
    - "dcp": a folder of ``torch.distributed.checkpoint``, with a flat state dict that has each name.

    By default ``.pt``, ``.pth`` and ``.bin`` stand for "pt", and all else for "safetensors". Files are written beside
    their place and renamed, so that an error leaves none; an earlier file, or a folder that holds weights alone, is
    replaced; a folder with a ``config.json`` or a tokenizer is replaced only where those are written anew. Without
    ``force``, a file or folder that another program has written is not replaced, nor is what was read: ``source``,
    what :func:`shardwright.load_weights` has filled the run from, or the folder of ``config``. In memory there is one
    tensor at a time beside a rank's own part; only "pt" needs the whole model in host memory, on rank 0.

    ``names`` turns plain names into those of the files: a prefix, a mapping or a function; None leaves a tensor out.
    Floating-point tensors are rounded to ``dtype``, if it is given; else they are as the run stores them, master
    weights in fp32. ``config`` is for "transformers": a config object of transformers, a dict, or a folder of
    transformers from which ``config.json`` and the tokenizer are copied; by default the ``config`` of the model. If
    ``source`` is a path, ``model`` may be the plain model, on the meta device too, from which ties and config are read.
    With ``averages``, ``source`` is the path of a checkpoint, whose averages (of ``run.average``) are written in place
    of the parameters; of a run, write ``with averages.applied(): sw.save_weights(run, to)``.

    With ``check_only`` no file is written, and the result has no files: before a long run, such a call raises the
    errors that the same call without it would raise at the end. Missing folders above ``to`` are made.

    Traffic: for a run, gathers of names, shapes and error texts as text, and of each tensor each element once.
    Raises: CheckpointError, on every rank: the source cannot be read, two tensors would have one name, ``to`` is a
        device, a link or a folder with other files in it, weights would be lost without ``force``, there is no config,
        the checkpoint has no averages, or the disk is full. PlanError: an option is not one of those above.

    >>> import tempfile, torch, shardwright as sw
    >>> plain, folder = nn.Linear(4, 2), Path(tempfile.mkdtemp())
    >>> def work(world):
    ...     run = sw.parallelize(plain, "dp2/zero3", world)
    ...     return save_weights(run, folder / "linear.pt").names
    >>> sw.launch(work, 2, ranks="threads")
    [('weight', 'bias'), ('weight', 'bias')]
    >>> plain.load_state_dict(torch.load(folder / "linear.pt", weights_only=True))
    <All keys matched successfully>
    >>> [file.name for file in save_weights(folder / "linear.pt", folder / "linear", format="dcp").files]
    ['__0_0.distcp', '.metadata']
    """
    to, kind = Path(to), _kind(Path(to), format)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise PlanError("'dtype' is no floating-point dtype", given=dtype, allowed="torch.bfloat16, torch.float32, "
                        "others of torch", fix="leave out dtype=, or --dtype")  # fmt: skip
    if max_file_bytes < 1:
        raise PlanError("the files would be too small", given=f"{max_file_bytes} bytes", allowed="1 or more",
                        fix="leave out max_file_bytes=, or --max-file-gb")  # fmt: skip
    writing = _WriteConfig(to, kind, names, dtype, config, max_file_bytes, force, check_only)
    if isinstance(source, str | PathLike):
        return _save_path(Path(source), writing, model, averages=averages)
    check_run(source, "sw.save_weights(run, to)")
    if averages:
        raise PlanError(
            "the averages of a run are those of an optimizer",
            given="averages=True, and a run",
            allowed="averages=True with the path of a checkpoint",
            fix="write with averages.applied(): sw.save_weights(run, to), where averages = run.average(optimizer)",
        )
    if source.world.rank == 0:
        warn_of_extra_state(source.model)
    return _save_run(source, writing)


class _WriteConfig(NamedTuple):
    """The options of a call of :func:`save_weights`; ``adapter`` names the peft adapter to write, None without one."""

    to: Path
    kind: Format
    names: Names
    dtype: torch.dtype | None
    config: Any
    max_file_bytes: int
    force: bool
    check_only: bool
    adapter: str | None = None

    def for_model(self, model: nn.Module | None, names: Sequence[str], everyone: Axis | None = None) -> _WriteConfig:
        """Returns these options for ``model``: if peft has wrapped it, only its adapter is written, under peft's names.

        Formats other than "transformers", and options with ``names``, stay as they are. ``everyone`` are the ranks of a
        run, on each of which ``model`` has the modules of its own pipeline stage.
        """
        if self.kind != "transformers" or self.names:
            return self
        adapter = adapter_in(model)
        if model is None or adapter is None:
            check_unwrapped(names)
            return self
        new_names = adapter_names(model, adapter, names)
        for rank_names in gather_json(everyone, new_names) if everyone is not None else ():
            new_names |= rank_names
        check_found(adapter, new_names)
        return self._replace(names={name: new_names.get(name) for name in names}, adapter=adapter)

    def beside(self, model: nn.Module | None, table: Sequence[WeightEntry]) -> Mapping[str, bytes]:
        """Returns the files of a folder of transformers or peft beside the weights, by name; of other kinds none."""
        if self.kind != "transformers":
            return {}
        if self.adapter is not None and model is not None:
            return adapter_files(model, self.adapter)
        return files_beside(self.config, model, table)

    def check(self, table: Sequence[WeightEntry], beside: Mapping[str, bytes], sources: Collection[Path]) -> None:
        """Raises CheckpointError if ``to`` cannot be written, or without ``force`` would lose other weights."""
        if self.check_only:
            weights = [weight for weight in table if weight.names]
            prepare(self.to, folder=self.is_folder, beside=beside, num_bytes=sum(entry.num_bytes for entry in weights))
            if self.kind in ("safetensors", "transformers"):
                header_of({entry.names[0]: (entry.dtype, entry.shape) for entry in weights}, {})
        check_target(self.to, folder=self.is_folder, beside=beside)
        if not self.force:
            config = [Path(self.config)] if isinstance(self.config, str | PathLike) else []
            check_replaces(self.to, [*sources, *config])

    @property
    def is_folder(self) -> bool:
        return self.kind in ("transformers", "dcp") or (self.kind == "safetensors" and self.to.suffix not in SUFFIXES)

    def table(self, tensors: Sequence[tuple[tuple[str, ...], torch.dtype, tuple[int, ...]]]) -> list[WeightEntry]:
        """Returns an entry for each of ``tensors``, (plain names, dtype, shape); one that is left out has no names."""
        check_names(self.names, [name for every, _, _ in tensors for name in every])
        entries, owner = [], dict[str, str]()
        for every, dtype, shape in tensors:
            new = tuple(dict.fromkeys(n for name in every if (n := renamed(name, self.names)) is not None))
            for name in new:
                if owner.setdefault(name, every[0]) != every[0]:
                    raise CheckpointError(
                        "two tensors would have one name",
                        given=f"'{owner[name]}' and '{every[0]}' as '{name}'",
                        allowed="a name for each tensor",
                        fix="give other names=, or leave out --prefix",
                    )
            cast = self.dtype if self.dtype is not None and dtype.is_floating_point else dtype
            entries.append(WeightEntry(new, cast, shape))
        return entries

    def write(self, table: list[WeightEntry], values: Iterator[Tensor], beside: Mapping[str, bytes]) -> list[str]:
        """Writes the tensors that have names, and returns the names of the files."""
        kept = [weight for weight in table if weight.names]
        written = (
            (weight, value.to(weight.dtype)) for weight, value in zip(table, values, strict=True) if weight.names
        )
        if self.kind == "dcp":
            return write_torch_folder(self.to, kept, written, most_bytes=self.max_file_bytes)
        if self.kind == "pt":
            return write_torch(self.to, kept, written)
        if self.is_folder:
            whole, most = (WHOLE[0], self.max_file_bytes) if self.adapter is None else (ADAPTER, sys.maxsize)
            return write_folder(self.to, kept, written, most_bytes=most, beside=beside, whole=whole)
        return write_safetensors(self.to, kept, written)

    def outcome(self, table: list[WeightEntry], files: Sequence[str]) -> SavedWeights:
        """Returns the description of what was written."""
        once = self.kind in ("safetensors", "transformers")
        names = [name for weight in table for name in (weight.names[:1] if once else weight.names)]
        paths = tuple(self.to / file if self.is_folder else self.to for file in files)
        return SavedWeights(paths, tuple(names), sum(weight.num_bytes for weight in table if weight.names))


def _kind(to: Path, format: Format | None) -> Format:
    kind: Any = format or SUFFIXES.get(to.suffix, "safetensors")
    if kind not in get_args(Format):
        raise PlanError(
            "no such format of weights",
            given=format,
            allowed=", ".join(get_args(Format)),
            fix=fix_for(
                str(format), get_args(Format), before="write format=", otherwise="leave out format=, or --format"
            ),
        )
    return kind  # type: ignore[no-any-return]


def _save_run(run: Run, writing: _WriteConfig) -> SavedWeights:
    everyone = run.axes["world"].for_strategy("state")
    tensors, _ = state_tensors(run, everyone)
    table: list[WeightEntry] = []
    beside: Mapping[str, bytes] = {}

    def check() -> None:
        nonlocal writing, table, beside
        writing = writing.for_model(run.model, [name for tensor in tensors for name in tensor.names], everyone)
        table = writing.table([(tensor.names, tensor.dtype, tensor.layout.shape) for tensor in tensors])
        if everyone.index == 0:
            beside = writing.beside(run.model, table)
            writing.check(table, beside, run.weights_read)

    _raise_together(everyone, _problem_of(writing.to, check))
    if writing.check_only:
        return writing.outcome(table, [])
    values = _gathered(run, tensors)
    files: list[str] = []
    problem = ""
    if everyone.index == 0:

        def write() -> None:
            files.extend(writing.write(table, values, beside))

        problem = _problem_of(writing.to, write)
    for _ in values:  # each is one collective, so all ranks take all of them, even if rank 0 failed before the last
        pass
    _raise_together(everyone, problem)
    return writing.outcome(table, gather_json(everyone, files)[0])


@torch.no_grad()
def _gathered(run: Run, tensors: Sequence[StateTensor]) -> Iterator[Tensor]:
    everyone = run.axes["world"].for_strategy("state")
    for tensor in tensors:
        local = torch.empty(0, dtype=tensor.dtype) if tensor.local is None else tensor.local.detach()
        yield gather_whole(everyone, run.plan.mesh, tensor.layout, local, tensor.first)


def _save_path(source: Path, writing: _WriteConfig, model: nn.Module | None, *, averages: bool) -> SavedWeights:
    store = open_store(source, averages=averages)
    ties = {} if model is None else _ties(model)
    tensors: dict[str, tuple[tuple[str, ...], torch.dtype, tuple[int, ...]]] = {}
    for name, (dtype, shape) in store.tensors.items():
        every = ties.get(name, (name,))
        first = next((alias for alias in every if alias in store.tensors), name)
        tensors.setdefault(first, (every, dtype, shape))
    writing = writing.for_model(model, [name for every, _, _ in tensors.values() for name in every])
    table = writing.table(list(tensors.values()))
    beside = writing.beside(model, table)
    writing.check(table, beside, [source])
    if writing.check_only:
        return writing.outcome(table, [])
    values = _read(store, {name: shape for name, (_, _, shape) in tensors.items()})
    with _errors_named(writing.to):
        files = writing.write(table, values, beside)
    return writing.outcome(table, files)


def _read(store: WeightStore, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Tensor]:
    """Yields whole tensors; before the last one it raises CheckpointError if the files have changed meanwhile."""
    for left, (name, shape) in zip(reversed(range(len(shapes))), shapes.items(), strict=True):
        values = store.read(name, Box.of(shape))
        if not left:
            store.end()
        yield values


def _ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Returns, for each name of a tied parameter, all of its names, the first one first."""
    names: dict[str, list[str]] = {}
    for path, _, own, name in owners(model, every_path=True):
        every = names.setdefault(name, [name])
        every += [key for key in [f"{path}.{own}".lstrip(".")] if key not in every]
    return {name: tuple(every) for every in names.values() if len(every) > 1 for name in every}


@contextmanager
def _errors_named(to: Path) -> Iterator[None]:
    """Returns a context that turns any exception of its block into a CheckpointError about writing ``to``."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as failure:  # any code may run here: of a config, of a user's function
        raise CheckpointError(
            f"the weights could not be written to '{to}'",
            given=f"{type(failure).__name__}: {first_line(failure)}",
            allowed="files that can be written, and options that fit the model",
            fix="mend what is given",
        ) from failure


def _problem_of(to: Path, do: Callable[[], None]) -> str:
    """Returns the text of the error that ``do`` raises, or "" if it raises none."""
    try:
        with _errors_named(to):
            do()
    except CheckpointError as failure:
        return str(failure)
    return ""


def _raise_together(everyone: Any, problem: str) -> None:
    if rank_problem := first_problem(everyone, problem):
        raise CheckpointError(rank_problem[1])
