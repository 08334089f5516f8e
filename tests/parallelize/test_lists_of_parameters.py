"""Models whose own methods list other parameters than torch's, and attributes that cannot be copied, are refused."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from shardwright import verify
from shardwright.errors import PlanError


class Prefix(nn.Module):
    """Trains its mapper alone, by what its ``parameters`` lists."""

    def __init__(self):
        super().__init__()
        self.mapper, self.decoder = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.decoder(self.mapper(x))


class OfTheMapper(Prefix):
    def parameters(self, recurse=True):
        return self.mapper.parameters(recurse)


class WithoutArguments(Prefix):
    def parameters(self):
        return super().parameters()


class Named(Prefix):
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self.mapper.named_parameters(prefix, recurse, remove_duplicate)


class Sorted(Prefix):
    """Lists the same parameters, in another order."""

    def parameters(self, recurse=True):
        return iter(sorted(super().parameters(recurse), key=len))


BATCH = torch.arange(16.0).view(4, 4), torch.arange(4) % 3


@pytest.mark.parametrize("line", ["single", "dp2", "tp2"])
@pytest.mark.parametrize("kind", [OfTheMapper, WithoutArguments, Named])
def test_a_model_that_lists_other_parameters_than_it_has_is_refused(kind, line):
    with pytest.raises(PlanError, match=r"parameters\(\) of its own, which lists other parameters"):
        verify(kind(), line, [BATCH])
    with pytest.raises(PlanError, match="the module '0' has a method"):
        verify(nn.Sequential(kind(), nn.Linear(3, 3)), line, [BATCH])


def test_a_model_that_lists_the_same_parameters_by_its_own_method_is_taken():
    assert verify(Sorted(), "dp2", [BATCH]).equal


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_attributes_that_python_cannot_copy_are_shared_or_named():
    model = Prefix()
    model.functions, model.scripted = torch.nn.functional, torch.jit.script(torch.nn.functional.relu)
    model.held = {"all": [model.functions, (model.scripted,)]}
    assert verify(model, "dp2", [BATCH]).equal
    model.lock = threading.Lock()
    with pytest.raises(PlanError, match="the attribute 'lock' of Prefix cannot be copied"):
        verify(model, "dp2", [BATCH])
