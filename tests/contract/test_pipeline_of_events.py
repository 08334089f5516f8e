"""Models whose code cannot be traced run in pipeline stages, each of which runs the whole forward with ghosts."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS, check_traffic, job_of, planned
from tests.contract.test_on_shards import TOKENS, WORDS, FusedBlock, GroupedBlock, Language, OwnCase
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.parallelize.planning import StepTraffic
from shardwright.plan import event_stages
from shardwright.plan.event_stages import EventStages


class Paired(nn.Module):
    """An encoder and a decoder with one table for both and for the head, and a mask from the inputs."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Parameter(torch.randn(TOKENS, 16))
        self.encoder = nn.ModuleList(FusedBlock() for _ in range(2))
        self.decoder = nn.ModuleList(GroupedBlock() for _ in range(2))
        self.mix = nn.Linear(16, 16)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def _embedded(self, tokens):
        assert tokens.size(1) <= TOKENS, "too many tokens"
        known = (tokens > 0).unsqueeze(-1)
        return (self.words(tokens) + self.places[: tokens.size(1)]) * known * self.scale

    def forward(self, tokens):
        memory = self._embedded(tokens)
        for block in self.encoder:
            memory = block(memory)
        x = self._embedded(tokens.flip(1))
        for block in self.decoder:
            x = block(x)
            x += torch.tanh(self.mix(memory))
        return x @ self.words.weight.T


class Repeated(Language):
    """A model with one dropout in several places, and a module that is called after each block."""

    def __init__(self):
        super().__init__(GroupedBlock)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), self.drop)

    def forward(self, tokens):
        assert tokens.size(1) <= TOKENS, "too many tokens"
        x = self.drop(self.words(tokens) + self.places[: tokens.size(1)])
        for block in self.blocks:
            x = self.last(block(x)) + x
        return self.head(x)


def case_of(make) -> OwnCase:
    torch.manual_seed(1)
    return OwnCase(make.__name__, make(), CrossEntropy(), num_tokens=TOKENS)


def fused():
    return Language(FusedBlock)


def check_of_events(line, case, but=()):
    """Holds a model that is cut by its record to every promise; returns its plan."""
    plan, _ = planned(line, case)
    assert isinstance(plan.stages, EventStages), "the model is cut by its record"
    for check in CHECKS:
        if check not in but:
            check(line, case)
    return plan


CASES = {make.__name__: case_of(make) for make in (fused, Paired, Repeated)}

LINES = (
    "pp2", "pp3/gpipe mb2", "pp2/1f1b mb3", "pp4/1f1b mb2", "pp2/interleaved:v2 mb2", "pp2/zb-h1 mb3", "pp2/zb-v mb2",
    "pp2 dp2", "pp2/1f1b dp2/zero1 mb2", "pp2/1f1b dp2/zero2 mb2", "pp2/1f1b dp2/zero3 mb2",
    "pp2/interleaved:v2 dp2/zero3 mb2", "pp2 recompute:full", "pp2/1f1b dp2/zero3 mb2 recompute:full",
    "pp2 recompute:selective",
)  # fmt: skip


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_events_keeps_every_promise(name, line):
    check_of_events(line, CASES[name])


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", [
    "dp2/zero3/bucket:0", "dp2/zero3/bucket:0 recompute:full", "dp2/zero3/bucket:0 tp2", "dp2/zero3/bucket:0 tp2x2/2d",
    "pp2/1f1b dp2/zero3/bucket:0 mb2 recompute:full", "pp2/interleaved:v2 dp2/zero3/bucket:0 mb2",
])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_a_param_group_is_gathered_once_an_action_also_if_others_are_used_between_its_uses(name, line):
    check_traffic(line, CASES[name])


def test_what_crosses_between_stages_is_read_from_the_record_that_they_were_cut_from(monkeypatch):
    line, case = "pp2/gpipe mb2", CASES["fused"]
    plan, strategies = planned(line, case)
    job, recorded, count = job_of(line, case), event_stages.record_events, []
    monkeypatch.setattr(event_stages, "record_events", lambda *given: count.append(given) or recorded(*given))
    num_samples = 2 * len(job.example)
    for inputs, times in (
        (case.batches[0][0][:1].repeat(num_samples, 1), 0),
        (torch.zeros(2, 3, dtype=torch.int64), 1),
    ):
        StepTraffic(job, plan, strategies, inputs).at({"pp": 0})
        assert len(count) == times


# ---- several paths through the code, and modules that inputs mask


class MaskedHead(nn.Module):
    """A batch norm behind which the values of an input mask activations; none of them is selected."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, words, x):
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.out(x * words.ne(2).to(x.dtype).unsqueeze(-1))


class Padded(nn.Module):
    """Two paths: the first is taken where a sample has padding."""

    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8), MaskedHead()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, words):
        padding, x = words.eq(1), self.words(words)
        if padding.any():
            x = x * (1 - padding.to(x.dtype)).unsqueeze(-1)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(words, x)


@pytest.mark.parametrize("factors", ["", " dp2", " dp2/zero1", " dp2/zero3"])
@pytest.mark.parametrize("number", [2, 4])
def test_no_module_runs_to_find_the_path_that_a_microbatch_takes(number, factors):
    """It would take steps of its own: on buffers of batch norms, and by collectives that other ranks do not make."""
    torch.manual_seed(0)
    words = torch.randint(2, 20, (8, 5))
    words[1, 3:] = 1
    batch = words, torch.randn(8, 5, 1)
    verdict = verify(Padded(), f"pp2/1f1b mb{number}/own-statistics{factors}", [batch] * 2, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Picks(nn.Module):
    """Takes the words at places that code outside has found, or finds them itself, or cuts all by a word."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(8, 8)

    def forward(self, x, words, places):
        x = self.layer(x)
        if self.how == "places":
            return x[places]
        if self.how == "mask":
            return x[words.ne(1)]
        return x[:, : 3 if int(words.eq(3).sum()) else 5]


class Picking(Padded):
    def __init__(self, how):
        super().__init__()
        self.head, self.pick, self.last = None, Picks(how), nn.Linear(8, 1)

    def forward(self, words):
        padding, x = words.eq(1), self.words(words)
        if padding.any():
            x = x * (1 - padding.to(x.dtype)).unsqueeze(-1)
        x = self.pick(x, words, padding.logical_not().nonzero(as_tuple=True))
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.last(x)


def squares(output, targets):
    return output.square().sum(), len(targets)


def few_words():
    """Words of eight samples, of which each has more than the one before; the others are padding."""
    torch.manual_seed(0)
    words = torch.randint(2, 20, (8, 5))
    words[torch.arange(8)[:, None] < torch.tensor([1, 2, 4, 6, 7])] = 1
    return words


@pytest.mark.parametrize("line", ["pp2/1f1b mb4", "pp2/1f1b mb2 dp2/zero1"])
@pytest.mark.parametrize("how", ["places", "mask"])
def test_microbatches_of_which_a_module_picks_unlike_numbers_of_words_are_followed(how, line):
    verdict = verify(Picking(how), line, [(few_words(), torch.zeros(8))] * 2, loss=squares)
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore:.*over all samples of a batch")
def test_a_module_that_cuts_by_values_of_a_microbatch_is_followed_in_each_of_them():
    """One device looks at all samples, so the losses are compared with those of microbatches without stages."""
    words = few_words()
    words[2:4], words[4:] = 3, 4
    torch.manual_seed(0)
    model = Picking("cut")

    def work(world, line):
        run = parallelize(model, line, world, loss=squares, example=words)
        return [run.step(part).item() for part in run.shard([(words, torch.zeros(8))] * 2)]

    of_stages, alone = (launch(work, line, line, ranks="threads")[0] for line in ("pp2/1f1b mb4", "mb4"))
    assert of_stages == pytest.approx(alone)
