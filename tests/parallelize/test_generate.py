"""``run.generate`` gives under every layout what the model's own ``generate`` gives on one device."""

from __future__ import annotations

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


def test_ranks_that_generate_from_other_inputs_are_told():
    model, ids = of(Continues)
    with pytest.raises(PlanError, match="ranks have generated different results"):
        generated(model, "dp2", [ids, ids.flip(1)])
