from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.comm.launch import launch
from shardwright.errors import PlanError
from shardwright.models.losses import CrossEntropy, MeanSquaredError, sum_and_count
from shardwright.parallelize import parallelize


@pytest.mark.parametrize("shape", [(), (7,), (2, 5), (2, 3, 4)])
@pytest.mark.parametrize("ignore_index", [-100, 2])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_cross_entropy_is_torchs_sum_and_the_number_of_targets_not_ignored(shape, ignore_index, label_smoothing):
    torch.manual_seed(0)
    logits = torch.randn(*shape, 6, dtype=torch.float64)
    targets = torch.randint(6, shape)
    loss_sum, count = CrossEntropy(ignore_index, label_smoothing)(logits, targets)
    expected = functional.cross_entropy(
        logits.reshape(-1, 6),
        targets.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )
    torch.testing.assert_close(loss_sum, expected, rtol=0, atol=0)
    assert count.item() == (targets != ignore_index).sum().item()
    assert (count.dtype, count.dim(), loss_sum.dim()) == (torch.int64, 0, 0)


def test_sum_over_count_is_torchs_mean():
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 4, 6), torch.randint(6, (3, 4))
    targets[0, :2] = -100
    loss_sum, count = CrossEntropy(label_smoothing=0.2)(logits, targets)
    mean = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(loss_sum / count, mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_sum_has_the_dtype_of_the_logits(dtype):
    assert CrossEntropy()(torch.zeros(2, 3, dtype=dtype), torch.tensor([0, 1]))[0].dtype == dtype
    assert MeanSquaredError()(torch.zeros(2, dtype=dtype), torch.zeros(2))[0].dtype == dtype


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_an_empty_batch_gives_zero_and_gradients_of_zero(label_smoothing):
    weight = torch.ones(4, 6, requires_grad=True)
    logits = torch.zeros(0, 3, 4) @ weight
    loss_sum, count = CrossEntropy(label_smoothing=label_smoothing)(logits, torch.zeros(0, 3, dtype=torch.int64))
    assert (loss_sum.item(), count.item()) == (0, 0)
    loss_sum.backward()
    assert torch.equal(weight.grad, torch.zeros(4, 6))
    error_sum, count = MeanSquaredError()(torch.zeros(0, 3, 4) @ weight, torch.zeros(0, 3, 6))
    error_sum.backward()
    assert (error_sum.item(), count.item()) == (0, 0)
    assert torch.equal(weight.grad, torch.zeros(4, 6))


def test_targets_that_are_all_ignored_give_zero_and_gradients_of_zero():
    logits = torch.randn(2, 6, requires_grad=True)
    loss_sum, count = CrossEntropy(label_smoothing=0.1)(logits, torch.full((2,), -100))
    loss_sum.backward()
    assert (loss_sum.item(), count.item()) == (0, 0)
    assert torch.equal(logits.grad, torch.zeros(2, 6))


def test_mean_squared_error_over_its_count_is_torchs_mean():
    torch.manual_seed(0)
    outputs, targets = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    error_sum, count = MeanSquaredError()(outputs, targets)
    torch.testing.assert_close(error_sum / count, functional.mse_loss(outputs, targets))


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(PlanError, match="differ in shape"):
        MeanSquaredError()(torch.zeros(4, 1), torch.zeros(4))
    with pytest.raises(PlanError, match="differ in shape"):
        CrossEntropy()(torch.zeros(4, 5, 6), torch.zeros(5, 4, dtype=torch.int64))


class Output(dict):
    """What some libraries return: a dict with names of its own."""


@pytest.mark.parametrize(
    ("output", "given"),
    [
        ({"logits": torch.zeros(2, 3), "hidden": None}, "dict with logits, hidden"),
        (Output(logits=torch.zeros(2, 3)), "Output with logits"),
        ((torch.zeros(2, 3), None), "tuple of Tensor, NoneType"),
        (None, "NoneType"),
    ],
)
@pytest.mark.parametrize("loss", [CrossEntropy(), MeanSquaredError()], ids=lambda loss: type(loss).__name__)
def test_an_output_that_is_no_tensor_is_refused_with_a_fix(loss, output, given):
    with pytest.raises(PlanError) as refusal:
        loss(output, torch.zeros(2, 3))
    assert f"as the model's output\n  given:   {given}\n" in str(refusal.value)
    assert "fix:     return it alone, or give a loss of your own" in str(refusal.value)
    with pytest.raises(PlanError, match="one tensor as the targets"):
        loss(torch.zeros(2, 3), output)


class GivesDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return {"logits": self.down(self.up(x).relu())}


@pytest.mark.parametrize("line", ["dp2", "tp2"])
def test_a_model_with_such_an_output_is_refused_on_every_rank_in_the_same_words(line):
    model = GivesDict()

    def work(world):
        run = parallelize(model, line, world)
        try:
            run.step(next(run.shard([(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))])))
        except PlanError as refusal:
            return str(refusal)
        return "not refused"

    (text,) = set(launch(work, 2, ranks="threads"))
    assert "given:   dict with logits" in text


@dataclass
class Scored:
    loss: torch.Tensor | None
    scores: torch.Tensor


@pytest.mark.parametrize(
    ("output", "targets", "fix"),
    [
        (Scored(None, torch.zeros(2, 3)), torch.zeros(2), "sw.CrossEntropy()(output.scores, targets)"),
        ((torch.zeros(2, 3), 1), torch.zeros(2), "sw.CrossEntropy()(output[0], targets)"),
        (torch.zeros(2, 3), None, "give batches of pairs (inputs, targets)"),
    ],
)
def test_what_is_no_tensor_is_refused_with_a_line_that_works(output, targets, fix):
    with pytest.raises(PlanError, match="takes one tensor as") as found:
        CrossEntropy()(output, targets)
    assert str(found.value).endswith(fix)


class Causal(nn.Module):
    """Returns the logits of the next token in a mapping, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7))

    def forward(self, ids):
        return {"logits": self.layers(ids)}


@pytest.mark.parametrize("line", ["dp2 tp2", "pp2 mb2"])
def test_the_line_for_causal_language_models_shifts_their_labels(line):
    ids, loss = torch.arange(24).view(4, 6) % 7, CrossEntropy(label_smoothing=0.1)
    model = Causal()
    with pytest.raises(PlanError, match="the tokens themselves") as found:
        loss(model(ids), ids)
    code = str(found.value).rpartition("or ")[2]
    assert code == "sw.CrossEntropy(label_smoothing=0.1)(output['logits'][:, :-1], targets[:, 1:])"
    proposed = eval(f"lambda output, targets: {code}", {"sw": sw})
    loss_sum, count = proposed(model(ids), ids)
    expected = functional.cross_entropy(
        model(ids)["logits"][:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(loss_sum / count, expected)
    assert sw.verify(model, line, [(ids, ids)], loss=proposed).equal


@pytest.mark.parametrize("count", ["three", None, object(), [1, 2], torch.ones(2), 10**400, {}])
def test_a_count_that_is_no_number_is_refused(count):
    with pytest.raises(PlanError, match="the count of a loss is no number"):
        sum_and_count((torch.tensor(3.0), count))


def test_a_model_that_returns_its_own_loss_behind_the_logits_is_told_how_to_give_it():
    output, targets = (torch.zeros(2, 3), torch.zeros(())), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(PlanError, match=r"loss=sw.MeanLoss\(lambda output, targets: output\[1\]\)"):
        CrossEntropy()(output, targets)
