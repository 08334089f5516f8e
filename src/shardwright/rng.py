"""Random numbers that do not depend on the layout.

Whether an element is dropped depends on (seed, step, sample, layer, element) and nothing else: not on which rank
computes it, nor on how the batch is cut into microbatches. So a mask is not drawn from a stream but computed, by
hashing each element's place in the whole tensor; a rank that holds a slice computes the slice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.attention_scores import attend_dropping
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, set_forward

KEYED = (nn.Dropout,)
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
UNKEYED = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)

_FACTORIES = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.bernoulli, torch.normal)
_LIKE = (torch.rand_like, torch.randn_like, torch.randint_like, functional.gumbel_softmax)
_FILLS = (Tensor.bernoulli_, Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.random_)
_DROPS = {
    functional.dropout: 0.5, functional.dropout1d: 0.5, functional.dropout2d: 0.5, functional.dropout3d: 0.5,
    functional.alpha_dropout: 0.5, functional.feature_alpha_dropout: 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class DimSlice:
    """What a rank holds of one dim of a cut activation: element ranges of a whole of ``size``."""

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]


class RngTracker:
    """The key of this moment's random numbers; the executor sets ``step`` and ``samples`` before each forward."""

    def __init__(self, seed: int = 0, step: int = 0, samples: Sequence[int] = range(0)) -> None:
        self.seed, self.step = seed, step
        self.samples = samples
        self.layers: set[str] = set()

    @property
    def samples(self) -> Sequence[int]:
        """The places in the global batch of the samples in hand; setting them begins a forward."""
        return self._samples

    @samples.setter
    def samples(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._calls: Counter[str] = Counter()
        self._first: dict[str, int] = {}
        self._backward = _current_graph_task_id()

    def call(self, layer: str) -> str:
        """The layer's name in the keys: a layer that is called again in one forward drops others.

        What a backward calls that nobody has taken back to a moment of the forward repeats the forward's call, as in
        ``torch.utils.checkpoint``. Raises: PlanError: there were several.
        """
        number = self._calls[layer]
        if self._repeats() and layer in self._first:
            if number > self._first[layer] + 1:
                raise _one_of_several(layer, number - self._first[layer])
            number = self._first[layer]
        else:
            self._first.setdefault(layer, number)
            self._calls[layer] += 1
        return f"{layer}#{number}" if number else layer

    def _repeats(self) -> bool:
        """Whether a backward is running, other than the one in which this moment of the forward was come back to."""
        return _current_graph_task_id() != self._backward

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores this state, so that a forward that is computed again drops the same."""
        step, samples, calls, first = self.step, self._samples, Counter(self._calls), dict(self._first)
        repeats, backward = self._repeats(), self._backward

        def back() -> None:
            self.step, self._samples, self._calls, self._first = step, samples, Counter(calls), dict(first)
            self._backward = backward if repeats else _current_graph_task_id()

        return back

    def repeat(self, layer: str, times: int) -> None:
        """The layer, and those inside it, were called so often in this forward, by another rank."""
        for name in (layer, *(each for each in self.layers if each.startswith(f"{layer}."))):
            self._calls[name] = times

    def keys(self, layer: str, samples: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Two 32-bit words for each sample: those of the microbatch, unless the layer sees others."""
        samples = self.samples if samples is None else samples
        start = hashlib.blake2b(f"{self.seed}/{self.step}/{layer}".encode(), digest_size=8).digest()
        mixed = [_mix64(int.from_bytes(start, "little") + sample * 0x9E3779B97F4A7C15) for sample in samples]
        return [(word & 0xFFFFFFFF, word >> 32) for word in mixed]


def _one_of_several(layer: str, number: int) -> PlanError:
    return PlanError(
        f"which of its calls dropout '{layer}' repeats in the backward cannot be known",
        given=f"{number} calls in one forward, and one more by torch.utils.checkpoint",
        allowed="inside torch.utils.checkpoint, dropout that is called once in a forward",
        fix="write recompute:full or recompute:PATTERN in the layout, in place of torch.utils.checkpoint",
    )


def _mix64(word: int) -> int:
    """A bijection of 64-bit words that spreads each bit over all (Stafford's mix 13)."""
    mask = 2**64 - 1
    word &= mask
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def _mix32_(x: Tensor) -> Tensor:
    """In place, a bijection of 32-bit words that spreads each bit over all. int32 wraps, ``&`` clears the sign."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def dropout_mask(
    rng: RngTracker,
    layer: str,
    shape: Sequence[int],
    cuts: Sequence[DimSlice],
    p: float,
    samples: Sequence[int] | None = None,
) -> Tensor:
    """True where dropout of probability ``p`` keeps the element.

    Shapes: ``shape`` is this rank's (samples, ...); each of ``cuts`` says which elements of a dim these are, and
    ``samples`` whose rows, where they are not those of the microbatch in hand.

    >>> whole = dropout_mask(RngTracker(seed=1, samples=range(2)), "drop", (2, 6), (), 0.5)
    >>> right = dropout_mask(RngTracker(seed=1, samples=range(2)), "drop", (2, 2), (DimSlice(1, 6, ((4, 6),)),), 0.5)
    >>> torch.equal(whole[:, 4:], right)
    True
    """
    held = {cut.dim % len(shape): cut for cut in cuts}
    place = torch.zeros((1,) * len(shape), dtype=torch.int64)
    stride = 1
    for dim in range(len(shape) - 1, 0, -1):
        ranges = held[dim].ranges if dim in held else ((0, shape[dim]),)
        index = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        place = place + (index * stride).view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= held[dim].size if dim in held else shape[dim]
    keys = torch.tensor(rng.keys(layer, samples), dtype=torch.int64).to(torch.int32).view(shape[0], 2)
    first, second = (keys[:, i].view(-1, *(1,) * (len(shape) - 1)) for i in (0, 1))
    words = _mix32_(place.to(torch.int32) ^ first)
    words = _mix32_(words.add_(second))
    return words.bitwise_and_(0xFFFFFF) >= round(p * 2**24)


@dataclass(frozen=True)
class KeyedDropout:
    """Dropout with masks from ``rng``, for one layer that sees these cuts of these samples.

    ``tokens`` gives the cuts of a tensor of one shape, where they depend on how long its sequences are. The samples are
    in ``dim``, 0 or 1; masks are those of a tensor that has them in dim 0.
    """

    rng: RngTracker
    layer: str
    cuts: tuple[DimSlice, ...] = ()
    rows: Callable[[], Sequence[int]] | None = None
    tokens: Callable[[Sequence[int]], tuple[DimSlice, ...]] | None = None
    dim: int = 0

    def __call__(self, input: Tensor, p: float) -> Tensor:
        """The input with elements dropped. Raises PlanError unless its samples are where they should be."""
        samples = self.rng.samples if self.rows is None else self.rows()
        if input.dim() <= self.dim or input.shape[self.dim] != len(samples):
            raise PlanError(
                f"dropout '{self.layer}' does not see one row for each sample",
                given=f"a tensor of shape {list(input.shape)} for {len(samples)} samples",
                allowed="activations whose dim 0 is the samples; inside torch's transformer layers dim 1, too",
                fix="apply dropout after the samples are in dim 0",
            )
        shape = input.transpose(0, self.dim).shape
        cuts = self.cuts if self.tokens is None else (*self.cuts, *self.tokens(shape))
        keep = dropout_mask(self.rng, self.rng.call(self.layer), shape, cuts, p, samples).transpose(0, self.dim)
        scale = 1 / (1 - p) if p < 1 else 0.0
        return input * (keep.to(input.device).to(input.dtype) * scale)


def _dropout(module: nn.Dropout, drop: KeyedDropout, input: Tensor) -> Tensor:
    return drop(input, module.p) if module.training and module.p > 0 else input


def drop_out_slice(module: nn.Dropout, input: Tensor, cut: DimSlice) -> Tensor:
    """Dropout by a module that :func:`key_dropout` has seen, of a slice that is known only now.

    >>> model, rng = nn.Dropout(0.5), RngTracker(seed=1, samples=range(2))
    >>> key_dropout(model, rng)
    >>> whole = model(torch.ones(2, 6))
    >>> rng.samples = range(2)
    >>> torch.equal(drop_out_slice(model, torch.ones(2, 2), DimSlice(1, 6, ((4, 6),))), whole[:, 4:])
    True
    """
    if not module.training:
        return input
    drop: KeyedDropout = module.__dict__["_dropper"]
    return _dropout(module, replace(drop, cuts=(*drop.cuts, cut)), input)


def _keyed_multihead(module: nn.MultiheadAttention, drop: KeyedDropout) -> Callable[..., Any]:
    """The module's own forward, torch's own code, with other functions under the names of those that drop."""

    def dropout(weights: Tensor, p: float, **_: Any) -> Tensor:
        by_head = weights.view(-1, module.num_heads, *weights.shape[-2:])
        return drop(by_head, p).view(weights.shape)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool) -> Tensor:
        if p == 0:
            return functional.scaled_dot_product_attention(q, k, v, mask, p, causal)
        return attend_dropping(q, k, v, mask, causal=causal, drop=lambda weights: drop(weights, p))

    attention = with_names(
        functional.multi_head_attention_forward,
        dropout=dropout,
        scaled_dot_product_attention=attend,
        has_torch_function=lambda _: False,  # or else whoever looks at calls is handed torch's own again
    )
    names = SimpleNamespace(**{**vars(functional), "multi_head_attention_forward": attention})
    return partial(with_names(nn.MultiheadAttention.forward, F=names), module)


def with_names(function: Any, **names: Any) -> FunctionType:
    """The same code, in which these global names mean something else.

    >>> def count(things):
    ...     return len(things)
    >>> with_names(count, len=sum)([1, 2]), count([1, 2])
    (3, 2)
    """
    code, known = function.__code__, {**function.__globals__, **names}
    assert names.keys() <= {*code.co_names}, f"this torch's {function.__name__} calls others"
    copied = FunctionType(code, known, argdefs=function.__defaults__, closure=function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def keyed_dropout_of(module: nn.MultiheadAttention) -> Callable[[Tensor], Tensor] | None:
    """How the attention weights of a module that :func:`key_dropout` has seen are dropped now; None: not at all.

    >>> keyed_dropout_of(nn.MultiheadAttention(4, 2)) is None
    True
    """
    drop: KeyedDropout | None = module.__dict__.get("_dropper")
    if drop is None or not module.training:
        return None
    return lambda weights_BNTS: drop(weights_BNTS, module.dropout)


def key_dropout(
    model: nn.Module,
    rng: RngTracker,
    cuts: Mapping[str, tuple[DimSlice, ...]] | None = None,
    rows: Mapping[str, Callable[[], Sequence[int]]] | None = None,
    tokens: Mapping[str, Callable[[Sequence[int]], tuple[DimSlice, ...]]] | None = None,
) -> None:
    """Makes every ``nn.Dropout`` of ``model``, and that of attention weights, compute its masks from ``rng``.

    ``cuts`` says which elements a layer sees, ``rows`` whose samples, where they are not all and this rank's own;
    ``tokens`` which tokens, of a tensor of some shape.

    Raises: PlanError: the model has a random layer whose numbers would depend on the layout.

    >>> model, rng = nn.Sequential(nn.Dropout(0.5)), RngTracker(seed=3, samples=range(1))
    >>> key_dropout(model, rng)
    >>> first, again = model(torch.ones(1, 8)), model(torch.ones(1, 8))
    >>> rng.samples = range(1)  # a new forward
    >>> torch.equal(model(torch.ones(1, 8)), first), torch.equal(again, first)
    (True, False)
    """
    second = frozenset(_with_samples_in_dim_1(model))
    for name, module in model.named_modules():
        rng.layers.add(name)
        held, whose, which = (cuts or {}).get(name, ()), (rows or {}).get(name), (tokens or {}).get(name)
        drop = KeyedDropout(rng, name, held, whose, which, dim=int(name in second))
        if type(module) is nn.MultiheadAttention and "forward" not in vars(module):
            if module.dropout > 0:
                _replace(module, drop, _keyed_multihead(module, drop))
            continue
        inner = isinstance(module, nn.MultiheadAttention | nn.RNNBase) and module.dropout > 0
        other = isinstance(module, nn.Dropout) and type(module) is not nn.Dropout and module.p > 0
        if isinstance(module, UNKEYED) or inner or other:
            raise PlanError(
                f"the random numbers of '{name}' would depend on the layout",
                given=type(module).__name__,
                allowed="nn.Dropout, and nn.MultiheadAttention with dropout",
                fix="use nn.Dropout, or take the layer out",
            )
        if type(module) in KEYED:
            _replace(module, drop, partial(_dropout, module, drop))


def _replace(module: nn.Module, drop: KeyedDropout, forward: Forward) -> None:
    """Gives a module the forward that drops by masks from ``drop``, in place of its own."""
    set_forward(module, Rung.DROPOUT, "masks from the seed, the step and the sample", by="core", forward=forward)
    module.__dict__["_dropper"] = drop


def _with_samples_in_dim_1(model: nn.Module) -> Iterator[str]:
    """The dropouts inside torch's own transformer layers that are built so: not ``batch_first``."""
    for path, layer in model.named_modules():
        if type(layer) in TRANSFORMER_LAYERS and not getattr(layer.self_attn, "batch_first", True):
            yield from (f"{path}.{own}".lstrip(".") for own, child in layer.named_children() if type(child) in KEYED)


class RefusesRandomNumbers(TorchFunctionMode):
    """Inside, drawing a random number that depends on the layout is an error.

    It looks at every function call, so it is for one forward, not for all.

    >>> with RefusesRandomNumbers():
    ...     functional.dropout(torch.ones(2), 0.5, training=True)
    Traceback (most recent call last):
    shardwright.errors.PlanError: the random numbers of 'dropout' would depend on the layout
      given:   a call of it in the forward
      allowed: nn.Dropout modules
      fix:     use nn.Dropout, or take the call out
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        drops = function in _DROPS and (
            (args[1] if len(args) > 1 else named.get("p", _DROPS[function])) > 0
            and (args[2] if len(args) > 2 else named.get("training", True))
        )
        attends = function is functional.scaled_dot_product_attention and (
            (args[4] if len(args) > 4 else named.get("dropout_p", 0.0)) > 0
        )
        if drops or attends or function in _FACTORIES or function in _LIKE or function in _FILLS:
            raise PlanError(
                f"the random numbers of '{function.__name__}' would depend on the layout",
                given="a call of it in the forward",
                allowed="nn.Dropout modules",
                fix="use nn.Dropout, or take the call out",
            )
        return function(*args, **named)


class _WithoutRandomNumbers(TorchFunctionMode):
    """Leaves tensors on the meta device alone where they would be filled with first values."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        fills = getattr(function, "__module__", "") == "torch.nn.init" or function in (Tensor.normal_, Tensor.uniform_)
        target = args[0] if args else (named or {}).get("tensor")
        if fills and isinstance(target, Tensor) and target.is_meta:
            return target
        return function(*args, **(named or {}))


@contextmanager
def without_values() -> Iterator[None]:
    """Models built inside have shapes and no values: ``torch.device("meta")``, and nothing is drawn.

    Drawing into nothing would be harmless, but the first draw on the meta device makes torch import its compiler,
    which takes longer than importing torch.

    >>> with without_values():
    ...     layer = nn.Embedding(10**9, 4096)
    >>> layer.weight.device.type
    'meta'
    """
    with torch.device("meta"), _WithoutRandomNumbers():
        yield
