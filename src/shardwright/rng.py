"""Random numbers that do not depend on the layout: the RNG tracker, and dropout keyed by it.

Whether an element is dropped depends on (seed, step, sample, layer, element) and nothing else: not on which rank
computes it, nor on how the batch is cut into microbatches. So a mask is not drawn from a stream but computed, by
hashing each element's index in the whole tensor; a rank that holds a slice computes the slice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.nn import functional

from shardwright.attention_scores import attend_dropping
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, set_forward
from shardwright.initial_values import ModuleRecorder

KEYED = (nn.Dropout,)
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class DimSlice:
    """The element ranges of one dim that a rank holds of a sharded activation; ``size`` is the whole dim's."""

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]


PartOf = Callable[[Tensor], tuple[tuple[DimSlice, ...], Callable[[Tensor], None]] | None]
"""Gives, for a tensor that is a part of a whole, the elements that it holds, and marks another as the same part."""


def _of_whole(_: Tensor) -> None:
    """The ``part_of`` of runs whose tensors are whole."""


class RngTracker:
    """Keys random numbers by seed, step, sample and layer; the executor sets ``step`` and ``samples`` per forward."""

    def __init__(self, seed: int = 0, step: int = 0, samples: Sequence[int] = range(0)) -> None:
        self.seed, self.step = seed, step
        self.samples = samples
        self.layers: set[str] = set()
        self.part_of: PartOf = _of_whole  # which part of a whole a tensor is, where models run on parts
        self.draw: Callable[..., Tensor] | None = None  # set by key_draws: a draw by its key, without counting it

    @property
    def samples(self) -> Sequence[int]:
        """The global-batch indices of this microbatch's samples; setting them starts a forward."""
        return self._samples

    @samples.setter
    def samples(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._calls: Counter[str] = Counter()  # of each layer, in this forward
        self._first: dict[str, int] = {}  # the number of each layer's first call by this rank
        self._backward = _current_graph_task_id()  # autograd's backward that runs now, -1 for none

    def call(self, layer: str) -> str:
        """Returns the key for the dropout mask of one call of a layer: each call in a forward gets its own.

        Raises: as :meth:`count`.
        """
        number = self.count(layer)
        return f"{layer}#{number}" if number else layer

    def count(self, layer: str) -> int:
        """Returns the number of one call of a layer in this forward, and counts the call.

        A call from inside a backward, without a restored snapshot, repeats the forward's call, as under
        ``torch.utils.checkpoint``. Raises: PlanError: the layer was called several times in the forward.
        """
        number = self._calls[layer]
        if self._in_unrestored_backward() and layer in self._first:
            if number > self._first[layer] + 1:
                raise PlanError(
                    f"which of its calls dropout '{layer}' repeats in the backward cannot be known",
                    given=f"{number - self._first[layer]} calls in one forward, and one more by torch.utils.checkpoint",
                    allowed="inside torch.utils.checkpoint, dropout that is called once in a forward",
                    fix="write recompute:full or recompute:PATTERN in the layout, in place of torch.utils.checkpoint",
                )
            number = self._first[layer]
        else:
            self._first.setdefault(layer, number)
            self._calls[layer] += 1
        return number

    def _in_unrestored_backward(self) -> bool:
        """Whether a backward is running, and no snapshot was restored in it."""
        return _current_graph_task_id() != self._backward

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the tracker's state, so that a recomputed forward drops equal elements."""
        step, samples, calls, first = self.step, self._samples, Counter(self._calls), dict(self._first)
        repeats, backward = self._in_unrestored_backward(), self._backward

        def restore() -> None:
            self.step, self._samples, self._calls, self._first = step, samples, Counter(calls), dict(first)
            # a recomputation counts its calls as the forward did, though it runs inside a backward
            self._backward = backward if repeats else _current_graph_task_id()

        return restore

    def repeat(self, layer: str, times: int) -> None:
        """Sets the count of calls of a layer, and of layers inside it, to that of another rank in this forward."""
        for name in (layer, *(each for each in self.layers if each.startswith(f"{layer}."))):
            self._calls[name] = times

    def keys(self, layer: str, samples: Sequence[int] | None = None) -> list[tuple[int, int]]:
        """Returns the random key, two 32-bit words, of each sample: of the microbatch's unless ``samples`` is given."""
        samples = self.samples if samples is None else samples
        start = hashlib.blake2b(f"{self.seed}/{self.step}/{layer}".encode(), digest_size=8).digest()
        mixed = [_mix64(int.from_bytes(start, "little") + sample * 0x9E3779B97F4A7C15) for sample in samples]
        return [(word & 0xFFFFFFFF, word >> 32) for word in mixed]


def _mix64(word: int) -> int:
    """Mixes a 64-bit word: a bijection that spreads each bit over all (Stafford's mix 13)."""
    mask = 2**64 - 1
    word &= mask
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return word ^ (word >> 31)


def _mix32_(x: Tensor) -> Tensor:
    """Mixes 32-bit words in place, a bijection that spreads each bit over all. int32 wraps; ``&`` clears the sign."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def dropout_mask(
    rng: RngTracker,
    layer: str,
    shape: Sequence[int],
    cuts: Sequence[DimSlice],
    p: float,
    samples: Sequence[int] | None = None,
) -> Tensor:
    """Returns this rank's slice of a dropout mask, True where dropout of probability ``p`` keeps the element.

    Shapes: ``shape`` is this rank's (samples, ...); each of ``cuts`` gives the elements that it holds of a dim, and
        ``samples`` the rows, where they are not the microbatch's.

    >>> whole = dropout_mask(RngTracker(seed=1, samples=range(2)), "drop", (2, 6), (), 0.5)
    >>> right = dropout_mask(RngTracker(seed=1, samples=range(2)), "drop", (2, 2), (DimSlice(1, 6, ((4, 6),)),), 0.5)
    >>> torch.equal(whole[:, 4:], right)
    True
    """
    # an element's index within its sample is hashed with the two words of the sample's key
    held = {cut.dim % len(shape): cut for cut in cuts}
    place = torch.zeros((1,) * len(shape), dtype=torch.int64)
    stride = 1
    for dim in range(len(shape) - 1, 0, -1):  # row-major index in the whole tensor, of the elements held here
        ranges = held[dim].ranges if dim in held else ((0, shape[dim]),)
        index = torch.cat([torch.arange(start, stop) for start, stop in ranges])
        place = place + (index * stride).view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= held[dim].size if dim in held else shape[dim]
    keys = torch.tensor(rng.keys(layer, samples), dtype=torch.int64).to(torch.int32).view(shape[0], 2)
    first, second = (keys[:, i].view(-1, *(1,) * (len(shape) - 1)) for i in (0, 1))
    return hashed(place, first, second) >= round(p * 2**24)


def hashed(place: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Returns 24 random bits for each place: its index within its sample, and the two words of the sample's key."""
    words = _mix32_(place.to(torch.int32) ^ first)
    return _mix32_(words.add_(second)).bitwise_and_(0xFFFFFF)


@dataclass(frozen=True)
class KeyedDropout:
    """Dropout of one layer with masks from ``rng``; ``cuts`` are the slices of the activation that this rank has.

    ``rows`` gives the samples, by default the microbatch's; ``tokens`` the cuts of a tensor of one shape, where they
    depend on the length of its sequences. The samples are in ``dim``, 0 or 1; masks are made with them in dim 0.
    """

    rng: RngTracker
    layer: str
    cuts: tuple[DimSlice, ...] = ()
    rows: Callable[[], Sequence[int]] | None = None
    tokens: Callable[[Sequence[int]], tuple[DimSlice, ...]] | None = None
    dim: int = 0

    def __call__(self, input: Tensor, p: float) -> Tensor:
        """Returns the input with elements dropped. Raises PlanError unless its samples are in ``dim``."""
        samples = self.rng.samples if self.rows is None else self.rows()
        if input.dim() <= self.dim or input.shape[self.dim] != len(samples):
            raise PlanError(
                f"dropout '{self.layer}' does not get one row for each sample",
                given=f"a tensor of shape {list(input.shape)} for {len(samples)} samples",
                allowed="activations whose dim 0 is the samples; inside torch's transformer layers dim 1, too",
                fix="apply dropout after the samples are in dim 0",
            )
        shape = input.transpose(0, self.dim).shape
        cuts = self.cuts if self.tokens is None else (*self.cuts, *self.tokens(shape))
        part = self.rng.part_of(input) if self.dim == 0 else None
        if part is not None:
            cuts = (*cuts, *part[0])
        keep = dropout_mask(self.rng, self.rng.call(self.layer), shape, cuts, p, samples).transpose(0, self.dim)
        scale = 1 / (1 - p) if p < 1 else 0.0
        keep = keep.to(input.device).to(input.dtype)
        if part is not None:
            part[1](keep)
        return input * (keep * scale)


def _dropout(module: nn.Dropout, drop: KeyedDropout, input: Tensor) -> Tensor:
    return drop(input, module.p) if module.training and module.p > 0 else input


def drop_out_slice(module: nn.Dropout, input: Tensor, cut: DimSlice) -> Tensor:
    """Applies a dropout module, keyed by :func:`key_dropout`, to a slice of its input that is known only at the call.

    >>> model, rng = nn.Dropout(0.5), RngTracker(seed=1, samples=range(2))
    >>> key_dropout(model, rng)
    >>> whole = model(torch.ones(2, 6))
    >>> rng.samples = range(2)
    >>> torch.equal(drop_out_slice(model, torch.ones(2, 2), DimSlice(1, 6, ((4, 6),))), whole[:, 4:])
    True
    """
    if not module.training:
        return input
    drop: KeyedDropout = module.__dict__["_keyed_dropout"]
    return _dropout(module, replace(drop, cuts=(*drop.cuts, cut)), input)


def _keyed_multihead(module: nn.MultiheadAttention, drop: KeyedDropout) -> Callable[..., Any]:
    """The module's own forward, torch's code, with keyed functions in place of those that drop."""

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
        has_torch_function=lambda _: False,  # else a TorchFunctionMode would be passed torch's own function
    )
    names = SimpleNamespace(**{**vars(functional), "multi_head_attention_forward": attention})
    return partial(with_names(nn.MultiheadAttention.forward, F=names), module)


def with_names(function: Any, **names: Any) -> FunctionType:
    """Returns a copy of a function in which the given global names have other values.

    >>> def count(things):
    ...     return len(things)
    >>> with_names(count, len=sum)([1, 2]), count([1, 2])
    (3, 2)
    """
    code = function.__code__
    assert names.keys() <= {*code.co_names}, f"this torch's {function.__name__} uses other names"
    copied = FunctionType(code, {**function.__globals__, **names}, None, function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def keyed_dropout_of(module: nn.MultiheadAttention) -> Callable[[Tensor], Tensor] | None:
    """Returns the current dropout of a module's attention weights, keyed by :func:`key_dropout`; None without one.

    >>> keyed_dropout_of(nn.MultiheadAttention(4, 2)) is None
    True
    """
    drop: KeyedDropout | None = module.__dict__.get("_keyed_dropout")
    if drop is None or not module.training:
        return None
    return lambda weights_BNTS: drop(weights_BNTS, module.dropout)


def key_dropout(
    model: nn.Module,
    rng: RngTracker,
    cuts: Mapping[str, tuple[DimSlice, ...]] | None = None,
    rows: Mapping[str, Callable[[], Sequence[int]]] | None = None,
    tokens: Mapping[str, Callable[[Sequence[int]], tuple[DimSlice, ...]]] | None = None,
    but: Collection[str] = (),
) -> None:
    """Makes every ``nn.Dropout`` of ``model``, and the dropout of attention weights, compute its masks from ``rng``.

    By layer name: ``cuts`` gives the elements that a layer sees, ``rows`` the samples, where they are not the
    microbatch's; ``tokens`` the tokens, for a tensor of a given shape. Layers in ``but`` are left as they are.

    >>> model, rng = nn.Sequential(nn.Dropout(0.5)), RngTracker(seed=3, samples=range(1))
    >>> key_dropout(model, rng)
    >>> first, again = model(torch.ones(1, 8)), model(torch.ones(1, 8))
    >>> rng.samples = range(1)  # a new forward
    >>> torch.equal(model(torch.ones(1, 8)), first), torch.equal(again, first)
    (True, False)
    """
    second = frozenset(with_samples_in_dim_1(model))
    for name, module in model.named_modules():
        rng.layers.add(name)
        own_rows, own_tokens = (rows or {}).get(name), (tokens or {}).get(name)
        drop = KeyedDropout(rng, name, (cuts or {}).get(name, ()), own_rows, own_tokens, dim=int(name in second))
        if type(module) is nn.MultiheadAttention and "forward" not in vars(module):
            if module.dropout > 0:
                _replace(module, drop, _keyed_multihead(module, drop))
            continue
        if type(module) in KEYED and name not in but:
            _replace(module, drop, partial(_dropout, module, drop))


def _replace(module: nn.Module, drop: KeyedDropout, forward: Forward) -> None:
    """Replaces a module's forward by one that drops with masks from ``drop``."""
    set_forward(module, Rung.DROPOUT, "masks from the seed, the step and the sample", by="core", forward=forward)
    module.__dict__["_keyed_dropout"] = drop


def with_samples_in_dim_1(model: nn.Module) -> Iterator[str]:
    """Yields the dropouts inside torch's transformer layers that are not ``batch_first``."""
    for path, layer in model.named_modules():
        if type(layer) in TRANSFORMER_LAYERS and not getattr(layer.self_attn, "batch_first", True):
            yield from (f"{path}.{own}".lstrip(".") for own, child in layer.named_children() if type(child) in KEYED)


@contextmanager
def without_values() -> Iterator[None]:
    """A context in which models are built on ``torch.device("meta")``, and no initial values are drawn.

    Modules remember how their constructors would have filled them, so that a run starts from values like these.

    >>> with without_values():
    ...     layer = nn.Embedding(10**9, 4096)
    >>> layer.weight.device.type
    'meta'
    """
    with torch.device("meta"), ModuleRecorder():
        yield
