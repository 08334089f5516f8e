"""Models with LSTMs, GRUs and RNNs under every kind of layout: each rank computes some hidden units."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from tests.contract.cases import Case, check_equal, check_traffic, job_of, planned, two_steps
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardwright as sw
from shardwright.comm.launch import launch
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.models.given_loss import as_loss
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan, structural_copy

TOKENS, WIDTH, UNITS, CLASSES, SAMPLES, STEPS = 11, 6, 8, 5, 8, 4
LINES = ["tp2", "tp3", "dp2/zero3 tp2", "tp2x2/2d", "tp2x2x2/2.5d", "pp2/1f1b mb2 dp2/zero1 tp2"]


class Tagger(nn.Module):
    """A class for each token: a table, two layers, and an output head."""

    def __init__(self, kind, *, batch_first=True, **options) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = kind(WIDTH, UNITS, num_layers=2, batch_first=batch_first, **options)
        self.head = nn.Linear(UNITS * (2 if options.get("bidirectional") else 1), CLASSES)
        self.batch_first = batch_first

    def forward(self, tokens):
        x = self.table(tokens)
        outputs, _ = self.layers(x if self.batch_first else x.transpose(0, 1))
        return self.head(outputs if self.batch_first else outputs.transpose(0, 1)).mean(1)


class Sentences(nn.Module):
    """A class for each sentence, from the states after its last token; padding is token 0."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.layers = kind(WIDTH, UNITS, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * UNITS, CLASSES)

    def forward(self, tokens):
        lengths = (tokens > 0).sum(1).cpu()
        packed = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        outputs, states = self.layers(packed)
        outputs, _ = pad_packed_sequence(outputs, batch_first=True, total_length=tokens.shape[1])
        last = states[0] + states[1] if isinstance(states, tuple) else states
        return self.head(torch.cat([*last], -1) + outputs.sum(1))


class ByCells(nn.Module):
    """Two cells that code calls step by step, the second on what the first gives; a first state that is learnt."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.first, self.second, self.head = kind(WIDTH, UNITS), kind(UNITS, UNITS), nn.Linear(UNITS, CLASSES)
        self.start = nn.Parameter(torch.randn(UNITS))

    def forward(self, tokens):
        start = self.start.expand(len(tokens), -1)
        states = [(start, start) if isinstance(self.first, nn.LSTMCell) else start] * 2
        for x in self.table(tokens).unbind(1):
            states[0] = self.first(x, states[0])
            states[1] = self.second(states[0][0] if isinstance(states[0], tuple) else states[0], states[1])
        return self.head(states[1][0] * states[1][1].tanh() if isinstance(states[1], tuple) else states[1])


class Translates(nn.Module):
    """Reads tokens by one layer, whose states another starts from, of the tokens the other way round."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(UNITS, CLASSES)
        self.reads, self.writes = (kind(WIDTH, UNITS, batch_first=True) for _ in range(2))

    def forward(self, tokens):
        x = self.table(tokens)
        outputs, states = self.reads(x)
        return self.head((self.writes(x.flip(1), states)[0] + outputs).mean(1))


class TakesStates(nn.Module):
    """Its first states come with the batch, as those of a policy do."""

    def __init__(self, kind) -> None:
        super().__init__()
        self.layer = kind(WIDTH, UNITS) if kind in (nn.LSTMCell, nn.GRUCell) else kind(WIDTH, UNITS, batch_first=True)
        self.head = nn.Linear(UNITS, CLASSES)

    def forward(self, x, first, memory):
        is_cell, is_lstm = isinstance(self.layer, nn.RNNCellBase), isinstance(self.layer, nn.LSTM | nn.LSTMCell)
        first, memory = (each if is_cell else each.unsqueeze(0) for each in (first, memory))
        found = self.layer(x[:, 0] if is_cell else x, (first, memory) if is_lstm else first)
        return self.head(found[0] if is_cell and is_lstm else found if is_cell else found[0][:, -1])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_first_states_may_come_with_the_batch(kind):
    torch.manual_seed(0)
    inputs = [(torch.randn(4, STEPS, WIDTH), torch.randn(4, UNITS), torch.randn(4, UNITS)) for _ in range(2)]
    batches = [
        (dict(zip(("x", "first", "memory"), each, strict=True)), torch.randint(CLASSES, (4,))) for each in inputs
    ]
    verdict = sw.verify(TakesStates(kind), "tp2", batches, loss=nn.CrossEntropyLoss())
    assert verdict.equal, str(verdict)
    assert verdict.shares["tp2"] > 0.9


MODELS = {
    "lstm": lambda: Tagger(nn.LSTM),
    "lstm, dropout": lambda: Tagger(nn.LSTM, dropout=0.3, bidirectional=True),
    "gru, both ways": lambda: Tagger(nn.GRU, bidirectional=True),
    "rnn, steps first": lambda: Tagger(nn.RNN, nonlinearity="relu", bias=False, batch_first=False),
    "lstm, packed": lambda: Sentences(nn.LSTM),
    "gru, packed": lambda: Sentences(nn.GRU),
    "lstm, cells": lambda: ByCells(nn.LSTMCell),
    "gru, cells": lambda: ByCells(nn.GRUCell),
    "rnn, cells": lambda: ByCells(nn.RNNCell),
    "lstm, given states": lambda: Translates(nn.LSTM),
    "gru, given states": lambda: Translates(nn.GRU),
}


@cache
def _made(name):
    torch.manual_seed(0)
    return MODELS[name]()


@dataclass(frozen=True)
class RecurrentCase(Case):
    """A case of a model of this file."""

    @property
    def model(self):
        return structural_copy(_made(self.name), torch.Tensor.double)

    @property
    def batches(self):
        generator, found = torch.Generator().manual_seed(0), []
        for _ in range(2):
            tokens = torch.randint(1, TOKENS, (SAMPLES, STEPS), generator=generator)
            lengths = torch.randint(1, STEPS + 1, (SAMPLES, 1), generator=generator)
            if "packed" in self.name:
                tokens[torch.arange(STEPS) >= lengths] = 0
            found.append((tokens, torch.randint(CLASSES, (SAMPLES,), generator=generator)))
        return found


LOSS = as_loss(nn.CrossEntropyLoss())
CASES = {name: RecurrentCase(name, None, LOSS) for name in MODELS}


@pytest.mark.sampled(17)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", MODELS)
def test_recurrent_layers_are_cut_by_units_equal_one_device_and_send_what_is_said(name, line):
    case = CASES[name]
    plan, _ = planned(line, case)
    recurrent = [
        name for name in plan.compute if name.startswith(("layers.", "first.", "second.", "reads.", "writes."))
    ]
    coords = [plan.mesh.coord(rank) for rank in range(plan.mesh.size)]
    held = {name: max(plan.compute[name].local_shape(coord)[0] for coord in coords) for name in recurrent}
    shares = {held[name] / plan.compute[name].shape[0] for name in recurrent}
    assert shares == ({3 / 8} if "tp3" in line else {1 / 2})  # of 8 units the first of three ranks has 3
    check_equal(line, case)
    if "packed" in name:
        check_at_most(line, case)
    else:
        check_traffic(line, case)


def check_at_most(line: str, case: Case) -> None:
    """What is stated of packed sequences is what they would send if all were as long as the padded ones."""
    plan, chosen = planned(line, case)
    _, every = two_steps(line, case)
    for number, (inputs, _) in enumerate(case.batches):
        traffic_at = StepTraffic(job_of(line, case), plan, chosen, inputs).at
        for rank, found in enumerate(every):
            said = [each for source in traffic_at(plan.mesh.coord(rank)).values() for each in source]
            times = sum(each.times for each in said)
            num_bytes = sum(each.num_bytes * each.times for each in said)
            assert sum(found.recorded[number].values()) <= times
            sent = sum(key[3] * times for key, times in found.recorded[number].items())
            assert 0.7 * num_bytes < sent <= num_bytes


@pytest.mark.sampled(0)
def test_the_state_of_each_step_is_gathered_once_and_its_gradient_reduce_scattered():
    verdict, found = two_steps("tp2", CASES["lstm"])
    assert verdict.equal, str(verdict)
    times = Counter({key[1:]: each for key, each in found[0].recorded[1].items()})
    state = SAMPLES * UNITS * 8
    assert times["all_gather", "tp", state] == 2 * STEPS + 2  # two layers, and their memory after the last step
    assert times["reduce_scatter", "tp", state] == 2 * (STEPS - 1)  # nothing uses the last state for another step


def test_cells_may_be_kept_from_one_batch_to_the_next():
    class Streams(nn.Module):
        """Keeps the states of its layer for the next call, as truncated backpropagation does."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head, self.states = nn.LSTM(WIDTH, UNITS), nn.Linear(UNITS, CLASSES), None

        def forward(self, x):
            given = None if self.states is None else tuple(each.detach() for each in self.states)
            outputs, self.states = self.layer(x.transpose(0, 1), given)
            return self.head(outputs[-1])

    torch.manual_seed(0)
    model, batch = Streams(), (torch.randn(SAMPLES, STEPS, WIDTH), torch.randint(CLASSES, (SAMPLES,)))

    def work(world, line):
        run = sw.parallelize(structural_copy(model), line, world, loss=LOSS, example=batch[0])
        optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
        return [run.step(part, update=optimizer).item() for part in run.shard([batch]) for _ in range(3)]

    (expected,) = launch(lambda world: work(world, "single"), 1, ranks="threads")
    for found in launch(lambda world: work(world, "tp2"), 2, ranks="threads"):
        assert found == pytest.approx(expected, rel=1e-5)
    assert expected[1] != expected[0]


@pytest.mark.sampled(0)
def test_a_layer_that_projects_its_state_stays_whole():
    class Projects(Tagger):
        def __init__(self):
            super().__init__(nn.LSTM, proj_size=UNITS - 1)
            self.head = nn.Linear(UNITS - 1, CLASSES)
            self.wide = nn.Sequential(nn.Linear(CLASSES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

        def forward(self, tokens):
            return self.wide(super().forward(tokens))

    MODELS["projects"] = Projects
    try:
        case = RecurrentCase("projects", None, LOSS)
        plan, _ = planned("tp2", case)
        held = {name: at.local_shape(plan.mesh.coord(0)) == at.shape for name, at in plan.compute.items()}
        assert all(whole for name, whole in held.items() if name.startswith("layers."))
        assert not held["wide.0.weight"]
        check_equal("tp2", case)
    finally:
        del MODELS["projects"]


def test_a_refusal_names_recurrent_layers_and_which_can_be_cut():
    layer = nn.LSTM(WIDTH, UNITS, proj_size=WIDTH)
    job = job_for(layer, LOSS, Layout.parse("tp2"), torch.randn(STEPS, SAMPLES, WIDTH))
    with pytest.raises(LayoutError) as raised:
        make_plan(job, Layout.parse("tp2"))
    assert "LSTM with LSTM '' (32, 6)" in str(raised.value)
    assert "a recurrent layer without proj_size" in str(raised.value)
