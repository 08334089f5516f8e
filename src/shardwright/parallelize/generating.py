"""Calls a model's own ``generate`` under any layout: where no rank can run the model alone, calls become predictions.

A ``generate`` calls its model once for each new token. Under data parallelism, ZeRO and one-dimensional tensor
parallelism a rank's model can be called by any code. The model of a pipeline stage, or of a rank that holds rows of the
batch, cannot: there each call of the model becomes a call of ``run.predict`` with the same arguments, on all ranks at
the same time. The output of an encoder-decoder's encoder is taken from one such call, and passed to those that follow.

A wrapper's ``generate``, such as peft's, calls the model inside of the wrapper. If the wrapper's forward only passes
its arguments on, such a call is handled as a call of the wrapper. To find that out, the code of that forward runs
without modules: the model inside is replaced by a function that notes its arguments.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from threading import Lock
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from shardwright.analysis.calls.draw_calls import draws_numbers
from shardwright.analysis.on_meta.module_calls import given_to
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.analysis.traced.structure import has_hooks_of_user
from shardwright.comm.agreement import Difference, check_agreement, tensor_digest
from shardwright.comm.axis import Axis
from shardwright.errors import PlanError
from shardwright.forward_stack import own_forward
from shardwright.models.eval_mode import eval_mode

Predict = Callable[[Any], Any]


def generate(
    model: nn.Module, predict: Predict | None, everyone: Axis, inputs: Any, seed: int, options: dict[str, Any],
    *, guarded: bool = False, by_threads: bool = False,
) -> Any:  # fmt: skip
    """Returns what ``model.generate(inputs, **options)`` returns.

    Unless ``predict`` is None, it is called in place of the model. ``guarded`` says that some modules inside refuse
    calls from outside of the model's forward, as layers do whose features tensor parallelism cuts. Every rank of the
    axis ``everyone`` calls this function. Random numbers are those that follow ``torch.manual_seed(seed)``, and the
    state of torch's generator is restored. ``by_threads`` says that the ranks are threads of one process, which share
    that generator.

    Raises: PlanError: the model has no ``generate``, inputs, options or the result differ between ranks, or ranks are
        threads and ``generate`` sets a seed itself.
    """
    own = getattr(model, "generate", None)
    if not callable(own):
        raise PlanError(
            f"{type(model).__name__} has no method generate",
            given="run.generate(...)",
            allowed="models that have one, as those of transformers do",
            fix="write a loop over run.predict(tokens), which returns the output of the whole model on every rank",
        )
    # made before the first collective, so that no thread has begun to draw when another reads the shared generator
    seeded = _ThreadDraws(seed, everyone.device) if by_threads else _seeded(seed, everyone.device)
    check_agreement(everyone, _lines((inputs, options), f"seed {seed}"), partial(_differ, "ranks would generate from"))
    settings = options.get("generation_config") or getattr(model, "generation_config", None)
    holders = [module for module in model.modules() if getattr(module, "generation_config", None) is not None]
    configs = [settings] if settings is not None else [holder.generation_config for holder in holders]
    num_beams = options.get("num_beams") or max(
        (getattr(config, "num_beams", None) or 1 for config in configs), default=1
    )
    # predictions cannot keep the cache of transformers; and a beam search sorts the cache outside of the forward, where
    # its tensors are not known to be a rank's parts
    without_cache = predict is not None or num_beams > 1
    if without_cache and (settings is not None or "use_cache" in options):
        options = {**options, "use_cache": False}
    args, named = given_to(inputs)
    with ExitStack() as stack:
        for holder in holders if without_cache else ():
            stack.enter_context(_without_cache(holder))
        for context in (seeded, eval_mode(model), torch.no_grad(), _calls(model, predict, guarded)):
            stack.enter_context(context)
        result = own(*args, **named, **options)
    check_agreement(everyone, _lines(result, "results"), partial(_differ, "ranks have generated"))
    return result


def _lines(tree: Any, first: str) -> list[str]:
    tensors = tensors_of(tree)
    return [first, *(f"tensor {n} of {list(t.shape)}: {tensor_digest(t)}" for n, t in enumerate(tensors))]


def _is_host(device: torch.device) -> bool:
    """Returns whether random numbers for tensors on a device come from the host's generator alone."""
    return device.type in ("cpu", "meta")


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Returns a context in which the generators of the host and of ``device`` begin at a seed, and are restored."""
    alone = _is_host(device)
    forked = torch.random.fork_rng([]) if alone else torch.random.fork_rng([device], device_type=device.type)
    with forked:
        torch.default_generator.manual_seed(seed)
        if not alone:
            torch.get_device_module(device).manual_seed(seed)
        yield


@contextmanager
def _without_cache(module: nn.Module) -> Iterator[None]:
    """Returns a context in which a model of transformers, which a wrapper may hold, generates without a cache."""
    before = module.generation_config
    settings: Any = copy(before)
    settings.use_cache = False
    module.generation_config = settings
    try:
        yield
    finally:
        module.generation_config = before


class _ThreadDraws(TorchFunctionMode):
    """A context in which a thread draws the random numbers that it would draw in a process of its own after a seed.

    The threads share torch's generators. While one thread draws, the generators have the state that its last draw left,
    and a lock keeps other threads from drawing. Between draws the generators have the state from before the context.

    Raises: PlanError, at the next draw or at the end of the context: code has set the state of the generators itself,
        as by ``torch.manual_seed``.
    """

    _ONE_AT_A_TIME = Lock()

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self.device = device
        with self._ONE_AT_A_TIME:
            self.before = self._read()
            with _seeded(seed, device):
                self.states = self._read()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with self._ONE_AT_A_TIME:
            try:
                if error[0] is None:
                    self._check()
            finally:
                self._write(self.before)

    def _read(self) -> list[Tensor]:
        on_device = [] if _is_host(self.device) else [torch.get_device_module(self.device).get_rng_state(self.device)]
        return [torch.default_generator.get_state(), *on_device]

    def _write(self, states: Sequence[Tensor]) -> None:
        torch.default_generator.set_state(states[0])
        for state in states[1:]:
            torch.get_device_module(self.device).set_rng_state(state, self.device)

    def _check(self) -> None:
        if not all(map(torch.equal, self._read(), self.before)):
            raise PlanError(
                "the model's generate sets the seed of random numbers itself",
                given="ranks that are threads, which share torch's generator",
                allowed="draws that follow the seed of run.generate, or a generate that sets its own where ranks are "
                "processes",
                fix="write run.generate(inputs, seed=...), or launch processes",
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if not draws_numbers(func, args, named):
            return func(*args, **named)
        with self._ONE_AT_A_TIME:
            self._check()
            self._write(self.states)
            try:
                return func(*args, **named)
            finally:
                self.states = self._read()
                self._write(self.before)


@contextmanager
def _calls(model: nn.Module, predict: Predict | None, guarded: bool) -> Iterator[None]:
    """Returns a context in which a call of the model becomes a call of ``predict``, unless ``predict`` itself makes it.

    So does a call of the encoder that the model's ``get_encoder`` returns, and a call of a module to which the model's
    forward passes the same arguments and whose output it returns. A call of another module inside raises PlanError:
    this rank may hold no part of it. If ``predict`` is None, the model itself is called in its place, and other modules
    run unchanged.
    """
    if predict is None and not guarded:
        yield
        return
    paths = {module: path for path, module in model.named_modules()}
    makers = (getattr(module, "get_encoder", None) for module in paths)  # a wrapper may hold the encoder-decoder
    encoder: Any = next((maker() for maker in makers if callable(maker)), None)

    def enter() -> None:
        for module in paths:
            vars(module)["_call_impl"] = partial(call_inside, module)
        vars(model)["_call_impl"] = call

    def leave() -> None:
        for module in paths:
            vars(module).pop("_call_impl", None)

    def natively(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        leave()
        try:
            return function(*args, **named)
        finally:
            enter()

    def call(*args: Any, **named: Any) -> Any:
        if predict is None:
            return natively(model, *args, **named)
        return natively(predict, _by_name(model, args, named) if named else args)

    def call_inside(module: nn.Module, *args: Any, **named: Any) -> Any:
        taken = _taken(model, named)
        try:
            is_same = _is_passed_on(model, paths, module, (args, taken), (args, named))
        finally:
            enter()
        if is_same:
            return call(*args, **taken)
        if predict is None:
            return natively(module, *args, **named)
        if module is encoder:
            owner = model.get_submodule(paths[encoder].rpartition(".")[0])
            takes = [*_names(model), *(_names(owner) if _takes_all(model) else ())]
            return _encoded(takes, _by_name(encoder, args, named), call) or _refuse(paths[encoder])
        return _refuse(paths[module])

    enter()
    try:
        yield
    finally:
        leave()


CallArguments = tuple[tuple[Any, ...], dict[str, Any]]


def _is_passed_on(
    model: nn.Module, paths: Mapping[nn.Module, str], inner: nn.Module, passed_in: CallArguments, wanted: CallArguments
) -> bool:
    """Returns whether the model, called with ``passed_in``, calls ``inner`` once, with ``wanted``, for its output.

    To find out, the code of the model, and of the modules between it and ``inner``, runs on copies of the tensors; no
    other module is called. A missing argument is the same as one that has its default. The caller restores the calls
    of all modules.
    """
    copies: dict[int, Tensor] = {}
    passed_in, wanted = tree_map_only(
        Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.clone()), (passed_in, wanted)
    )
    calls: list[tuple[dict[str, Any], tuple[object, ...]]] = []
    output, before = object(), _surroundings(passed_in)

    def note(*args: Any, **named: Any) -> Any:
        calls.append((_arguments(inner, args, named), _surroundings(passed_in)))
        return output

    for module, path in paths.items():
        is_between = path == "" or paths[inner].startswith(f"{path}.")
        if is_between and has_hooks_of_user(module):
            return False  # hooks may change arguments or the output
        vars(module)["_call_impl"] = own_forward(module) if is_between else partial(_refuse, path)
    vars(inner)["_call_impl"] = note
    args, named = passed_in
    try:
        returned = model(*args, **named)
        expected = _arguments(inner, *wanted)
    except Exception:  # the output of inner was a plain object: user code that computes with it may raise any error
        return False
    if returned is not output or len(calls) != 1:
        return False
    passed, inside = calls[0]
    return _are_same(passed, expected) and inside == before


def _surroundings(arguments: CallArguments) -> tuple[object, ...]:
    """Returns what else decides what a call computes: the modes that it runs under, and the versions of its tensors."""
    tensors = tensors_of(arguments)
    types = sorted({"cpu", *(tensor.device.type for tensor in tensors)})
    autocast = [
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)) for device_type in types
    ]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
    return (*modes, *autocast, *(tensor._version for tensor in tensors if not tensor.is_inference()))


def _taken(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Returns the named arguments that the model's forward takes: all of them if it has ``**kwargs``."""
    return named if _takes_all(model) else {name: value for name, value in named.items() if name in _names(model)}


def _names(module: nn.Module) -> Collection[str]:
    return inspect.signature(module.forward).parameters.keys()


def _takes_all(module: nn.Module) -> bool:
    return any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(module.forward).parameters.values()
    )


def _arguments(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a module's call by name, without those that have their default.

    Arguments that the forward takes by ``**kwargs`` are left out too if they are None.
    """
    signature = inspect.signature(module.forward)
    arguments = dict(signature.bind(*args, **named).arguments)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update({key: value for key, value in arguments.pop(name, {}).items() if value is not None})
        elif name in arguments and _is_same(arguments[name], parameter.default):
            del arguments[name]
    return arguments


def _are_same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(_is_same(value, second[name]) for name, value in first.items())


def _is_same(first: Any, second: Any) -> bool:
    """Returns whether two arguments are one object, or equal flags, numbers, texts, or sequences and dicts of these."""
    if type(first) is type(second) and isinstance(first, Mapping):
        return _are_same(first, second)
    if type(first) is type(second) and isinstance(first, tuple | list) and len(first) == len(second):
        return all(map(_is_same, first, second))
    plain = bool, int, float, str, torch.dtype
    return first is second or (type(first) is type(second) and isinstance(first, plain) and first == second)


def _encoded(takes: Collection[str], named: Mapping[str, Any], call: Callable[..., Any]) -> Any:
    """Returns the output of an encoder of transformers, from a call of the whole model on one token.

    ``named`` are the encoder's arguments by name, and ``takes`` the names of the arguments that the model takes. The
    result is None if these do not include ``decoder_input_ids``, or the model returns no ``encoder_last_hidden_state``.
    """
    outputs = sys.modules.get("transformers.modeling_outputs")
    samples = tensors_of(named)
    if outputs is None or "decoder_input_ids" not in takes or not samples:
        return None
    arguments = {name: value for name, value in named.items() if name in takes}
    token = torch.zeros(len(samples[0]), 1, dtype=torch.int64, device=samples[0].device)
    output = call(**arguments, decoder_input_ids=token, **({"use_cache": False} if "use_cache" in takes else {}))
    hidden = output.get("encoder_last_hidden_state") if isinstance(output, Mapping) else None
    return None if hidden is None else outputs.BaseModelOutput(last_hidden_state=hidden)


def _by_name(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of the model by name, as a prediction takes them."""
    signature = inspect.signature(model.forward)
    arguments = dict(signature.bind(*args, **named).arguments)
    for name, parameter in signature.parameters.items():
        if name in arguments and parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise PlanError(
                "a call that generate makes of the model cannot be predicted",
                given=f"an argument '{name}' without a name, beside named ones",
                allowed="arguments that all have names, or none",
                fix="call the model by names in generate",
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(arguments.pop(name, {}))
    return arguments


def _refuse(path: str, *_: Any, **__: Any) -> NoReturn:
    raise PlanError(
        "this layout cannot generate with this model",
        given=f"a generate that calls '{path}' by itself, or that calls self.forward",
        allowed="a generate that calls the whole model, or a module of which the model's forward passes on the same "
        "arguments and the output, unchanged; or a layout whose ranks can each run it: dp2, dp2/zero3, tp2",
        fix="write self(...) for self.forward(...), and of a wrapper def forward(self, *args, **named): return "
        f"self.{path}(*args, **named); else export the weights and generate on one device, or loop over run.predict",
    )


def _differ(what: str, difference: Difference) -> PlanError:
    return PlanError(
        f"{what} different tensors",
        given=str(difference),
        allowed="the same inputs, options and seed on every rank, and random numbers of torch's default generator",
        fix="give every rank the same inputs, all samples of them",
    )
