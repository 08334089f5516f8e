"""Models that ranks may train are found in the same places in each process, wherever the ranks' function has them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
from torch import nn

from shardwright.comm import trained_copies
from shardwright.comm.trained_copies import note_trained, objects_of, tell_trained, trained_among

MODEL = nn.Linear(2, 2)


def of_a_global(world):
    return MODEL


def of_an_argument(world, *args):
    return args


class Trainer:
    def __init__(self, model):
        self.model = model

    def work(self, world):
        return self.model


@dataclass
class Unhashable(nn.Module):
    """A module with __eq__ and without __hash__."""

    size: int = 1

    def __post_init__(self):
        super().__init__()


def enclosed(model):
    return lambda world: model


@pytest.mark.parametrize(
    ("made", "args"),
    [
        (lambda model: of_an_argument, lambda model: (1, {"a": [model]})),
        (lambda model: partial(of_an_argument, model=model), lambda model: ()),
        (lambda model: Trainer(model).work, lambda model: ()),
        (enclosed, lambda model: (3,)),
    ],
)
@pytest.mark.parametrize("kind", [lambda: nn.Linear(2, 2), Unhashable])
def test_a_trained_copy_is_told_of_the_model_in_its_place(monkeypatch, made, args, kind):
    told = []
    monkeypatch.setattr(trained_copies, "ON_RETURN", [told.append])
    ours, theirs = kind(), kind()  # in the process that launches, and in a rank
    there = objects_of(made(theirs), args(theirs))
    assert trained_among(there) == []
    note_trained(theirs)
    note_trained(theirs)
    tell_trained(objects_of(made(ours), args(ours)), trained_among(there))
    assert len(told) == 1
    assert told[0] is ours


def test_a_global_that_the_function_names_is_found():
    assert any(each is MODEL for each in objects_of(of_a_global, ()))
    assert not any(each is MODEL for each in objects_of(of_an_argument, ()))
    assert objects_of(print, (1,))[0] == 1  # native code has no names


def test_places_that_are_no_model_here_are_left_out(monkeypatch):
    told = []
    monkeypatch.setattr(trained_copies, "ON_RETURN", [told.append])
    tell_trained([1, MODEL], [0, 5])
    assert told == []
