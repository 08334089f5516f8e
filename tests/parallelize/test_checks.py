"""Models that no layout can run are refused in words, on every rank and by ``verify``; odd ones that can be run are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import launch, parallelize, verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.models.losses import MeanSquaredError

LOSS = MeanSquaredError()
BATCH = (torch.randn(5, 6), torch.randn(5, 6))
LINES = ["single", "dp2", "tp2", "pp2 mb1"]


def pair():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.pair = nn.utils.weight_norm(nn.Linear(6, 6)), pair()

    def forward(self, x):
        return self.pair(self.layer(x))


REFUSED = {
    "a lazy layer": (lambda: nn.Sequential(nn.LazyLinear(6), *pair()), "'0.weight' has no shape yet"),
    "weight_norm as it was": (Normed, "'layer.weight' was computed from parameters"),
    "a sparse table": (lambda: nn.Sequential(nn.Embedding(9, 6, sparse=True), *pair()), "table '0' is sparse"),
    "a sparse bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), *pair()), "table '0' is sparse"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:Lazy modules")
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_run_is_refused_by_name(name, line):
    build, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        verify(build(), line, [BATCH], loss=LOSS)
    with pytest.raises((PlanError, RankFailedError), match=words):
        launch(lambda world: parallelize(build(), line, world, loss=LOSS), 2 - (line == "single"), ranks="threads")


class Penalised(nn.Module):
    """A loss of its own, and what a part that it holds weighs."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, outputs, targets):
        total, count = LOSS(outputs, targets)
        return total + count * sum(each.square().sum() for each in self.part.parameters()), count


def test_a_loss_with_parameters_that_want_gradients_is_refused_by_name():
    model = pair()
    for loss, name in ((Penalised(model), "part.0.weight"), (Penalised(nn.PReLU()), "part.weight")):
        with pytest.raises(PlanError, match=f"never be trained: '{name}'"):
            verify(model, "dp2", [BATCH], loss=loss, launcher=lambda *_: pytest.fail("ran"))
        with pytest.raises(PlanError, match=f"never be trained: '{name}'"):
            launch(lambda world, loss=loss: parallelize(model, "single", world, loss=loss), 1, ranks="threads")
    frozen = Penalised(nn.PReLU().requires_grad_(False))
    assert verify(model, "dp2", [BATCH], loss=frozen).equal


@pytest.mark.parametrize("line", LINES)
def test_a_model_without_anything_to_train_predicts_and_evaluates_but_takes_no_step(line):
    model = pair().requires_grad_(False)
    with pytest.raises(PlanError, match="no parameter of the model requires a gradient"):
        verify(model, line, [BATCH], loss=LOSS)

    def work(world):
        run = parallelize(model, line, world, loss=LOSS)
        (batch,) = run.shard([BATCH])
        with pytest.raises(PlanError, match="no parameter of the model requires a gradient"):
            run.step(batch)
        return run.evaluate(batch), run.predict(BATCH[0])

    for loss, output in launch(work, 2 - (line == "single"), ranks="threads"):
        torch.testing.assert_close(output, model(BATCH[0]))
        torch.testing.assert_close(float(loss), nn.functional.mse_loss(model(BATCH[0]), BATCH[1]).item())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "tp2x2/2d", "pp2 mb1", "dp2 tp2"])
def test_layers_without_features_equal_one_device(line):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 0), nn.ReLU(), nn.Linear(0, 6), *pair())
    verdict = verify(model, line, [BATCH] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d", "pp2 mb1"])
def test_a_layer_that_computes_its_weight_before_each_forward_stays_whole(line):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 6)), *pair())
    verdict = verify(model, line, [BATCH] * 2, loss=LOSS)
    assert verdict.equal, str(verdict)
