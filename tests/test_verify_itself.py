"""``verify`` does not deceive itself: no gradient is not a zero one, rounding is one device's own, a share is cut."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from shardwright import ModelLoss, verify
from shardwright.analysis import model_graph
from shardwright.models import GPT, GPTConfig, MeanSquaredError
from shardwright.verify.reference import DeviceDifference

LOSS = MeanSquaredError()


def batch(width=6, samples=6):
    return torch.randn(samples, width), torch.randn(samples, width)


# ---- no gradient is not a zero gradient


class Unused(nn.Module):
    """Calls a second model and drops its output; a third one is never called."""

    def __init__(self, make):
        super().__init__()
        self.used, self.dropped, self.never = make(), make(), make()

    def forward(self, x):
        self.dropped(x)
        return self.used(x)


def gpt():
    return GPT(GPTConfig(vocabulary=19, max_tokens=6, num_layers=1, num_heads=3, width=9, hidden=11))


def pair():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


LINES = [
    *("dp2", "dp2/zero1", "dp2/zero2", "dp2/zero3", "tp2", "tp2/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d"),
    *("tp2x2x2/2.5d dp2/zero2", "pp2/1f1b mb2 tp2x2x2/2.5d", "pp2/zb-h1 mb2 tp2x2/2d", "bf16 tp2x2x2/2.5d"),
]


@pytest.mark.parametrize("line", LINES)
def test_parameters_that_the_loss_does_not_reach_stay_without_a_gradient(line):
    tokens = torch.randint(19, (8, 6), generator=torch.Generator().manual_seed(0))
    verdict = verify(Unused(gpt), line, [(tokens[:, :-1], tokens[:, 1:])] * 2)
    assert verdict.equal, str(verdict)


def with_gradients(change):
    """An alteration: ``change`` sees the parameters of the last rank after each step."""

    def alter(run):
        step = run.step

        def wrong(batch):
            loss = step(batch)
            if run.world.rank == run.world.size - 1:
                change(run.parameters)
            return loss

        run.step = wrong

    return alter


def test_a_gradient_of_zeros_where_one_device_has_none_is_a_difference():
    def fill(parameters):
        unreached = parameters["dropped.2.weight"]
        unreached.grad = torch.zeros_like(unreached)

    verdict = verify(Unused(pair), "dp2", [batch()] * 2, loss=LOSS, alter=with_gradients(fill))
    assert not verdict.equal
    assert verdict.first_difference == "dropped.2.weight"
    assert verdict.gradients_error == float("inf")
    assert "'dropped.2.weight' has no gradient on one device, and one of zeros on rank 1" in str(verdict)
    assert verdict.parameters_error > verdict.tolerance, "weight decay has moved it"


def test_no_gradient_where_one_device_has_one_of_zeros_is_a_difference():
    class Zeros(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.zero = pair(), pair()

        def forward(self, x):
            return self.used(x) + 0 * self.zero(x)

    def drop(parameters):
        parameters["zero.0.bias"].grad = None

    assert verify(Zeros(), "dp2", [batch()], loss=LOSS).equal
    verdict = verify(Zeros(), "dp2", [batch()], loss=LOSS, alter=with_gradients(drop))
    assert not verdict.equal
    assert "'zero.0.bias' has a gradient on one device, and none on rank 1" in str(verdict)


# ---- float32 inside


class Norm(nn.Module):
    """A norm that computes in float32, whatever its input is."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class SomeRows(nn.Module):
    """A loss over some of the samples: a layout knows their number after the forward, so it scales gradients twice."""

    def forward(self, output, targets):
        counts = (targets[:, :1] > -0.3).to(output.dtype)
        return ((output - targets) ** 2 * counts).sum(), counts.sum() * output.shape[1]


class Branches(nn.Module):
    """Two models side by side, with float32 inside the second alone."""

    def __init__(self):
        super().__init__()
        self.exact = pair()
        self.rounded = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Norm(16), nn.Linear(16, 16), nn.Tanh(), Norm(16))
        self.last = nn.Linear(16, 6)

    def forward(self, x):
        return torch.cat([self.exact(x), self.last(self.rounded(x))], -1)


def rounded(line, alter=None):
    torch.manual_seed(0)
    steps = [(torch.randn(6, 6), torch.randn(6, 12)) for _ in range(2)]
    return verify(Branches(), line, steps, loss=SomeRows(), alter=alter)


def scaled(name, factor):
    def alter(run):
        run.model.get_parameter(name).register_hook(lambda gradient: gradient * factor)

    return alter


def test_one_rank_alone_rounds_as_plain_torch_does():
    assert rounded("single").max_relative_error == 0


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero2 mb2", "pp2/1f1b mb2"])
def test_a_model_with_float32_inside_is_allowed_what_one_device_differs_from_itself(line):
    verdict = rounded(line)
    assert verdict.equal, str(verdict)
    assert 1e-8 < verdict.max_relative_error < 4e-7, "float32 rounding"
    assert 1e-8 < verdict.own_error < 4e-7
    assert "; one device itself differs by " in str(verdict)
    assert verdict.tolerance == 1e-10


@pytest.mark.parametrize("name", ["rounded.0.weight", "rounded.3.weight", "rounded.2.weight", "last.bias"])
def test_a_millionth_of_one_gradient_of_such_a_model_is_still_found(name):
    verdict = rounded("dp2", scaled(name, 1 + 1e-6))
    assert not verdict.equal
    assert verdict.first_difference == name


def test_a_tensor_that_float32_does_not_touch_keeps_its_tolerance():
    verdict = rounded("dp2", scaled("exact.0.weight", 1 + 1e-9))
    assert not verdict.equal
    assert verdict.first_difference == "exact.0.weight"
    assert verdict.allowed == verdict.tolerance == 1e-10


@pytest.mark.parametrize("error", [1e30, float("inf"), float("nan")])
def test_a_device_that_differs_from_itself_by_everything_allows_nothing_wrong(monkeypatch, error):
    def measured(*args):
        return DeviceDifference(torch.float32, error, dict.fromkeys(NAMES, error), dict.fromkeys(NAMES, error))

    monkeypatch.setattr(sys.modules["shardwright.verify"], "own_errors", measured)
    verdict = rounded("dp2", scaled("last.bias", 1.01))
    assert not verdict.equal
    assert verdict.allowed < 2e-4


class OneNumber(nn.Module):
    """Multiplies by one number, which it computes in float32."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.randn(4) * 0.3) for _ in range(2))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        number = (self.q * self.k).sum(-1, dtype=torch.float32).exp()
        return torch.tanh(self.linear(x)) * number.to(x.dtype) + x


@pytest.mark.parametrize("seed", [0, 3, 7])
def test_a_gradient_of_one_rounded_number_is_allowed_a_rounding_though_runs_may_round_it_alike(seed):
    torch.manual_seed(seed)
    model, steps = nn.Sequential(OneNumber(), OneNumber()), [batch(4, 4)] * 2
    verdict = verify(model, "mb2", steps, loss=LOSS)
    assert verdict.equal, str(verdict)
    assert verdict.max_relative_error > 1e-10
    assert not verify(model, "mb2", steps, loss=LOSS, alter=scaled("0.linear.weight", 1 + 1e-6)).equal


def test_a_loss_whose_roundings_cancel_in_one_comparison_is_still_allowed_a_rounding():
    own = DeviceDifference(torch.float32, 9e-11, {"x": 1e-7, "y": 1e-12}, {})
    allowed, largest = sys.modules["shardwright.verify.comparison"]._allowed(own, 1e-10, {"z"})
    assert largest == 1e-7
    assert 1e-8 < allowed("loss", "") < 2e-7
    assert allowed("gradients", "y") == 1e-10, "a tensor has many elements, and is told by its own"
    assert allowed("gradients", "z") == pytest.approx(3e-7), "a gate of one element is one number, as the loss is"


NAMES = [name for name, _ in Branches().named_parameters()]


def test_all_runs_on_one_device_share_one_record_of_the_model(monkeypatch):
    records, record = [], model_graph._recorded
    monkeypatch.setattr(model_graph, "_recorded", lambda *given: records.append(given) or record(*given))
    assert rounded("dp2").own_error
    assert len(records) == 1, "which the ranks share in tests"


def test_a_model_without_float32_inside_keeps_its_tolerance():
    torch.manual_seed(0)
    verdict = verify(pair(), "dp2", [batch()] * 2, loss=LOSS, alter=scaled("0.weight", 1 + 1e-9))
    assert not verdict.equal
    assert verdict.own_error == 0
    assert verdict.allowed == 1e-10
    assert "itself" not in str(verdict)


# ---- what was cut


def test_an_equal_verdict_says_what_share_of_the_parameters_and_flops_each_factor_cuts():
    verdict = verify(pair(), "dp2/zero1 tp2", [batch()], loss=LOSS)
    assert verdict.equal
    assert verdict.shares == {"dp2/zero1": 1.0, "tp2": pytest.approx(104 / 110)}
    assert verdict.flops == {"dp2/zero1": 1.0, "tp2": 1.0}
    cuts = (
        "; dp2/zero1 cuts 100 % of the parameters and 100 % of the FLOPs; tp2 cuts 94.5 % of the parameters and 100 %"
    )
    assert str(verdict).endswith(f"{cuts} of the FLOPs")
    assert not verify(pair(), "dp2", [batch()], loss=LOSS).shares


class Penalized(nn.Module):
    """Adds to its output a sum of the weights of two layers, which so are read by other code than their own."""

    def __init__(self):
        super().__init__()
        self.pair, self.large, self.back = pair(), nn.Linear(6, 50), nn.Linear(50, 6)

    def forward(self, x):
        x = self.large(self.pair(x).softmax(-1)).softmax(-1)
        return self.back(x).softmax(-1) + (self.large.weight.sum() + self.back.weight.sum()) / 100


def test_a_verdict_names_the_layers_that_a_factor_leaves_whole_where_it_cuts_little():
    verdict = verify(Penalized(), "tp2", [batch()], loss=LOSS)
    assert verdict.equal
    assert verdict.shares["tp2"] < 0.5
    text = "; warning: tp2 cuts 13.6 % of the parameters and 13.8 % of the FLOPs; whole are large (45.7 %: its weights"
    assert f"{text} are read by other code: every rank computes it whole)" in str(verdict)


class SumInFloat32(nn.Module):
    """A loss in float32 whose gradients float32 holds, until they are divided by the three targets."""

    def forward(self, outputs, targets):
        return outputs.float().sum(), 3


def test_the_mean_over_targets_rounds_no_gradient_to_the_dtype_of_the_loss():
    torch.manual_seed(0)
    batch = torch.randint(-3, 4, (4, 4)).double(), torch.zeros(4, 4)
    verdict = verify(nn.Linear(4, 4).double(), "single", [batch], loss=SumInFloat32())
    assert max(verdict.gradients_error, verdict.parameters_error) < 1e-14, str(verdict)


class OwnLoss(nn.Module):
    """Computes its loss in float32, as models of transformers do, over the labels that are not ignored."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(24, 16), nn.Linear(16, 24, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3)
        )
        for block in self.blocks:
            nn.init.zeros_(block[3].bias)  # after two steps it is as large as a step, and so are its roundings

    def forward(self, ids, labels):
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x).float()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("line", ["single", "dp2", "pp3 mb2"])
def test_a_loss_that_the_model_computes_in_float32_is_equal_to_itself(line, seed):
    torch.manual_seed(seed)
    ids = [torch.randint(24, (8, 12)) for _ in range(2)]
    labels = [torch.where(torch.rand(8, 12) < 0.4, -100, each) for each in ids]  # so a mean is not over all targets
    batches = [{"ids": each, "labels": given} for each, given in zip(ids, labels, strict=True)]
    verdict = verify(OwnLoss(), line, batches, loss=ModelLoss(shifted=False))
    assert verdict.equal, str(verdict)
    assert verdict.allowed < 1e-6


def test_a_loss_of_one_device_that_is_no_number_is_said():
    class Root(nn.Linear):
        def forward(self, x):
            return super().forward(x).sub(1e6).sqrt()

    verdict = verify(Root(4, 3), "dp2", [(torch.randn(4, 4), torch.randn(4, 3))], loss=MeanSquaredError())
    assert not verdict.equal
    assert "the loss of one device itself is nan" in str(verdict)
