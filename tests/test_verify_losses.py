"""A loss may refer to the model: ``verify`` compares with one that refers to the copy that one device trains."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import PlanError


class Autoencoder(nn.Module):
    """A model with its loss as a method, and with attributes that its forward sets."""

    def __init__(self):
        super().__init__()
        self.encoder, self.norm, self.decoder = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.factor, self.share = 1.0, 0.5

    def forward(self, x):
        hidden = self.norm(self.encoder(x))
        self.factor, self.code_size = 2.0, hidden.square().mean()
        return self.decoder(hidden), hidden

    def loss_of(self, output, targets):
        decoded, hidden = output
        return self.share * functional.mse_loss(decoded, targets) + hidden.square().mean()


GLOBAL = Autoencoder()
BATCH = torch.randn(8, 6), torch.randn(8, 6)


def squares(output, targets):
    return (output[0] - targets).square()


def of_global_factor(output, targets):
    return squares(output, targets).sum() * GLOBAL.factor, targets.numel()


def of_global_code(output, targets):
    return squares(output, targets).sum() + GLOBAL.code_size, targets.numel()


def of_global_method(output, targets):
    return GLOBAL.loss_of(output, targets) * len(targets), len(targets)


def of_closure(model):
    """The same losses with the model in a closure."""

    def of_factor(output, targets):
        return squares(output, targets).sum() * model.factor, targets.numel()

    def of_code(output, targets):
        return squares(output, targets).sum() + model.code_size, targets.numel()

    def of_method(output, targets):
        return model.loss_of(output, targets) * len(targets), len(targets)

    return of_factor, of_code, of_method


@pytest.fixture
def model():
    return Autoencoder()


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize(("number", "name"), [(0, "factor"), (1, "code_size")])
def test_attributes_that_the_forward_sets_are_refused_as_in_a_run(model, is_global, number, name):
    model, losses = (GLOBAL, [of_global_factor, of_global_code]) if is_global else (model, of_closure(model))
    with pytest.raises(PlanError, match=f"the loss reads '{name}' of the model"):
        sw.verify(model, "dp2", [BATCH], loss=losses[number])
    assert model.factor == 1.0


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
def test_a_method_of_the_model_as_its_loss_is_equal_without_a_warning(model, is_global, layout):
    model, loss = (GLOBAL, of_global_method) if is_global else (model, of_closure(model)[2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verdict = sw.verify(model, layout, [BATCH] * 2, loss=loss)
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("detached", [False, True])
def test_a_loss_of_the_models_parameters_is_refused_as_in_a_run(model, detached):
    """A run trains a copy: the parameters of the model that was given have no gradient, and keep their values."""

    def penalised(output, targets):
        weight = model.encoder.weight.detach() if detached else model.encoder.weight
        return squares(output, targets).sum() * weight.norm(), targets.numel()

    with pytest.raises(PlanError, match="the loss reads parameters beside the model's output"):
        sw.verify(model, "dp2", [BATCH], loss=penalised)
    assert model.encoder.weight.grad is None


def test_frozen_parameters_and_shapes_of_the_model_are_read_as_on_one_device(model):
    model.decoder.weight.requires_grad_(False)

    def scaled(output, targets):
        size = model.decoder.weight.norm() * len(model.encoder.weight) * model.encoder.weight.shape[1]
        return squares(output, targets).sum() * size, targets.numel()

    verdict = sw.verify(model, "dp2", [BATCH] * 3, loss=scaled)
    assert verdict.equal, str(verdict)


def test_the_reference_trains_what_its_loss_reads(model):
    """So a run whose loss reads other values than it trains is told from one device, if it is not refused."""

    def scaled(output, targets):
        return squares(output, targets).sum() * model.encoder.weight.detach().norm(), targets.numel()

    def unwatched(run):
        run._step._knows_reads = True

    assert sw.verify(model, "dp2", [BATCH], loss=scaled, alter=unwatched).equal  # the values are those given
    assert not sw.verify(model, "dp2", [BATCH] * 3, loss=scaled, alter=unwatched).equal


def test_a_frozen_float32_teacher_beside_the_model_is_compared_in_float64(model):
    teacher = nn.Linear(6, 6).requires_grad_(False)

    def distilled(output, targets):
        return model.share * (output[0] - teacher(targets)).square().sum(), targets.numel()

    verdict = sw.verify(model, "dp2", [BATCH] * 2, loss=distilled)
    assert verdict.equal, str(verdict)
    assert not verdict.only_float32
    assert teacher.weight.dtype == model.encoder.weight.dtype == torch.float32
