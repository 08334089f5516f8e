"""The random numbers of a model's own code: what they depend on, how they are distributed; they equal torch's."""

from __future__ import annotations

import copy
import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from tests.contract.test_draws import HEADS, TOKENS, Language
from torch import nn
from torch.nn import functional

from shardwright.analysis.calls.draw_calls import draw_of
from shardwright.analysis.model_graph import ModelGraph
from shardwright.analysis.random_numbers.draws import FIRST, Draws, SamplePlace
from shardwright.analysis.random_numbers.other_generators import other_generators
from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.forward_stack import Rung, stack_of
from shardwright.parallelize import parallelize
from shardwright.rng import RngTracker
from shardwright.runtime import keyed_numbers
from shardwright.runtime.keyed_draws import key_draws
from shardwright.runtime.keyed_numbers import KeyedNumbers
from shardwright.verify import verify

ALMOST_NONE = 1e-9
"""A probability that drops nothing of a small tensor: its threshold is 4 of 2**32."""


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


def drawn(function, *args, seed=0, step=0, samples=None, draws=None):
    model, rng = Calls(function), RngTracker(seed, step, range(len(args[0])) if samples is None else samples)
    key_draws(model, rng, draws)
    return model(*args)


def numbers(shape=(), samples=range(64), place=FIRST):
    return KeyedNumbers(RngTracker(3, samples=samples), "draw", place, samples, torch.device("cpu"))


# ---- what they depend on


@pytest.mark.parametrize("change", [{"seed": 1}, {"step": 1}, {"samples": range(8, 16)}])
def test_numbers_depend_on_seed_step_and_sample(change):
    x = torch.ones(8, 64)
    assert not (drawn(torch.rand_like, x) == drawn(torch.rand_like, x, **change)).any()


def test_each_draw_of_a_call_and_each_call_have_their_own_numbers():
    model, rng = Calls(lambda x: (torch.rand_like(x), torch.rand_like(x))), RngTracker(samples=range(4))
    key_draws(model, rng, None)
    found = [*model(torch.ones(4, 9)), *model(torch.ones(4, 9))]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_uniform_numbers_are_below_1_in_every_precision(dtype):
    found = numbers().uniform((64, 2000), dtype)
    assert found.dtype is dtype
    assert 0 <= found.min() < 0.01
    assert 0.98 < found.max() < 1


@pytest.mark.parametrize(
    ("place", "shape", "sample_of"),
    [
        (SamplePlace(0), (4, 6), lambda x, n: x[n]),
        (SamplePlace(1), (6, 4), lambda x, n: x[:, n]),
        (SamplePlace(0, inside=3), (12, 2), lambda x, n: x.view(4, 3, 2)[n]),
        (SamplePlace(0, outside=3), (12, 2), lambda x, n: x.view(3, 4, 2)[:, n]),
        (SamplePlace(1, outside=2, inside=3), (5, 24), lambda x, n: x.view(5, 2, 4, 3)[:, :, n]),
        (None, (5, 2), lambda x, n: x),
    ],
)
def test_a_samples_numbers_are_its_own_wherever_the_samples_are(place, shape, sample_of):
    whole = numbers(samples=range(4), place=place).words(shape)
    sizes = list(shape)
    if place is not None:
        sizes[place.dim] //= 4
    for sample in range(4):
        alone = numbers(samples=range(sample, sample + 1), place=place).words(sizes)
        assert torch.equal(sample_of(whole, sample).reshape(-1), alone.reshape(-1))


def test_another_number_of_tokens_than_the_examples_is_no_error():
    place = SamplePlace(0, inside=5)
    assert numbers(samples=range(4), place=place).words((28, 3)).shape == (28, 3)
    with pytest.raises(PlanError, match="not drawn for each sample"):
        numbers(samples=range(4), place=place).words((27, 3))


# ---- how they are distributed


def test_numbers_have_the_mean_and_the_spread_of_their_distribution():
    many = (64, 4000)
    for found, mean, spread in [
        (numbers().uniform(many, torch.float32), 1 / 2, 12**-0.5),
        (numbers().normal(many, torch.float32), 0, 1),
        (numbers().exponential(many), 1, 1),
        (numbers().integers(many, -2, 5).double(), 1, 2),
        (numbers().bernoulli(many, 0.3).double(), 0.3, 0.21**0.5),
        (numbers().bernoulli(many, torch.tensor(0.3)).double(), 0.3, 0.21**0.5),
        (functional.relu(numbers().normal(many, torch.float64)).square(), 1 / 2, 5**0.5 / 2),
    ]:
        assert abs(found.mean() - mean) < 5 * spread / 64 / 4000**0.5 * 8
        assert abs(found.std() / spread - 1) < 0.02


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_picks_by_weight_and_without_replacement_none_twice(replacement):
    weights = torch.tensor([4.0, 0.0, 3.0, 2.0, 1.0]).expand(20000, 5)
    found = drawn(lambda x: torch.multinomial(x, 2, replacement), weights)
    first = functional.one_hot(found[:, 0], 5).double().mean(0)
    assert torch.allclose(first, weights[0].double() / 10, atol=0.015)
    assert (found[:, 0] == found[:, 1]).any() == replacement


def test_a_drawn_permutation_is_one():
    found = drawn(lambda x: torch.randperm(50), torch.ones(1), draws=Draws({("", 0, 0): None}))
    assert sorted(found.tolist()) == list(range(50)) != found.tolist()


def test_alpha_dropout_keeps_mean_and_variance():
    found = drawn(nn.AlphaDropout(0.3), torch.randn(64, 4000))
    assert abs(found.mean()) < 0.02
    assert abs(found.var() - 1) < 0.05


@pytest.mark.parametrize(("kind", "shape"), [(nn.Dropout1d, (8, 50, 7)), (nn.Dropout2d, (8, 50, 3, 3))])
def test_dropout_of_channels_drops_whole_channels(kind, shape):
    found = drawn(kind(0.5), torch.ones(shape)).flatten(2)
    assert (found == found[..., :1]).all()
    assert 0 < (found == 0).double().mean() < 1


# ---- where nothing is dropped they are torch's


def attention(q, k, v, mask=None, **named):
    return functional.scaled_dot_product_attention(q, k, v, mask, **named)


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.randn(5, 5)},
        {"attn_mask": torch.rand(5, 5) < 0.7},
        {"enable_gqa": True},
    ],
    ids=lambda named: "-".join(named),
)
def test_attention_that_drops_nothing_equals_torchs(named):
    heads = 2 if "enable_gqa" in named else 4
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, heads, 5, 8), torch.randn(3, heads, 5, 8)
    expected = functional.scaled_dot_product_attention(q, k, v, **named)
    found = drawn(lambda *qkv: functional.scaled_dot_product_attention(*qkv, dropout_p=ALMOST_NONE, **named), q, k, v)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "batch_first": True}, {"bias": False}], ids=str)
def test_recurrent_layers_that_drop_nothing_equal_torchs(kind, options):
    layers, x = kind(4, 6, num_layers=3, **options), torch.randn(5, 5, 4)
    expected, ends = layers(x)
    layers.dropout = ALMOST_NONE
    found, found_ends = drawn(layers, x)
    assert torch.allclose(found, expected, atol=1e-6)
    for a, b in zip(*(end if isinstance(end, tuple) else (end,) for end in (found_ends, ends)), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_dropout_between_recurrent_layers_needs_padded_sequences():
    layers = nn.LSTM(4, 6, num_layers=2, dropout=0.5)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
    with pytest.raises(PlanError, match="needs padded sequences"):
        drawn(lambda _: layers(packed), torch.ones(2))


@pytest.mark.parametrize(("num_layers", "dropout", "training"), [(2, 0.5, False), (2, 0.0, True), (1, 0.0, True)])
def test_recurrent_layers_that_draw_nothing_take_packed_sequences(num_layers, dropout, training):
    layers = nn.LSTM(4, 6, num_layers=num_layers, dropout=dropout).train(training)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor([5, 3]))
    expected = layers(packed)[0].data
    assert torch.equal(drawn(lambda _: layers(packed)[0].data, torch.ones(2)), expected)


@pytest.mark.parametrize(
    ("args", "named", "expected"),
    [
        ((7, (2, 3)), {}, (0, 7, (2, 3))),
        ((2, 7, (2, 3)), {}, (2, 7, (2, 3))),
        ((7,), {"size": (2,)}, (0, 7, (2,))),
        ((2,), {"high": 7, "size": (2,)}, (2, 7, (2,))),
        ((), {"high": 7, "size": (2,)}, (0, 7, (2,))),
        ((), {"low": 1, "high": 7, "size": (2,)}, (1, 7, (2,))),
    ],
)
def test_randint_takes_its_range_as_torchs_does(args, named, expected):
    call = draw_of(torch.randint, args, named)
    assert (call["low"], call["high"], call.size) == expected


# ---- models without an example, models without draws


def losses(model, line, count, example):
    def work(world):
        run = parallelize(model, line, world, example=example)
        x = torch.arange(12.0).view(6, 2)
        return [run.step(batch).item() for batch in run.shard([(x, torch.zeros(6, dtype=torch.int64))] * 2)]

    return launch(work, count, ranks="threads")[0]


def test_without_an_example_samples_are_in_dim_0_or_the_draw_is_refused():
    layer = nn.Linear(2, 4)
    first, second = nn.Sequential(layer, Calls(functional.dropout)), Calls(lambda x: functional.dropout(layer(x).T).T)
    second.layer = layer
    assert losses(first, "dp2", 2, None) == pytest.approx(losses(first, "single", 1, None))
    assert losses(second, "dp2", 2, torch.ones(6, 2)) == pytest.approx(losses(second, "single", 1, torch.ones(6, 2)))
    with pytest.raises(PlanError, match="draws random numbers otherwise than for each sample in dim 0"):
        losses(second, "dp2", 2, None)


def test_a_copy_of_a_model_that_draws_runs_its_own_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.AlphaDropout(0.5))
    key_draws(model, RngTracker(samples=range(3)), None)
    other = copy.deepcopy(model)
    assert other[1].forward.module is other[1]
    assert torch.equal(other(torch.ones(3, 2)), model(torch.ones(3, 2)))


def test_modules_that_draw_nothing_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Sequential(nn.Linear(2, 2), Calls(functional.dropout)))
    draws = ModelGraph(model, torch.ones(3, 2)).draws
    key_draws(model, RngTracker(samples=range(3)), draws)
    drawing = [p for p, module in model.named_modules() if any(w.rung is Rung.DRAWS for w in stack_of(module).wrappers)]
    assert drawing == ["2.1"]


def test_a_draw_that_the_example_did_not_make_is_refused_where_no_module_draws():
    class Sometimes(nn.Linear):
        def forward(self, x):
            return functional.dropout(super().forward(x)) if x.shape[1:] == (2,) and len(x) == 3 else super().forward(x)

    with pytest.raises(PlanError, match="'dropout' would depend on the layout"):
        losses(Sometimes(2, 3), "dp2", 2, torch.ones(8, 2))


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2 mb2"])
def test_a_draw_in_a_loss_is_refused_with_where_to_draw(line):
    def noisy(output, targets):
        return (output - torch.randn_like(output)).square().sum(), output.numel()

    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    with pytest.raises(PlanError, match=r"'randn_like' would depend on the layout") as failure:
        verify(model, line, [(torch.ones(8, 2), torch.ones(8, 2))], loss=noisy)
    assert "a call of it in the loss" in str(failure.value)
    assert "draw them in the forward" in str(failure.value)


def test_ranks_on_parts_hash_their_own_elements_only(monkeypatch):
    def sizes(line):
        found = set()

        def noting(*args):
            bits = random_bits(*args)
            found.add(bits[0].numel())
            return bits

        monkeypatch.setattr(keyed_numbers, "random_bits", noting)
        run_of_heads(line)
        return found

    random_bits, weights = keyed_numbers.random_bits, HEADS * TOKENS * TOKENS
    assert weights in sizes("single")
    on_shards = sizes("tp2")
    assert weights // 2 in on_shards
    assert weights not in on_shards


def run_of_heads(line):
    tokens, model = torch.ones(6, TOKENS, dtype=torch.int64), Language("heads")

    def work(world):
        run = parallelize(model, line, world, example=tokens)
        return [run.step(batch).item() for batch in run.shard([(tokens, tokens)])]

    launch(work, 2 if line == "tp2" else 1, ranks="threads")


def test_the_generators_of_python_and_numpy_are_restored_after_a_forward_that_fails():
    state, numpys = random.getstate(), np.random.get_state()[1].tolist()
    with suppress(ZeroDivisionError), other_generators() as found:
        random.random()
        np.random.random()
        raise ZeroDivisionError
    assert list(found) == ["Python's random", "numpy.random"]
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpys


class Rotates(nn.Module):
    """Turns its input by random numbers, or by those that it is given, and drops elements."""

    def forward(self, x, turn=None):
        turn = torch.randn(4, dtype=x.dtype) if turn is None else turn
        return functional.dropout(x * turn, 0.5), turn


class _Again(torch.autograd.Function):
    """Keeps the random numbers of the forward, and runs the rest again in the backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, x, inner):
        y, turn = inner(x)
        ctx.inner = inner
        ctx.save_for_backward(x, turn)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, turn = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            ctx.inner(x, turn)[0].backward(dy)
        return x.grad, None


class Turned(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.layer, self.inner = nn.Linear(4, 4).double(), Rotates()

    def forward(self, x):
        return _Again.apply(self.layer(x), self.inner) if self.again else self.inner(self.layer(x))[0]


def test_a_backward_that_keeps_some_draws_of_the_forward_repeats_the_others():
    torch.manual_seed(0)
    plain, x = Turned(again=False), torch.randn(8, 4, dtype=torch.float64)
    gradients = []
    for again in (False, True):
        model, rng = copy.deepcopy(plain), RngTracker(3, samples=range(8))
        model.again = again
        key_draws(model, rng, ModelGraph(plain, x).draws)
        restore = []
        for part in (range(3), range(3, 8)):  # two microbatches in flight
            rng.samples = part
            restore.append((model(x[part.start : part.stop]).square().sum(), rng.snapshot()))
        for loss, restored in restore:
            restored()
            loss.backward()
        gradients.append(model.layer.weight.grad)
    assert torch.equal(*gradients)
