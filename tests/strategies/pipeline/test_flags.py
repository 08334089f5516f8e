"""A flag of the forward may be given in some batches alone, also where stages are cut by traced code."""

from __future__ import annotations

from enum import Enum

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError

X, Y = torch.randn(8, 6), torch.randn(8, 6)


class Flagged(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.extra = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 6)

    def forward(self, x, kind="gelu", twice=False):
        for layer in self.layers:
            x = x + (torch.relu(layer(x)) if kind == "relu" else nn.functional.gelu(layer(x)))
            if twice:
                x = self.extra(x)
        return x


def losses(batches, example=None):
    torch.manual_seed(0)
    model = Flagged()

    def work(world):
        run = sw.parallelize(model, "pp2 mb2", world, loss=sw.MeanSquaredError(), example=example)
        return [run.step(part).item() for part in run.shard([(batch, Y) for batch in batches])]

    def alone(batch):
        return model(**batch) if isinstance(batch, dict) else model(*batch)

    expected = [nn.functional.mse_loss(alone(batch), Y).item() for batch in batches]
    return sw.launch(work, 2, ranks="threads"), pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "batches",
    [[{"x": X}, {"x": X, "kind": "relu"}, {"x": X, "kind": "gelu"}], [(X,), (X, "relu"), (X, "relu", False)]],
    ids=["named", "in order"],
)
def test_code_that_branches_on_a_flag_is_traced_for_its_value(batches):
    found, expected = losses(batches)
    assert found == [expected, expected]


class Kind(str, Enum):  # noqa: UP042
    """Not a StrEnum: its repr is that of an Enum."""

    RELU = "relu"


def test_a_flag_that_is_an_enum_and_a_text_is_refused_in_the_words_of_code_that_cannot_be_followed():
    with pytest.raises(LayoutError, match=r"cannot be followed(?s:.*)kind == \"relu\""):
        losses([{"x": X}, {"x": X, "kind": Kind.RELU}])


def test_a_flag_by_which_other_layers_are_called_is_asked_for_in_the_example():
    batches = [{"x": X}, {"x": X, "twice": True}]
    with pytest.raises(LayoutError, match=r"now calls 'extra'(?s:.*)give these arguments in the example"):
        losses(batches)
    found, expected = losses(batches, example=batches[1])
    assert found == [expected, expected]
