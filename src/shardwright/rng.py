"""Makes dropout independent of the layout, by masks that are computed from keys instead of drawn from a stream.

Whether an element is dropped depends on the seed, the step, the sample, the layer, the number of the layer's call in
the forward, and the element's index in the whole tensor; not on which rank computes it, nor on how the batch is cut
into microbatches. A mask is a hash of all these, so a rank that holds a slice of a tensor computes that slice of the
mask. ``RngTracker`` keeps the seed, step, samples and calls. ``without_values``, beside that, builds models without
drawing their initial values.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import FunctionType, MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.nn import functional

from shardwright.attention_scores import attend_dropping
from shardwright.element_hash import HeldDim, random_bits
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, set_forward
from shardwright.initial_values import ModuleRecorder
from shardwright.row_numbers import equal_before

KEYED = (nn.Dropout,)
KEYED_DROPOUT = "_keyed_dropout"
"""The attribute under which a module stores its :class:`KeyedDropout`."""
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


@dataclass(frozen=True)
class DimSlice:
    """The elements that this rank holds of a sharded activation along ``dim``, whose whole size is ``size``.

    ``ranges`` are pairs (start, stop) of indices in the whole dim.
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]


ShardOf = Callable[[Tensor], tuple[tuple[DimSlice, ...], Callable[[Tensor], None]] | None]
"""A function that returns a tensor's slices of the whole, and a function that marks another tensor as the same part.

It returns None for a tensor that is whole.
"""


def _of_whole(_: Tensor) -> None:
    """Returns None: the ``shard_of`` of runs in which every tensor is whole."""


class RngTracker:
    """The state from which dropout masks are computed: seed, step, samples of the microbatch, and calls of each layer.

    The code that runs the steps sets ``step`` for each step, and ``samples`` for each forward. Equal states give equal
    numbers under every layout. ``layers`` are the names of the model's modules, for :meth:`repeat`.
    """

    def __init__(self, seed: int = 0, step: int = 0, samples: Sequence[int] = range(0)) -> None:
        self._seed, self.step = seed, step
        self.samples = samples
        self.layers: set[str] = set()
        self.unrecorded = ""  # what the model's code raised, for which its forward could not be recorded
        self.shard_of: ShardOf = _of_whole  # which shard of a whole a tensor is, where models run on shards
        self.draw: Callable[..., Tensor] | None = None  # set by key_draws: a draw by its key, without counting it
        self.forward_ended: Callable[[], None] | None = None  # set by key_draws: checks how often modules were called

    def fix_for_samples(self, otherwise: str) -> str:
        """Returns what to do where a draw does not have the samples in dim 0: ``otherwise``, if there is no record."""
        if not self.unrecorded:
            return otherwise
        return (
            "put the samples in dim 0 where random numbers are drawn; or let the forward run on tensors without "
            f"values, for which it could not be recorded: {self.unrecorded.splitlines()[0]}"
        )

    @property
    def seed(self) -> int:
        """The random seed of the run."""
        return self._seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._seed = seed
        self.step = self._step

    @property
    def step(self) -> int:
        """The number of the current optimizer step; random numbers differ from step to step."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        # a tensor, since torch.compile takes a number for a constant and would compile anew at each step
        self._moment = torch.tensor(_word(f"{self._seed}/{step}"), device="cpu")

    @property
    def samples(self) -> Sequence[int]:
        """The indices of this microbatch's samples in the global batch.

        Setting them starts a new forward, in which the calls of each layer are counted from 0.
        """
        return self._samples

    @samples.setter
    def samples(self, samples: Sequence[int]) -> None:
        self._samples = samples
        self._calls: Counter[str] = Counter()  # of each layer, in this forward
        self._first: dict[str, int] = {}  # the number of each layer's first call by this rank
        self._rows: dict[str, Tensor] = {}  # the numbers of the rows for which each layer has drawn in this forward
        self._backward = _current_graph_task_id()  # autograd's backward that runs now, -1 for none

    def call(self, layer: str) -> str:
        """Counts a call of a layer in this forward, and returns the key of the call's dropout mask, as text.

        The key is the layer's name and, after the first call, the call's number.

        Raises: PlanError: the call is a recomputation, and :meth:`count` cannot know of which call.
        """
        number = self.count(layer)
        return f"{layer}#{number}" if number else layer

    def count(self, layer: str) -> int:
        """Counts a call of a layer in this forward, and returns the call's number, from 0.

        A call from inside a backward in which no :meth:`snapshot` was restored is taken for a recomputation, as by
        ``torch.utils.checkpoint``: it is not counted, and gets the number of the layer's first call.

        Raises: PlanError: such a recomputation of a layer that was called several times in the forward, because it
            cannot be known which of these calls it repeats.
        """
        number = self._calls[layer]
        if self.repeats and layer in self._first:
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

    def num_calls(self, layer: str) -> int:
        """Returns how often a layer was called in this forward."""
        return self._calls[layer]

    def draws_before(self, layer: str, rows: Tensor) -> Tensor:
        """Returns how often a layer has drawn for each of ``rows`` in this forward already, and counts this draw too.

        Shapes: ``rows`` (..., 1) has the numbers of the rows (``row_numbers.py``); returns (count of rows,).

        >>> rng = RngTracker()
        >>> rng.draws_before("drop", torch.tensor([[7], [3], [7]])).tolist()
        [0, 0, 1]
        >>> rng.draws_before("drop", torch.tensor([[3], [5], [7]])).tolist()
        [1, 0, 2]
        """
        with torch._C.DisableTorchFunction():
            before = self._rows.get(layer, rows.new_empty(0))
            self._rows[layer] = drawn = torch.cat([before, rows.flatten()])
            return equal_before(drawn)[len(before) :]

    @property
    def repeats(self) -> bool:
        """Whether the user's code now runs a part of the forward again in a backward, as reentrant checkpointing does.

        A recomputation by the library restores a snapshot first, and does not count.
        """
        return not torch.compiler.is_dynamo_compiling() and _current_graph_task_id() != self._backward

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the tracker's step, samples and counts to what they are now.

        Activation checkpointing calls that function before it recomputes a forward, so that the same elements are
        dropped.
        """
        step, moment = self._step, self._moment
        samples, calls, first, rows = self._samples, Counter(self._calls), dict(self._first), dict(self._rows)
        repeats, backward = self.repeats, self._backward

        def restore() -> None:
            self._step, self._moment = step, moment
            self._samples, self._calls, self._first, self._rows = samples, Counter(calls), dict(first), dict(rows)
            # a recomputation counts its calls as the forward did, though it runs inside a backward
            self._backward = backward if repeats else _current_graph_task_id()

        return restore

    def repeat(self, layer: str, times: int) -> None:
        """Sets to ``times`` how often ``layer`` and the layers inside it count as called in this forward.

        A pipeline chunk uses it to count on from the calls that earlier chunks of the model made on other ranks.
        """
        for name in (layer, *(each for each in self.layers if each.startswith(f"{layer}."))):
            self._calls[name] = times

    def words(self, layer: str) -> tuple[int | Tensor, int]:
        """Returns the key of a layer's random numbers: a 64-bit hash of seed and step, and one of the layer's name.

        In code that ``torch.compile`` traces, the first is a tensor, so that a new step does not recompile the code.
        """
        return self._moment if torch.compiler.is_dynamo_compiling() else _word(f"{self.seed}/{self.step}"), _word(layer)


def _word(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


_word._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as assume_constant_result says, which imports much


def sample_indices(samples: Sequence[int], device: torch.device) -> Tensor:
    """Returns ``samples`` (indices) as an int64 tensor that is computed on ``device``, without a copy from the host.

    >>> sample_indices((0, 1, 2, 7, 4), torch.device("cpu"))
    tensor([0, 1, 2, 7, 4])
    """
    if isinstance(samples, range) and samples.step == 1:
        return torch.arange(samples.start, samples.stop, device=device)
    ends = [i for i in range(1, len(samples)) if samples[i] != samples[i - 1] + 1]
    runs = [(samples[a], samples[b - 1] + 1) for a, b in pairwise((0, *ends, len(samples))) if b]
    return HeldDim(runs, 0).indices(torch.empty(0, dtype=torch.int64, device=device))


def held_of(shape: Sequence[int], cuts: Sequence[DimSlice]) -> list[HeldDim]:
    """Returns, for each dim of a tensor with local ``shape``, the elements of the whole dim that this rank holds.

    These are given by the dim's entry in ``cuts``; a dim without one is held whole.
    """
    held = {cut.dim % len(shape): HeldDim(cut.ranges, cut.size) for cut in cuts}
    return [held.get(dim) or HeldDim(((0, size),), size) for dim, size in enumerate(shape)]


def least_kept(p: float) -> int:
    """Returns the smallest random int32 for which dropout of probability ``p`` keeps an element."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def dropout_mask(
    rng: RngTracker,
    layer: str,
    shape: Sequence[int],
    cuts: Sequence[DimSlice],
    p: float,
    samples: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Returns this rank's slice of a dropout mask, True where dropout of probability ``p`` keeps the element.

    ``layer`` is the layer's name, or the key of one of its calls (:meth:`RngTracker.call`). ``cuts`` give the elements
    that this rank holds of dims that are sharded. ``samples`` are the indices of the samples in the global batch, by
    default ``rng.samples``. The mask is made on ``device``, by default the CPU.

    Shapes: ``shape`` is that of this rank's slice, (samples, ...), and of the mask.

    >>> whole = dropout_mask(RngTracker(seed=1, samples=range(2)), "drop", (2, 6), (), 0.5)
    >>> right = dropout_mask(RngTracker(seed=1, samples=range(2)), "drop", (2, 2), (DimSlice(1, 6, ((4, 6),)),), 0.5)
    >>> torch.equal(whole[:, 4:], right)
    True
    """
    samples = rng.samples if samples is None else samples
    if not 0 < p < 1:
        return torch.full(tuple(shape), p <= 0, device=device)
    with torch._C.DisableTorchFunction():
        sample_N = sample_indices(samples, torch.device("cpu") if device is None else device)
        _, *dims = held_of(shape, cuts)
        return random_bits(rng.words(layer), sample_N, torch.zeros_like(sample_N), dims, least_kept(p))


def dropout_factors(keep: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """Returns the factors by which dropout of probability ``p`` multiplies elements: 1 / (1 - p) where kept, else 0.

    >>> dropout_factors(torch.tensor([True, False]), 0.5, torch.float32)
    tensor([2., 0.])
    """
    return keep.view(torch.int8).to(dtype).mul_(1 / (1 - p) if p < 1 else 0.0)  # int8 is converted in vectors


@dataclass
class KeyedDropout:
    """Dropout of one layer, whose masks depend on the state of ``rng`` and not on the layout of the run.

    Call it with a tensor and a probability. ``layer`` is the name of the layer, of which :meth:`factors` counts the
    calls. ``cuts`` are the slices that this rank holds of the layer's input. ``rows()`` returns the indices of the
    samples, by default ``rng.samples``. ``tokens(shape)`` returns further cuts, for inputs of that shape whose
    sequences are cut. ``dim``, 0 or 1, is the dim of the samples. ``folds`` are pairs (outside, inside): dim 0 may then
    have outside * samples * inside rows. ``traced`` replaces :meth:`factors` in code that ``torch.compile`` traces.
    """

    rng: RngTracker
    layer: str
    cuts: tuple[DimSlice, ...] = ()
    rows: Callable[[], Sequence[int]] | None = None
    tokens: Callable[[Sequence[int]], tuple[DimSlice, ...]] | None = None
    dim: int = 0
    folds: frozenset[tuple[int, int]] = frozenset()
    traced: Callable[[Tensor, float], Tensor] | None = None

    def __call__(self, input: Tensor, p: float) -> Tensor:
        """Returns ``input`` with dropout of probability ``p`` applied. Raises PlanError as :meth:`factors` does."""
        if self.traced is not None and torch.compiler.is_dynamo_compiling():
            return input * self.traced(input, p)
        return input * self.factors(input, p)

    def factors(self, input: Tensor, p: float) -> Tensor:
        """Returns the factors by which dropout multiplies ``input``: 0, or 1 / (1 - p). Counts one call of the layer.

        Shapes: the factors have the shape and dtype of ``input``.
        Raises: PlanError: dim ``dim`` of the input does not have one entry for each sample, or the call is a
            recomputation and it cannot be known of which call (:meth:`RngTracker.count`).
        """
        samples = self.rng.samples if self.rows is None else self.rows()
        if self.folds and samples and len(input) != len(samples):
            return self._of_folded(input, p, samples)
        if input.dim() <= self.dim or input.shape[self.dim] != len(samples):
            raise PlanError(
                f"dropout '{self.layer}' does not get one row for each sample",
                given=f"a tensor of shape {list(input.shape)} for {len(samples)} samples",
                allowed="activations whose dim 0 is the samples; inside torch's transformer layers dim 1, too; other "
                "dims where a record of the forward says where the samples are",
                fix=self.rng.fix_for_samples(
                    "give parallelize(..., example=inputs), by which the forward is recorded, or apply dropout after "
                    "the samples are in dim 0; or, where run.model is called by hand, write run.step(batch) to train "
                    "or run.predict(inputs)"
                ),
            )
        shape = input.transpose(0, self.dim).shape
        cuts = self.cuts if self.tokens is None else (*self.cuts, *self.tokens(shape))
        part = self.rng.shard_of(input) if self.dim == 0 else None
        if part is not None:
            cuts = (*cuts, *part[0])
        key = self.rng.call(self.layer)
        keep = dropout_mask(self.rng, key, shape, cuts, p, samples, input.device).transpose(0, self.dim)
        factors = dropout_factors(keep, p, input.dtype)
        if part is not None:
            part[1](factors)
        return factors

    def _of_folded(self, input: Tensor, p: float, samples: Sequence[int]) -> Tensor:
        """Returns the factors of an input with several rows for each sample, as windows of a sequence."""
        count = len(samples)
        found = [outside for outside, inside in self.folds if outside * count * inside == len(input)]
        if len(found) != 1:  # the order of the rows is not known: as many may be one sample's after the other, or not
            known = " or ".join(sorted(f"{outside * inside}" for outside, inside in self.folds))
            raise PlanError(
                f"dropout '{self.layer}' does not get the rows for each sample that the example has",
                given=f"{len(input)} rows for {count} samples",
                allowed=f"{known} rows for each sample, in one order" if known else "one row for each sample",
                fix="give parallelize(..., example=inputs) the inputs of such a batch, or call layers of their own on "
                "rows in different orders",
            )
        (outside,) = found
        shape = (count, len(input) // count, *input.shape[1:])
        part = self.rng.shard_of(input)
        cuts = [replace(each, dim=each.dim + (each.dim > 0)) for each in (*self.cuts, *(part[0] if part else ()))]
        keep = dropout_mask(self.rng, self.rng.call(self.layer), shape, tuple(cuts), p, samples, input.device)
        keep = keep.unflatten(1, (outside, -1)).transpose(0, 1).flatten(0, 2)
        factors = dropout_factors(keep, p, input.dtype)
        if part is not None:
            part[1](factors)
        return factors


def _dropout(module: nn.Dropout, drop: KeyedDropout, input: Tensor) -> Tensor:
    return drop(input, module.p) if module.training and module.p > 0 else input


def drop_out_slice(module: nn.Dropout, input: Tensor, cut: DimSlice) -> Tensor:
    """Returns ``input`` after a module's dropout, with the slice ``cut`` of the mask that the whole input would get.

    Use it where the slice that this rank holds is known only at the call. The module must have been set up by
    :func:`key_dropout`. In evaluation the input is returned unchanged.

    >>> model, rng = nn.Dropout(0.5), RngTracker(seed=1, samples=range(2))
    >>> key_dropout(model, rng)
    >>> whole = model(torch.ones(2, 6))
    >>> rng.samples = range(2)
    >>> torch.equal(drop_out_slice(model, torch.ones(2, 2), DimSlice(1, 6, ((4, 6),))), whole[:, 4:])
    True
    """
    if not module.training:
        return input
    drop: KeyedDropout = module.__dict__[KEYED_DROPOUT]
    return _dropout(module, replace(drop, cuts=(*drop.cuts, cut), traced=None), input)


def _keyed_multihead(module: nn.MultiheadAttention, drop: KeyedDropout) -> Callable[..., Any]:
    """Returns torch's forward of the module with its dropout replaced by ``drop``."""

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
    """Returns a copy of a function whose code sees other values for some global names: those in ``names``.

    The function itself is left alone. An assertion fails if its code does not use all of these names.

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
    """Returns the function that applies dropout to a module's attention weights, as :func:`key_dropout` set it up.

    The function takes and returns weights of shape (samples, heads, queries, keys). Returns None if it set up none for
    this module, or if the module is not in training.

    >>> keyed_dropout_of(nn.MultiheadAttention(4, 2)) is None
    True
    """
    drop: KeyedDropout | None = module.__dict__.get(KEYED_DROPOUT)
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
    folded: Mapping[str, frozenset[tuple[int, int]]] = MappingProxyType({}),
) -> None:
    """Makes every ``nn.Dropout`` and ``nn.MultiheadAttention`` of ``model`` compute its dropout masks from ``rng``.

    Their forwards are replaced in place. ``cuts``, ``rows`` and ``tokens`` map names of layers to the fields of their
    :class:`KeyedDropout`: the slices that this rank holds of a layer's input; the samples, if they are not
    ``rng.samples``; and further slices, for an input of a given shape. ``folded`` has the names of attention that gets
    several rows for each sample (``folds`` of :class:`KeyedDropout`). An ``nn.Dropout`` named in ``but`` stays as it
    is, and so do subclasses of the two and attention whose forward was replaced before.

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
                drop = replace(drop, folds=folded.get(name, frozenset()))
                _replace(module, drop, _keyed_multihead(module, drop))
            continue
        if type(module) in KEYED and name not in but:
            _replace(module, drop, partial(_dropout, module, drop))


def _replace(module: nn.Module, drop: KeyedDropout, forward: Forward) -> None:
    """Replaces a module's forward by one whose dropout masks are those of ``drop``."""
    set_forward(module, Rung.DROPOUT, "masks from the seed, the step and the sample", by="core", forward=forward)
    module.__dict__[KEYED_DROPOUT] = drop


def with_samples_in_dim_1(model: nn.Module) -> Iterator[str]:
    """Yields the names of the dropouts of ``model`` whose input has the samples in dim 1.

    These are the dropouts that belong directly to torch's transformer encoder and decoder layers without
    ``batch_first``.
    """
    for path, layer in model.named_modules():
        if type(layer) in TRANSFORMER_LAYERS and not getattr(layer.self_attn, "batch_first", True):
            yield from (f"{path}.{own}".lstrip(".") for own, child in layer.named_children() if type(child) in KEYED)


@contextmanager
def without_values() -> Iterator[None]:
    """Returns a context in which models are built on the meta device, so that no initial values are drawn or stored.

    Use it to build a model that is too large for one host. How the constructors would have filled the parameters is
    recorded, and a run draws such values when it starts, on each rank those of its shard alone.

    Raises: NoValuesError: a constructor needs values that are not known, such as random ones.

    >>> with without_values():
    ...     layer = nn.Embedding(10**9, 4096)
    >>> layer.weight.device.type
    'meta'
    """
    with torch.device("meta"), ModuleRecorder():
        yield
