"""Tables that a model's code keeps in caches of Python are those of real forwards, and not of a record's."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.analysis.model_graph import ModelGraph
from shardwright.models.losses import MeanSquaredError

BATCH = torch.randn(8, 5, 6), torch.randn(8, 5, 6)
TABLES, ROWS = {}, []


def computed(size, device, dtype):
    return torch.arange(size, device=device, dtype=dtype)[:, None] / size


def counted(function):
    """A decorator that hides the cache in a closure."""
    cached = functools.lru_cache(maxsize=2)(function)

    @functools.wraps(function)
    def called(*args):
        return cached(*args)

    called.cached = cached
    return called


unbounded = functools.cache(computed)
bounded = functools.lru_cache(maxsize=1)(computed)
hidden = counted(computed)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        x = x + self.table(x.shape[1], x.device, x.dtype)
        return x + self.down(torch.sigmoid(self.up(x)) * 2)

    def table(self, *key):
        return computed(*key)


class Unbounded(Model):
    def table(self, *key):
        return unbounded(*key)


class Bounded(Model):
    def table(self, *key):
        return bounded(*key)


class Hidden(Model):
    def table(self, *key):
        return hidden(*key)


class Static(Model):
    @staticmethod
    @counted
    def table(*key):
        return computed(*key)


class OfItsOwn(Model):
    def __init__(self):
        super().__init__()
        self.table = functools.lru_cache(computed)


class InDict(Model):
    def table(self, *key):
        if key not in TABLES:
            TABLES[key] = computed(*key)
        return TABLES[key]


class OfItsClass(Model):
    """Keeps one table as an attribute of its class, and others in a dict there."""

    last, known = None, {}

    def table(self, *key):
        if key not in type(self).known:
            type(self).last = computed(*key)
            type(self).known[key] = type(self).last
        return type(self).known[key]


class InList(Model):
    """Keeps tables in a list, of which it looks for the one that fits."""

    def table(self, *key):
        found = next((table for known, table in ROWS if known == key), None)
        if found is None:
            found = computed(*key)
            ROWS.append((key, found))
        return found


class WithLength(Model):
    """Keeps beside a table what it is for, under keys that stay."""

    def table(self, *key):
        if TABLES.get("key") != key:
            TABLES["key"], TABLES["table"] = key, computed(*key)
        return TABLES["table"]


KINDS = [Unbounded, Bounded, Hidden, Static, OfItsOwn, InDict, OfItsClass]


@pytest.fixture(autouse=True)
def _empty():
    for cached in (unbounded, bounded, hidden.cached, Static.table.cached):
        cached.cache_clear()
    TABLES.clear()
    ROWS.clear()
    OfItsClass.last, OfItsClass.known = None, {}


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (WithLength, "dp2/zero3"),
        (InList, "dp2/zero3"),
        *((kind, line) for kind in KINDS for line in ("tp2", "pp2/1f1b mb4", "dp2/zero3")),
    ],
)
def test_a_table_in_a_cache_has_values_after_a_run(kind, line):
    model = kind().double()
    inputs, targets = (each.double() for each in BATCH)
    assert verify(model, line, [(inputs, targets)] * 2, loss=MeanSquaredError()).equal
    assert torch.equal(model(inputs), Model.forward(model, inputs))
    assert not model(inputs).is_meta


@pytest.mark.parametrize("kind", [*KINDS, InList])
def test_a_record_leaves_tables_that_were_there(kind):
    model = kind()
    before = model.table(5, torch.device("cpu"), torch.float32)
    assert ModelGraph(model, BATCH[0].to("meta")).run.recording.calls
    assert model.table(5, torch.device("cpu"), torch.float32) is before


KEPT = {}


class Keeps(nn.Module):
    """Leaves in a global dict what it reads later: of its inputs, or of a shape alone."""

    def __init__(self, *, of_inputs):
        super().__init__()
        self.of_inputs, self.up, self.down = of_inputs, nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, x):
        KEPT["mask"] = (x.sum(-1, keepdim=True) > 0).to(x.dtype) if self.of_inputs else torch.ones(x.shape[1], 1)
        return self.down(torch.tanh(self.up(x)) * KEPT["mask"])


@pytest.mark.parametrize("of_inputs", [True, False])
def test_tensors_of_a_batch_that_a_forward_leaves_in_a_global_are_warned_of_on_ranks_that_are_threads(of_inputs):
    def said(**given):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            verdict = verify(Keeps(of_inputs=of_inputs), "dp2", [BATCH], loss=MeanSquaredError(), **given)
        KEPT.clear()
        return verdict, [str(each.message) for each in caught if "leaves tensors outside" in str(each.message)]

    _, texts = said()
    assert bool(texts) == of_inputs
    assert all("'KEPT'" in text and "ranks='processes'" in text for text in texts)
    verdict, texts = said(ranks="processes")
    assert verdict.equal, str(verdict)
    assert not texts
