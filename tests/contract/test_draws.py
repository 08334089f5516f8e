"""Models whose own code draws random numbers, by whatever function, equal one device under every layout."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.comm.backends.fake import fake_world
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.parallelize import parallelize

SAMPLES, TOKENS, WIDTH, HEADS, WORDS = 6, 5, 16, 4, 23


class Attention(nn.Module):
    """Dropout of weights by functions, as GPT-2's and others' code has it: by heads, flattened, or inside attention."""

    def __init__(self, form: str):
        super().__init__()
        self.form = form
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        samples, tokens, _ = x.shape
        q, k, v = self.qkv(x).split(WIDTH, dim=2)
        q, k, v = (each.view(samples, tokens, HEADS, -1).transpose(1, 2) for each in (q, k, v))
        if self.form == "fused":
            y = functional.scaled_dot_product_attention(
                q, k, v, dropout_p=0.2 if self.training else 0.0, is_causal=True
            )
        else:
            if self.form == "flat":
                q, k, v = (each.reshape(samples * HEADS, tokens, -1) for each in (q, k, v))
            hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
            weights = (q @ k.mT / 2).masked_fill(hidden, -torch.inf).softmax(-1)
            y = functional.dropout(weights, 0.2, self.training) @ v
            y = y.view(samples, HEADS, tokens, -1)
        y = y.transpose(1, 2).reshape(samples, tokens, WIDTH)
        return functional.dropout(self.out(y), p=0.1, training=self.training)


class Block(nn.Module):
    def __init__(self, form: str, checkpointed: bool = False):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.checkpointed = Attention(form), checkpointed
        self.up, self.down = (nn.Parameter(torch.randn(n, m) * 0.2) for n, m in ((WIDTH, 24), (24, WIDTH)))
        self.drop = nn.Dropout(0.1)

    def run(self, x):
        x = x + self.attention(self.norm(x))
        flat = self.norm2(x).view(-1, WIDTH)
        return x + self.drop(functional.gelu(flat @ self.up) @ self.down).view(x.shape)  # dim 0: samples * tokens

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointed else self.run(x)


class Language(nn.Module):
    def __init__(self, form: str, checkpointed: bool = False):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.blocks = nn.ModuleList(Block(form, checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        places = self.drop(self.places(torch.arange(tokens.shape[1], device=tokens.device)))  # one mask for all samples
        x = self.words(tokens) + places
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SkipsBranches(nn.Module):
    """Stochastic depth, in two ways."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)) for _ in "ab")
        self.skips = nn.ModuleList(SkipsSamples(floor) for floor in (True, False))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = x + skip(layer(x))
        return self.out(x.mean(1))


class SkipsSamples(nn.Module):
    def __init__(self, floor: bool):
        super().__init__()
        self.floor = floor

    def forward(self, x):
        shape = (x.shape[0],) + (1,) * (x.ndim - 1)
        if self.floor:
            kept = 0.7 + torch.rand(shape, dtype=x.dtype, device=x.device)
            return x.div(0.7) * kept.floor_()
        return x * x.new_empty(shape).bernoulli_(0.7).div_(0.7)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = kind(WIDTH, 8, num_layers=3, dropout=0.3, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        if self.layers.batch_first:
            return self.head(self.layers(x)[0])
        return self.head(self.layers(x.transpose(0, 1))[0].transpose(0, 1))


class Noisy(nn.Module):
    """One of many functions that draw, between two layers."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.second, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), draw

    def forward(self, x):
        return self.second(self.draw(self.first(x))).mean(1)


def normals(x):
    return x + 0.1 * torch.normal(torch.zeros_like(x), 1.0) + 0.1 * torch.normal(0.0, 1.0, x.shape, dtype=x.dtype)


def picked(x):
    chosen = torch.multinomial(x.softmax(-1).view(-1, WIDTH), 3)
    return x + functional.one_hot(chosen, WIDTH).sum(1).view(x.shape)


DRAWS = {
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.2, True),
    "feature_alpha_dropout": lambda x: functional.feature_alpha_dropout(x, 0.2, True),
    "dropout1d": lambda x: functional.dropout1d(x.mT, 0.2).mT,
    "dropout2d": lambda x: nn.Dropout2d(0.2)(x.view(*x.shape, 1)).view(x.shape),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.2, inplace=True),
    "tokens first": lambda x: functional.dropout(x.transpose(0, 1), 0.2).transpose(0, 1),
    "tokens and samples in one dim": lambda x: functional.dropout(
        x.transpose(0, 1).reshape(-1, x.shape[2]), 0.2
    ).view(x.shape[1], -1, x.shape[2]).transpose(0, 1),
    "two views end to end": lambda x: sum(functional.dropout(torch.cat([x, -x]), 0.2).chunk(2)),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x) + functional.gumbel_softmax(x, hard=True, dim=1),
    "rand_like": lambda x: x + torch.rand_like(x) + torch.randn_like(x),
    "randn": lambda x: x + torch.randn(x.shape, dtype=x.dtype) + torch.randn(x.size(0), 1, 1, dtype=x.dtype),
    "randint": lambda x: x + torch.randint(3, x.shape) + torch.randint_like(x, 2, 4),
    "for all samples alike": lambda x: x + torch.rand(TOKENS, 1, dtype=x.dtype) + torch.rand(1, dtype=x.dtype),
    "shuffled features": lambda x: x[..., torch.randperm(WIDTH)],
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "uniform_": lambda x: x + torch.empty_like(x).uniform_(-1, 1) + torch.empty_like(x).exponential_(2.0),
    "normal": normals,
    "normal, of deviations": lambda x: x + torch.normal(torch.zeros(1, dtype=x.dtype), 0.1 * torch.ones_like(x)),
    "multinomial": picked,
    "skipped at random": lambda x: x if torch.rand(()) < 0.5 else 2 * x,
}  # fmt: skip

TOKEN_BATCHES = [
    (torch.randint(WORDS, (SAMPLES, TOKENS)), torch.randint(WORDS, (SAMPLES, TOKENS))),
    (torch.randint(WORDS, (SAMPLES + 1, TOKENS)), torch.randint(WORDS, (SAMPLES + 1, TOKENS))),
]
NUMBER_BATCHES = [(torch.randn(SAMPLES, TOKENS, WIDTH), torch.randn(SAMPLES, 3))] * 2
MODELS = {
    "by heads": lambda: Language("heads"),
    "flat": lambda: Language("flat"),
    "fused": lambda: Language("fused"),
    "checkpointed": lambda: Language("fused", checkpointed=True),
    "skips": SkipsBranches,
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU, bidirectional=True),
}
LINES = ["single", "dp2", "dp2/zero3", "tp2", "dp2 tp2", "pp2/1f1b mb2", "dp2 mb2 recompute:full"]


def verdict(model, line):
    in_numbers = isinstance(model, SkipsBranches | Noisy)
    batches, loss = (NUMBER_BATCHES, MeanSquaredError()) if in_numbers else (TOKEN_BATCHES, CrossEntropy())
    return verify(model, line, batches, loss=loss, ranks="threads")


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", MODELS)
def test_models_that_draw_equal_one_device(name, line):
    if name in ("lstm", "gru"):
        line = line.replace("recompute:full", "recompute:layers")
    found = verdict(MODELS[name](), line)
    assert found.equal, str(found)


@pytest.mark.parametrize("line", ["dp2", "dp2 mb2"])
@pytest.mark.parametrize("name", DRAWS)
def test_every_function_that_draws_draws_the_same_under_every_layout(name, line):
    found = verdict(Noisy(DRAWS[name]), line)
    assert found.equal, str(found)


@pytest.mark.parametrize("name", DRAWS)
def test_every_function_that_draws_is_found(name):
    found = ModelGraph(Noisy(DRAWS[name]), NUMBER_BATCHES[0][0]).draws
    assert found is not None
    assert found.places


@pytest.mark.parametrize(
    ("draw", "reason"),
    [
        (lambda x: x[torch.randperm(len(x))], "mix the samples"),
        (
            lambda x: x * torch.rand(len(x) ** 2).view(len(x), len(x)).mean(1).view(-1, *[1] * (x.dim() - 1)),
            "mix the samples",
        ),
        (lambda x: x * random.random(), "Python's random"),
        (lambda x: x * float(np.random.rand()), "numpy.random"),
        (lambda x: x * torch.distributions.Gamma(torch.ones_like(x), 1.0).rsample(), "'_standard_gamma' under several"),
        (lambda x: x * torch.distributions.Dirichlet(torch.ones_like(x)).sample(), "'_sample_dirichlet' under several"),
        (lambda x: x + torch.ops.aten.multinomial(x.flatten(1).softmax(-1), 1).sum(), "'multinomial' under several"),
        (lambda x: x + torch.poisson(x.detach().abs()), "'poisson' under several(?s:.*)compute the numbers from"),
    ],
)
def test_draws_that_differ_by_rank_are_refused_by_name_on_several_ranks_alone(draw, reason):
    with pytest.raises(PlanError, match=reason):
        verdict(Noisy(draw), "dp2")
    if reason == "mix the samples":
        for line in ("single", "tp2", "pp2"):
            assert verdict(Noisy(draw), line).equal
        for line in ("dp1 mb2", "pp2 mb2", "tp2/sp"):
            with pytest.raises(PlanError, match=reason):
                verdict(Noisy(draw), line)


class Drawing(nn.Module):
    """Two layers, and ``act(module, x)`` between them, which may draw from Python's or NumPy's generator."""

    def __init__(self, act):
        super().__init__()
        self.up, self.down, self.act, self.kept = nn.Linear(8, 12), nn.Linear(12, 8), act, 1.0
        self.first, self.second = (nn.Parameter(torch.randn(12)) for _ in range(2))
        self.register_buffer("near", torch.randn(2000))
        self.register_buffer("far", torch.randn(2000))

    def forward(self, x):
        return self.down(self.act(self, self.up(x).tanh()))


def kept_for_the_next_forward(module, x):
    x, module.kept = x * module.kept, random.random()
    return x


MATTERS = {
    "a rare branch": lambda module, x: x * 2 if random.random() < 1e-3 else x,
    "a rare branch at the other end": lambda module, x: x * 2 if np.random.rand() > 0.999 else x,
    "a choice of two": lambda module, x: random.choice([torch.sin, torch.cos])(x),
    "a choice of two of one shape": lambda module, x: x * torch.tensor(random.choice([0.5, 2.0])),
    "an order": lambda module, x: x[:, random.sample(range(12), 12)],
    "a table": lambda module, x: x * torch.from_numpy(np.random.rand(12)).to(x.dtype),
    "the next forward": kept_for_the_next_forward,
    "one of two activations": lambda module, x: random.choice([x.sin(), x.cos()]) * 2,
    "the order of two activations": lambda module, x: torch.cat(random.sample(list(x.chunk(2, 1)), 2), 1),
    "one of two weights": lambda module, x: x * random.choice([module.first, module.second]),
    "one of two tables": lambda module, x: x + random.choice([module.near, module.far])[:12],
    "what is returned": lambda module, x: random.choice([x.sin(), x.cos()]),
}


@pytest.mark.parametrize("act", MATTERS.values(), ids=MATTERS)
def test_draws_from_python_that_a_forward_depends_on_are_refused(act):
    batch = torch.randn(6, 8), torch.randint(8, (6,))
    with pytest.raises(PlanError, match="the forward draws random numbers from"):
        verify(Drawing(act), "dp2", [batch])


def checked_at_random(module, x):
    """As packages do that check the types of arguments: one of the items, which a random number chooses."""
    items = [x, x.relu(), x.exp()]
    assert isinstance(items[random.getrandbits(32) % 3], torch.Tensor)
    assert np.random.rand() <= 1
    return items[1]


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2", "dp2/zero3 mb2"])
def test_draws_from_python_that_change_nothing_are_let_be(line):
    torch.manual_seed(0)
    verdict = verify(Drawing(checked_at_random), line, [(torch.randn(6, 8), torch.randint(8, (6,)))])
    assert verdict.equal, str(verdict)


class Neighbours(nn.Module):
    """Attention between the samples of a batch, the nodes of a graph, with dropout of its scores and its features."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x).unflatten(1, (HEADS, -1)).transpose(0, 1) for each in (self.q, self.k, self.v))
        scores = functional.dropout((q @ k.transpose(1, 2)).softmax(-1), 0.3, self.training)
        return x + functional.dropout(self.out((scores @ v).transpose(0, 1).flatten(1)), 0.2, self.training)


@pytest.mark.parametrize("line", ["tp2", "tp4", "pp2", "pp2 tp2", "tp2 recompute:full"])
def test_scores_of_all_samples_with_all_are_dropped_where_ranks_have_all_samples(line):
    torch.manual_seed(0)
    batch = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    model = nn.Sequential(Neighbours(), Neighbours(), Neighbours())
    verdict = verify(model, line, [batch, batch], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    with pytest.warns(UserWarning, match="over all samples"), pytest.raises(PlanError, match="mix the samples"):
        verify(model, "dp2", [batch], loss=MeanSquaredError())


def seeds_itself(x):
    np.random.seed(3)
    return x * float(np.random.rand())


@pytest.mark.of_threads
def test_a_generator_that_the_forward_seeds_is_refused_where_ranks_share_it():
    seeds_itself(torch.ones(1))  # as a forward before has left the state
    with pytest.raises(PlanError, match=r"numpy\.random, which the forward seeds(?s:.*)ranks='processes'"):
        verdict(Noisy(seeds_itself), "tp2")
    draws = ModelGraph(Noisy(seeds_itself), NUMBER_BATCHES[0][0]).draws
    assert draws is not None
    draws.check(are_threads=False, cuts=False, cuts_samples=False)
    unseeded = ModelGraph(Noisy(lambda x: seeds_itself(x) * random.random()), NUMBER_BATCHES[0][0]).draws
    with pytest.raises(PlanError, match=r"from Python's random\n"):
        unseeded.check(are_threads=False, cuts=False, cuts_samples=False)


@pytest.mark.parametrize("line", ["mb2", "dp2", "dp2/zero3", "pp2", "tp2/sp", "tp2"])
def test_a_forward_that_seeds_a_generator_runs_where_each_rank_runs_whole_batches_alone(line):
    """What it seeds and draws may depend on the number of samples, which one record does not tell."""

    def each_its_own(x):
        np.random.seed(3)
        return x * torch.from_numpy(np.random.rand(len(x), 1, 1)).to(x.dtype)

    def made():
        model, size = Noisy(each_its_own), 1 if line == "mb2" else 2
        return parallelize(model, line, fake_world(0, size), loss=MeanSquaredError(), example=NUMBER_BATCHES[0][0])

    if line == "tp2":
        assert made().plan.layout.num_ranks == 2
    else:
        with pytest.raises(PlanError, match=r"numpy\.random under a layout of several ranks or microbatches"):
            made()


class Scores(nn.Module):
    """Multiplies what two layers make of each sample with what they make of all others, as CLIP does."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        return self.one(x) @ self.other(x).mT


def test_samples_that_are_combined_with_one_another_are_named_in_a_warning():
    draws = ModelGraph(Scores(), torch.ones(5, 6)).draws
    with pytest.warns(UserWarning, match="takes mm over all samples of a batch"):
        draws.check(are_threads=True, cuts=True, cuts_samples=True)
    draws = ModelGraph(Scores(), torch.ones(5, 3, 6)).draws  # the tokens of each sample with one another
    assert draws.across == ()


def unknown(x):
    """An operator without a rule of its dims, as it is for those of which nobody has thought."""
    return torch.linalg.inv(x @ x.transpose(1, 2) + torch.eye(x.shape[1], dtype=x.dtype))


class Windows(nn.Module):
    """Pictures in windows, of which each is a row of its own, and drops what a row of samples and windows says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.up, self.down, self.head = nn.Linear(4, 16), nn.Linear(16, 4), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.4)

    def forward(self, x):
        # (samples, 4 windows, 4 pixels)
        x = functional.unfold(x[:, None], 2, stride=2).transpose(1, 2) if self.how == "unfold" else unknown(x)
        x = x.reshape(x.shape[0] * 4, 4) if self.how != "samples" else x
        x = x + self.down(self.drop(self.up(x)))
        return self.head(x.reshape(-1, 16))


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb2", "tp2", "tp4/2d"])
@pytest.mark.parametrize("how", ["unfold", "rows", "samples"])
def test_dropout_behind_operators_that_make_rows_of_samples_and_more_is_that_of_one_device(how, line):
    torch.manual_seed(0)
    batch = torch.randn(8, 4, 4), torch.randn(8, 4)
    verdict = verify(Windows(how), line, [batch, batch], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@torch.library.custom_op("shardwright_tests::shaped", mutates_args=())
def shaped(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return x.reshape(shape).clone()


@shaped.register_fake
def _(x, shape):
    return torch.empty(shape, dtype=x.dtype, device=x.device)


shaped.register_autograd(
    lambda ctx, dy: (shaped(dy, ctx.shape), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", list(inputs[0].shape)),
)


class Unknown(nn.Module):
    """Rows of samples and more that an operator makes of which no one knows how, and takes apart again."""

    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.4)

    def forward(self, x):
        return shaped(self.drop(self.layer(shaped(x, [3 * len(x), 4]))), [len(x), 12])


def test_dropout_of_rows_of_which_nobody_knows_the_samples_is_refused():
    with pytest.raises(PlanError, match="mix the samples"):
        verify(Unknown(), "dp2", [(torch.randn(8, 3, 4), torch.randn(8, 12))], loss=MeanSquaredError())


class DrawsFromOne(nn.Module):
    """Features scaled by numbers that are drawn for all samples from one distribution, as negative samples are."""

    def __init__(self, draw):
        super().__init__()
        self.up, self.down, self.draw = nn.Linear(8, 16), nn.Linear(16, 8), draw
        self.register_buffer("weights", torch.rand(16) + 0.1)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return self.down(hidden * self.draw(self.weights, hidden))


FROM_ONE = {
    "flat": lambda weights, h: 1.0 + torch.multinomial(weights, 16 * len(h), replacement=True).view(-1, 16),
    "categorical": lambda weights, h: 1.0 + torch.distributions.Categorical(probs=weights).sample((len(h), 16)),
    "one hot": lambda weights, h: torch.distributions.OneHotCategorical(probs=weights).sample((len(h),)),
    "rows": lambda weights, h: 1.0 + torch.multinomial(weights.expand(len(h), -1), 16),
    "normal": lambda weights, h: torch.normal(weights.to(h.dtype), h[:, :1].detach().abs() + 0.1),
}


CASES_OF_ONE = [(form, line) for form in FROM_ONE for line in ("dp2", "mb2", "pp2/1f1b mb2", "dp2/zero3 tp2")]
CASES_OF_ONE.remove(("normal", "dp2/zero3 tp2"))  # of a shard and a gathered tensor: refused


@pytest.mark.parametrize(("form", "line"), CASES_OF_ONE)
def test_numbers_of_all_samples_from_one_distribution_are_those_of_one_device(form, line):
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(8, 8, generator=numbers)
    verdict = verify(DrawsFromOne(FROM_ONE[form]), line, [(x, x)] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb2"])
def test_numbers_of_all_samples_without_replacement_are_refused_where_the_batch_is_cut(line):
    model = DrawsFromOne(lambda weights, h: 1.0 + torch.multinomial(weights, len(h)).unsqueeze(1))
    x = torch.randn(8, 8)
    with pytest.raises(PlanError, match="draws random numbers that mix the samples"):
        verify(model, line, [(x, x)], loss=MeanSquaredError())


def test_a_refused_draw_in_a_record_of_stages_names_the_users_line():
    class OldConstructor(DrawsFromOne):
        def forward(self, x):
            return self.down(self.up(x) + torch.LongTensor(torch.FloatTensor(len(x), 1).uniform_(0, 9).long()))

    x = torch.randn(8, 8)
    with pytest.raises((LayoutError, PlanError), match=r"test_draws\.py:\d+: return self\.down"):
        verify(OldConstructor(None), "pp2/1f1b mb2", [(x, x)], loss=MeanSquaredError())


class SkipsAtRandom(nn.Module):
    """Layers with dropout, each of which is left out if a number that is drawn for it is small, as in QANet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            h = layer(functional.dropout(x, 0.1) if number % 2 else x)
            if torch.empty(1).uniform_(0, 1) < 0.4:
                continue
            x = x + functional.dropout(h.tanh(), 0.3)
        return x


@pytest.mark.parametrize("line", ["dp2", "mb2", "tp2", "dp2/zero3 tp2", "pp2/1f1b mb2", "dp2 recompute:full"])
def test_draws_after_layers_that_are_skipped_at_random_are_those_of_one_device(line):
    numbers = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randn(8, 8, generator=numbers) for _ in range(2)) for _ in range(6)]
    model = nn.Sequential(SkipsAtRandom(), nn.Tanh(), SkipsAtRandom())
    verdict = verify(model, line, batches, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
