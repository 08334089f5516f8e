"""Batches whose samples are in dim 1, as torch's recurrent layers and transformers take them: every promise holds."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import CHECKS
from tests.contract.test_on_shards import TOKENS, WIDTH, WORDS, OwnCase
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import CrossEntropy


class Encoder(nn.Module):
    """A transformer with the time in dim 0, as torch makes it by default."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.1)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return self.head(self.encoder(self.words(words)))


class Recurrent(nn.Module):
    """A recurrent network with the time in dim 0; its first state has the samples in dim 1 too."""

    def __init__(self):
        super().__init__()
        self.words, self.rnn = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH, 2, dropout=0.1)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, state=None):
        return self.head(self.rnn(self.words(words), state)[0])


class TimeFirst(OwnCase):
    @property
    def batches(self):
        return [tuple(sw.samples_in(tensor.T.contiguous(), 1) for tensor in batch) for batch in super().batches]


def case_of(model):
    torch.manual_seed(1)
    return TimeFirst(model.__name__, model(), CrossEntropy(), num_tokens=TOKENS)


CASES = {model.__name__: case_of(model) for model in (Encoder, Recurrent)}
LINES = ("dp2", "dp2/zero3 mb2", "tp2", "tp2x2/2d", "tp2x2x2/3d", "tp2/sp", "pp2/1f1b mb2", "pp2 mb2 dp2/zero1 tp2")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_takes_the_time_first_keeps_every_promise(name, line):
    for check in CHECKS:
        check(line, CASES[name])


def time_first(steps, samples, width=WIDTH):
    draw = torch.Generator().manual_seed(0)
    return torch.randn(steps, samples, width, generator=draw), torch.randint(3, (steps, samples), generator=draw)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(WIDTH, WIDTH, 2), nn.Linear(WIDTH, 3)

    def forward(self, x, *state):
        return self.head(self.rnn(x, state or None)[0])


@pytest.mark.parametrize("line", ["dp2", "dp2 mb2", "tp2", "pp2 mb2"])
def test_states_have_their_samples_in_dim_1_too(line):
    x, y = time_first(5, 4)
    inputs = tuple(sw.samples_in(tensor, 1) for tensor in (x, torch.zeros(2, 4, WIDTH), torch.zeros(2, 4, WIDTH)))
    verdict = sw.verify(Tagger(), line, [(inputs, sw.samples_in(y, 1))] * 2)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["single", "dp2", "dp2 mb2", "pp2 mb2", "tp2x2/2d"])
@pytest.mark.parametrize("steps", [2, 4, 5])
def test_predictions_are_of_all_samples_whatever_the_number_of_steps(line, steps):
    """On two ranks two steps are as many as samples, which are not to be taken for these."""
    x, model = time_first(steps, 4)[0], Tagger()
    expected = model(x).detach()

    def work(world):
        return sw.parallelize(model, line, world, example=sw.samples_in(x, 1)).predict(sw.samples_in(x, 1))

    for output in sw.launch(work, sw.Layout.parse(line).num_ranks, ranks="threads"):
        torch.testing.assert_close(output, expected)


def test_ranks_evaluate_their_own_samples():
    x, y = time_first(5, 4)
    model = Tagger()
    expected = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).item()

    def work(world):
        run = sw.parallelize(model, "dp2", world, example=sw.samples_in(x, 1))
        return [run.evaluate(part).item() for part in run.shard([(sw.samples_in(x, 1), sw.samples_in(y, 1))])]

    assert [loss for losses in sw.launch(work, 2, ranks="threads") for loss in losses] == pytest.approx([expected] * 2)


def test_a_batch_with_the_time_first_is_refused_with_what_to_write():
    x, y = time_first(5, 4)
    states = torch.zeros(2, 4, WIDTH), torch.zeros(2, 4, WIDTH)
    with pytest.raises(LayoutError, match=r"sw\.samples_in\(tensor, 1\)"):
        sw.verify(Tagger(), "dp2", [((x, *states), y)])


def test_dropout_across_what_are_no_samples_is_refused_with_what_to_write():
    words = torch.randint(WORDS, (6, 4))
    with pytest.raises(PlanError, match=r"write sw\.samples_in\(tensor, 1\)"):
        sw.verify(Encoder(), "dp2", [(words, words)])


@pytest.mark.parametrize(("tensor", "dim"), [(torch.ones(3), 1), (torch.ones(2, 3), -3), ([1, 2], 0)])
def test_only_a_dim_that_a_tensor_has_can_be_that_of_the_samples(tensor, dim):
    with pytest.raises(PlanError, match=r"sw\.samples_in says which dim"):
        sw.samples_in(tensor, dim)


class Recursion(nn.Module):
    """The loss of a conditional random field: it walks over the steps, each sample alone; or sums over samples too."""

    def __init__(self, *, mixes=False):
        super().__init__()
        self.mixes = mixes

    def forward(self, scores, tags):
        gold = scores.gather(2, tags.unsqueeze(2)).sum()
        if self.mixes:
            return scores.logsumexp(1).sum() - gold, tags.shape[1]
        state = scores[0]
        for step in scores[1:]:
            state = (state.unsqueeze(2) + step.unsqueeze(1)).logsumexp(1)
        return state.logsumexp(1).sum() - gold, tags.shape[1]


@pytest.mark.parametrize("line", ["dp2", "mb2", "pp2 mb2", "dp2/zero3 tp2"])
def test_a_loss_that_walks_over_the_steps_is_equal_and_not_named(line, recwarn):
    batch = tuple(sw.samples_in(tensor, 1) for tensor in time_first(5, 8))
    verdict = sw.verify(Tagger(), line, [batch] * 2, loss=Recursion())
    assert verdict.equal, str(verdict)
    assert not [str(each.message) for each in recwarn if "loss" in str(each.message)]


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_a_loss_that_combines_samples_in_dim_1_is_named(line):
    batch = tuple(sw.samples_in(tensor, 1) for tensor in time_first(5, 8))
    with pytest.warns(UserWarning, match="the loss takes logsumexp over all samples"):
        assert not sw.verify(Tagger(), line, [batch], loss=Recursion(mixes=True)).equal
