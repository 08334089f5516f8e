"""Models that return tensors inside of objects: dataclasses, dicts of their own class, distributions."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional
from torch.utils import _pytree as pytree

from shardwright import launch, parallelize
from shardwright.analysis.chunks.forward_events import record_events
from shardwright.errors import PlanError
from shardwright.verify import verify


@dataclass
class Output:
    y: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True)
class Registered:
    y: torch.Tensor
    hidden: torch.Tensor


class Attributes(dict):
    __getattr__ = dict.__getitem__


class Slots:
    __slots__ = ("hidden", "y")

    def __init__(self, y, hidden):
        self.y, self.hidden = y, hidden


class Pair(tuple):
    """A tuple of a class of its own, whose items cannot be set."""

    y = property(lambda self: self[0])
    hidden = property(lambda self: self[1])


KINDS = {
    "dataclass": Output,
    "dict of its own class": lambda y, hidden: Attributes(y=y, hidden=hidden),
    "UserDict": lambda y, hidden: UserDict(y=y, hidden=hidden),
    "namespace": lambda y, hidden: SimpleNamespace(y=y, hidden=hidden),
    "slots": Slots,
    "in a dict": lambda y, hidden: {"o": Slots(y, hidden)},
}


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b, self.c = nn.Linear(6, 32), nn.Linear(32, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        return self.kind(self.c(torch.relu(self.b(hidden))), hidden)


def read(output):
    output = output["o"] if isinstance(output, dict) and "o" in output else output
    return (output["y"], output["hidden"]) if isinstance(output, UserDict) else (output.y, output.hidden)


def loss(output, targets):
    y, hidden = read(output)
    entropy = (functional.softmax(y, -1) * functional.log_softmax(y, -1)).sum()
    return functional.cross_entropy(y, targets, reduction="sum") + entropy + hidden.std(-1).sum(), len(targets)


def batches():
    torch.manual_seed(0)
    return [(torch.randn(8, 6), torch.randint(4, (8,))) for _ in range(2)]


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "pp2", "pp2/1f1b mb2", "pp2 dp2 mb2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_reads_outputs_in_an_object_though_another_stage_made_one_of_them(kind, line):
    verdict = verify(Model(KINDS[kind]), line, batches(), loss=loss)
    assert verdict.equal, str(verdict)


def test_the_look_at_a_loss_leaves_the_graph_of_outputs_in_an_object_alone():
    def entropy(output, targets):
        y, _ = read(output)
        return functional.softmax(y, -1).mul(functional.log_softmax(y, -1)).sum(), torch.tensor(len(targets))

    verdict = verify(Model(Output), "pp2 mb2", batches(), loss=entropy)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["tp2", "tp2/sp", "tp2x2/2d", "pp2 mb2 tp2"])
@pytest.mark.parametrize("kind", [*KINDS, "tuple of its own class"])
def test_parts_of_outputs_in_an_object_are_refused_by_its_class(kind, line):
    made = KINDS.get(kind, lambda *both: Pair(both))
    name = type(made(1, 2)).__name__ if kind != "in a dict" else "Slots"
    with pytest.raises(
        PlanError, match=rf"inside of an object, into(?s:.*)given: +{name} in the model's output, under tp2"
    ):
        verify(Model(made), line, batches(), loss=loss)


def test_an_output_that_another_stage_made_cannot_be_put_into_a_tuple_of_its_own_class():
    def untraceable(*both):
        return Pair(both if float(both[0].shape[0]) else ())

    model = Model(untraceable)
    with pytest.raises(
        PlanError, match=r"inside of an object, into(?s:.*)given: +Pair in the model's output, under pp"
    ):
        verify(model, "pp2", batches(), loss=loss)


def test_a_dataclass_that_torch_was_told_of_is_cut():
    if Registered not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(Registered)
    for line in ("tp2", "tp2x2/2d", "pp2 mb2 tp2"):
        verdict = verify(Model(Registered), line, batches(), loss=loss)
        assert verdict.equal, str(verdict)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.mean, self.log_std = nn.Linear(32, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        spread = self.log_std.exp()
        return Independent(Normal(self.mean(self.net(x)), spread, validate_args=False), 1, validate_args=False)


@pytest.mark.parametrize("line", ["dp2", "pp2 mb2"])
def test_a_policy_that_returns_a_distribution_trains_as_on_one_device(line):
    def negative(distribution, targets):
        return -distribution.log_prob(targets).sum(), len(targets)

    made = [(x, torch.randn(8, 4)) for x, _ in batches()]
    verdict = verify(Policy(), line, made, loss=negative)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("kind", ["namespace", "dict of its own class"])
def test_predictions_of_stages_in_an_object_are_refused(kind):
    model, (inputs, _), *_ = Model(KINDS[kind]), *batches()

    def work(world):
        return parallelize(model, "pp2", world, loss=loss, example=inputs).predict(inputs)

    with pytest.raises(PlanError, match="the output of the last chunk is no tree of tensors"):
        launch(work, 2, ranks="threads")


@pytest.mark.parametrize("line", ["dp2", "pp2", "pp2/1f1b mb2"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_evaluates_a_loss_of_outputs_in_an_object(kind, line):
    model, (batch, _) = Model(KINDS[kind]), batches()
    with torch.no_grad():
        expected, count = loss(model(batch[0]), batch[1])

    def work(world):
        run = parallelize(model, line, world, loss=loss, example=batch[0])
        return run.evaluate(next(run.shard([batch]))).item()

    for found in launch(work, 2, ranks="threads"):
        assert found == pytest.approx(expected.item() / count, rel=1e-5)


class WithCache(nn.Module):
    """Returns its logits beside an object as a cache is: keys that lead to them, and a window of these."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 32), nn.Linear(32, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = self.a(x)
        keys = self.c(torch.relu(self.b(torch.relu(h))))
        cache = SimpleNamespace(layers=[SimpleNamespace(keys=h[:, :8], states=(h, h.detach()))], last=keys)
        return self.d(torch.relu(keys)), cache


def logits_alone(output, targets):
    return functional.cross_entropy(output[0], targets, reduction="sum"), len(targets)


@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d", "pp2 mb2", "pp2 mb2 tp2"])
def test_an_object_that_the_loss_does_not_read_is_let_be(line):
    verdict = verify(WithCache(), line, batches(), loss=logits_alone)
    assert verdict.equal, str(verdict)


def test_what_only_leads_to_other_outputs_is_not_sent_between_stages():
    record = record_events(WithCache().to("meta"), torch.empty(8, 6, device="meta"), ["a", "b", "c", "d"])
    assert record.outputs == ((len(record.events) - 1, 0),)


READS = {
    "keys": lambda cache: cache.last.pow(2).sum(),
    "a window": lambda cache: cache.layers[0].keys.std(1).sum(),
    "in a tuple": lambda cache: cache.layers[0].states[0].std(1).sum(),
    "without a gradient": lambda cache: cache.layers[0].states[1].std(1).sum(),
}


@pytest.mark.parametrize("line", ["tp2", "tp2x2/2d", "pp2 mb2 tp2"])
@pytest.mark.parametrize("what", READS)
def test_a_loss_that_reads_such_an_object_is_refused_under_tp_in_the_first_step(what, line):
    def both(output, targets):
        return logits_alone(output, targets)[0] + READS[what](output[1]), len(targets)

    with pytest.raises(PlanError, match=r"inside of an object, into(?s:.*)given: +SimpleNamespace"):
        verify(WithCache(), line, batches(), loss=both)


def test_stages_refuse_a_read_of_what_another_stage_keeps_in_an_object():
    def both(output, targets):
        return logits_alone(output, targets)[0] + READS["in a tuple"](output[1]), len(targets)

    with pytest.raises(PlanError, match=r"inside of an object, into(?s:.*)given: +SimpleNamespace"):
        verify(WithCache(), "pp2/cut:a,c mb2", batches(), loss=both)


@pytest.mark.parametrize("what", [what for what in READS if what != "in a tuple"])
def test_stages_read_what_the_last_one_has_computed_in_an_object(what):
    def both(output, targets):
        return logits_alone(output, targets)[0] + READS[what](output[1]), len(targets)

    verdict = verify(WithCache(), "pp2/cut:a,c mb2", batches(), loss=both)
    assert verdict.equal, str(verdict)


class Raises(nn.Linear):
    """Returns an object with a property that raises, and with a long list of numbers."""

    def forward(self, x):
        output = Property()
        output.__dict__["broken"], output.y, output.numbers = 1, super().forward(x), list(range(200_000))
        return {"y": output.y, "o": output}


class Property:
    @property
    def broken(self):
        raise ValueError("not yet")


def test_properties_of_an_object_are_not_asked():
    def first(output, targets):
        return functional.cross_entropy(output["y"], targets, reduction="sum"), len(targets)

    verdict = verify(nn.Sequential(nn.Linear(6, 8), Raises(8, 4)), "dp2", batches(), loss=first)
    assert verdict.equal, str(verdict)
