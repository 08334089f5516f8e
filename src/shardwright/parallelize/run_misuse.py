"""Errors for a run that is used like a module, or like a wrapper of another library, with what to write instead."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwright.errors import PlanError

_WRITTEN_INSTEAD = {
    "train": "run.step trains in the mode that the model has: write run.model.train() for one that from_pretrained "
    "loaded, in eval mode; run.evaluate and run.predict are in eval mode by themselves",
    "eval": "run.evaluate and run.predict are in eval mode by themselves",
    "to": "the model is on the rank's device already, and run.shard moves batches there",
    "backward": "run.step(batch) runs forward and backward, and its loss is only a number",
    "forward": "write run.predict(inputs), or run.step(batch) to train",
    "zero_grad": "each run.step begins with gradients of zero; to add up several batches write run.accumulate(batches)",
    "save": "write sw.save(folder, run, optimizer)",
    "load": "write sw.load(folder, run, optimizer)",
    "clip_grad_norm": "write run.clip_grad_norm_(max_norm)",
    "module": "write run.model",
    "named_parameters": "write run.parameters.items()",
}
"""What to write in place of attributes that modules and wrappers of other libraries have."""

_FIXED = {
    "loss": "write sw.parallelize(model, layout, world, loss=...)",
    "model": "change the plain model, and write sw.parallelize(model, layout, world)",
    "parameters": "write to their tensors, then run.changed(), or write run.load_state_dict(state)",
    **dict.fromkeys(("plan", "world", "axes", "coord"), "write sw.parallelize(model, layout, world)"),
}
"""Attributes of a run that code may not set, because steps would not read the new value, with what to write instead."""


def is_fixed(name: str) -> bool:
    """Returns whether an attribute of a run is one that its steps do not read again.

    >>> is_fixed("loss"), is_fixed("num_steps")
    (True, False)
    """
    return name in _FIXED


def refuse_new(name: str, value: Any) -> NoReturn:
    """Raises PlanError for a fixed attribute of a run that code sets to ``value``.

    >>> refuse_new("plan", 1)
    Traceback (most recent call last):
    shardwright.errors.PlanError: no step would read the new 'plan' of a run
      given:   run.plan = a int
      allowed: what sw.parallelize was given
      fix:     write sw.parallelize(model, layout, world)
    """
    raise PlanError(
        f"no step would read the new '{name}' of a run",
        given=f"run.{name} = a {type(value).__name__}",
        allowed="what sw.parallelize was given",
        fix=_FIXED[name],
    )


def refuse_missing(run: object, name: str) -> NoReturn:
    """Raises AttributeError for an attribute that a run lacks.

    If modules, or wrappers of other libraries, have one of that name, the text says what to write for a run instead.

    >>> refuse_missing(None, "backward")
    Traceback (most recent call last):
    AttributeError: a run has no 'backward'; run.step(batch) runs forward and backward, and its loss is only a number
    """
    line = _WRITTEN_INSTEAD.get(name)
    more = f"; {line}" if line else ""
    raise AttributeError(f"a run has no '{name}'{more}", name=name, obj=run)


def refuse_call() -> NoReturn:
    """Raises TypeError for a run that is called like a model.

    >>> refuse_call()
    Traceback (most recent call last):
    TypeError: a run is not called like a model; write run.predict(inputs), or run.step(batch) to train
    """
    raise TypeError(f"a run is not called like a model; {_WRITTEN_INSTEAD['forward']}")
