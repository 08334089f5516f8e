"""``run.generate`` gives under every layout what the model's own ``generate`` gives on one device."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardwright import Layout, launch, parallelize
from shardwright.comm.backends.fake import fake_world
from shardwright.errors import PlanError, RankFailedError
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


def laid_out(model, line, world):
    """A run; without an example, no forward is recorded, and layers of known classes are cut."""
    example = None if isinstance(model, WrapsKnown) else torch.zeros(8, 5, dtype=torch.int64)
    return parallelize(model, line, world, example=example)


def generated(model, line, inputs, **options):
    def work(world):
        run = laid_out(model, line, world)
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
        return {"tokens": ids + int(threading.current_thread().name.removeprefix("rank "))}


def test_ranks_that_have_generated_other_results_are_told():
    model, ids = of(DrawsByRank)
    with pytest.raises(PlanError, match="ranks have generated different tensors"):
        generated(model, "dp2", ids)


class DrawsInManyWays(Continues):
    """Continues by numbers of several distributions, one of which comes from a generator of its own."""

    @torch.no_grad()
    def generate(self, ids):
        own = torch.Generator().manual_seed(5)
        for _ in range(3):
            logits = self(ids)[:, -1]
            shares = (logits / logits.abs().max()).softmax(-1)
            times = torch.empty_like(shares).exponential_() / shares
            counts = torch.poisson(shares * 4) + torch.rand(len(ids), 1) + torch.randint(3, (1,))
            counts += torch.rand(len(ids), 1, generator=own)
            ids = torch.cat((ids, times.argmin(-1, keepdim=True), counts.argmax(-1, keepdim=True)), 1)
        return ids


@pytest.mark.parametrize("line", ["dp2/zero3", "tp2", "tp2/sp", "tp4/2d", "pp2/1f1b mb2"])
@pytest.mark.parametrize(("kind", "options"), [(Continues, {"sample": True}), (DrawsInManyWays, {})])
def test_ranks_that_are_threads_draw_what_one_device_draws_after_the_seed(line, kind, options):
    model, ids = of(kind)
    before = torch.get_rng_state()
    torch.manual_seed(7)
    expected = model.eval().generate(ids, **options)
    torch.set_rng_state(before)
    for found, _ in generated(model, line, ids, seed=7, **options):
        assert torch.equal(found, expected)
    assert torch.equal(torch.get_rng_state(), before)


class SetsItsSeed(Continues):
    def generate(self, ids, *, how):
        how()
        return super().generate(ids, sample=True)


def in_a_fork():
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(3)
        torch.rand(1)


@pytest.mark.parametrize("how", [lambda: torch.default_generator.manual_seed(3), in_a_fork], ids=["set", "in a fork"])
def test_a_generate_that_sets_its_own_seed_is_refused_where_ranks_are_threads(how):
    model, ids = of(SetsItsSeed)
    before = torch.get_rng_state()
    # one rank may put the generator back before another looks; this one then ends because the first has
    with pytest.raises((PlanError, RankFailedError), match="sets the seed of random numbers itself"):
        generated(model, "dp2", ids, how=how)
    assert torch.equal(torch.get_rng_state(), before)


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


# ---- a generate that calls a module inside


class Gated(nn.Module):
    """A block of no known layers: it is cut by its record."""

    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Parameter(torch.empty(WIDTH, 64)), nn.Parameter(torch.empty(32, WIDTH))

    def forward(self, x):
        gate, up = (x @ self.fused).split(32, dim=-1)
        return (torch.sigmoid(gate) * up) @ self.out


class Recorded(Continues):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))


class Wraps(nn.Module):
    """Holds the model, as adapters do, and generates with it; its forward passes everything on."""

    def __init__(self, kind=Continues):
        super().__init__()
        self.inner = nn.ModuleDict({"lm": kind()})

    def forward(self, *args, **named):
        return self.inner["lm"](*args, **named)

    def generate(self, ids):
        return self.inner["lm"].generate(ids)


class WrapsKnown(nn.Module):
    """Holds a model of known layers, whose classes the loss takes cut."""

    def __init__(self):
        super().__init__()
        mlp = nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)
        self.lm = nn.Sequential(nn.Embedding(WORDS, WIDTH), *mlp, nn.Linear(WIDTH, WORDS))

    def forward(self, ids):
        return self.lm(ids)

    def generate(self, ids):
        for number in range(4):
            ids = torch.cat((ids, (self.lm(ids)[:, -1:].argmax(-1) + number) % WORDS), 1)
        return ids


class WrapsRecorded(Wraps):
    def __init__(self):
        super().__init__(Recorded)


class WrapsWrapper(nn.Module):
    """Takes fewer arguments than the model inside, and gives it one of its own."""

    def __init__(self):
        super().__init__()
        self.wrapped = WrapsRecorded()

    def forward(self, ids, mask=None):
        return self.wrapped(ids)

    def generate(self, ids):
        return self.wrapped.generate(ids)


@pytest.mark.sampled(100)
@pytest.mark.parametrize(
    "line", ["dp2/zero3", "tp2", "tp2 dp2", "tp2/sp", "tp4/2d", "pp2/1f1b mb2", "pp2/zb-v mb4 dp2"]
)
@pytest.mark.parametrize("kind", [Wraps, WrapsKnown, WrapsRecorded, WrapsWrapper])
def test_a_generate_that_calls_the_model_inside_gives_what_one_device_gives(kind, line):
    model, ids = of(kind)
    expected = model.eval().generate(ids)
    assert (expected[:, 5:] != expected[:, 5:6]).any()
    for found, _ in generated(model, line, ids):
        assert torch.equal(found, expected)


def test_a_part_of_the_model_called_by_hand_gives_its_whole_output_under_tp():
    model, ids = of(WrapsRecorded)
    x = torch.randn(3, WIDTH).double()

    def outputs(model):
        lm = model.eval().inner["lm"]
        with torch.no_grad():
            return lm(ids), lm.embedding(ids), lm.head(x), lm.blocks[0](x)

    def work(world):
        run = laid_out(model, "tp2", world)
        assert run.plan.notes[""].shards, "it is cut by its record"
        return outputs(run.model)

    expected = outputs(model)
    for found in launch(work, 2, ranks="threads"):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


class Twice(Wraps):
    def forward(self, ids):
        return self.inner["lm"](ids) + self.inner["lm"](ids)


class Names(Wraps):
    def forward(self, ids):
        return {"logits": self.inner["lm"](ids)}


class Scales(Wraps):
    def forward(self, ids):
        return self.inner["lm"](ids) * 2


class Shifts(Wraps):
    def forward(self, ids):
        return self.inner["lm"]((ids + 1) % WORDS)


class Narrow(Wraps):
    """Calls the model under autocast, which no argument tells."""

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner["lm"](ids)


class Overwrites(Wraps):
    """Writes to what it is given before it passes it on."""

    def forward(self, ids):
        ids.add_(1).remainder_(WORDS)
        return self.inner["lm"](ids)


class Scaled(Continues):
    """Has an argument whose default is not None."""

    def forward(self, ids, scale=3.0):
        found = super().forward(ids)
        return found if scale is None else found.flip(-1)


class GivesNone(Wraps):
    """Passes on None where the model inside has another default."""

    def __init__(self):
        super().__init__(Scaled)

    def forward(self, ids, scale=None):
        return self.inner["lm"](ids, scale=scale)


class Hooked(Wraps):
    def __init__(self):
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Twice, "pp2 mb2"),
        (Names, "pp2 mb2"),
        (Scales, "pp2 mb2"),
        (Shifts, "pp2 mb2"),
        (Hooked, "tp2/sp"),
        (Narrow, "pp2 mb2"),
        (Narrow, "tp2/sp"),
        (Overwrites, "pp2 mb2"),
        (Overwrites, "tp2/sp"),
        (GivesNone, "pp2 mb2"),
    ],
)
def test_a_wrapper_that_does_more_than_pass_on_is_refused_where_a_rank_does_not_hold_the_model(kind, line):
    model, ids = of(kind)
    before = ids.clone()
    with pytest.raises(PlanError, match=r"a generate that calls 'inner.lm' by itself"):
        generated(model, line, ids)
    assert torch.equal(ids, before)
    expected = model.eval().generate(ids)
    for found, _ in generated(model, "tp2", ids):
        assert torch.equal(found, expected)
