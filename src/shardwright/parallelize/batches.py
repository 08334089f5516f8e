"""Checks that users pass batches as pairs (inputs, targets); an error says which line of code to write instead.

Nothing is guessed, because a batch that is misread would train the model on the wrong targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from inspect import isgenerator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shardwright.errors import PlanError
from shardwright.runtime.executor import Microbatch

_TARGETS = ("labels", "targets", "target", "label", "y")
"""The keys by which a batch that is a dict may name its targets."""


def pairs(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields the inputs and targets of each batch, with dict-like classes of other libraries turned into dicts.

    Raises: PlanError: the loader has split the batches between ranks already, or a batch is not a pair of inputs and
        targets; and as :func:`as_tensors`.

    >>> next(pairs([{"tokens": torch.ones(2), "labels": torch.ones(2)}]))
    Traceback (most recent call last):
    shardwright.errors.PlanError: a batch is a pair of inputs and targets
      given:   dict with tokens, labels
      allowed: (inputs, targets); the inputs may be a tensor, a tuple of arguments or a dict of named ones
      fix:     write run.shard(({k: v for k, v in b.items() if k != 'labels'}, b['labels']) for b in batches)
    """
    _check_unsplit(batches)
    for batch in batches:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise PlanError(
                "a batch is a pair of inputs and targets",
                given=_described(batch),
                allowed="(inputs, targets); the inputs may be a tensor, a tuple of arguments or a dict of named ones",
                fix=f"write run.shard({_line(batch)} for b in batches)",
            )
        inputs, targets = batch
        yield as_tensors(inputs), as_tensors(targets)


def as_tensors(tree: Any) -> Any:
    """Returns a batch's inputs or targets with dict-like classes of other libraries turned into dicts.

    Mappings that torch's pytree knows, such as an ``OrderedDict``, and all other values stay as they are.

    Raises: PlanError: there is a NumPy-like array, a tensor without dims inside a tuple, list or dict, or an object
        with tensors as attributes. From these, ranks cannot take their samples.
    """
    return tree if isinstance(tree, Tensor) else tree_map(_as_tensor, tree)


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        if leaf.dim():
            return leaf
        given, fix = "a tensor without dims", "pass numbers as they are: tensor.item()"
    elif isinstance(leaf, Mapping):
        return {key: as_tensors(value) for key, value in leaf.items()}
    elif hasattr(leaf, "__array__"):
        given, fix = f"{type(leaf).__name__} of {getattr(leaf, 'shape', '?')}", "write torch.as_tensor(array)"
    elif any(isinstance(each, Tensor) for each in getattr(leaf, "__dict__", {}).values()):
        given, fix = f"{type(leaf).__name__}, which holds tensors", "write vars(batch), or a dict of its tensors"
    else:
        return leaf
    raise PlanError(
        "ranks cannot take their samples of a batch",
        given=given,
        allowed="tensors with samples in dim 0, in tuples, lists and dicts; other values go to every rank",
        fix=fix,
    )


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
        fix=f"write for batch in run.shard([(inputs, targets)]): run.{method}(batch)",
    )


def _samplers_of(batches: Any) -> Iterator[Any]:
    """Yields the samplers of a data loader, also of a loader that a generator iterates over."""
    reads = list(batches.gi_frame.f_locals.values()) if isgenerator(batches) and batches.gi_frame is not None else []
    for loader in (batches, *reads):
        # what iterates over a loader of torch has an index sampler: the loader's batch sampler, or its sampler
        batch_sampler = getattr(loader, "batch_sampler", None) or getattr(loader, "_index_sampler", None)
        yield from (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler)


def _check_unsplit(batches: Any) -> None:
    """Raises PlanError for a loader with a distributed sampler, since ranks would take a part of a part of a batch."""
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


def _line(batch: Any) -> str:
    """Returns, for an error, the expression that makes a pair (inputs, targets) of a batch ``b`` like this one."""
    if isinstance(batch, Mapping):
        name = next((each for each in _TARGETS if each in batch), next(reversed(list(batch)), "labels"))
        return f"({{k: v for k, v in b.items() if k != {name!r}}}, b[{name!r}])"
    if isinstance(batch, tuple | list) and len(batch) > 2:
        return "(tuple(b[:-1]), b[-1])"
    return "(b, b)" if isinstance(batch, Tensor) else "(b.inputs, b.targets)"
