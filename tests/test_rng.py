"""Dropout masks that do not depend on the layout, and that are random enough."""

from __future__ import annotations

import hashlib
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from shardwright import element_hash
from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.keyed_dropout import dropout_mask, key_dropout
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.rng import DimSlice, RngTracker
from shardwright.runtime.keyed_draws import key_draws

# ---- the hash once more, in numpy, from its published form


def word(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(words):
    """Stafford's mix 13, as in SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def mix32(first, second, columns):
    """Two rounds of xor-shift, in which the sign is shifted in, and multiply."""
    words = first ^ columns.astype(np.uint32)
    words ^= (words.view(np.int32) >> 16).view(np.uint32)
    words = words * np.uint32(0x7FEB352D) + second
    words ^= (words.view(np.int32) >> 15).view(np.uint32)
    return words * np.uint32(0x846CA68B)


def expected_mask(seed, step, samples, layer, shape, p):
    first, size = len(shape), 1
    while first and size < 256:  # the columns are the last dims that have 256 elements together, or all
        first -= 1
        size *= shape[first]
    key, outer = (
        word(f"{seed}/{step}") + word(layer),
        np.arange(np.prod(shape[:first], dtype=np.int64), dtype=np.uint64),
    )
    sample = np.array([(key + sample * 0x9E3779B97F4A7C15) % 2**64 for sample in samples], dtype=np.uint64)
    rows = mix64(sample[:, None, None] + (outer * np.uint64(0xBF58476D1CE4E5B9))[:, None])
    words = mix32((rows >> np.uint64(32)).astype(np.uint32), rows.astype(np.uint32), np.arange(size))
    return torch.from_numpy((words.astype(np.int64) + 2**31) % 2**32 >= round(p * 2**32)).view(len(samples), *shape)


def mask(shape, *, seed=0, step=0, samples=range(3), layer="drop", cuts=(), p=0.5):
    return dropout_mask(RngTracker(seed, step, samples), layer, (len(samples), *shape), cuts, p)


@given(
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    start=st.integers(0, 2**33),
    layer=st.text(max_size=8),
    shape=st.lists(st.integers(1, 5), max_size=3)
    | st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 40)),
    p=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
)
def test_masks_are_the_hash_of_each_elements_place(seed, step, start, layer, shape, p):
    samples = range(start, start + 3)
    found = dropout_mask(RngTracker(seed, step, samples), layer, (3, *shape), (), p)
    assert torch.equal(found, expected_mask(seed, step, samples, layer, tuple(shape), p))


# ---- any cut gives the whole's part


@st.composite
def slices(draw, size):
    """Disjoint ranges of a dim, in any order."""
    points = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=6)))
    ranges = [(a, b) for a, b in zip(points[::2], points[1::2], strict=False) if a < b]
    return tuple(draw(st.permutations(ranges))) or ((0, size),)


@pytest.mark.sampled(0)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
@settings(max_examples=150)
def test_any_slices_of_any_dims_equal_the_wholes_part(shape, data):
    sizes = {
        "FEWEST_COLUMNS": data.draw(st.sampled_from([1, 5, 256])),
        "BLOCK": data.draw(st.sampled_from([1, 7, 2**17])),
    }
    with patch.multiple(element_hash, **sizes):  # the columns are one dim, some or all; in one block or many
        check_any_slices(shape, data)


def check_any_slices(shape, data):
    samples = range(5, 12)
    first = data.draw(st.integers(0, 6))
    last = data.draw(st.integers(first + 1, 7))
    whole = mask(shape, samples=samples)
    part, held, cuts = whole[first:last], list(shape), []
    for dim, size in enumerate(shape, start=1):
        if data.draw(st.booleans()):
            ranges = data.draw(slices(size))
            named = dim if data.draw(st.booleans()) else dim - len(shape) - 1
            cuts.append(DimSlice(named, size, ranges))
            index = torch.cat([torch.arange(a, b) for a, b in ranges])
            part, held[dim - 1] = part.index_select(dim, index), len(index)
    found = mask(held, samples=samples[first:last], cuts=data.draw(st.permutations(cuts)))
    assert torch.equal(found, part)


def test_a_microbatch_without_samples_has_an_empty_mask():
    assert mask((4,), samples=range(7, 7)).shape == (0, 4)


# ---- what the masks depend on


def test_the_same_key_gives_the_same_mask():
    assert torch.equal(mask((64,), seed=4, step=2), mask((64,), seed=4, step=2))


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 1}, {"layer": "drop2"}, {"samples": range(3, 6)}])
def test_masks_depend_on_seed_step_layer_and_sample(change):
    agree = (mask((4096,)) == mask((4096,), **change)).double().mean().item()
    assert abs(agree - 0.5) < 0.02  # 4 standard deviations of 12288 coins


def test_seed_and_step_are_not_mixed_up():
    masks = [mask((64,), seed=a, step=b) for a, b in [(1, 12), (11, 2), (112, 0), (0, 112), (2, 11)]]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


# ---- randomness


@pytest.mark.parametrize("p", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p):
    kept = mask((256, 256), samples=range(8), p=p).double().mean().item()
    deviation = (p * (1 - p) / (8 * 256 * 256)) ** 0.5
    assert abs(kept - (1 - p)) < 5 * deviation


def test_nothing_is_dropped_at_0_and_everything_at_1():
    assert mask((100,), p=0.0).all()
    assert not mask((100,), p=1.0).any()


def correlation(a, b):
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return ((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt()).item()


def test_neighbouring_samples_steps_elements_and_rows_are_uncorrelated():
    whole = mask((128, 128), samples=range(8))
    later = mask((128, 128), samples=range(8), step=1)
    limit = 5 / (7 * 128 * 127) ** 0.5
    for one, other in [
        (whole[1:], whole[:-1]),
        (whole[:, 1:], whole[:, :-1]),
        (whole[:, :, 1:], whole[:, :, :-1]),
        (whole, later),
        (whole[1:], later[:-1]),
        (whole, mask((128, 128), samples=range(8), layer="drop1")),
        (whole, mask((128, 128), samples=range(8), seed=1)),
    ]:
        assert abs(correlation(one, other)) < limit


def test_runs_are_as_long_as_those_of_a_fair_coin():
    """Of 2**18 throws a share of 1/2**k of the runs has a length of k."""
    flat = mask((2**18,), samples=range(1)).flatten().int()
    changes = flat.diff().nonzero().flatten()
    lengths = changes.diff()
    for k in range(1, 8):
        share = (lengths == k).double().mean().item()
        deviation = (0.5**k * (1 - 0.5**k) / len(lengths)) ** 0.5
        assert abs(share - 0.5**k) < 5 * deviation


def test_every_column_of_many_samples_is_dropped_as_often():
    """A hash that mixed the sample badly would drop some element in every sample, or in none."""
    share = mask((512,), samples=range(2000)).double().mean(0)
    assert (share - 0.5).abs().max() < 6 * (0.25 / 2000) ** 0.5


# ---- the layer


def test_keyed_dropout_scales_what_it_keeps_and_its_gradient_alike():
    model, rng = nn.Sequential(nn.Dropout(0.25)), RngTracker(seed=3, samples=range(4))
    key_dropout(model, rng)
    x = torch.randn(4, 50, dtype=torch.float64).requires_grad_()
    y = model(x)
    kept = dropout_mask(rng, "0", (4, 50), (), 0.25)
    assert torch.equal(y == 0, ~kept)
    torch.testing.assert_close(y, x * kept / 0.75, rtol=1e-15, atol=0)
    y.sum().backward()
    torch.testing.assert_close(x.grad, kept / torch.tensor(0.75, dtype=torch.float64), rtol=1e-15, atol=0)


def test_keyed_dropout_of_probability_1_gives_zeros_as_torch_does():
    model = nn.Sequential(nn.Dropout(1.0))
    key_dropout(model, RngTracker(samples=range(2)))
    x = torch.ones(2, 3, requires_grad=True)
    model(x).sum().backward()
    assert model(x).eq(0).all()
    assert x.grad.eq(0).all()


def test_keyed_dropout_keeps_everything_when_it_evaluates():
    model = nn.Sequential(nn.Dropout(0.9))
    key_dropout(model, RngTracker())
    x = torch.randn(3, 5)
    assert torch.equal(model.eval()(x), x)


def test_keyed_dropout_takes_its_input_by_torchs_name():
    model, x = nn.Sequential(nn.Dropout(0.5)), torch.ones(2, 50)
    rng = RngTracker(samples=range(2))
    key_dropout(model, rng)
    first = model[0](input=x)
    rng.samples = range(2)
    assert torch.equal(first, model[0](x))


def test_every_layer_draws_its_own_mask_and_a_later_step_another():
    model, rng = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)), RngTracker(samples=range(2))
    key_dropout(model, rng)
    x = torch.ones(2, 200)
    first, second = model[0](x), model[1](x)
    assert not torch.equal(first, second)
    again = model[0](x)
    assert not torch.equal(again, first)  # a second call in the same forward
    rng.samples = range(2)  # a new forward
    assert torch.equal(model[0](x), first)
    assert torch.equal(model[0](x), again)
    rng.samples, rng.step = range(2), 1
    assert not torch.equal(model[0](x), first)


def test_dropout_of_each_dtype_drops_the_same():
    model, rng = nn.Sequential(nn.Dropout(0.5)), RngTracker(samples=range(2))
    key_dropout(model, rng)
    found = []
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        rng.samples = range(2)
        found.append(model(torch.ones(2, 64, dtype=dtype)))
    assert [each.dtype for each in found] == [torch.float64, torch.float32, torch.bfloat16]
    assert all(torch.equal(each == 0, found[0] == 0) for each in found)


def test_dropout_refuses_activations_whose_rows_are_no_samples():
    model = nn.Sequential(nn.Dropout(0.5))
    key_dropout(model, RngTracker(samples=range(3)))
    with pytest.raises(PlanError, match="does not get one row for each sample"):
        model(torch.ones(4, 3))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_torchs_layers_drop_the_same_of_each_sample_whichever_dim_the_samples_are_in(kind):
    first, second = (kind(8, 2, 12, dropout=0.5, batch_first=batch_first) for batch_first in (True, False))
    second.load_state_dict(first.state_dict())
    x, memory = torch.randn(3, 3, 8), torch.randn(3, 2, 8)
    given = (x, memory) if kind is nn.TransformerDecoderLayer else (x,)
    for model in (first, second):
        key_dropout(model, RngTracker(seed=1, samples=range(3)))
    found = second(*(each.transpose(0, 1) for each in given)).transpose(0, 1)
    torch.testing.assert_close(found, first(*given))


def test_a_torch_layer_without_samples_refuses_to_drop():
    layer = nn.TransformerEncoderLayer(8, 2, 12)
    key_dropout(layer, RngTracker(samples=range(3)))
    with pytest.raises(PlanError, match=r"dropout 'dropout1' does not get one row for each sample(.|\n)*\[3, 8\]"):
        layer.dropout1(torch.randn(3, 8))


def test_a_compiled_layer_is_traced_whole_once_and_drops_the_same():
    model, rng = nn.Sequential(nn.Linear(300, 300), nn.Dropout(0.3)), RngTracker(seed=1)
    model.append(model[1])  # called twice
    key_dropout(model, rng)
    counter, x = CompileCounter(), torch.randn(4, 5, 300)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rng.step, rng.seed in [(0, 1), (1, 1), (2, 1), (2, 9)]:
        rng.samples = range(4)
        expected = model(x)
        rng.samples = range(4)
        assert torch.equal(compiled(x), expected)
    assert counter.frame_count == 1


def test_dropout_of_a_thread_computes_as_always_while_another_thread_compiles():
    rng = RngTracker(seed=1)
    expected = rng.words("drop")
    with torch.compiler._compile_session_context():  # torch's flag is one for all threads
        assert rng.words("drop") == expected
        assert not isinstance(rng.words("drop")[0], torch.Tensor)


# ---- calls that torch's own checkpointing recomputes


class _Again(nn.Module):
    """A block with dropout, which torch recomputes."""

    def __init__(self, reentrant):
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Tanh()), reentrant

    def forward(self, x):
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _gradients(reentrant, line, shared=False):
    torch.manual_seed(0)
    blocks, inputs = [_Again(reentrant) for _ in range(2)], torch.randn(6, 4, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(4, 4), blocks[0], blocks[0 if shared else 1]).double()

    def work(world):
        run = parallelize(model, line, world)
        run.step(next(run.shard([(inputs, torch.arange(6) % 4)])))
        return [p.grad for p in run.parameters.values() if p.grad is not None]

    return launch(work, Layout.parse(line), ranks="threads")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("line", ["dp2 mb2", "pp2/1f1b/cut:0,2 mb3"])
def test_a_recomputation_by_torch_drops_the_same(line, reentrant):
    torch.testing.assert_close(_gradients(reentrant, line), _gradients(None, line), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("line", ["dp2 mb2", "pp2/1f1b mb3"])
def test_each_of_several_calls_that_torch_recomputes_drops_the_same(line, reentrant):
    expected = _gradients(None, line, shared=True)
    torch.testing.assert_close(_gradients(reentrant, line, shared=True), expected, rtol=1e-12, atol=1e-12)


def test_dropout_of_several_calls_that_code_repeats_otherwise_is_refused_by_name():
    drop, rng = nn.Dropout(), RngTracker(samples=range(6))
    key_draws(nn.Sequential(drop), rng, None)
    x = torch.ones(6, 4, requires_grad=True)
    y = drop(drop(x)) * x
    y.register_hook(lambda _: drop(x))  # in a backward, and not by a checkpoint
    with pytest.raises(PlanError, match=r"dropout '0' repeats.*\n.*2 calls.*\n.*\n.*recompute:PATTERN"):
        y.sum().backward()
