"""Calls a model's own ``generate`` under any layout: where no rank can run the model alone, calls become predictions.

A ``generate`` calls its model once for each new token. Under data parallelism, ZeRO and one-dimensional tensor
parallelism a rank's model can be called by any code. A pipeline stage, and a rank that holds rows of the batch, cannot:
there each call of the model becomes one of ``run.predict`` with the same arguments, on all ranks at the same time. What
an encoder-decoder's encoder makes is taken from one such call, and given to those that follow.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright.analysis.draw_calls import draw_of
from shardwright.analysis.module_calls import given_to
from shardwright.analysis.operator_results import tensors_of
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
    state of the rank's generator is restored. With a seed of None, where ranks share the generator, none may be drawn.

    Raises: PlanError: the model has no ``generate``, inputs, options or the result differ between ranks, or random
        numbers are drawn without a seed.
    """
    own = getattr(model, "generate", None)
    if not callable(own):
        raise PlanError(
            f"{type(model).__name__} has no method generate",
            given="run.generate(...)",
            allowed="models that have one, as those of transformers do",
            fix="write a loop over run.predict(tokens), which returns the output of the whole model on every rank",
        )
    check_agreement(everyone, _lines((inputs, options), f"seed {seed}"), partial(_differ, "ranks would generate from"))
    settings = options.get("generation_config") or getattr(model, "generation_config", None)
    num_beams = options.get("num_beams") or getattr(settings, "num_beams", None) or 1
    if settings is not None and (predict is not None or num_beams > 1):
        # the cache of transformers would be kept by one rank; and beams are sorted in it, where parts are not known
        options = {**options, "use_cache": False}
    args, named = given_to(inputs)
    alone = _RefusesDraws() if seed is None else _seeded(seed, everyone.device)
    with alone, eval_mode(model), torch.no_grad(), _calls(model, predict):
        result = own(*args, **named, **options)
    check_agreement(everyone, _lines(result, "results"), partial(_differ, "ranks have generated"))
    return result


def _lines(tree: Any, first: str) -> list[str]:
    tensors = tensors_of(tree)
    return [first, *(f"tensor {n} of {list(t.shape)}: {tensor_digest(t)}" for n, t in enumerate(tensors))]


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Returns a context in which the generators of the host and of ``device`` begin at a seed, and are restored."""
    is_host = device.type in ("cpu", "meta")
    forked = torch.random.fork_rng([]) if is_host else torch.random.fork_rng([device], device_type=device.type)
    with forked:
        torch.default_generator.manual_seed(seed)
        if not is_host:
            torch.get_device_module(device).manual_seed(seed)
        yield


class _RefusesDraws(TorchFunctionMode):
    """A context in which a draw of random numbers raises PlanError, on every rank at the same call."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if draw_of(func, args, kwargs or {}) is not None:
            raise PlanError(
                "ranks that are threads share torch's generator, and would draw different tokens",
                given=f"{getattr(func, '__name__', func)} in the model's generate",
                allowed="random numbers where ranks are processes, or the likeliest token everywhere",
                fix="write do_sample=False, or launch processes",
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _calls(model: nn.Module, predict: Predict | None) -> Iterator[None]:
    """Returns a context in which calls of the model, but for those that ``predict`` itself makes, are predictions.

    So is a call of the encoder that the model's ``get_encoder`` returns. A call of another module inside raises
    PlanError: this rank may hold no part of it.
    """
    if predict is None:
        yield
        return
    paths = {module: path for path, module in model.named_modules()}
    encoder_of: Any = getattr(model, "get_encoder", None)
    encoder: Any = encoder_of() if callable(encoder_of) else None

    def enter() -> None:
        for module, path in paths.items():
            vars(module)["_call_impl"] = partial(_refuse, path)
        if encoder in paths:
            vars(encoder)["_call_impl"] = encode
        vars(model)["_call_impl"] = call

    def leave() -> None:
        for module in paths:
            vars(module).pop("_call_impl", None)

    def call(*args: Any, **named: Any) -> Any:
        given = _by_name(model, args, named) if named else args
        leave()
        try:
            return predict(given)
        finally:
            enter()

    def encode(*args: Any, **named: Any) -> Any:
        return _encoded(model, _by_name(encoder, args, named), call) or _refuse(paths[encoder])

    enter()
    try:
        yield
    finally:
        leave()


def _encoded(model: nn.Module, given: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """Returns what an encoder of transformers makes of its arguments, from a call of the whole model on one token.

    It is None if the model takes no ``decoder_input_ids``, or returns no ``encoder_last_hidden_state``.
    """
    outputs, takes = sys.modules.get("transformers.modeling_outputs"), inspect.signature(model.forward).parameters
    samples = tensors_of(given)
    if outputs is None or "decoder_input_ids" not in takes or not samples:
        return None
    known = {name: value for name, value in given.items() if name in takes}
    token = torch.zeros(len(samples[0]), 1, dtype=torch.int64, device=samples[0].device)
    found = call(**known, decoder_input_ids=token, **({"use_cache": False} if "use_cache" in takes else {}))
    hidden = found.get("encoder_last_hidden_state") if isinstance(found, Mapping) else None
    return None if hidden is None else outputs.BaseModelOutput(last_hidden_state=hidden)


def _by_name(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of the model by name, as a prediction takes them."""
    signature = inspect.signature(model.forward)
    given = dict(signature.bind(*args, **named).arguments)
    for name, parameter in signature.parameters.items():
        if name in given and parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise PlanError(
                "a call that generate makes of the model cannot be predicted",
                given=f"an argument '{name}' without a name, beside named ones",
                allowed="arguments that all have names, or none",
                fix="call the model by names in generate",
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def _refuse(path: str, *_: Any, **__: Any) -> NoReturn:
    raise PlanError(
        "this layout cannot generate with this model",
        given=f"a generate that calls '{path}' by itself, or that calls self.forward",
        allowed="a generate that calls the whole model, or a layout whose ranks can each run it: dp2, dp2/zero3, tp2",
        fix="write self(...) for self.forward(...); else export the weights and generate on one device, or write a "
        "loop over run.predict",
    )


def _differ(what: str, found: Difference) -> PlanError:
    return PlanError(
        f"{what} different tensors",
        given=str(found),
        allowed="the same inputs, options and seed on every rank, and random numbers of torch's default generator",
        fix="give every rank the same inputs, all samples of them",
    )
