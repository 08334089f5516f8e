"""Applies dropout by masks that are hashed from keys, so that they are the same under every layout.

Whether an element is dropped depends on the key that ``RngTracker`` gives a layer's call and on the element's index in
the whole tensor. A rank that holds a slice of a tensor computes that slice of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.attention_scores import attend_dropping
from shardwright.element_hash import random_bits
from shardwright.errors import PlanError
from shardwright.forward_stack import Forward, Rung, set_forward
from shardwright.function_copies import with_names
from shardwright.rng import DimSlice, RngTracker, held_of, least_kept, sample_indices

KEYED = (nn.Dropout,)
KEYED_DROPOUT = "_keyed_dropout"
"""The attribute under which a module stores its :class:`KeyedDropout`."""
TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


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

    Call it with a tensor and a probability. ``layer`` is the name of the layer, whose calls :meth:`factors` counts.
    ``cuts`` are the slices that this rank holds of the layer's input. ``rows()`` returns the indices of the samples, by
    default ``rng.samples``. ``tokens(shape)`` returns further cuts, for inputs of that shape whose sequences are cut.
    ``dim``, 0 or 1, is the dim of the samples. ``folds`` are pairs (outside, inside): dim 0 may then have outside *
    samples * inside rows. ``traced`` replaces :meth:`factors` in code that ``torch.compile`` traces.
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
            recomputation of a call that cannot be found (:meth:`RngTracker.count`).
        """
        samples = self.rng.samples if self.rows is None else self.rows()
        outside = self._outside(input, samples)
        shard = self.rng.shard_of(input) if self.dim == 0 else None
        cuts = (*self.cuts, *(() if shard is None else shard[0]))
        if outside is None:
            shape = input.transpose(0, self.dim).shape
            cuts = (*cuts, *(() if self.tokens is None else self.tokens(shape)))
        else:  # with one more dim, for the rows of a sample
            shape = torch.Size((len(samples), len(input) // len(samples), *input.shape[1:]))
            cuts = tuple(replace(cut, dim=cut.dim + (cut.dim > 0)) for cut in cuts)
        keep = dropout_mask(self.rng, self.rng.call(self.layer), shape, cuts, p, samples, input.device)
        if outside is None:
            keep = keep.transpose(0, self.dim)
        else:
            keep = keep.unflatten(1, (outside, -1)).transpose(0, 1).flatten(0, 2)
        factors = dropout_factors(keep, p, input.dtype)
        if shard is not None:
            shard[1](factors)
        return factors

    def _outside(self, input: Tensor, samples: Sequence[int]) -> int | None:
        """Returns the size of ``outside`` if dim 0 of the input is (outside, samples, inside), a pair of ``folds``.

        Such an input has several rows for each sample, for example the windows of its sequence. Returns None for an
        input with one row for each sample.
        """
        count = len(samples)
        if self.folds and samples and len(input) != count:
            group_counts = [outside for outside, inside in self.folds if outside * count * inside == len(input)]
            if len(group_counts) != 1:  # no pair of folds fits, or several do: which rows are of a sample is not known
                numbers = " or ".join(sorted(f"{outside * inside}" for outside, inside in self.folds))
                raise PlanError(
                    f"dropout '{self.layer}' does not get the rows for each sample that the example has",
                    given=f"{len(input)} rows for {count} samples",
                    allowed=f"{numbers} rows for each sample, in one order" if numbers else "one row for each sample",
                    fix="give parallelize(..., example=inputs) the inputs of such a batch, or call layers of their own "
                    "on rows in different orders",
                )
            return group_counts[0]
        if input.dim() <= self.dim or input.shape[self.dim] != count:
            raise PlanError(
                f"dropout '{self.layer}' does not get one row for each sample",
                given=f"a tensor of shape {list(input.shape)} for {count} samples",
                allowed="activations whose dim 0 is the samples; inside torch's transformer layers dim 1, too; other "
                "dims where a record of the forward says where the samples are",
                fix=self.rng.fix_for_samples(
                    "write sw.samples_in(tensor, 1) for a batch of (time, samples), give parallelize(..., "
                    "example=inputs), by which the forward is recorded, or apply dropout after the samples are in dim "
                    "0; or, where run.model is called by hand, write run.step(batch) to train or run.predict(inputs)"
                ),
            )
        return None


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
        has_torch_function=lambda _: False,  # if True, torch would pass its own function to a TorchFunctionMode
    )
    names = SimpleNamespace(**{**vars(functional), "multi_head_attention_forward": attention})
    return partial(with_names(nn.MultiheadAttention.forward, F=names), module)


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
    """Replaces the forward of a dropout module by ``forward``, which drops the elements that ``drop`` says."""
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
