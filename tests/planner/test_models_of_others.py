"""Plans of models that others write: what a run takes is priced, and ends in no error of torch's."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.cost.cluster import Cluster
from shardwright.ledger import measure_memory
from shardwright.parallelize.auto import num_shares


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
        self.table, self.encoder = nn.Embedding(37, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 37)

    def forward(self, x):
        return self.head(self.encoder(self.table(x)))


class Counted(nn.Module):
    """Counts how many rows go to each of its experts, in whole numbers where it finds no CPU, as mixtures do."""

    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = nn.Embedding(37, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 37)

    def forward(self, x):
        h = self.table(x)
        places = torch.arange(x.shape[1], device=x.device) % 4
        counts = torch.histc(places.float() if x.device.type == "cpu" else places.int(), bins=4, min=0, max=3)
        return self.head(h + self.second(torch.relu(self.first(h))) * (counts.sum() / x.shape[1]))


class OwnLoss(nn.Module):
    """Computes a mean itself, which torch divides by its number of elements."""

    def __init__(self, loss):
        super().__init__()
        self.layers, self.loss = nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))), loss

    def forward(self, x, labels):
        return {"loss": self.loss(self.layers(x).sigmoid(), labels.sigmoid())}


class HasEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.none, self.first, self.last = nn.Parameter(torch.zeros(0, 8)), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.last(torch.relu(self.first(x))) + self.none.sum(0)


class Checkpoints(nn.Module):
    """Runs its layers again in the backward itself, by torch's function for that."""

    def __init__(self, reentrant=None, width=32):
        super().__init__()
        self.table, self.head = nn.Embedding(37, width), nn.Linear(width, 37)
        self.queries = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(3))
        self.reentrant = reentrant

    def layer(self, of_queries, x):
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in of_queries(x).chunk(3, -1))
        return x + functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)

    def forward(self, x):
        h = self.table(x)
        for each in self.queries:
            again = self.reentrant is not None
            h = checkpoint(self.layer, each, h, use_reentrant=self.reentrant) if again else self.layer(each, h)
        return self.head(h)


TOKENS = torch.arange(64).reshape(8, 8) % 37


@pytest.mark.parametrize(
    ("model", "line"), [(Encoder, "pp2/1f1b mb4"), (Counted, "pp2/1f1b mb2 tp2"), (Encoder, "pp2/1f1b mb2 dp2/zero1")]
)
def test_stages_of_torchs_encoders_and_of_mixtures_are_priced(model, line):
    plans = sw.plan_layouts(model(), f"a100-80gb:1x{sw.Layout.parse(line).num_ranks}", (TOKENS, TOKENS), layout=line)
    assert plans.best.step_s > 0
    verdict = sw.verify(model(), line, [(TOKENS, TOKENS)])
    assert verdict.equal, str(verdict)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_attention_that_a_checkpoint_of_the_models_own_runs_again_is_priced_as_attention(reentrant):
    tokens = TOKENS.repeat(1, 16)  # where scores of all tokens with all would be most of the memory
    cluster = Cluster.parse("a100-80gb:1x2")
    plain, again = (
        sw.plan_layouts(Checkpoints(kind), cluster, (tokens, tokens), layout="dp2").best for kind in (None, reentrant)
    )
    assert again.memory[0].by_kind["activations"] < plain.memory[0].by_kind["activations"]
    assert plain.step_s < again.step_s < 1.5 * plain.step_s


@pytest.mark.parametrize(
    "loss", [functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss, functional.binary_cross_entropy]
)
def test_a_mean_of_no_samples_on_a_rank_is_priced(loss):
    x = torch.randn(8, 12)
    batch = {"x": x, "labels": x.flip(1)}
    plans = sw.plan_layouts(OwnLoss(loss), "a100-80gb:1x2", batch, loss=sw.ModelLoss(), layout="mb8 tp2/sp")
    assert plans.best.step_s > 0


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d"])
def test_a_parameter_without_elements_is_no_obstacle_to_a_cut(line):
    x = torch.randn(8, 8)
    batch = (x, torch.zeros(8, dtype=torch.int64))
    plans = sw.plan_layouts(HasEmpty(), f"a100-80gb:1x{sw.Layout.parse(line).num_ranks}", batch, layout=line)
    assert plans.best.step_s > 0
    verdict = sw.verify(HasEmpty(), line, [batch])
    assert verdict.equal, str(verdict)


class Pairs(nn.Module):
    """Samples 2k and 2k + 1 belong together."""

    least = 2

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 10)

    def forward(self, x):
        return self.second(torch.relu(self.first(x).view(-1, 2, 24).flip(1).reshape(-1, 24)))


class Threes(Pairs):
    least = 3

    def forward(self, x):
        return self.second(torch.relu(self.first(x).view(-1, 3, 24).flip(1).reshape(-1, 24)))


class AtLeastFour(nn.Module):
    least = 4

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

    def forward(self, x):
        assert len(x) >= 4, "at least four"
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Pairs, Threes, AtLeastFour])
def test_a_search_for_a_model_that_takes_some_numbers_of_samples_alone_finds_layouts_that_it_takes(kind):
    number = 12 if kind is Threes else 8
    batch = torch.randn(number, 12), torch.randint(10, (number,))
    with warnings.catch_warnings(action="ignore"):  # that samples meet
        plans = sw.plan_layouts(kind(), "h100-80gb:1x2", batch)
    assert plans.layouts
    assert all(number // num_shares(price.layout) >= kind.least for price in plans.layouts)


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 32), nn.Linear(32, 10)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.steps += 1
        return self.last(torch.relu(self.first(x)))


def test_a_search_names_no_microbatches_for_a_buffer_that_counts_calls():
    batch = torch.randn(8, 12), torch.randint(10, (8,))
    model = Counts()
    plans = sw.plan_layouts(model, "h100-80gb:1x2", batch, fix="fp32")
    assert all(price.layout.num_microbatches == 1 or price.layout.own_statistics for price in plans.layouts)
    price = plans.layouts[0]

    def work(world):
        run = sw.parallelize(model, price.layout, world, example=batch[0])
        for each in run.shard([batch]):
            run.step(each)

    sw.launch(work, price.layout, ranks="threads")


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        samples, tokens, width = x.shape
        heads = (each.view(samples, tokens, 4, 8).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(samples, tokens, width))
        return x + self.down(functional.gelu(self.up(x)))


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "pp2/1f1b mb2 tp2"])
def test_memory_on_an_accelerator_is_that_of_a_run_where_a_forward_runs_on_shards(line):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 32), *(OwnAttention() for _ in range(3)), nn.Linear(32, 64))
    tokens = torch.randint(64, (8, 64))
    batch, num_ranks = (tokens, tokens.roll(-1, 1)), sw.Layout.parse(line).num_ranks
    price = sw.plan_layouts(model, f"h100-80gb:1x{num_ranks}", batch, layout=line).best

    def work(world):
        run = sw.parallelize(model, line, world, example=tokens)
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3, foreach=True)
        *before, last = run.shard([batch] * 3)
        for each in before:
            run.step(each, update=optimizer)
            optimizer.step()
        return measure_memory(run, last, optimizer).peak_bytes

    held = max(sw.launch(work, num_ranks, ranks="threads"))
    assert max(sum(each.by_kind.values()) for each in price.memory) == pytest.approx(held, rel=0.02)
