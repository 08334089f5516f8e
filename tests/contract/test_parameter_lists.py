"""Parameters that a model keeps in plain lists too, as those to regularize, are cut if no forward reads the lists."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright import verify
from shardwright.analysis.objects.held_parameters import UnreadParameter, parameter_lists, put_unread
from shardwright.errors import LayoutError

LINES = ("tp2", "dp2/zero1", "dp2/zero3", "pp2/1f1b mb2", "pp2/1f1b mb2 dp2/zero1 tp2", "tp2x2/2d")
LOSS = sw.MeanSquaredError()
BATCH = torch.randn(8, 8), torch.randn(8, 8)


class Regularized(nn.Module):
    """A model with a method for a penalty over parameters that it keeps in lists of names, tuples, dicts and sets."""

    def __init__(self, *, reads=""):
        super().__init__()
        self.up, self.inner, self.down = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.lists = [(list(self.up.named_parameters()), 1e-3), ((self.down.weight,), 1e-4)]
        self.inner.by_name = {"weights": {self.inner.weight}, "kinds": ["plain"]}
        self.reads = reads

    def forward(self, x):
        hidden = torch.tanh(self.inner(torch.tanh(self.up(x))))
        if self.reads == "product":
            return self.down(hidden) + hidden @ self.lists[1][0][0].T
        if self.reads == "caught":
            try:
                self.lists[1][0][0].sum()
            except LayoutError:
                return self.down(2 * hidden)
        if self.reads == "evaluation" and not self.training:
            return self.down(hidden) + self.lists[1][0][0].sum()
        return self.down(hidden)

    def penalty(self):
        return sum(scale * weight.square().sum() for _, weight in self.lists[0][0] for scale in (1e-3,))


@pytest.mark.parametrize("line", LINES)
def test_a_model_with_lists_that_no_forward_reads_is_equal_and_cut(line):
    plans = []
    verdict = verify(Regularized(), line, [BATCH] * 2, loss=LOSS, alter=lambda run: plans.append(run.plan))
    assert verdict.equal, str(verdict)
    if "tp" in line:
        cut = {name for name, layout in plans[0].compute.items() if set(layout.axes) - {"pp", "dp"}}
        assert len(cut & {"up.weight", "inner.weight", "down.weight"}) >= 2


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("reads", ["product", "caught", "evaluation"])
def test_a_list_that_the_forward_reads_keeps_its_parameters(line, reads):
    model = Regularized(reads=reads)
    if line.startswith("pp2/1f1b mb2") and "tp" not in line:  # the stage that reads the list has the parameter whole
        verdict = verify(model, line, [BATCH] * 2, loss=LOSS)
        assert verdict.equal, str(verdict)
        return
    with pytest.raises(LayoutError, match=r"'up\.weight' would be sharded where other code uses it whole"):
        verify(model, line, [BATCH] * 2, loss=LOSS)


def reading(world, line, given=BATCH[0]):
    with sw.without_values():
        model = Regularized()
    run = sw.parallelize(model, line, world, loss=LOSS, example=given)
    for batch in run.shard([BATCH]):
        run.step(batch)
    assert torch.is_tensor(model.penalty()), "the caller's model keeps its parameters"
    try:
        return run.model.penalty()
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize("line", ["tp2", "dp2/zero3", "pp2/1f1b mb2"])
def test_code_that_reads_such_a_list_after_a_step_gets_an_error_and_no_part(line):
    for text in sw.launch(reading, 2, line, ranks="threads"):
        assert text.startswith("code reads the parameter 'up.weight' in a list")
        assert "the attribute 'lists' of the model" in text


def test_where_every_rank_has_all_parameters_lists_hold_them_as_before():
    for penalty in sw.launch(reading, 2, "dp2", ranks="threads"):
        assert penalty.item() > 0


def test_without_an_example_such_a_layout_is_refused_with_what_to_write(caplog):
    caplog.set_level(logging.ERROR)
    with pytest.raises(LayoutError, match=r"if no forward reads it there, write sw\.parallelize"):
        sw.launch(reading, 2, "dp2/zero3", None, ranks="threads")


@pytest.mark.parametrize(
    "reads",
    [
        lambda held: held + 1,
        lambda held: 2 * held,
        lambda held: torch.ones(2) @ held,
        lambda held: torch.stack([held]),
        lambda held: torch.nn.functional.linear(torch.ones(1, 2), weight=held),
        lambda held: held.shape,
        lambda held: held[0],
        lambda held: -held,
        lambda held: float(held),
        lambda held: held.data,
    ],
)  # fmt: skip
def test_whatever_reads_the_object_in_a_parameters_place_gets_the_error(reads):
    read = set()
    with pytest.raises(LayoutError, match=r"code reads the parameter 'a\.weight' in a list"):
        reads(UnreadParameter("a.weight", ("", "held"), read))
    assert read == {("", "held")}


def test_every_list_of_a_model_is_found_and_its_other_entries_stay():
    model = Regularized()
    lists = parameter_lists(model)
    assert set(lists) == {("", "lists"), ("inner", "by_name")}
    put_unread(model, lists)
    pairs, scale = model.lists[0]
    assert [name for name, _ in pairs] == ["weight", "bias"]
    assert scale == 1e-3
    assert model.inner.by_name["kinds"] == ["plain"]
    assert not parameter_lists(model)
