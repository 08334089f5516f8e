"""Code that a tracer follows on another branch than values do: stages compute what one device does, or refuse it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import shardwright as sw
from shardwright.errors import LayoutError, PlanError, UnknownCodeError
from shardwright.models.losses import MeanSquaredError


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(x).relu()), None  # as attention without weights


class Model(nn.Module):
    """Four blocks, with one of several ways between them that proxies answer otherwise than values."""

    def __init__(self, way):
        super().__init__()
        self.way, self.blocks = way, nn.ModuleList(Block() for _ in range(4))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        mask, other = x[..., :1] > 0, x[..., 1:2] > 0
        for block in self.blocks:
            x, extra = block(x)
            if self.way == "is None":
                x = x if extra is None else x * 2
            elif self.way == "hasattr":
                x = x * 2 if hasattr(x, "mask") else x
            elif self.way == "getattr":
                x = x if getattr(x, "mask", None) is None else x * 2
            elif self.way == "type":
                x = x if type(x) is torch.Tensor else x * 2
            elif self.way == "same object":
                x = x if x.contiguous() is x else x * 2
            elif self.way == "other name":
                x = x * 1
                residual = x
                x += 1
                x = x + residual
            elif self.way == "and":
                both = mask & other
                x = x * both + mask
            elif self.way == "or of views":
                both = mask[None] | other[None]
                x = x * both[0] + mask
            elif self.way == "attention":
                x, weights = self.attention(x, x, x, need_weights=False)
                x = x if weights is None else x * 2
        return x


WAYS = ["is None", "hasattr", "getattr", "type", "same object", "other name", "and", "or of views", "attention"]


def batches():
    numbers = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(8, 3, 8, generator=numbers) for _ in range(2)) for _ in range(2)]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("line", ["pp2/1f1b mb4", "pp4/zb-h1 mb4", "pp2 mb2 dp2/zero1"])
@pytest.mark.parametrize("way", WAYS)
def test_stages_take_the_branches_that_values_take(way, line):
    verdict = sw.verify(Model(way), line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


def first_loss(model, line, **given):
    """The loss of the first step on one device, and on ranks."""
    x, y = batches()[0]
    wanted = functional.mse_loss(copy.deepcopy(model)(x.clone()), y).item()

    def work(world):
        run = sw.parallelize(model, line, world, loss=nn.MSELoss(), **given)
        update = run.optimizer(torch.optim.SGD, lr=0.1)
        return [run.step(each, update=update).item() for each in run.shard([(x.clone(), y)])]

    return wanted, sw.launch(work, line, ranks="threads")[0][0]


@pytest.mark.parametrize("way", ["is None", "hasattr", "type", "other name"])
def test_without_an_example_the_first_step_refuses_the_other_branch(way):
    with pytest.raises(UnknownCodeError, match="is not followed as it runs") as refused:
        first_loss(Model(way), "pp2/1f1b mb4")
    assert "example" in str(refused.value)
    wanted, found = first_loss(Model(way), "pp2/1f1b mb4", example=batches()[0][0])
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("way", ["and", "or of views"])
def test_operators_of_python_whose_names_end_so_write_nothing(way):
    wanted, found = first_loss(Model(way), "pp2/1f1b mb4")
    assert found == pytest.approx(wanted, rel=1e-6)


class Normalized(nn.Module):
    """Takes the mean off where it is entered, and adds it again at the end, as RevIN does."""

    def forward(self, x, enters):
        if enters:
            self.mean = x.mean(1, keepdim=True)
            return x - self.mean
        return x + self.mean


class Scaled(nn.Module):
    """The same with weights, and with a mean without a gradient: one call is known to leave something for another."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x, enters):
        if enters:
            self.mean = x.mean(1, keepdim=True).detach()
            return (x - self.mean) * self.weight + self.bias
        return (x - self.bias) / self.weight + self.mean


class Forecast(nn.Module):
    def __init__(self, *, is_traced, norm=Normalized):
        super().__init__()
        self.is_traced, self.norm, self.blocks = is_traced, norm(), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.norm(x, True)
        if not self.is_traced:
            assert x.shape[0] in range(100)
        for block in self.blocks:
            x, _ = block(x)
        return self.norm(x, False)


@pytest.mark.parametrize("line", ["pp2/1f1b mb4", "pp4/1f1b mb4", "pp2 mb2 dp2/zero1"])
@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("was_called", [True, False])
@pytest.mark.parametrize("norm", [Normalized, Scaled])
def test_what_one_call_of_a_module_leaves_for_another_reaches_its_stage(line, is_traced, was_called, norm):
    model = Forecast(is_traced=is_traced, norm=norm)
    if was_called:
        with torch.no_grad():
            model(torch.randn(1, 3, 8))
    verdict = sw.verify(model, line, batches(), loss=MeanSquaredError())
    assert verdict.equal, str(verdict)


class Masking(nn.Embedding):
    def forward(self, ids):
        self.mask = (ids > 2)[..., None].double()
        return super().forward(ids)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.first, self.second = Masking(20, 8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, ids):
        return self.second(torch.relu(self.first(self.table(ids)))) * self.table.mask


@pytest.mark.parametrize("was_called", [True, False])
def test_a_mask_that_a_stage_keeps_and_code_outside_reads_is_named(was_called):
    model = Masked().double()
    if was_called:  # other stages would have the mask of that call
        model(torch.randint(20, (4, 5)))
    batch = torch.randint(20, (4, 5)), torch.zeros(4, 5, 8)
    with pytest.raises(LayoutError, match="reads a tensor that 'table' makes and does not return"):
        sw.verify(model, "pp2/1f1b mb2", [batch], loss=MeanSquaredError())


def test_without_an_example_what_a_call_leaves_for_another_is_named():
    with pytest.raises(UnknownCodeError, match="a call of 'norm' in one chunk keeps something for its call in another"):
        first_loss(Forecast(is_traced=True), "pp2/1f1b mb4")


class InTurns(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x.relu() if self.calls % 2 else x.tanh()


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.turns, self.layers = InTurns(), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = self.turns(layer(x))
        return x


@pytest.mark.parametrize("given", [{}, {"example": torch.zeros(8, 3, 8)}])
def test_a_module_that_counts_the_calls_of_several_stages_is_refused(given):
    with pytest.raises((PlanError, LayoutError), match=r"call of|calls"):
        first_loss(Counting(), "pp2/1f1b mb4", **given)


class Scaling(nn.Module):
    """Writes into its input, in code that is recorded and not traced."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        assert x.shape[0] in range(100)
        x.mul_(2)
        for block in self.blocks:
            x, _ = block(x)
        return x


@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/1f1b mb4", "pp2/interleaved:v2 mb4", "pp2/zb-v mb4"])
def test_inputs_that_a_forward_writes_are_written_once(line):
    wanted, found = first_loss(Scaling(), line, example=torch.zeros(8, 3, 8))
    assert found == pytest.approx(wanted, rel=1e-6)


class AtTheEnd(nn.Module):
    """Takes another branch behind all blocks, or with numbers that are near to others."""

    def __init__(self, way):
        super().__init__()
        self.way, self.blocks, self.refine = way, nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x):
        for block in self.blocks:
            x, extra = block(x)
        if self.way == "one more layer":
            return x if extra is None else self.refine(x)
        if self.way == "dim":
            return x.softmax(-1 if extra is None else -2)
        if self.way == "factor":
            return x * (-1 if extra is None else -2)
        if self.way == "limit":
            return x.clamp(min=0.1) if extra is None else x.clamp(max=0.1)
        assert self.way == "evaluation"
        return x if self.training or extra is None else x * 2


@pytest.mark.parametrize("way", ["one more layer", "dim", "factor", "limit"])
def test_other_operators_at_the_end_are_seen(way):
    wanted, found = first_loss(AtTheEnd(way), "pp2/1f1b mb4", example=batches()[0][0])
    assert found == pytest.approx(wanted, rel=1e-6)
    with pytest.raises(UnknownCodeError, match="is not followed as it runs"):
        first_loss(AtTheEnd(way), "pp2/1f1b mb4")


@pytest.mark.parametrize("given", [{}, {"example": batches()[0][0]}])
def test_a_branch_of_evaluation_alone_is_compared_in_the_first_evaluation(given):
    model, batch = AtTheEnd("evaluation"), batches()[0]

    def work(world):
        run = sw.parallelize(model, "pp2/1f1b mb4", world, loss=nn.MSELoss(), **given)
        with pytest.raises(UnknownCodeError, match="is not followed as it runs"):
            run.evaluate(next(run.shard([batch])))

    sw.launch(work, 2, ranks="threads")


class Shared(nn.Module):
    """Is called by all layers, and keeps something that no other call needs."""

    def __init__(self, way):
        super().__init__()
        self.way, self.kept, self.longest, self.table = way, {}, 0, None

    def forward(self, x):
        tokens = x.shape[1]
        if self.way == "table by length":
            if tokens not in self.kept:
                self.kept[tokens] = torch.arange(tokens).float()[:, None].cos()
            return x * self.kept[tokens]
        if self.way == "longest table" and tokens > self.longest:
            self.longest, self.table = tokens, torch.arange(tokens).float()[:, None].cos()
        if self.way == "count":
            self.longest += 1
        if self.way == "log":
            self.table = x.detach().mean()
        return x * self.table if self.way == "longest table" else x * 1


class Plain(nn.Module):
    """Code that a trace follows rightly, in one of several ways that are not plain to compare."""

    def __init__(self, way):
        super().__init__()
        self.way, self.layers = way, nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.shared = Shared(way)

    def forward(self, x):
        given = x
        for number, layer in enumerate(self.layers):
            x = self.shared(layer(x))
            if self.way == "constants":
                mask = torch.triu(torch.full((3, 3), -1.0), 1)
                x = x + (torch.arange(8) + number) / torch.sqrt(torch.tensor(8.0)) + mask @ torch.ones(3, 8)
            elif self.way == "in place":
                x += 1
                x.mul_(0.5)
            elif self.way == "in a view" and number == 3:
                x = x * 1
                x[:, :2].mul_(2)
                x[:, 0] += 1
            elif self.way == "by gradients":
                x = x * 2 if torch.is_grad_enabled() and layer.weight.requires_grad else x
        if self.way == "its input":
            return x, given
        return (x, torch.zeros(())) if self.way == "a constant" else x


@pytest.mark.parametrize("given", [{}, {"example": batches()[0][0]}])
@pytest.mark.parametrize(
    "way",
    ["constants", "in place", "in a view", "by gradients", "its input", "a constant", "table by length",
     "longest table", "count", "log"],
)  # fmt: skip
def test_code_that_is_traced_rightly_trains_with_and_without_an_example(way, given):
    def loss(output, targets):
        output = output[0] if isinstance(output, tuple) else output
        return (output - targets).square().sum(), torch.tensor(targets.numel())

    model, (x, y) = Plain(way), batches()[0]
    total, count = loss(copy.deepcopy(model)(x.clone()), y)

    def work(world):
        run = sw.parallelize(model, "pp2/1f1b mb4", world, loss=loss, **given)
        update = run.optimizer(torch.optim.SGD, lr=0.1)
        return next(run.step(each, update=update).item() for each in run.shard([(x.clone(), y)]))

    assert sw.launch(work, 2, ranks="threads")[0] == pytest.approx((total / count).item(), rel=1e-6)
