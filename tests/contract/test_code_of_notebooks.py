"""Models as people write them in notebooks: what they hold and checkpoint, each equal to one device or refused."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from tests.contract.cases import Pictures, check_traffic
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.errors import LayoutError
from shardwright.models.losses import CrossEntropy
from shardwright.strategies.tensor_parallel.graph_cuts import graph_cuts

SAMPLES, TOKENS, WORDS, WIDTH, HEADS = 6, 5, 11, 16, 4


def tokens():
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randint(WORDS, (SAMPLES, TOKENS), generator=draw) for _ in range(2))


def rows(width=WIDTH):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, width, generator=draw), torch.randint(WORDS, (SAMPLES,), generator=draw)


def check_equal(model, line, batch):
    verdict = verify(model, line, [batch, batch], loss=CrossEntropy())
    assert verdict.equal, str(verdict)
    return verdict


class Recurrent(nn.Module):
    """An LSTM keeps its weights in a list as well, so they stay whole."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WORDS)

    def forward(self, x):
        out, _ = self.lstm(self.words(x))
        return self.down(self.up(out).relu())


class ZeroKeyBias(nn.Module):
    """A fused projection whose bias is joined of two parameters and a buffer."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.query, self.value = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("key", torch.zeros(WIDTH), persistent=False)

    def forward(self, x):
        bias = torch.cat((self.query, self.key, self.value))
        qkv = functional.linear(x, self.qkv.weight, bias).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v).contiguous()
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        assert x.shape[-1] == WIDTH
        return x + self.drop(self.down(functional.gelu(self.up(x))))


class Language(nn.Module):
    def __init__(self, make, num=2, call=lambda block, x: block(x)):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(make() for _ in range(num))
        self.head, self.call = nn.Linear(WIDTH, WORDS), call

    def forward(self, x):
        assert x.shape[1] <= TOKENS
        x = self.words(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


@pytest.mark.parametrize("line", ["tp2/sp", "tp2x2/2d", "pp2 mb2 tp2"])
def test_recurrent_layers_stay_whole_beside_layers_that_are_cut(line):
    torch.manual_seed(0)
    check_equal(Recurrent(), line, tokens())


def test_a_buffer_that_every_stage_may_read_is_cut_on_every_stage():
    torch.manual_seed(0)
    check_equal(Language(ZeroKeyBias), "pp2 mb2 tp2", tokens())


# ---- checkpoints and autograd functions


def checkpointed(block, x):
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def both(block, x, *, reentrant=False):
    return checkpoint(lambda x: block(x).tanh(), x, use_reentrant=reentrant)


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp2/1f1b mb2 dp2 tp2"])
@pytest.mark.parametrize("call", [checkpointed, reentrant])
def test_a_block_that_the_code_checkpoints_runs_again_on_its_own_stage(line, call):
    torch.manual_seed(0)
    check_equal(Language(Mlp, num=3, call=call), line, tokens())


@pytest.mark.parametrize("call", [both, partial(both, reentrant=True)])
def test_what_a_backward_runs_as_a_whole_is_not_cut_into_stages(call):
    with pytest.raises(LayoutError, match="runs code of Language as a whole, so it cannot be cut"):
        verify(Language(Mlp, call=call), "pp2 mb2", [tokens()], loss=CrossEntropy())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -dy


class Scored(torch.autograd.Function):
    """A softmax whose backward sums over its last dim."""

    @staticmethod
    def forward(ctx, x):
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return (dy - (dy * y).sum(-1, keepdim=True)) * y


class Steered(nn.Module):
    """A mixture of two MLPs by a score of its own, and a reversed gradient."""

    def __init__(self):
        super().__init__()
        self.score, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        scores = Scored.apply(self.score(x))
        return Reversed.apply(sum(each(x) * scores[..., n, None] for n, each in enumerate(self.experts)))


@pytest.mark.parametrize("line", ["tp2", "pp2 mb2 dp2 tp2"])
def test_layers_beside_a_function_whose_backward_sums_are_cut(line):
    torch.manual_seed(0)
    verdict = check_equal(Language(Steered), line, tokens())
    assert verdict.shares["tp2"] > 0.7


class Centred(torch.autograd.Function):
    """Elementwise but for its backward, which takes the mean of the gradient away."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return 2 * (dy - dy.mean(-1, keepdim=True))


def test_what_a_backward_of_the_users_own_sums_is_not_cut():
    class Alone(nn.Sequential):
        def forward(self, x):
            up, down = self
            return down(Centred.apply(up(x)))

    model = Alone(nn.Linear(6, 8), nn.Linear(8, 6))
    assert verify(model, "tp2", [(torch.randn(4, 6), torch.randint(6, (4,)))]).equal
    run = ModelGraph(model.to("meta"), torch.empty(2, 6)).run
    cuts = graph_cuts(model, run.recording, run.axes, 2)
    assert (set(cuts.shards), cuts.gathered) == ({"1.weight", "1.bias"}, {"1"})  # the layer behind it, alone


def test_a_function_between_stages_is_refused_and_not_run_without_its_backward():
    class Adversarial(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
            self.head = nn.Linear(WIDTH, WORDS)

        def forward(self, x):
            return self.head(Reversed.apply(self.body(x)))

    with pytest.raises(LayoutError, match="as a whole, so it cannot be cut into stages"):
        verify(Adversarial(), "pp2 mb2", [rows()], loss=CrossEntropy())


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))


def snake(x: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return x + (alpha + 1e-9).reciprocal() * torch.sin(alpha * x).pow(2)


def add_dropped(x: torch.Tensor, bias: torch.Tensor, rest: torch.Tensor, p: float, training: bool) -> torch.Tensor:
    return rest + functional.dropout(x + bias, p, training)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # models of others have such functions all the same
    scripted_gelu, scripted_snake, scripted_add = map(torch.jit.script, (gelu, snake, add_dropped))
    traced_gelu = torch.jit.trace(gelu, torch.ones(2, 3))


class Compiled(Mlp):
    """An MLP with an activation that torch has made a program of its own."""

    def __init__(self, activation=scripted_gelu):
        super().__init__()
        self.activation = (activation,)

    def forward(self, x):
        assert x.shape[-1] == WIDTH
        return x + self.down(self.activation[0](self.up(x)))


class Beside(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.plain = first, nn.ModuleList([Mlp(), Mlp()])

    def forward(self, x):
        x = self.first(x)
        for each in self.plain:
            x = each(x)
        return x


@pytest.mark.parametrize("activation", [scripted_gelu, traced_gelu], ids=["scripted", "traced"])
@pytest.mark.parametrize("line", ["tp2x2/2d", "pp2 mb2 dp2 tp2"])
def test_a_model_with_functions_that_torch_has_compiled_is_equal(line, activation):
    torch.manual_seed(0)
    check_equal(Language(lambda: Beside(Compiled(activation))), line, tokens())


class Snake(nn.Module):
    """The activation of audio codecs, whose code is scripted."""

    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.rand(1, channels, 1) + 0.5)

    def forward(self, x):
        return scripted_snake(x, self.alpha)


def test_convolutions_with_weight_norms_around_a_scripted_function_are_cut():
    torch.manual_seed(0)
    first, last = (weight_norm(nn.Conv1d(*sizes, 3, padding=1)) for sizes in ((2, 8), (8, WORDS)))
    model = nn.Sequential(first, Snake(8), last, nn.AdaptiveAvgPool1d(1), nn.Flatten())
    batch = torch.randn(SAMPLES, 2, 9), torch.randint(WORDS, (SAMPLES,))
    assert check_equal(model, "tp2", batch).flops == {"tp2": 1.0}


class Dropping(Mlp):
    """The end of a layer as in Megatron's code, one scripted function for the bias, the dropout and the sum."""

    def __init__(self):
        super().__init__()
        self.end = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return scripted_add(self.end(super().forward(x)), self.bias, x, 0.3, self.training)


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "tp2x2/2d", "dp2/zero3 mb2", "pp2 mb2 dp2 tp2"])
def test_what_a_scripted_function_drops_is_what_one_device_drops(line):
    torch.manual_seed(0)
    check_equal(Language(lambda: Beside(Dropping())), line, tokens())


# ---- norms and layers


class NormAndRelu(nn.BatchNorm1d):
    """The code of torch's BatchNorm, copied, with an activation in it."""

    def __init__(self, width):
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        y = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(y)


def normed():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 32), NormAndRelu(32), nn.Linear(32, WIDTH), NormAndRelu(WIDTH), nn.Linear(WIDTH, WORDS)
    )


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3 tp2", "tp2x2/2d", "pp2 mb2/own-statistics dp2 tp2"])
def test_a_subclass_of_a_batch_norm_has_the_statistics_of_all_samples(line):
    check_equal(normed(), line, rows())


@pytest.mark.parametrize("line", ["dp2", "dp2 tp2"])
def test_the_statistics_of_a_subclass_are_priced(line):
    check_traffic(line, Pictures("normed", make=normed, shape=(WIDTH,)))


def test_a_subclass_that_computes_two_batch_norms_is_refused():
    class Twice(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) + super().forward(2 * x)

    with pytest.raises(LayoutError, match="computes statistics over the batch"):
        verify(nn.Sequential(nn.Linear(WIDTH, WORDS), Twice(WORDS)), "dp2", [rows()], loss=CrossEntropy())


def test_layers_with_weight_norm_are_cut():
    torch.manual_seed(0)
    norm = nn.utils.parametrizations.weight_norm
    model = nn.Sequential(norm(nn.Linear(WIDTH, 64)), nn.ReLU(), nn.Linear(64, WORDS))
    assert check_equal(model, "tp2", rows()).shares["tp2"] > 0.9


class Named(nn.Module):
    """A mixture that finds its experts by names made of the router's choice."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleDict({f"expert_{number}": Mlp() for number in range(3)})

    def forward(self, x):
        x = x.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in functional.one_hot(chosen, 3).sum(0).nonzero():
            (at,) = torch.where(chosen == number[0])
            out.index_add_(0, at, self.experts[f"expert_{number[0]}"](x[at]) * weights[at, None])
        return out.view(SAMPLES if len(x) == SAMPLES * TOKENS else -1, TOKENS, WIDTH)


def test_experts_that_are_found_by_name_are_cut():
    class NoDrop(Named):
        def __init__(self):
            super().__init__()
            for each in self.experts.values():
                each.drop.p = 0.0

    torch.manual_seed(0)
    assert check_equal(Language(NoDrop), "tp2", tokens()).shares["tp2"] > 0.7


def test_the_encoder_and_the_decoder_of_a_transformer_are_cut_apart():
    class Translating(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
            self.both = nn.Transformer(WIDTH, HEADS, 2, 2, 32, batch_first=True)

        def forward(self, x):
            hidden = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.head(self.both(self.words(x), self.words(x.flip(1)), tgt_mask=hidden))

    torch.manual_seed(0)
    check_equal(Translating(), "pp3/zb-v mb6", tokens())
