"""What ``run.predict`` returns: each rank computes its share of the samples, and all get the whole output in order."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwright import Layout, MeanSquaredError, launch, parallelize
from shardwright.errors import PlanError
from shardwright.models import GPT, GPTConfig


def x_of(num_samples):
    return torch.arange(num_samples * 3.0).view(num_samples, 3)


class Other(nn.Module):
    """A model whose output has a form that a test gives."""

    def __init__(self, form):
        super().__init__()
        self.form, self.linear = form, nn.Linear(3, 2)
        self.table = nn.Parameter(torch.ones(2, 5))

    def forward(self, x):
        return self.form(self, x, self.linear(x))


def predicted(model, line, inputs, times=1):
    """What each rank predicts, and how many samples the model was called with on it."""

    def work(world):
        run, calls = parallelize(model, line, world, loss=MeanSquaredError()), []
        first = run.model.linear if isinstance(model, Other) else run.model
        first.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
        return [run.predict(inputs) for _ in range(times)], calls

    return launch(work, Layout.parse(line), ranks="threads")


def assert_whole(found, model, inputs):
    with torch.no_grad():
        expected = pytree.tree_leaves(model.eval()(inputs))
    for outputs, _ in found:
        for output in outputs:
            leaves = pytree.tree_leaves(output)
            assert len(leaves) == len(expected)
            for leaf, wanted in zip(leaves, expected, strict=True):
                if isinstance(wanted, torch.Tensor) and not wanted.dim():
                    assert leaf is None
                elif isinstance(wanted, torch.Tensor):
                    torch.testing.assert_close(leaf, wanted, rtol=1e-6, atol=1e-7)
                else:
                    assert leaf == wanted


@pytest.mark.parametrize(
    "line", ["dp2", "dp3/zero3", "dp2 tp2", "dp2 tp2/sp", "dp2 tp2/seq", "tp2x2/2d", "tp2x2x2/3d", "pp2/1f1b mb2 dp2"]
)
def test_each_rank_computes_its_share_and_all_get_the_whole_in_order(line):
    torch.manual_seed(0)
    model = GPT(GPTConfig(num_layers=2, num_heads=4, width=16, vocabulary=23, dropout=0.3)).double()
    tokens = torch.randint(23, (9, 4))
    found = predicted(model, line, tokens)
    assert_whole(found, model, tokens)
    counts = [count for _, calls in found for count in calls]
    num_shares = {"tp2x2/2d": 2, "tp2x2x2/3d": 4, "dp2 tp2/sp": 4, "dp3/zero3": 3}.get(line, 2)
    assert counts == [] if "pp" in line else max(counts) == -(-9 // num_shares)
    assert "pp" in line or sum(counts) == 9 * len(found) / num_shares


@dataclass
class Named:
    scores: torch.Tensor
    kept: torch.Tensor
    name: str
    loss: torch.Tensor


pytree.register_pytree_node(
    Named, lambda it: ([it.scores, it.kept, it.name, it.loss], None), lambda leaves, _: Named(*leaves)
)

FORMS = {
    "tuple": lambda model, x, y: (y, (x.long(), y > 0)),
    "dict": lambda model, x, y: {"logits": y.bfloat16(), "none": None, "flag": True, "loss": y.mean()},
    "dataclass": lambda model, x, y: Named(y, x.topk(2).values, "scores", y.sum()),
    "narrow": lambda model, x, y: [y.half(), torch.complex(y, y), x.to(torch.uint8)],
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("num_samples", [4, 5])
def test_outputs_of_every_form_are_joined_with_their_dtypes(name, num_samples):
    model, x = Other(FORMS[name]), x_of(num_samples)
    found = predicted(model, "dp2", x, times=2)
    assert_whole(found, model, x)
    assert sum(sum(calls) for _, calls in found) == 2 * num_samples
    dtypes = [leaf.dtype for leaf in pytree.tree_leaves(model(x)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    assert [leaf.dtype for leaf in pytree.tree_leaves(found[0][0][0]) if isinstance(leaf, torch.Tensor)] == dtypes


def test_an_output_under_bf16_is_as_wide_as_the_model_computed_it():
    model = Other(lambda model, x, y: y)
    for outputs, _ in predicted(model, "dp2 bf16", x_of(4)):
        assert outputs[0].dtype == torch.bfloat16
        torch.testing.assert_close(outputs[0].float(), model(x_of(4)).detach(), rtol=0.02, atol=0.1)


class Cache:
    """An object that torch does not look into, of a rank's samples."""

    def __init__(self, y):
        self.y = y

    def __eq__(self, other):
        return torch.allclose(self.y, other.y)


OTHERS = {
    "a table": lambda model, x, y: (y, model.table.repeat(5, 1)),
    "a number of samples": lambda model, x, y: (y, len(x)),
    "a cache": lambda model, x, y: (y, Cache(y)),
    "samples and tokens in one dim": lambda model, x, y: (y, x.reshape(-1)),
    "a padded length of its own": lambda model, x, y: y.new_ones(len(x), int(x[-1, 0])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_of_an_output_that_is_not_cut_by_samples_every_rank_computes_the_whole_from_then_on(name):
    model, x = Other(OTHERS[name]), x_of(4)
    found = predicted(model, "dp2", x, times=2)
    assert_whole(found, model, x)
    assert [calls for _, calls in found] == [[2, 4, 4]] * 2


def test_a_table_as_long_as_a_ranks_samples_is_told_by_its_values():
    model = Other(lambda model, x, y: (y, model.table))
    found = predicted(model, "dp2", x_of(4), times=2)  # two samples on a rank, and two rows
    assert_whole(found, model, x_of(4))
    assert [calls for _, calls in found] == [[2, 4, 4]] * 2


def test_samples_that_are_alike_are_told_from_a_table_by_the_whole_once():
    model, x = Other(lambda model, x, y: y), torch.ones(4, 3)
    found = predicted(model, "dp2", x, times=3)
    assert_whole(found, model, x)
    assert [calls for _, calls in found] == [[2, 4, 2, 2]] * 2


@pytest.mark.parametrize("num_samples", [1, 2])
def test_fewer_samples_than_shares_are_computed_by_every_rank(num_samples):
    model = Other(lambda model, x, y: y)
    found = predicted(model, "dp3", x_of(num_samples))
    assert_whole(found, model, x_of(num_samples))
    assert [calls for _, calls in found] == [[num_samples]] * 3


@pytest.mark.parametrize("line", ["dp2", "dp4", "pp2 dp2"])
def test_the_outputs_are_sent_once_over_the_axes_that_cut_samples(line):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 64))

    def work(world):
        run = parallelize(model, line, world, loss=MeanSquaredError())
        with world.recorder.recording() as records:
            run.predict(x_of(6))
        return [each for each in records if each.axis == "dp"]

    for records in launch(work, Layout.parse(line), ranks="threads"):
        assert [(each.kind, each.num_bytes, each.source) for each in records] == [("all_gather", 6 * 64 * 4, "core")]


@pytest.mark.parametrize("others", [x_of(5), x_of(4) + 1, x_of(1)], ids=["more", "other values", "too few to share"])
def test_ranks_that_predict_different_inputs_are_named_on_every_rank(others):
    model, errors = Other(lambda model, x, y: y), []

    def work(world):
        run = parallelize(model, "dp2", world, loss=MeanSquaredError())
        try:
            run.predict(others if world.rank else x_of(4))
        except ValueError as error:
            errors.append(str(error))
            raise

    with pytest.raises(PlanError, match="ranks were given different inputs to predict"):
        launch(work, 2, ranks="threads")
    assert len(errors) == 2
    assert f"4 samples on rank 0, {len(others)} on rank 1" in errors[0]
