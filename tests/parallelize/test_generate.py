"""``run.generate`` gives under every layout what the model's own ``generate`` gives on one device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardwright import Layout, launch, parallelize
from shardwright.comm.backends.fake import fake_world
from shardwright.errors import PlanError
from shardwright.parallelize.generating import generate

WIDTH, WORDS = 16, 12


class Continues(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, ids):
        x = self.embedding(ids).cumsum(1).sin()
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, ids, num=4, *, sample=False):
        for _ in range(num):
            logits = self(ids)[:, -1]
            shares = (logits / logits.abs().max()).softmax(-1)
            chosen = torch.multinomial(shares, 1) if sample else shares.argmax(-1, keepdim=True)
            ids = torch.cat((ids, chosen), 1)
        return ids


class CallsParts(Continues):
    def generate(self, ids):
        return self.head(self.embedding(ids))


def of(kind):
    torch.manual_seed(0)
    model = kind().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)  # large enough that one token is not the likeliest for ever
    return model, torch.randint(WORDS, (4, 5))


def generated(model, line, inputs, **options):
    def work(world):
        run = parallelize(model, line, world, example=torch.zeros(8, 5, dtype=torch.int64))
        return run.generate(inputs[world.rank] if isinstance(inputs, list) else inputs, **options), run.model.training

    return launch(work, Layout.parse(line).num_ranks, ranks="threads")


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "tp2/sp", "tp4/2d", "pp2/1f1b mb2", "pp2/zb-v mb4 dp2"])
def test_generate_gives_what_one_device_gives(line):
    model, ids = of(Continues)
    expected = model.eval().generate(ids)
    model.train()
    assert (expected[:, 5:] != expected[:, 5:6]).any()  # other tokens than the first: each depends on those before
    for found, is_training in generated(model, line, ids):
        assert torch.equal(found, expected)
        assert is_training


def test_random_numbers_come_from_the_seed_and_the_generator_is_left_as_it_was():
    model, ids = of(Continues)
    before = torch.get_rng_state()
    torch.manual_seed(7)
    expected = model.eval().generate(ids, sample=True)
    torch.set_rng_state(before)
    assert torch.equal(generate(model, None, fake_world(0, 1).everyone(), ids, 7, {"sample": True}), expected)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("kind", "line", "text"),
    [(nn.Linear, "dp2", "Linear has no method generate"), (CallsParts, "pp2 mb2", "calls 'embedding' by itself")],
)
def test_what_cannot_generate_is_refused_on_every_rank(kind, line, text):
    model = nn.Linear(5, 5) if kind is nn.Linear else of(kind)[0]
    with pytest.raises(PlanError, match=text):
        generated(model, line, torch.zeros(4, 5, dtype=torch.int64))


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2"])
def test_ranks_that_would_generate_from_other_inputs_are_told_before_they_do(line):
    model, ids = of(Continues)
    with pytest.raises(PlanError, match="ranks would generate from different tensors"):
        generated(model, line, [ids, ids.flip(1)])


class DrawsByRank(Continues):
    def generate(self, ids):
        return {"tokens": ids + threading.get_ident() % 1000}


def test_ranks_that_have_generated_other_results_are_told():
    model, ids = of(DrawsByRank)
    with pytest.raises(PlanError, match="ranks have generated different tensors"):
        generated(model, "dp2", ids)


def test_ranks_that_are_threads_draw_nothing():
    model, ids = of(Continues)
    with pytest.raises(PlanError, match="ranks that are threads share torch's generator"):
        generated(model, "pp2 mb2", ids, sample=True)


class Config:
    num_beams = 1


class Named(Continues):
    """Calls itself by names, one of which only ``**options`` takes, and keeps what it was given."""

    generation_config = Config()

    def forward(self, ids, **options):
        return super().forward(ids) * options.get("sign", 1)

    def generate(self, ids, use_cache=True, num_beams=1):
        assert not torch.is_grad_enabled()
        self.used = use_cache
        return self(ids=ids, sign=-1)[:, -1].argmax(-1, keepdim=True)


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "pp2 mb2"])
def test_arguments_reach_the_model_by_name_and_a_cache_is_kept_only_where_a_rank_runs_the_model(line):
    model, ids = of(Named)
    with torch.no_grad():
        expected, used = model.eval().generate(ids), []

    def work(world):
        run = parallelize(model, line, world, example={"ids": torch.zeros(8, 5, dtype=torch.int64), "sign": 1})
        found = run.generate(ids)
        used.append(run.model.used)
        run.generate(ids, num_beams=2)
        used.append(run.model.used)
        return found

    for found in launch(work, 2, ranks="threads"):
        assert torch.equal(found, expected)
    assert used.count(True) == (2 if line == "tp2" else 0)


class Fails(Continues):
    def generate(self, ids):
        self(ids)
        raise ValueError("of the user")


def test_a_generate_that_raises_leaves_the_model_as_it_was():
    model, ids = of(Fails)

    def work(world):
        run = parallelize(model, "pp2 mb2", world, example=torch.zeros(8, 5, dtype=torch.int64))
        with pytest.raises(ValueError, match="of the user"):
            run.generate(ids)
        return run.model.training, run.predict(ids)

    with torch.no_grad():
        expected = model.eval()(ids)
    model.train()
    for is_training, found in launch(work, 2, ranks="threads"):
        assert is_training
        assert torch.allclose(found, expected)
