"""Values that code writes into after or before another stage or a recomputation reads them, and draws' gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import launch, parallelize, verify
from shardwright.errors import LayoutError, PlanError
from shardwright.models.losses import CrossEntropy, MeanSquaredError

WIDTH, CLASSES = 8, 5


def batches():
    numbers = torch.Generator().manual_seed(0)
    return [(torch.randn(n, WIDTH, generator=numbers), torch.randint(CLASSES, (n,), generator=numbers)) for n in (8, 6)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(functional.silu(self.norm(x))) * 1.0


class PreActivation(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu, self.layer = nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(self.relu(x)) * 1.0


class Model(nn.Module):
    """Six blocks that a function runs; with ``rehearsed``, code that no tracer reads and that a rehearsal cuts."""

    def __init__(self, body, *, rehearsed=False, block=Block):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(block() for _ in range(6)), nn.Linear(WIDTH, CLASSES)
        self.register_buffer("places", torch.ones(WIDTH, dtype=torch.long))
        self.body, self.rehearsed = body, rehearsed

    def forward(self, x):
        if self.rehearsed:
            assert int(x.shape[1]) == WIDTH
        return self.head(self.body(self, x))

    def run(self, x, first, last):
        for number in range(first, last):
            x = self.blocks[number](x)
        return x


def collected(self, x):
    features = []
    for block in self.blocks:
        features.append(x)
        x = block(x)
    return x + sum(features)


def turned(self, x):
    x = self.run(x, 0, 1)
    view = x.T
    y = self.run(x.detach() * 1.0, 1, 4)
    view.mul_(y.mean())
    return self.run(self.run(y, 4, 5) + x, 5, 6)


def unfolded(self, x):
    x = self.run(x, 0, 1)
    view = x.unfold(1, 4, 4)
    y = self.run(x * 1.0, 1, 4)
    view.mul_(y.mean())
    return self.run(self.run(y, 4, 5) + x, 5, 6)


def out(self, x):
    x = self.run(x, 0, 1)
    kept = (x * 1.0).detach()
    y = self.run(x, 1, 4)
    with torch.no_grad():
        torch.add(y.detach(), 1.0, out=kept)
    return self.run(self.run(y, 4, 5) + kept, 5, 6)


def activated_later(self, x):
    x = self.run(x, 0, 1)
    y = x + self.run(x * 1.0, 1, 4)
    x.relu_()
    return self.run(y, 4, 6) + x


def filled_later(self, x):
    skip = self.run(x, 0, 1)
    y = skip + self.run(skip * 1.0, 1, 5)
    skip[:, 0] = 0
    return self.run(y, 5, 6) * 0.5 + skip


def filled_through_a_view(self, x):
    canvas = x.new_zeros(x.shape[0], WIDTH)
    x = self.run(x, 0, 1)
    canvas.view(-1, 2, 4)[:, 0] = x[:, :4]
    return self.run(self.run(x, 1, 5) + canvas, 5, 6)


def filled_through_selections(self, x):
    canvas = x.new_zeros(2, x.shape[0], WIDTH).transpose(0, 1)
    x = self.run(x, 0, 1)
    canvas.select(1, 0).copy_(x)
    x = self.run(x, 1, 4)
    canvas.select(1, 1).copy_(x)
    return self.run(self.run(x, 4, 5) + canvas.sum(1), 5, 6)


def sum_of_weights(self, x):
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for block in self.blocks:
        x = block(x)
        total += block.norm.weight.detach()
    return x * total


def sum_with_a_buffer(self, x):
    places = torch.arange(WIDTH)
    places = places.clamp_(max=5)
    places += self.places
    return self.run(x, 0, 6) * places


def sum_of_squares(self, x):
    total = torch.tensor(0.0, dtype=torch.float64)
    for block in self.blocks:
        x = block(x)
        total += x.pow(2).mean()
    return x * total


def sum_of_means(self, x):
    total = torch.zeros(WIDTH, dtype=torch.float64)
    for block in self.blocks:
        x = block(x)
        total = total.add_(x.mean(0))
    return x * total


def dropped(self, x):
    return functional.dropout(self.run(x, 0, 6), 0.1, self.training)


def equal(model, line):
    verdict = verify(model, line, batches())
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["pp2", "pp2/interleaved:v2 mb2"])
def test_features_collected_before_a_block_that_writes_into_its_input_are_those_of_one_device(line):
    equal(Model(collected, block=PreActivation), line)


@pytest.mark.parametrize(("body", "line"), [(turned, "pp2"), (unfolded, "pp2"), (out, "pp3")])
def test_a_later_stage_that_writes_through_another_name_of_a_value_is_as_on_one_device(body, line):
    equal(Model(body), line)


@pytest.mark.parametrize("line", ["pp2 mb2", "pp3", "pp2/zb-v mb4"])
@pytest.mark.parametrize("body", [activated_later, filled_later])
def test_a_value_that_is_written_into_later_is_read_on_each_stage_as_it_was_there(body, line):
    equal(Model(body), line)


@pytest.mark.parametrize("rehearsed", [False, True])
@pytest.mark.parametrize("body", [filled_through_a_view, filled_through_selections])
def test_a_new_tensor_that_is_filled_through_a_view_is_right_or_refused(body, rehearsed):
    model = Model(body, rehearsed=rehearsed)
    try:
        verdict = verify(model, "pp2", batches())
    except (LayoutError, PlanError):
        assert verify(model, "dp2", batches()).equal
    else:
        assert verdict.equal, str(verdict)


class WritesIntoAView(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        assert int(x.shape[1]) == WIDTH
        y = self.blocks[0](x).view(-1, 2, 4)
        x = self.blocks[1](x)
        for number in (2, 3, 4):
            x = self.blocks[number](x)
        flat = y.flatten(1)
        flat += x
        return self.head(self.blocks[5](flat))


@pytest.mark.parametrize("line", ["pp2", "pp3"])
def test_an_early_stage_whose_view_is_written_into_later_gets_its_gradient(line):
    equal(WritesIntoAView(), line)


@pytest.mark.parametrize("body", [sum_of_weights, sum_with_a_buffer, sum_of_squares, sum_of_means])
def test_a_constant_that_each_forward_makes_and_writes_into_starts_anew_in_each_step(body):
    equal(Model(body), "pp2")


@pytest.mark.parametrize("line", ["pp2 recompute:full", "dp2 pp2 recompute:full mb2"])
def test_a_model_that_drops_out_at_its_end_may_be_cut_and_recomputed(line):
    equal(Model(dropped), line)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.layer(x)
        return x, torch.sigmoid(x)


class AddsToTheResult(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Gate() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            y, gate = block(x)
            y += x
            x = y * gate
        return self.head(x)


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.layer = Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        scores, gate = self.gate(x)
        return scores, gate, self.layer(gate * x)


class ScalesTheScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Router() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.blocks:
            scores, _, y = block(x)
            scores[:, 0] = 0.0
            scores *= 3
            x = x + y + 0.1 * scores
        return self.head(x)


@pytest.mark.parametrize("line", ["recompute:selective", "pp2 recompute:selective mb2", "recompute:full mb2"])
@pytest.mark.parametrize("build", [AddsToTheResult, ScalesTheScores])
def test_a_block_is_recomputed_right_after_its_result_was_written_into(build, line):
    equal(build(), line)


DRAWS = {
    "normal of a mean and a deviation": lambda x: torch.normal(x, x.sigmoid()),
    "normal of a mean": lambda x: torch.normal(x, 1.0),
    "normal of a deviation": lambda x: torch.normal(0.0, x.sigmoid()),
    "normal_": lambda x: (x * 1).normal_(),
    "uniform_": lambda x: (x * 1).uniform_(),
    "exponential_": lambda x: (x * 1).exponential_(),
    "bernoulli_": lambda x: (x * 1).bernoulli_(0.5),
}


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES), draw

    def forward(self, x):
        return self.last(self.draw(self.first(x)))


@pytest.mark.parametrize("name", DRAWS)
def test_what_a_draw_is_made_from_gets_a_gradient_of_zeros_as_in_torch(name):
    model, (batch, _) = Drawing(DRAWS[name]), batches()
    plain = copy.deepcopy(model)
    functional.cross_entropy(plain(batch[0]), batch[1]).backward()
    assert not plain.first.weight.grad.any()

    def work(world):
        run = parallelize(copy.deepcopy(model), "dp2", world, loss=CrossEntropy())
        (shard,) = run.shard([batch])
        run.step(shard)
        return [run.model.first.weight.grad, run.model.last.weight.grad]

    for first, last in launch(work, 2, ranks="threads"):
        assert first is not None
        assert not first.any()
        assert last.any()


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.temperature = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, x):
        return self.down(self.up(x).tanh() * self.temperature)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("line", ["dp2", "pp2"])
def test_an_attribute_set_before_the_first_step_or_evaluation_is_read_by_every_stage(line, evaluates):
    model, batch = Tempered(), (torch.randn(4, WIDTH), torch.randn(4, WIDTH))
    plain = copy.deepcopy(model)
    plain.temperature = 3.0
    expected = functional.mse_loss(plain(batch[0]), batch[1])

    def work(world):
        run = parallelize(copy.deepcopy(model), line, world, loss=MeanSquaredError())
        (shard,) = run.shard([batch])
        if evaluates:
            run.step(shard)
        run.model.temperature = 3.0
        return run.evaluate(shard) if evaluates else run.step(shard)

    for loss in launch(work, 2, ranks="threads"):
        torch.testing.assert_close(loss.detach().reshape(()).to(expected.dtype), expected.detach())


class LossByParts(nn.Module):
    """A loss of each token, filled by slices: the first tokens by one layer, and the others by two."""

    def __init__(self):
        super().__init__()
        self.common, self.others = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)

    def forward(self, hidden, targets):
        first = self.common(hidden).log_softmax(-1)
        losses = torch.zeros_like(targets, dtype=hidden.dtype)
        losses[:, :2].copy_(-first[:, :2].gather(2, targets[:, :2, None] % 3).squeeze(2))
        rest = self.others(hidden[:, 2:]).log_softmax(-1) + first[:, 2:, 2:]
        losses[:, 2:].copy_(-rest.gather(2, targets[:, 2:, None] % 2).squeeze(2))
        return losses


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.loss = nn.ModuleList(Block() for _ in range(4)), LossByParts()

    def forward(self, x, labels):
        for block in self.blocks:
            x = x + block(x)
        return self.loss(x, labels).flatten(1)


class LossSum(nn.Module):
    def forward(self, losses, targets):
        return losses.sum(), targets.numel()


@pytest.mark.parametrize("line", ["pp2/1f1b", "pp2/1f1b tp2", "pp2/zb-h1 tp2 dp2/zero1"])
def test_a_module_that_fills_its_result_by_parts_runs_whole_on_one_stage(line):
    numbers = torch.Generator().manual_seed(0)
    x, labels = torch.randn(8, 4, WIDTH, generator=numbers), torch.randint(CLASSES, (8, 4), generator=numbers)
    verdict = verify(LanguageModel(), line, [({"x": x, "labels": labels}, labels)] * 2, loss=LossSum())
    assert verdict.equal, str(verdict)
