"""``verify`` itself: it says equal where it is, and where not, what differs first."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import nn

from processor_time import takes_less
from shardwright.errors import LayoutError, PlanError
from shardwright.models import GPT, CrossEntropy, GPTConfig, MeanSquaredError, MLPConfig, build_mlp
from shardwright.models.model_loss import ModelLoss
from shardwright.verify import verify

CONFIG = GPTConfig(vocabulary=19, max_tokens=6, num_layers=2, num_heads=2, width=8, hidden=11, dropout=0.1)


def gpt(**changes):
    settings = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    with torch.device("meta"):
        return GPT(GPTConfig(**{**settings, **changes}))


def batches(num_samples=5, steps=1):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(19, (num_samples, 6), generator=generator) for _ in range(steps)]
    return [(each[:, :-1], each[:, 1:]) for each in drawn]


NAMES = [name for name, _ in gpt().named_parameters()]


# ---- equal


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "dp2 tp2 mb2"])
def test_float32_is_equal_within_1e_5(line):
    verdict = verify(gpt(), line, batches(), dtype=torch.float32)
    assert verdict.equal, str(verdict)
    assert verdict.tolerance == 1e-5
    assert verdict.max_relative_error < 1e-5


def test_float64_is_equal_within_1e_10_after_several_steps():
    verdict = verify(gpt(), "dp2 tp2", batches(steps=4))
    assert verdict.equal, str(verdict)
    assert (verdict.tolerance, verdict.steps, verdict.world_size, verdict.parameters) == (1e-10, 4, 4, len(NAMES))
    assert verdict.parameters_error < 1e-10


@pytest.mark.sampled(0)
def test_sixty_four_ranks_of_a_small_model_are_equal():
    verdicts = []
    assert takes_less(30, lambda: verdicts.append(verify(gpt(), "dp16 tp4 mb2", batches(20))))
    for verdict in verdicts:
        assert verdict.equal, str(verdict)
        assert verdict.world_size == 64


def test_a_model_with_values_of_its_own_is_compared_as_it_is_and_left_alone():
    model = build_mlp(MLPConfig(widths=(5, 9, 4)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = (torch.randn(6, 5), torch.arange(6) % 4)
    assert verify(model, "dp2 tp2", [batch] * 3).equal
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_losses_of_ones_own_are_compared_too():
    model = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3))
    verdict = verify(model, "dp2 tp3", [(torch.randn(5, 4), torch.randn(5, 3))], loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


def test_a_gradient_that_is_truly_zero_is_no_difference():
    model = gpt(dropout=0.0)
    verdict = verify(model, "tp2", batches())  # the keys' biases move no softmax
    assert verdict.equal, str(verdict)


# ---- not equal


def scaled(name, factor):
    """An alteration: one gradient is scaled on the first rank."""

    def alter(run):
        if run.world.rank == 0:
            run.model.get_parameter(name).register_hook(lambda gradient: gradient * factor)

    return alter


@pytest.mark.parametrize("name", [NAMES[0], NAMES[5], NAMES[-1], "blocks.1.mlp.down.weight"])
def test_the_first_parameter_that_differs_is_named(name):
    verdict = verify(gpt(), "dp2", batches(), alter=scaled(name, 1.001))
    assert not verdict.equal
    assert verdict.first_difference == verdict.worst_parameter == name
    assert f"NOT equal to one device: first at {name}" in str(verdict)


def test_of_several_parameters_that_differ_the_first_in_forward_order_is_named():
    def alter(run):
        scaled("blocks.1.mlp.up.weight", 1.5)(run)
        scaled("blocks.0.attention.o.bias", 1.01)(run)

    verdict = verify(gpt(), "dp2", batches(), alter=alter)
    assert verdict.first_difference == "blocks.0.attention.o.bias"
    assert verdict.worst_parameter == "blocks.1.mlp.up.weight"


def test_one_element_on_one_of_many_ranks_is_seen():
    def alter(run):
        if run.world.rank == 3:
            run.model.get_parameter("blocks.0.mlp.up.weight").data[0, 0] += 1e-6

    assert not verify(gpt(), "dp2 tp2", batches(), alter=alter).equal


def test_one_element_of_a_gradient_on_the_last_rank_alone_is_seen():
    def alter(run):
        step = run.step

        def wrong(batch):
            loss = step(batch)
            if run.world.rank == run.world.size - 1:
                run.model.norm.bias.grad[-1] *= 1.001
            return loss

        run.step = wrong

    verdict = verify(gpt(), "dp2 tp2", batches(), alter=alter)
    assert not verdict.equal
    assert verdict.first_difference == "norm.bias"


def test_a_gradient_that_is_not_a_number_is_seen():
    verdict = verify(gpt(), "dp2", batches(), alter=scaled("position.weight", float("nan")))
    assert not verdict.equal
    assert verdict.max_relative_error == float("inf")
    assert verdict.first_difference == "position.weight"


@pytest.mark.parametrize(("rank", "wrong_step"), [(0, 0), (1, 0), (1, 1)])
def test_a_loss_that_is_not_a_number_is_seen_on_any_rank_and_in_any_step(rank, wrong_step):
    def alter(run):
        plain, number = run.step, iter(range(9))

        def step(batch):
            loss = plain(batch)
            return loss * float("nan") if run.world.rank == rank and next(number) == wrong_step else loss

        run.step = step

    verdict = verify(gpt(), "dp2", batches(steps=2), alter=alter)
    assert not verdict.equal
    assert math.isnan(verdict.loss_error)


class Root(nn.Module):
    """A model whose output is finite, and whose gradients are not, on one device too."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        y = self.linear(x)
        return y + (y * 0).sqrt()


def test_gradients_that_are_not_numbers_on_either_side_prove_nothing():
    torch.manual_seed(0)
    verdict = verify(Root(), "dp2", [(torch.ones(4, 4), torch.zeros(4, dtype=torch.int64))])
    assert not verdict.equal
    assert verdict.first_difference == "linear.weight"


def test_a_loss_that_is_off_is_seen_where_every_gradient_is_right():
    def alter(run):
        plain = run.loss.forward
        run.loss.forward = lambda output, targets: (lambda total, count: (total + total.detach() * 1e-6, count))(
            *plain(output, targets)
        )

    verdict = verify(gpt(), "dp2", batches(), alter=alter)
    assert not verdict.equal
    assert verdict.max_relative_error < verdict.tolerance
    assert verdict.loss_error == pytest.approx(1e-6, rel=1e-3)


def test_a_second_step_that_goes_wrong_is_seen_in_the_parameters():
    def alter(run):
        step = run.step

        def wrong(batch):
            loss = step(batch)
            if run.num_steps == 2:
                run.model.token.weight.grad.mul_(-1)
            return loss

        run.step = wrong

    verdict = verify(gpt(), "dp2", batches(steps=2), alter=alter)
    assert verdict.gradients_error < verdict.tolerance
    assert verdict.parameters_error > 1e-6
    assert not verdict.equal
    assert verdict.first_difference == verdict.worst_parameter == "token.weight"
    assert verdict.max_relative_error == verdict.parameters_error


@pytest.mark.parametrize("name", ["blocks.0.mlp.up.weight", "norm.bias"])
def test_a_millionth_of_the_gradients_of_later_steps_is_seen_in_the_parameters(name):
    def alter(run):
        step = run.step

        def wrong(batch):
            loss = step(batch)
            if run.num_steps > 1:
                run.model.get_parameter(name).grad.mul_(1 + 1e-6)
            return loss

        run.step = wrong

    verdict = verify(gpt(), "dp2", batches(steps=3), alter=alter)
    assert verdict.gradients_error < verdict.tolerance < verdict.parameters_error
    assert not verdict.equal


def scales_gradient(name, factor):
    def alter(run):
        step = run.step

        def wrong(batch):
            loss = step(batch)
            run.parameters[name].grad.mul_(factor)
            return loss

        run.step = wrong

    return alter


def test_a_model_that_magnifies_bf16_is_allowed_three_times_what_plain_torch_in_bf16_is_off_by():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(4)]
    model, given = nn.Sequential(*layers, nn.Linear(32, 8)), [(torch.randn(32, 32), torch.randint(8, (32,)))]
    verdict = verify(model, "dp2 bf16", given)
    assert verdict, str(verdict)
    assert verdict.tolerance < verdict.gradients_error < verdict.allowed <= 0.45
    assert f"one device itself differs by {verdict.own_error:.0e}" in str(verdict)
    wrong = [("4.weight", 1.2), ("4.weight", 0.5), ("0.0.weight", 2.0), ("0.0.weight", 0.5), ("1.0.weight", 0.5)]
    for name, factor in [*wrong, ("0.1.bias", 0.0)]:
        assert not verify(model, "dp2 bf16", given, alter=scales_gradient(name, factor)), name


def test_a_model_that_magnifies_fp16_is_allowed_three_times_what_plain_torch_with_a_loss_scale_is_off_by():
    torch.manual_seed(0)
    widths = ((3, 8), *[(8, 8)] * 5)
    layers = [nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in widths]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    given = [(torch.randn(8, 3, 6, 6), torch.randint(5, (8,)))]
    verdict = verify(model, "dp2 fp16", given)
    assert verdict, str(verdict)
    assert verdict.tolerance < verdict.gradients_error < verdict.allowed <= 0.45
    assert f"one device itself differs by {verdict.own_error:.0e}" in str(verdict)
    for name, factor in (("8.weight", 1.2), ("8.weight", 0.5), ("0.0.weight", 2.0), ("0.1.bias", 0.0)):
        assert not verify(model, "dp2 fp16", given, alter=scales_gradient(name, factor)), name


class Rooted(nn.Linear):
    """Adds a root, of 0 in float64 and of ``least`` in float32."""

    def __init__(self, least):
        super().__init__(4, 3)
        self.least = least

    def forward(self, x):
        scores = super().forward(x)
        return scores + (0 * scores + self.least * (torch.finfo(scores.dtype).eps > 1e-10)).sqrt()


def test_a_model_whose_gradients_are_finite_in_float32_alone_is_compared_in_it():
    given = [(torch.randn(4, 4), torch.tensor([0, 1, 2, 0]))]
    verdict = verify(Rooted(1.0), "dp2", given)
    assert verdict, str(verdict)
    assert verdict.only_float32 == "the gradient of 'weight' is not finite"
    verdict = verify(Rooted(0.0), "dp2", given)
    assert not verdict
    assert "the gradient of 'weight' on one device itself is not finite" in str(verdict)


class Magnifies(nn.Module):
    """A logistic map, iterated 25 times, of which each magnifies all roundings before it."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x).sigmoid()
        for _ in range(25):  # with 30 the roundings fill the range, and what is allowed is the bound MOST alone
            y = 3.9 * y * (1 - y)
        return self.head(y)


class OfPoints(nn.Module):
    """Runs in float32 alone; the gradient of each bias before a norm is a sum of many numbers that is zero."""

    def __init__(self):
        super().__init__()
        layers = (each for _ in range(4) for each in (nn.Conv1d(8, 8, 1), nn.BatchNorm1d(8), nn.ReLU()))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layers(x.float()).amax(-1))


def test_differences_as_large_as_roundings_on_one_device_are_told_where_they_are_more_than_can_be_allowed(monkeypatch):
    torch.manual_seed(1)
    comparison = import_module("shardwright.verify.comparison")
    monkeypatch.setattr(comparison, "MAX_ROUNDINGS", 1)  # so that the bound is below the roundings
    verdict = verify(OfPoints(), "dp2", [(torch.randn(6, 8, 64), torch.randint(3, (6,)))])
    assert not verdict
    assert "each difference is as large as roundings on one device, more than can be allowed" in str(verdict)
    wrong = verify(
        OfPoints(), "dp2", [(torch.randn(6, 8, 64), torch.randint(3, (6,)))], alter=scales_gradient("head.weight", 1.01)
    )
    assert not wrong
    assert "as large as roundings" not in str(wrong)


def test_a_model_that_magnifies_roundings_is_allowed_three_times_what_one_rounding_does_on_one_device():
    torch.manual_seed(0)
    model, given = Magnifies(), [(torch.randn(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    verdict = verify(model, "dp3", given)
    assert verdict.equal
    assert verdict.tolerance < verdict.max_relative_error < verdict.allowed < 1e-4
    assert f"one device itself differs by {verdict.own_error:.0e}" in str(verdict)

    different = verify(model, "dp3", given, alter=scales_gradient("head.weight", 1 + 1e-4))
    assert not different
    assert "as large as roundings" not in str(different)
    assert verify(nn.Linear(4, 3), "dp3", given).allowed == verdict.tolerance


@pytest.mark.parametrize("line", ["dp2", "dp4", "mb2", "dp3 mb2"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_gradient_that_is_truly_zero_is_no_difference_after_several_steps_either(line, seed):
    """The keys' third of a fused bias: its neighbours, which move, set no bound for it."""
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    steps = [(torch.randn(6, 5, 16), torch.randn(6, 5, 16)) for _ in range(6)]
    verdict = verify(layer, line, steps, loss=MeanSquaredError())
    assert verdict.equal, str(verdict)
    assert verdict.max_relative_error < 1e-12, "a hundredth of what is allowed"


def test_parameters_that_are_frozen_are_compared_too():
    def alter(run):
        step = run.step

        def wrong(batch):
            loss = step(batch)
            run.model.position.weight.data[0, 0] += 1e-6
            return loss

        run.step = wrong

    model = gpt()
    model.position.weight.requires_grad_(False)
    assert verify(model, "dp2", batches()).equal
    verdict = verify(model, "dp2", batches(), alter=alter)
    assert not verdict.equal
    assert verdict.first_difference == verdict.worst_parameter == "position.weight"
    assert verdict.gradients_error < verdict.tolerance


def test_float32_still_sees_a_difference_of_a_thousandth():
    assert not verify(gpt(), "dp2", batches(), dtype=torch.float32, alter=scaled("token.weight", 1.001)).equal


# ---- the verdict, and what is refused


def test_a_verdict_is_json():
    found = json.loads(json.dumps(verify(gpt(), "dp2", batches()).to_dict()))
    keys = {"equal", "max_relative_error", "worst_parameter", "parameters", "world_size"}
    assert keys <= found.keys()
    assert found["equal"] is True


def test_half_precision_is_refused():
    with pytest.raises(PlanError, match="float64, float32"):
        verify(gpt(), "dp2", batches(), dtype=torch.bfloat16)


class InFloat32(nn.Module):
    """Code as of normalized pictures, which makes its numbers float32 whatever the model's dtype is."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.float() / 255)))


class FillsWithTheLeast(nn.Module):
    """Fills a float32 mask with the least number of the dtype that it computes in, which float64 has none for."""

    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(6, 8), nn.Linear(8, 16), nn.Linear(16, 3)

    def forward(self, x):
        y = self.table(x)
        mask = torch.full((len(x[0]),), torch.finfo(y.dtype).min, dtype=torch.float32)
        return (self.down(torch.relu(self.up(y))) + mask.exp()[:, None]).mean(1)


class Asserts(FillsWithTheLeast):
    """Asserts the dtype of a table, as nanochat does."""

    def forward(self, x):
        y = self.table(x)
        assert y.dtype == torch.float32, "tables must be in torch.float32"
        return self.down(torch.relu(self.up(y))).mean(1)


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("kind", [FillsWithTheLeast, Asserts])
def test_a_forward_that_cannot_be_recorded_in_float64_is_compared_in_float32(kind, line):
    verdict = verify(kind(), line, [(torch.randint(6, (4, 5)), torch.randint(3, (4,)))])
    assert verdict.equal, str(verdict)
    assert "compared in float32" in str(verdict)


@pytest.mark.parametrize("line", ["dp2", "tp2"])
def test_a_model_that_runs_in_float32_alone_is_compared_in_it_and_the_verdict_says_so(line):
    batch = torch.randint(255, (4, 6), dtype=torch.uint8), torch.randint(3, (4,))
    for model in (InFloat32(), InFloat32().to("meta")):
        verdict = verify(model, line, [batch])
        assert verdict.equal
        assert verdict.tolerance == 1e-5
        assert "compared in float32, since plain torch has no result of the model in float64 (" in str(verdict)
    with pytest.raises(RuntimeError, match="same dtype"):
        verify(InFloat32(), line, [batch], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):  # in both dtypes: the error itself
        verify(nn.Linear(6, 3), "dp2", [(torch.ones(4, 5), batch[1])])


class Masked(nn.Module):
    """Code whose mask has infinities in float64, and so the loss NaN, as it has in some models of others."""

    def __init__(self):
        super().__init__()
        self.queries, self.values, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        queries = self.queries(x)
        hidden = (1.0 - mask[:, None].float()) * torch.finfo(x.dtype).min
        return self.head((queries @ queries.transpose(1, 2) + hidden).softmax(-1) @ self.values(x))


def test_a_model_whose_loss_is_nan_in_float64_alone_is_compared_in_float32_and_the_verdict_says_so():
    mask = torch.ones(8, 5, dtype=torch.long)
    mask[::2, -2:] = 0
    batch = {"x": torch.randn(8, 5, 8), "mask": mask}, torch.randint(3, (8, 5))
    verdict = verify(Masked(), "dp2", [batch])
    assert verdict.equal
    assert "no result of the model in float64 (its loss is nan)" in str(verdict)
    assert not verify(Masked(), "dp2", [batch], dtype=torch.float64)
    infinite = {"x": torch.full((8, 5, 8), torch.inf), "mask": mask}, batch[1]  # in float32 too
    assert "the loss of one device itself is nan" in str(verify(Masked(), "dp2", [infinite]))


class Grouped(nn.Module):
    """A product for each half of the rows, as of experts, by an operator that torch has for float32 and bf16."""

    def __init__(self):
        super().__init__()
        self.enter, self.up, self.leave = nn.Linear(16, 16), nn.Parameter(torch.randn(2, 16, 16) / 4), nn.Linear(16, 8)

    def forward(self, x):
        ends = torch.tensor([len(x) // 2, len(x)], dtype=torch.int32)
        return self.leave(torch.nn.functional.grouped_mm(self.enter(x), self.up, offs=ends))


@pytest.mark.parametrize("line", ["tp2", "bf16 tp2"])
def test_a_model_that_runs_in_float32_alone_is_compared_in_it_under_bf16_too(line):
    torch.manual_seed(0)
    verdict = verify(Grouped(), line, [(torch.randn(8, 16), torch.randint(8, (8,)))])
    assert verdict.equal
    assert "no result of the model in float64 (" in str(verdict)


class Decay(nn.Module):
    """A loss inside, and a gradient in float32 that is a small difference of large terms, which each scale rounds."""

    def __init__(self):
        super().__init__()
        self.layer, self.decay = nn.Linear(5, 1), nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        y = self.layer(x).float()[:, 0] + (self.decay.float() * x.float() * 1000).sum(1)
        return {"loss": nn.functional.l1_loss(y, labels.float())}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("line", ["dp2", "dp3", "mb5"])
def test_what_another_scale_of_the_loss_rounds_counts_as_one_devices_own_difference(line, dtype):
    torch.manual_seed(0)
    x = torch.randn(120, 5)
    x[:, 4] = -x[:, :4].sum(1) + torch.randn(120) * 0.1
    verdict = verify(Decay(), line, [{"x": x, "labels": torch.randn(120) * 50}], loss=ModelLoss(), dtype=dtype)
    assert verdict.equal, str(verdict)


def test_a_layout_that_cannot_be_is_refused_before_anything_runs():
    with pytest.raises(LayoutError, match="no layer of the model can be cut"):
        verify(nn.Linear(2, 2), "tp2", [(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))])


def test_smoothing_and_ignored_targets_are_compared_as_the_loss_has_them():
    inputs, targets = batches()[0]
    targets = targets.clone()
    targets[:3] = 7
    loss = CrossEntropy(ignore_index=7, label_smoothing=0.3)
    assert verify(gpt(), "dp3 tp2", [(inputs, targets)], loss=loss).equal


def test_a_verdict_is_true_where_the_layout_equals_one_device():
    verdict = verify(nn.Linear(4, 3), "dp2", [(torch.randn(4, 4), torch.randint(3, (4,)))])
    assert verdict
    assert not replace(verdict, equal=False)


def test_a_batch_that_is_no_pair_is_refused_as_a_run_refuses_it():
    batch = {"x": torch.ones(2, 4), "labels": torch.zeros(2)}
    with pytest.raises(PlanError, match="a batch is a pair of inputs and targets"):
        verify(nn.Linear(4, 1), "dp2", [batch])


class Masking(nn.Module):
    """Holds minus infinity in a parameter that is not trained, as pointer networks do to mask what was chosen."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)
        self.masked = nn.Parameter(torch.tensor([float("-inf"), 0.5]), requires_grad=False)

    def forward(self, x):
        hidden = self.up(x)
        return self.down(torch.where(hidden > 1, self.masked[:1], hidden).softmax(-1))


def test_infinite_elements_of_a_parameter_are_equal_and_hide_no_difference():
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    assert verify(Masking(), "dp2", [batch], loss=CrossEntropy()).equal

    def of(name):
        def alter(run):
            if run.world.rank == 1:
                run.parameters[name].data[-1] += 1e-3

        return verify(Masking(), "dp2", [batch], loss=CrossEntropy(), alter=alter)

    assert of("masked").first_difference == "masked"
    assert not of("down.bias").equal
