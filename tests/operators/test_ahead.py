"""Weights prefetched: gathered in time, never stale, never for nothing if a model repeats its forward."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis.strategies import integers, lists
from torch import nn
from torch.utils.checkpoint import checkpoint

from contract.cases import NUM_SAMPLES, Case, check_traffic
from shardwright import verify
from shardwright.comm.pending import Pending
from shardwright.models.losses import MeanSquaredError
from shardwright.operators.linear import GridProduct, WeightFetch, WeightPrefetch

# ---- which message is sent when: an axis that logs its calls


@dataclass
class Log:
    """An axis: ``lines`` are the starts of messages and the waits for them."""

    lines: list[str] = field(default_factory=list)

    def all_gather_async(self, tensor, dim, sizes):
        sent, name = tensor.detach().clone(), int(tensor[0])
        self.lines.append(f"begin {name}")
        return Pending(lambda: (self.lines.append(f"wait {name}"), sent)[1])


class Layers:
    """Layers whose weights hold their number and the step in which they were set."""

    def __init__(self, num_layers: int) -> None:
        self.log, self.prefetch, self.root = Log(), WeightPrefetch(), nn.Identity()
        self.prefetch.watch(self.root)
        self.weights = [torch.tensor([float(number), 0.0]) for number in range(num_layers)]
        fetch = (WeightFetch(self.log, (1, 1)),)
        self.products = [GridProduct(fetch=fetch, weight=lambda w=w: w) for w in self.weights]
        self.root.forward = self.forward

    def forward(self, order):
        for number in order:
            found = self.prefetch.fetch(self.products[number], self.weights[number]).wait()
            assert torch.equal(found, self.weights[number]), "the weight as it is now"

    def step(self, order):
        """Runs one forward, then changes every weight; returns the logged messages."""
        self.log.lines.clear()
        self.root(order)
        for weight in self.weights:
            weight[1] += 1
        return list(self.log.lines)


ORDERS = lists(lists(integers(0, 3), max_size=6), min_size=1, max_size=6)


@given(ORDERS)
def test_whatever_the_order_each_layer_sees_its_weight_as_it_is_and_every_message_is_waited_for_once(orders):
    layers = Layers(4)
    for order in orders:
        lines = layers.step(order)
        begun = sorted(line.split()[1] for line in lines if "begin" in line)
        assert begun == sorted(line.split()[1] for line in lines if "wait" in line)
        assert len(begun) <= len(order) + 1  # one at most is sent for nothing


@given(lists(integers(0, 3), max_size=6))
def test_a_forward_that_does_as_the_one_before_sends_each_weight_once_while_the_layer_before_computes(order):
    layers = Layers(4)
    first, second = layers.step(order), layers.step(order)
    assert first == [f"{what} {number}" for number in order for what in ("begin", "wait")]
    assert sorted(second) == sorted(first)
    for place in range(1, len(order)):  # the next begins before this one is waited for
        waits = [i for i, line in enumerate(second) if "wait" in line]
        begins = [i for i, line in enumerate(second) if "begin" in line]
        assert begins[place] < waits[place - 1]


def test_a_weight_that_changes_while_it_is_on_its_way_is_fetched_again():
    layers = Layers(2)
    layers.step([0, 1])

    def forward():
        layers.prefetch.fetch(layers.products[0], layers.weights[0]).wait()
        layers.weights[1][1] += 1
        assert torch.equal(layers.prefetch.fetch(layers.products[1], layers.weights[1]).wait(), layers.weights[1])

    layers.root.forward = forward
    layers.root()


def test_layers_called_outside_of_a_forward_are_fetched_when_they_are_called():
    layers = Layers(2)
    for _ in range(3):
        layers.log.lines.clear()
        layers.forward([0, 1])
        assert layers.log.lines == ["begin 0", "wait 0", "begin 1", "wait 1"]


# ---- models, in every mode that fetches weights


def pair():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


class Turning(nn.Module):
    """First a, then b; from the second step on the other way round."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.num_forwards = pair(), pair(), 0

    def forward(self, x):
        self.num_forwards += 1
        return self.b(self.a(x)) if self.num_forwards == 1 else self.a(self.b(x))


class Repeating(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = torch.tanh(self.again(x))
        return self.last(x)


class Recomputing(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = pair(), pair()

    def forward(self, x):
        x = checkpoint(self.a, x, use_reentrant=False)
        return checkpoint(self.b, x, use_reentrant=False)


LINES = ["tp2x2/2d", "tp2x2x2/3d", "tp2x2/2d/regather", "tp2x2/2d/no-overlap"]
BATCH = (torch.randn(64, 40, 8), torch.randn(64, 40, 8))  # enough tokens that weights are what is sent


RUNS = [(Turning, "tp2/sp"), (Turning, "tp3/sp"), (Recomputing, "tp2/sp")]  # in 2D and 3D the order is in the plan
RUNS += [(model, line) for model in (Repeating, Recomputing) for line in LINES]


@pytest.mark.sampled(100)
@pytest.mark.parametrize(("model", "line"), RUNS, ids=lambda value: getattr(value, "__name__", value))
def test_a_model_that_does_not_call_its_layers_once_and_in_one_order_equals_one_device(model, line):
    torch.manual_seed(0)
    verdict = verify(model(), line, [BATCH] * 3, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


@dataclass(frozen=True, eq=False)
class Calls(Case):
    """Layers that a forward calls several times, on a batch of many tokens."""

    @property
    def model(self):
        torch.manual_seed(0)
        return Repeating().double()

    @property
    def batches(self):
        return [tuple(tensor.double() for tensor in BATCH)] * len(NUM_SAMPLES)


@pytest.mark.parametrize("line", ["tp2x2/2d", "tp2x2x2/3d", "tp2x2/2d/no-overlap"])
def test_a_layer_called_three_times_sends_what_is_said_in_the_second_step_too(line):
    check_traffic(line, Calls("calls", None, MeanSquaredError()))
