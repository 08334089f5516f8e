"""Calls a model's own ``generate`` under any layout: where no rank can run the model alone, calls become predictions.

A ``generate`` calls its model once for each new token. Under data parallelism, ZeRO and one-dimensional tensor
parallelism a rank's model can be called by any code. A pipeline stage, and a rank that holds rows of the batch, cannot:
there each call of the model becomes one of ``run.predict`` with the same arguments, on all ranks at the same time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.analysis.module_calls import given_to
from shardwright.comm.agreement import Difference, check_agreement, tensor_digest
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.models.eval_mode import eval_mode

Predict = Callable[[Any], Any]


def generate(
    model: nn.Module, predict: Predict | None, everyone: Axis, inputs: Any, seed: int | None, options: dict[str, Any]
) -> Any:
    """Returns what ``model.generate(inputs, **options)`` returns; calls of the model are ``predict``'s unless None.

    Every rank of the axis ``everyone`` calls it. Random numbers are drawn after ``torch.manual_seed(seed)``, and the
    generator's state is restored. With a seed of None the generator is left alone, because other ranks share it.

    Raises: PlanError: the model has no ``generate``, or its result differs between ranks.
    """
    own = getattr(model, "generate", None)
    if not callable(own):
        raise PlanError(
            f"{type(model).__name__} has no method generate",
            given="run.generate(...)",
            allowed="models that have one, as those of transformers do",
            fix="write a loop over run.predict(tokens), which returns the output of the whole model on every rank",
        )
    settings = getattr(model, "generation_config", None)
    if settings is not None and (predict is not None or options.get("num_beams", settings.num_beams or 1) > 1):
        # the cache of transformers would be kept by one rank; and beams are sorted in it, where parts are not known
        options = {**options, "use_cache": False}
    args, named = given_to(inputs)
    with _seeded(seed, everyone.device), eval_mode(model), torch.no_grad(), _calls(model, predict):
        result = own(*args, **named, **options)
    tensors = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    if isinstance(tensors, torch.Tensor):
        check_agreement(everyone, [tensor_digest(tensors)], _differ)
    return result


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Returns a context in which torch's default generators begin at a seed; their states are restored after it."""
    if seed is None:
        yield
        return
    of_host = device.type in ("cpu", "meta")
    forked = torch.random.fork_rng
    with forked([]) if of_host else forked([device.index or 0], device_type=device.type):
        torch.manual_seed(seed)
        yield


@contextmanager
def _calls(model: nn.Module, predict: Predict | None) -> Iterator[None]:
    """Returns a context in which calls of the model, but for those that ``predict`` itself makes, are predictions.

    A call of a module inside raises PlanError: this rank may hold no part of it.
    """
    if predict is None:
        yield
        return
    paths = {module: path for path, module in model.named_modules()}

    def enter() -> None:
        for module, path in paths.items():
            vars(module)["_call_impl"] = partial(_refuse, path) if path else call

    def leave() -> None:
        for module in paths:
            vars(module).pop("_call_impl", None)

    def call(*args: Any, **named: Any) -> Any:
        given = inspect.signature(model.forward).bind(*args, **named).arguments if named else args
        leave()
        try:
            return predict(given)
        finally:
            enter()

    enter()
    try:
        yield
    finally:
        leave()


def _refuse(path: str, *_: Any, **__: Any) -> None:
    raise PlanError(
        "this layout cannot generate with this model",
        given=f"a generate that calls '{path}' by itself, as one with an encoder does",
        allowed="a generate that calls the whole model, or a layout whose ranks can each run it: dp, zero3, tp2",
        fix="export the weights and generate on one device, or write a loop over run.predict",
    )


def _differ(found: Difference) -> PlanError:
    return PlanError(
        "ranks have generated different results",
        given=str(found),
        allowed="the same inputs and options on every rank, and random numbers of torch's default generator alone",
        fix="where ranks are threads, which share that generator, take the likeliest token, or launch processes",
    )
