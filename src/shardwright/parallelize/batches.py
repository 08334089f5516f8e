"""Turns the batches of users' data loaders into pairs (inputs, targets); an error says which line of code to write.

Nothing is guessed, because a batch that is misread would train the model on the wrong targets: a batch is a pair, or
the user says what its targets are, by ``run.shard(loader, targets=...)`` or by a loss that the model itself computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from inspect import isgenerator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwright.analysis.objects.marked_inputs import SampleValues, is_mark, lists_marked
from shardwright.analysis.on_meta.module_calls import given_to
from shardwright.analysis.traced.structure import kind_of
from shardwright.errors import PlanError
from shardwright.runtime.executor import Microbatch

Targets = str | int | Callable[[Any], tuple[Any, Any]] | None
"""Where a batch's targets are: a name, a position, a function that returns (inputs, targets), or None for pairs."""

TARGETS = ("labels", "targets", "target", "label", "y")
"""The keys by which a batch that is a dict may name its targets."""


def pairs(
    batches: Iterable[Any], targets: Targets = None, model: nn.Module | None = None, call: str = "run.shard(batches"
) -> Iterator[tuple[Any, Any]]:
    """Yields the inputs and targets of each batch, with dict-like classes of other libraries turned into dicts.

    Without ``targets``, each batch is a pair (inputs, targets). If ``targets`` is a name, it is a key of a mapping (a
    dict, a ``BatchEncoding``) or a field of a dataclass or named tuple; the inputs are then a dict of all other values,
    and the model is called as ``model(**inputs)``. If it is a number, it is a position in a tuple or list, such as -1;
    the inputs are then the other entries: a single one itself, or a tuple of arguments. If it is a function, that
    returns the pair. With ``model``, names of inputs are checked against the arguments of the model's forward. ``call``
    is the beginning of the user's call, for errors.

    Raises: PlanError: the loader has split the batches between ranks already, a batch is no pair of inputs and targets,
        it has no such key, field or position, or the model's forward has no argument with the name of a key; and as
        :func:`as_tensors`.

    >>> inputs, targets = next(pairs([{"tokens": torch.ones(2), "labels": torch.zeros(2)}], "labels"))
    >>> list(inputs), targets
    (['tokens'], tensor([0., 0.]))
    >>> next(pairs([{"tokens": torch.ones(2), "labels": torch.ones(2)}]))
    Traceback (most recent call last):
    shardwright.errors.PlanError: a batch is a pair of inputs and targets
      given:   dict with tokens, labels
      allowed: (inputs, targets); the inputs may be a tensor, a tuple of arguments or a dict of named ones
      fix:     write run.shard(batches, targets='labels'), or loss=sw.ModelLoss() where the model computes its loss from
               them
    """
    _check_unsplit(batches)
    is_one = isinstance(batches, Tensor) or (isinstance(batches, tuple) and any(isinstance(b, Tensor) for b in batches))
    batches = batches if is_one else map(_no_part, batches)
    if is_one and targets is None:
        raise PlanError(
            "run.shard takes batches, as a loader yields them",
            given=f"{_described(batches)}, which is one batch",
            allowed="an iterable of global batches",
            fix="write run.shard([(inputs, targets)])",
        )
    checked = False
    for batch in batches:
        pair = batch if targets is None else _split(batch, targets, call)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise PlanError(
                "a batch is a pair of inputs and targets"
                if not callable(targets)
                else "the function given as targets returns a pair of inputs and targets",
                given=_described(pair),
                allowed="(inputs, targets); the inputs may be a tensor, a tuple of arguments or a dict of named ones",
                fix=f"write {_line(batch, call)}" if not callable(targets) else "return (inputs, targets)",
            )
        inputs, wanted = pair
        if model is not None and not checked:
            checked = True  # once: the loader's batches are alike
            _check_named(model, inputs, targets, call)
        yield as_tensors(inputs), as_tensors(wanted)


def _check_named(model: nn.Module, inputs: Any, targets: Targets, call: str) -> None:
    """Raises PlanError if named inputs have names that are no argument of the model's forward."""
    if not isinstance(inputs, Mapping) or not (strange := unknown_names(model, inputs)):
        return
    names = list(inspect.signature(model.forward).parameters)
    others = [f"batch[{name!r}]" for name in inputs]
    inputs_code = others[0] if len(others) == 1 else f"({', '.join(others)})"
    last = repr(targets) if isinstance(targets, str) else "'labels'"
    raise PlanError(
        f"the model's forward has no argument {strange[0]!r}, which a batch has",
        given=f"a dict with {', '.join(map(str, inputs))}, by which the model is called as model(**inputs)",
        allowed=f"arguments of the forward of {kind_of(model).__name__}: ({', '.join(names)})",
        fix=f"rename the keys, or write {call}, targets=lambda batch: ({inputs_code}, batch[{last}]))",
    )


def unknown_names(model: nn.Module, names: Iterable[Any]) -> list[Any]:
    """Returns the ``names`` that are no argument of the model's forward.

    >>> unknown_names(nn.Linear(3, 1), ["input", "x"])
    ['x']
    """
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [name for name in names if name not in parameters]


def _split(batch: Any, targets: str | int | Callable[[Any], tuple[Any, Any]], call: str) -> Any:
    """Returns the pair (inputs, targets) of a batch by the name or place of its targets, or by the user's function."""
    if callable(targets):
        return targets(batch)
    if isinstance(targets, int) and isinstance(batch, tuple | list) and -len(batch) <= targets < len(batch) > 1:
        place = targets % len(batch)
        others = (*batch[:place], *batch[place + 1 :])
        return (others[0] if len(others) == 1 else others), batch[place]
    named = named_parts(batch)
    if isinstance(targets, str) and targets in named and len(named) > 1:
        return {name: value for name, value in named.items() if name != targets}, named[targets]
    raise PlanError(
        f"a batch has no targets {targets!r} beside inputs",
        given=_described(batch),
        allowed="the name of a key or field, the place in a tuple or list, or a function that returns a pair",
        fix=f"write {_line(batch, call)}",
    )


def named_parts(batch: Any) -> dict[str, Any]:
    """Returns the values of a mapping, a dataclass or a named tuple by name; empty for any other batch.

    >>> named_parts({"x": 1}), named_parts((1, 2))
    ({'x': 1}, {})
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: getattr(batch, name) for name in getattr(batch, "_fields", ()) if isinstance(batch, tuple)}


def as_tensors(tree: Any) -> Any:
    """Returns a batch's inputs or targets with dict-like classes of other libraries turned into dicts.

    Lists with an entry for each sample are marked (:func:`~shardwright.analysis.objects.marked_inputs.lists_marked`).
    Mappings that torch's pytree knows, such as an ``OrderedDict``, and all other values stay as they are.

    Raises: PlanError: there is a NumPy-like array, a tensor without dims inside a tuple, list or dict, or an object
        with tensors as attributes. From these, ranks cannot take their samples.
    """
    if isinstance(tree, Tensor):
        return tree
    return tree_map(_as_tensor, lists_marked(_as_dicts(tree)), is_leaf=is_mark)


def _as_dicts(tree: Any) -> Any:
    return tree_map(
        lambda leaf: {k: _as_dicts(v) for k, v in leaf.items()} if isinstance(leaf, Mapping) else leaf,
        tree,
        is_leaf=is_mark,
    )


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, SampleValues):
        return SampleValues([tree_map(_as_entry, entry) for entry in leaf.entries])
    if is_mark(leaf):
        return leaf
    if isinstance(leaf, Tensor):
        if leaf.dim():
            return leaf
        description, fix = "a tensor without dims", "pass numbers as they are: tensor.item(), or write sw.whole(tensor)"
    elif hasattr(leaf, "__array__"):
        description, fix = f"{type(leaf).__name__} of {getattr(leaf, 'shape', '?')}", "write torch.as_tensor(array)"
    elif any(isinstance(value, Tensor) for value in getattr(leaf, "__dict__", {}).values()):
        description, fix = f"{type(leaf).__name__}, which holds tensors", "write vars(batch), or a dict of its tensors"
    else:
        return leaf
    raise PlanError(
        "ranks cannot take their samples of a batch",
        given=description,
        allowed="tensors with samples in dim 0, in tuples, lists and dicts, and lists with an entry for each sample; "
        "other values go to every rank",
        fix=fix,
    )


def _as_entry(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor) else _as_tensor(leaf)  # a sample's number may have no dims


def check_part(method: str, batch: Any, update: Any = None) -> None:
    """Raises PlanError unless ``batch`` comes from ``Run.shard`` or ``Run.part`` and ``update`` has a ``step`` method.

    ``update`` is an optimizer or None. ``method`` is the name of the method of ``Run`` that was called, for the error.

    >>> check_part("step", (torch.ones(2, 3), torch.ones(2)))
    Traceback (most recent call last):
    shardwright.errors.PlanError: run.step takes this rank's part of a global batch
      given:   tuple of Tensor [2, 3], Tensor [2]
      allowed: what run.shard yields, or run.part returns
      fix:     write for batch in run.shard([(inputs, targets)]): run.step(batch)
    """
    if isinstance(batch, Microbatch) and batch.num_global is not None and (update is None or hasattr(update, "step")):
        return
    raise PlanError(
        f"run.{method} takes this rank's part of a global batch",
        given=_described(batch) + ("" if update is None else f", and then {_described(update)}"),
        allowed="what run.shard yields, or run.part returns",
        fix=f"write run.{method}(run.shard(batches)), of several batches"
        if method in ("accumulate", "evaluate_all")
        else f"write for batch in run.shard([(inputs, targets)]): run.{method}(batch)",
    )


def checked_number(num_global: Any, inputs: Any, targets: Any) -> int:
    """Returns the number of samples in a global batch that ``Run.part`` is given, beside its inputs and targets.

    Raises: PlanError: it is missing, or no whole number from 0.

    >>> checked_number(None, (torch.ones(2, 3), torch.ones(2)), None)
    Traceback (most recent call last):
    shardwright.errors.PlanError: run.part takes inputs, targets, and the number of samples in the global batch
      given:   tuple of Tensor [2, 3], Tensor [2]
      allowed: this rank's samples, and a number of samples from 0
      fix:     write run.part(inputs, targets, num_global), or give global batches to run.shard
    """
    if isinstance(num_global, Integral) and (number := int(num_global)) >= 0:
        return number
    description = ", then ".join(_described(value) for value in (inputs, targets, num_global) if value is not None)
    raise PlanError(
        "run.part takes inputs, targets, and the number of samples in the global batch",
        given=f"{num_global} samples" if isinstance(num_global, Integral) else description,
        allowed="this rank's samples, and a number of samples from 0",
        fix="write run.part(inputs, targets, num_global), or give global batches to run.shard",
    )


def check_takes_inputs(model: nn.Module, inputs: Any) -> None:
    """Raises PlanError if a model's forward does not take the inputs given to ``Run.predict``, with the line to write.

    >>> check_takes_inputs(nn.Linear(3, 1), (torch.ones(2, 3), torch.ones(2)))
    Traceback (most recent call last):
    shardwright.errors.PlanError: run.predict takes the inputs of the model, for all samples
      given:   tuple of Tensor [2, 3], Tensor [2]
      allowed: what the forward of Linear takes: (input)
      fix:     write run.predict(inputs), for inputs, targets = batch
    """
    if is_part := isinstance(inputs, Microbatch):
        fix = "write run.predict(inputs) with the inputs of the global batch, or run.evaluate(batch) for the loss"
    else:
        fix = "write run.predict(inputs), for inputs, targets = batch"
    forward = inspect.signature(kind_of(model).forward)
    names = list(forward.parameters)[1:]
    if isinstance(inputs, Mapping):
        kept = ", ".join(f"{name!r}: batch[{name!r}]" for name in inputs if name in names)
        fix = f"write run.predict({{{kept}}})" if kept else f"name them {', '.join(names)}"
    try:
        args, named = given_to(inputs)
        forward.bind(model, *args, **named)
    except TypeError:
        pass
    else:
        if not is_part:
            return
    raise PlanError(
        "run.predict takes the inputs of the model, for all samples",
        given="this rank's part of a batch, from run.shard or run.part" if is_part else _described(inputs),
        allowed=f"what the forward of {kind_of(model).__name__} takes: ({', '.join(names)})",
        fix=fix,
    )


def _samplers_of(batches: Any) -> Iterator[Any]:
    """Yields the samplers of a data loader, also of a loader that a generator iterates over."""
    reads = list(batches.gi_frame.f_locals.values()) if isgenerator(batches) and batches.gi_frame is not None else []
    for loader in (batches, *reads):
        # torch's iterators over loaders have `_index_sampler`: the loader's batch sampler, or else its sampler
        batch_sampler = getattr(loader, "batch_sampler", None)
        if batch_sampler is None:  # not its truth value: that asks for its length, and a sampler without one raises
            batch_sampler = getattr(loader, "_index_sampler", None)
        yield from (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler)


def _check_unsplit(batches: Any) -> None:
    """Raises PlanError for a loader with a distributed sampler: each rank would take a part of a part of a batch."""
    for sampler in _samplers_of(batches):
        split = getattr(sampler, "num_replicas", 1)
        if isinstance(sampler, torch.utils.data.Sampler) and split > 1:
            raise PlanError(
                "run.shard takes this rank's samples of a batch that its loader has split between ranks already",
                given=f"{type(sampler).__name__}(num_replicas={split}): a part of a part would be trained on",
                allowed="the same global batches on every rank",
                fix="write DataLoader(data, batch_size=<global>, shuffle=True, generator=torch.Generator()"
                ".manual_seed(0)), the same on every rank and without a sampler",
            )


def _no_part(batch: Any) -> Any:
    """Returns ``batch``; raises PlanError if it is a rank's part of a batch already, as from a second ``run.shard``."""
    if isinstance(batch, Microbatch):
        raise PlanError(
            "run.shard takes global batches, and gives each rank its part",
            given="a part that run.shard or run.part has made already",
            allowed="an iterable of global batches",
            fix="write run.shard(batches) once",
        )
    return batch


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"Tensor {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with {', '.join(map(str, value))}"
    if isinstance(value, Microbatch):
        return "a part of run.pieces, or of no global batch"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {', '.join(map(_described, value))}"
    return type(value).__name__


def _line(batch: Any, call: str) -> str:
    """Returns, for an error, the call that takes batches like this one; it begins with ``call``."""
    if named := named_parts(batch):
        name = next((key for key in TARGETS if key in named), next(reversed(named), "labels"))
        hint = ", or loss=sw.ModelLoss() where the model computes its loss from them" if name == "labels" else ""
        return f"{call}, targets={name!r}){hint}"
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return f"{call}, targets=-1)"
    inner = "(b, b)" if isinstance(batch, Tensor) else "(b.inputs, b.targets)"
    return f"{call}, targets=lambda b: {inner})"
