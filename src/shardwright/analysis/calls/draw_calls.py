"""Describes the torch functions that draw random numbers: what a call draws, and for which tensor.

The same table is used when a forward is recorded, to note its draws, and in training, where random numbers are replaced
by numbers that do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.errors import EXAMPLE, PlanError
from shardwright.function_copies import with_names

DrawKind = Literal[
    "drop", "fill", "like", "new", "bernoulli", "normal", "multinomial", "gumbel", "rrelu", "attend", "recur"
]

_DROP = "input p=0.5 training=True inplace=False"
_NEW = "dtype=None layout=None device=None pin_memory=False requires_grad=False out=None generator=None"
_RECUR = "input hx params has_biases num_layers dropout train bidirectional batch_first"

_PARAMETERS: dict[Callable[..., Any], tuple[DrawKind, str]] = {
    functional.dropout: ("drop", _DROP),
    functional.dropout1d: ("drop", _DROP),
    functional.dropout2d: ("drop", _DROP),
    functional.dropout3d: ("drop", _DROP),
    functional.alpha_dropout: ("drop", _DROP.replace("True", "False")),
    functional.feature_alpha_dropout: ("drop", _DROP.replace("True", "False")),
    torch.dropout: ("drop", "input p training"),
    torch.dropout_: ("drop", "input p training inplace=True"),
    torch.feature_dropout: ("drop", "input p training"),
    torch.feature_dropout_: ("drop", "input p training inplace=True"),
    torch.alpha_dropout: ("drop", "input p training"),
    torch.alpha_dropout_: ("drop", "input p training inplace=True"),
    torch.feature_alpha_dropout: ("drop", "input p training"),
    torch.feature_alpha_dropout_: ("drop", "input p training inplace=True"),
    Tensor.bernoulli_: ("fill", "input p=0.5 generator=None"),
    Tensor.uniform_: ("fill", "input from=0.0 to=1.0 generator=None"),
    Tensor.normal_: ("fill", "input mean=0.0 std=1.0 generator=None"),
    Tensor.exponential_: ("fill", "input lambd=1.0 generator=None"),
    Tensor.random_: ("fill", "input from=None to=None generator=None"),
    nn.init.uniform_: ("fill", "tensor a=0.0 b=1.0 generator=None"),
    nn.init.normal_: ("fill", "tensor mean=0.0 std=1.0 generator=None"),
    torch.rand_like: ("like", f"input {_NEW} memory_format=None"),
    torch.randn_like: ("like", f"input {_NEW} memory_format=None"),
    torch.randint_like: ("like", f"input low high=None {_NEW} memory_format=None"),
    torch.rand: ("new", f"*size {_NEW} names=None"),
    torch.randn: ("new", f"*size {_NEW} names=None"),
    torch.randint: ("new", f"low high size=None {_NEW}"),
    torch.randperm: ("new", f"n {_NEW}"),
    torch.bernoulli: ("bernoulli", "input p=None generator=None out=None"),
    Tensor.bernoulli: ("bernoulli", "input p=None generator=None"),
    torch.normal: ("normal", f"mean=0.0 std=1.0 size=None {_NEW}"),
    torch.multinomial: ("multinomial", "input num_samples replacement=False generator=None out=None"),
    Tensor.multinomial: ("multinomial", "input num_samples replacement=False generator=None"),
    functional.gumbel_softmax: ("gumbel", "input tau=1 hard=False eps=1e-10 dim=-1"),
    functional.rrelu: ("rrelu", "input lower=0.125 upper=0.3333333333333333 training=False inplace=False"),
    torch.rrelu: ("rrelu", "input lower=0.125 upper=0.3333333333333333 training=False generator=None"),
    torch.rrelu_: ("rrelu", "input lower=0.125 upper=0.3333333333333333 training=False generator=None inplace=True"),
    functional.scaled_dot_product_attention: (
        "attend", "input key value attn_mask=None dropout_p=0.0 is_causal=False scale=None enable_gqa=False",
    ),
    torch.lstm: ("recur", _RECUR),
    torch.gru: ("recur", _RECUR),
    torch.rnn_tanh: ("recur", _RECUR),
    torch.rnn_relu: ("recur", _RECUR),
}  # fmt: skip
_OTHER_NAMES = {
    **dict.fromkeys(("logits", "query", "self", "tensor"), "input"), "train": "training", "a": "from", "b": "to",
}  # fmt: skip
KEYED_FUNCTIONS = (
    "dropout, attention with dropout, torch.rand, randn, randint, randperm, normal, bernoulli, multinomial, and "
    "uniform_, normal_, exponential_, random_"
)
"""The functions whose numbers do not depend on the layout, as text for errors."""

UNKEYED_FIX = "compute the numbers from torch.rand, or draw in the data loader and pass them as an input"
"""The advice in an error about random draws by any other function."""

_OTHERS = (torch.poisson, torch.binomial, Tensor.cauchy_, Tensor.geometric_, Tensor.log_normal_)
"""Functions that draw random numbers and that the library cannot make independent of the layout."""

in_multihead = with_names(functional.multi_head_attention_forward, has_torch_function=lambda _: False)
"""A copy of ``multi_head_attention_forward`` that shows its inner calls to an active TorchFunctionMode.

It lets such a mode see the dropout of ``nn.MultiheadAttention``; torch's own function hides it.
"""


_WORDS = {"None": None, "True": True, "False": False}


def _value(text: str) -> Any:
    return _WORDS[text] if text in _WORDS else float(text)


@dataclass(frozen=True)
class DrawCall:
    """One call of a torch function that draws random numbers: the function, its kind, and its arguments by name.

    ``given`` has the arguments, defaults included. Those that torch names ``self``, ``tensor``, ``query`` or ``logits``
    are named ``input`` there.
    """

    function: Callable[..., Any]
    kind: DrawKind
    given: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the torch function."""
        return str(self.function.__name__)

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the argument ``name``, or ``default`` if it is None or the function has no such argument."""
        value = self.given.get(name)
        return default if value is None else value

    @property
    def device(self) -> torch.device:
        """The device of the result: the device of the tensor that numbers are drawn for, or the call's argument."""
        x = self.drawn(None)
        return x.device if isinstance(x, Tensor) else self.empty().device

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of the result of a function that takes sizes and no tensor, such as ``torch.rand``."""
        size = (self["n"],) if "n" in self.given else self.get("size", ())
        return tuple(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)

    def empty(self, device: Any = None) -> Tensor:
        """Returns an uninitialized result for a function that takes sizes and no tensor, such as ``torch.rand``.

        Integers are the least that the call may return. The result is on the device that the call names, or else on
        ``device``.
        """
        integers = self.name in ("randint", "randperm")
        dtype = self.get("dtype", torch.int64 if integers else torch.get_default_dtype())
        place = self.get("device", device)
        if integers:  # code may use them as indices, so they must be valid
            return torch.full(self.size, self.get("low", 0), dtype=dtype, device=place)
        return torch.empty(self.size, dtype=dtype, device=place)

    def drawn(self, result: Any) -> Any:
        """Returns the tensor for which numbers are drawn: the call's largest operand, or ``result`` if it has none.

        The operands are the arguments ``input`` (a query, for attention), ``mean`` and ``std``. Of operands of equal
        size, the first is taken.
        """
        operands = [self.given.get(name) for name in ("input", "mean", "std")]
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        return max(tensors, key=Tensor.numel) if tensors else result

    def numbered(self, result: Any) -> Any:
        """Returns the tensor each of whose elements gets a random number: ``result``, or what :meth:`drawn` returns.

        ``torch.multinomial`` with replacement draws each of its results, also where they share one distribution, and
        ``torch.normal`` of two tensors each element of both broadcast.
        """
        is_each = bool(self.get("replacement")) or self.get("num_samples") == 1
        return result if self.kind == "normal" or (self.kind == "multinomial" and is_each) else self.drawn(result)

    def drawn_together(self, result: Any) -> Any:
        """Returns ``result`` if each number in its last dim depends on the others there, or else None.

        That is so for ``torch.multinomial`` without replacement.
        """
        return result if self.kind == "multinomial" and self.numbered(result) is not result else None

    def without_numbers(self) -> Any:
        """Runs the call without drawing random numbers and returns a result of the right shape and dtype.

        The values are arbitrary. Only a one-element result of a function that takes sizes and no tensor, such as
        ``torch.rand(1)``, or of one that fills a tensor, is a value that a real call could return. Attention and
        recurrent networks run without their dropout, and other functions that write in place leave their input alone.
        """
        x = self.drawn(None)
        if self.kind == "attend":
            named = {name: value for name, value in self.given.items() if name not in ("input", "dropout_p")}
            return self.function(x, **named)
        if self.kind == "recur":
            return self.function(*(0.0 if name == "dropout" else value for name, value in self.given.items()))
        if self.kind == "gumbel":
            return x.softmax(int(self["dim"]))
        if self.kind == "multinomial":
            return x.narrow(-1, 0, 1).expand(*x.shape[:-1], int(self["num_samples"])).to(torch.int64)
        if self.kind == "fill" and x.numel() == 1 and not x.is_meta:
            with torch.no_grad():  # code may read it, as one does that skips a layer at random
                return x.fill_(0.5 if x.is_floating_point() else 0)
        if self.kind == "fill" or self.get("inplace"):
            return x
        if self.kind == "normal" and isinstance(self["mean"], Tensor) and isinstance(self["std"], Tensor):
            return torch.broadcast_tensors(self["mean"], self["std"])[0].clone()
        if isinstance(x, Tensor):
            return x.to(self.get("dtype", x.dtype), copy=True)
        made = self.empty()
        return made.fill_(0.5 if made.is_floating_point() else self.get("low", 0)) if made.numel() == 1 else made


def draw_of(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> DrawCall | None:
    """Returns the :class:`DrawCall` of a torch function call, or None if the call draws no random numbers.

    Dropout outside of training, for example, draws nothing. The result is None too for functions whose numbers cannot
    be made independent of the layout, such as ``torch.poisson``; :class:`RefusesRandomNumbers` refuses those.

    Raises: PlanError: a recurrent network with dropout between its layers is called on packed sequences in training.

    >>> draw_of(functional.dropout, (torch.ones(2),), {"p": 0.1})["p"]
    0.1
    >>> draw_of(functional.dropout, (torch.ones(2), 0.1, False), {}) is None
    True
    """
    entry = _PARAMETERS.get(function)
    if entry is None:
        return None
    kind, parameters = entry
    arguments = _bound(parameters, args, named)
    call = DrawCall(function, kind, arguments)
    if kind == "drop":
        draws = arguments["training"] and arguments["p"] > 0
    elif kind == "attend":
        draws = arguments["dropout_p"] > 0
    elif kind == "recur":
        packed = not isinstance(arguments["has_biases"], bool)  # packed sequences shift the arguments by one
        if packed:
            arguments = _bound(parameters, (args[0], *args[2:]), named)
        draws = arguments["training"] and arguments["dropout"] > 0 and arguments["num_layers"] > 1
        if packed and draws:
            raise PlanError(
                "dropout between the layers of a recurrent network needs padded sequences",
                given="packed sequences",
                allowed="a tensor (samples, tokens, features), or dropout=0",
                fix="give the layer the padded tensor, or use a layer for each with nn.Dropout between",
            )
    else:
        draws = kind != "rrelu" or arguments["training"]
    return call if draws else None


def draws_numbers(function: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Returns whether a torch function call draws random numbers, also in ways that :func:`draw_of` does not describe.

    >>> draws_numbers(torch.poisson, (torch.ones(2),), {}), draws_numbers(torch.relu, (torch.ones(2),), {})
    (True, False)
    """
    return function in _OTHERS or draw_of(function, args, named) is not None


def draws_by_method(name: str) -> bool:
    """Returns whether a method of tensors draws random numbers, by its name.

    >>> draws_by_method("bernoulli_"), draws_by_method("relu_")
    (True, False)
    """
    function = getattr(Tensor, name, None)
    return function in _PARAMETERS or function in _OTHERS


def _bound(parameters: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by parameter name, bound as torch's parser does."""
    arguments: dict[str, Any] = {}
    names = []
    for parameter in parameters.split(" "):
        name, _, default = parameter.partition("=")
        names.append(_OTHER_NAMES.get(name, name).removeprefix("*"))
        arguments[names[-1]] = _value(default) if default else None
    if parameters.startswith("*size") and args and isinstance(args[0], int):
        args = (args,)
    if names[:2] == ["low", "high"] and _is_high(args, named):
        args = (0, *args)
    arguments |= zip(names, args, strict=False)
    arguments |= {_OTHER_NAMES.get(name, name): value for name, value in named.items()}
    for low, high in (("low", "high"), ("from", "to")):
        if names[:3] == ["input", low, high] and arguments[high] is None:
            arguments[low], arguments[high] = 0, arguments[low]  # one number is the end of the range
    return arguments


def _is_high(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Whether the first argument of a ``randint`` call is the end of its range, because no start was passed."""
    if len(args) > 1:
        return len(args) == 2 and not isinstance(args[1], int)
    return "high" not in named if args else "low" not in named


class RefusesRandomNumbers(TorchFunctionMode):
    """A context in which a call that draws random numbers raises PlanError.

    It is for code that runs where random numbers would depend on the layout: a forward, or with ``in_loss`` the loss,
    of which no record is made. It inspects every function call and is slow, so it is meant for a single forward.

    >>> with RefusesRandomNumbers():
    ...     functional.dropout(torch.ones(2), 0.5, training=True)
    Traceback (most recent call last):
    shardwright.errors.PlanError: the random numbers of 'dropout' would depend on the layout
      given:   a call of it in the forward, where the example of the inputs did not make it
      ...
    """

    def __init__(self, *, in_loss: bool = False) -> None:
        super().__init__()
        self._in_loss = in_loss

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        if draws_numbers(function, args, named or {}):
            is_known, what = function not in _OTHERS, f"the random numbers of '{function.__name__}'"
            if self._in_loss:
                raise PlanError(
                    f"{what} would depend on the layout",
                    given="a call of it in the loss, of which each rank computes its part",
                    allowed="in the model's forward: " + KEYED_FUNCTIONS,
                    fix="draw them in the forward, and return them with the output, or in the data loader",
                )
            raise PlanError(
                f"{what} would depend on the layout",
                given="a call of it in the forward" + ", where the example of the inputs did not make it" * is_known,
                allowed=KEYED_FUNCTIONS + ", in calls that the example makes too" * is_known,
                fix=f"{EXAMPLE}; or take the call out" if is_known else UNKEYED_FIX,
            )
        return function(*args, **(named or {}))
