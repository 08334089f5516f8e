"""What training loops do beside steps: settings that change, penalties, optimizers by turns, hooks, streams."""

from __future__ import annotations

import copy
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from shardwright import MeanLoss, launch, parallelize, verify
from shardwright.errors import PlanError, RankFailedError
from shardwright.layout import Layout
from shardwright.parallelize.loss_settings import MOST_ENTRIES, follow_settings, settings_of
from shardwright.parallelize.planning import structural_copy

LINES = ("single", "dp2", "dp2/zero3", "tp2", "pp2 mb2")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()


def batches(number=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 6, generator=generator).double(), torch.randint(3, (6,), generator=generator))
        for _ in range(number)
    ]


def on_ranks(line, work, model=None, **options):
    model = plain() if model is None else model
    return launch(lambda world: work(parallelize(model, line, world, **options)), Layout.parse(line), ranks="threads")


def by_sgd(run, each=lambda number: None):
    """The losses of four steps; ``each`` is called before each of them."""
    optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
    for number, batch in enumerate(run.shard(batches())):
        each(number)
        losses.append(run.step(batch).item())
        optimizer.step()
    return losses


def by_plain_sgd(loss, model=None, each=lambda number: None):
    model = plain() if model is None else model
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number, (x, y) in enumerate(batches()):
        each(number)
        optimizer.zero_grad()
        mean = loss(model(x), y)
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


def close(found, expected):
    return all(rank == pytest.approx(expected, rel=1e-9) for rank in found)


# ---- settings of the loss


class Smoothed(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta, self.more = 0.0, {"scale": 1.0}

    def forward(self, output, targets):
        each = functional.cross_entropy(output, targets, reduction="sum")
        return self.more["scale"] * (each + self.beta * (output**2).sum()), len(targets)


def smoothed(output, targets, beta):
    return Smoothed.forward(SimpleNamespace(beta=beta, more={"scale": 1.0}), output, targets)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("how", ["module", "bound method", "partial", "inside", "run.loss"])
@pytest.mark.sampled(5)
def test_settings_of_a_loss_that_change_between_steps_hold_for_the_next_step(line, how):
    def work(world, model):
        loss = Smoothed()
        given = {"bound method": loss.forward, "partial": partial(smoothed, beta=0.0)}.get(how, loss)
        run = parallelize(model, line, world, loss=given)

        def each(number):
            if how == "partial":
                given.keywords["beta"] = 0.2 * number
            elif how == "inside":
                loss.more["scale"] = 1.0 + 0.2 * number
            else:
                (run.loss if how == "run.loss" else loss).beta = 0.2 * number

        return by_sgd(run, each)

    expected, own = Smoothed(), plain()

    def mean(output, targets):
        total, count = expected(output, targets)
        return total / count

    def changed(number):
        if how == "inside":
            expected.more["scale"] = 1.0 + 0.2 * number
        else:
            expected.beta = 0.2 * number

    assert close(launch(work, Layout.parse(line), own, ranks="threads"), by_plain_sgd(mean, each=changed))


def test_a_setting_of_torchs_loss_may_change_too():
    def work(world, model):
        loss = nn.CrossEntropyLoss()
        run = parallelize(model, "dp2", world, loss=loss)
        return by_sgd(run, lambda number: setattr(loss, "label_smoothing", 0.2 * number))

    loss = nn.CrossEntropyLoss()
    expected = by_plain_sgd(loss, each=lambda number: setattr(loss, "label_smoothing", 0.2 * number))
    assert close(launch(work, 2, plain(), ranks="threads"), expected)


def test_a_table_of_a_loss_is_no_setting_that_is_looked_up_before_each_step():
    class WithTable(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.beta = {str(number): number for number in range(MOST_ENTRIES + 1)}, 0.0

    given, own = WithTable(), WithTable()
    follow_settings(given, own)
    given.words["3"], given.beta = 4, 0.5
    settings_of(own).renew()
    assert (own.words["3"], own.beta) == (3, 0.5)


# ---- what a loss depends on beside the output


class ByConfidence(nn.Module):
    """A mean by weights that the output gives, so that the count has a gradient too."""

    def forward(self, output, targets):
        weights = output.sigmoid().mean(-1)
        return (weights * functional.cross_entropy(output, targets, reduction="none")).sum(), weights.sum()


def test_a_count_with_a_gradient_is_differentiated_on_one_rank():
    def mean(output, targets):
        total, count = ByConfidence()(output, targets)
        return total / count

    assert close(on_ranks("single", by_sgd, loss=ByConfidence()), by_plain_sgd(mean))
    assert verify(plain(), "single", batches(2), loss=ByConfidence()).equal


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2", "mb2"])
def test_and_refused_where_the_mean_is_taken_after_the_backward(line):
    with pytest.raises(PlanError, match="the count of a loss depends on parameters"):
        verify(plain(), line, batches(1), loss=ByConfidence())


def penalty(parameters):
    return 0.01 * sum(each.abs().sum() for each in parameters)


@pytest.mark.parametrize("line", LINES)
def test_a_penalty_over_parameters_of_the_plain_model_is_refused(line):
    model = plain()

    def loss(output, targets):
        each = functional.cross_entropy(output, targets, reduction="sum")
        return each + len(targets) * penalty(model.parameters()), len(targets)

    with pytest.raises(PlanError, match="the loss reads parameters beside the model's output"):
        on_ranks(line, by_sgd, model, loss=loss)


@pytest.mark.parametrize(("line", "is_refused"), [*zip(LINES, (False, False, True, True, True), strict=True)])
def test_a_penalty_over_parameters_of_the_run_is_refused_where_ranks_have_parts(line, is_refused):
    def work(world, model):
        runs = []

        def loss(output, targets):
            each = functional.cross_entropy(output, targets, reduction="sum")
            return each + len(targets) * penalty(runs[0].model.parameters()), len(targets)

        runs.append(parallelize(model, line, world, loss=loss))
        return by_sgd(runs[0])

    model = plain()
    if is_refused:
        with pytest.raises(
            PlanError, match=r"the parameter '\d.\w+', of which ranks hold parts, or which one stage has"
        ):
            launch(work, Layout.parse(line), model, ranks="threads")
    else:
        own = plain()
        expected = by_plain_sgd(lambda o, t: functional.cross_entropy(o, t) + penalty(own.parameters()), own)
        assert close(launch(work, Layout.parse(line), model, ranks="threads"), expected)


class Keeping(nn.Sequential):
    """Keeps a term for the loss, as mixtures of experts do; its own parameters made it."""

    def forward(self, x):
        hidden = self[1](self[0](x))
        self.term = (hidden**2).sum()
        return self[2](hidden)


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_term_that_the_forward_has_kept_may_be_read_by_the_loss(line):
    def work(world, model):
        runs = []

        def loss(output, targets):
            return functional.cross_entropy(output, targets, reduction="sum") + 0.1 * runs[0].model.term, len(targets)

        runs.append(parallelize(model, line, world, loss=loss))
        return by_sgd(runs[0])

    def keeping():
        return Keeping(*plain())

    own = keeping()
    expected = by_plain_sgd(lambda o, t: functional.cross_entropy(o, t) + 0.1 * own.term / len(t), own)
    assert close(launch(work, Layout.parse(line), keeping(), ranks="threads"), expected)


def test_a_network_beside_the_model_may_be_read_by_a_loss_though_it_was_not_frozen():
    torch.manual_seed(2)
    features = nn.Linear(3, 3).double()

    def loss(output, targets):
        return functional.cross_entropy(features(output), targets, reduction="sum"), len(targets)

    expected = by_plain_sgd(lambda o, t: functional.cross_entropy(features(o), t))
    assert close(on_ranks("dp2 tp2", by_sgd, loss=loss), expected)


# ---- settings of the model


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.settings, self.more, self.all = SimpleNamespace(tau=1.0), {"tau": 1.0}, [1.0]

    def forward(self, x):
        return self.down(self.up(x).tanh()) / self.settings.tau / self.more["tau"] / self.all[0]

    def set(self, number):
        self.settings.tau, self.more["tau"], self.all[0] = 1.0 + number, 1.0 + number / 2, 1.0 + number / 4


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2", "pp2/gpipe mb2"])
def test_settings_inside_of_a_models_objects_hold_for_the_next_step(line):
    def tempered():
        torch.manual_seed(0)
        return Tempered().double()

    own = tempered()
    expected = by_plain_sgd(functional.cross_entropy, own, own.set)
    assert close(on_ranks(line, lambda run: by_sgd(run, run.model.set), tempered()), expected)


# ---- optimizers


class OverAll(torch.optim.SGD):
    """Estimates one number from all its tensors, as optimizers that find the rate themselves do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["estimate"] = group.get("estimate", 0.0) + sum(float(p.grad.abs().sum()) for p in group["params"])
        return super().step(closure)


class WithModes(torch.optim.SGD):
    """Steps in its own training mode alone, as optimizers without a schedule do."""

    training = False

    def train(self):
        self.training = True

    def step(self, closure=None):
        assert self.training, "call optimizer.train() first"
        return super().step(closure)


@pytest.mark.parametrize("line", ["dp2/zero1", "tp2"])
@pytest.mark.parametrize("kind", [OverAll, torch.optim.Adafactor])
@pytest.mark.parametrize("by_hand", [True, False])
def test_an_optimizer_that_needs_whole_tensors_is_refused_however_it_was_made(line, kind, by_hand):
    def work(run):
        run.step(next(run.shard(batches(1))))
        make = (lambda: kind(run.parameters.values(), lr=0.1)) if by_hand else (lambda: run.optimizer(kind, lr=0.1))
        with pytest.raises(PlanError, match=f"{kind.__name__} needs whole tensors or all of them"):
            make().step()

    on_ranks(line, work)


def test_a_matrix_optimizer_made_by_hand_is_refused_where_matrices_are_cut():
    def work(run):
        run.step(next(run.shard(batches(1))))
        matrices = [each for each in run.parameters.values() if each.dim() == 2]
        with pytest.raises(PlanError, match="Muon needs whole tensors"):
            torch.optim.Muon(matrices, lr=0.1).step()

    on_ranks("tp2", work)


def test_stages_step_an_optimizer_that_needs_whole_tensors_but_not_all_of_them():
    def work(run, kind, **options):
        optimizer = run.optimizer(kind, **options)
        for batch in run.shard(batches()):
            run.step(batch)
            optimizer.step()
        return run.state_dict()

    kind = torch.optim.Adafactor
    (expected,) = on_ranks("single", partial(work, kind=kind, lr=0.1))
    for found in on_ranks("pp2 mb2", partial(work, kind=kind, lr=0.1)):
        torch.testing.assert_close(found, expected)
    with pytest.raises(PlanError, match=r"OverAll needs all tensors, and '0.weight' is on one stage"):
        on_ranks("pp2", partial(work, kind=OverAll, lr=0.1))


def test_stages_step_an_optimizer_of_matrices():
    def work(run):
        matrices = [each for each in run.parameters.values() if each.dim() == 2]
        optimizer = torch.optim.Muon(matrices, lr=0.1)
        losses = []
        for batch in run.shard(batches()):
            losses.append(run.step(batch).item())
            optimizer.step()
        return losses

    assert close(on_ranks("pp2 mb2", work), on_ranks("single", work)[0])


@pytest.mark.parametrize("line", ["dp2/zero1", "tp2"])
def test_an_optimizer_with_modes_is_tried_in_its_training_mode(line):
    def work(run):
        optimizer = run.optimizer(WithModes, lr=0.1)
        optimizer.train()
        for batch in run.shard(batches()):
            run.step(batch)
            optimizer.step()
        return run.evaluate(next(run.shard(batches(1)))).item()

    assert close([[found] for found in on_ranks(line, work)], on_ranks("single", work))


@pytest.mark.parametrize("line", [*LINES, "pp2"])
def test_two_optimizers_step_by_turns_though_each_stage_has_parameters_of_one(line):
    def work(run):
        rules = [lambda name, shape, own=own: {} if name[0] == own else None for own in "02"]
        optimizers, losses = [run.optimizer(torch.optim.SGD, parameters=rule, lr=0.1) for rule in rules], []
        for number, batch in enumerate(run.shard(batches())):
            losses.append(run.step(batch).item())
            optimizers[number % 2].step()
        return losses

    (expected,) = on_ranks("single", work)
    assert close(on_ranks(line, work), expected)


# ---- hooks and loaders


@pytest.mark.parametrize(("line", "times"), [("single", 0), ("dp2", 0), ("dp2/zero1", 1), ("dp2 bf16", 1)])
def test_a_hook_on_a_stored_parameter_that_no_backward_reaches_is_warned_of(line, times, caplog):
    def work(run):
        next(iter(run.parameters.values())).register_post_accumulate_grad_hook(lambda parameter: None)
        run.step(next(run.shard(batches(1))))

    with caplog.at_level(logging.WARNING, "shardwright"):
        on_ranks(line, work)
    told = [
        each for each in caplog.messages if "the hook on the gradient of run.parameters['0.weight'] never runs" in each
    ]
    assert len(told) == times


class Endless(IterableDataset):
    def __iter__(self):
        (x, y), *_ = batches()
        return iter(zip(x, y, strict=True))


class WithoutLength(Sampler):
    def __iter__(self):
        return iter(range(6))


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Endless(), batch_size=3),
        lambda: DataLoader(TensorDataset(*batches()[0]), batch_size=3, sampler=WithoutLength()),
    ],
    ids=["a stream", "a sampler without a length"],
)
def test_a_loader_without_a_length_is_read(loader):
    losses = on_ranks("dp2", lambda run: [run.evaluate(part).item() for part in run.shard(loader())])
    assert close(losses, on_ranks("single", lambda run: [run.evaluate(part).item() for part in run.shard(loader())])[0])
    assert len(losses[0]) == 2


@pytest.mark.parametrize("line", ["dp2", "tp2", "dp2/zero3", "pp2"])
def test_a_loss_that_calls_the_model_of_another_run_needs_all_of_it_on_each_rank(line):
    generator, critic = (nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, out)) for out in (4, 1))
    latent, wanted = torch.randn(4, 4), torch.ones(4, 1)

    def work(world):
        score = parallelize(critic, line, world, loss=MeanLoss(functional.mse_loss)).model
        loss = MeanLoss(lambda made, targets: functional.mse_loss(score(made), targets))
        run = parallelize(generator, line, world, loss=loss)
        return run.step(next(iter(run.shard([(latent, wanted)])))).item()

    if line == "dp2":
        expected = functional.mse_loss(critic(generator(latent)), wanted).item()
        assert launch(work, line, ranks="threads") == pytest.approx([expected] * 2, rel=1e-5)
        return
    with pytest.raises(PlanError, match="the loss holds the model of a run, of which this rank has parts") as failure:
        launch(work, line, ranks="threads")
    assert "lay the discriminator out by dp" in str(failure.value)


# ---- what a loop does with gradients and weights of run.model between a step and the optimizer's


def four_steps(model, line, between):
    """Losses of steps under a layout, with what a loop does between each and the optimizer's step."""
    torch.manual_seed(0)
    batches = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(4)]

    def work(world):
        run = parallelize(structural_copy(model), line, world, example=batches[0][0])
        optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.5), []
        for part in run.shard(batches):
            losses.append(run.step(part).item())
            between(run.model)
            optimizer.step()
        return losses

    return launch(work, line, ranks="threads")[0]


def drops_one(model):
    for name, parameter in model.named_parameters():
        if name.startswith("2."):
            parameter.grad = None


def drops_by_module(model):
    for name, module in model.named_modules():
        if name == "2":
            module.zero_grad()


def deletes(model):
    del model.get_parameter("2.weight").grad
    del model.get_parameter("2.bias").grad


def three_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero2", "dp2/zero3", "bf16 dp2", "bf16 dp2/zero3"])
@pytest.mark.parametrize("drops", [drops_one, drops_by_module, deletes])
def test_a_gradient_that_a_loop_drops_is_dropped_of_what_the_optimizer_updates(line, drops):
    found, expected = four_steps(three_layers(), line, drops), four_steps(three_layers(), "single", drops)
    assert found == pytest.approx(expected, rel=1e-2 if "bf16" in line else 1e-5)
    assert expected[-1] != pytest.approx(four_steps(three_layers(), "single", lambda _: None)[-1], rel=1e-4)


def sets_one(model):
    parameter = model.get_parameter("2.weight")
    parameter.grad = torch.zeros_like(parameter)


def clamps_data(model):
    model.get_parameter("2.weight").data.clamp_(-0.05, 0.05)


def clamps_into(model):
    data = model.get_parameter("2.weight").data
    torch.clamp(data, -0.05, 0.05, out=data)


def zeroes_a_row(model):
    model.get_parameter("2.weight").data[0].zero_()


def initializes(model):
    nn.init.constant_(model.get_parameter("2.weight").data, 0.1)


def scales_chunks(model):
    for part in model.get_parameter("2.weight").data.detach().chunk(2):
        part.view(-1).mul_(0.5)


def scales_all(model):
    torch._foreach_mul_([model.get_parameter("2.weight").data], 0.5)


WRITES = [sets_one, clamps_data, clamps_into, zeroes_a_row, initializes, scales_chunks, scales_all]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("line", ["dp2/zero1", "dp2/zero3", "bf16 dp2", "bf16 dp2/zero1"])
@pytest.mark.parametrize("changes", WRITES)
def test_what_a_loop_writes_where_it_would_be_lost_is_refused(line, changes):
    if line == "dp2/zero1" and changes is not sets_one:  # the shard is a part of what is read: nothing is lost
        expected = four_steps(three_layers(), "single", changes)
        assert four_steps(three_layers(), line, changes) == pytest.approx(expected, rel=1e-5)
        return
    with pytest.raises((PlanError, RankFailedError), match=r"2\.weight"):
        four_steps(three_layers(), line, changes)


def test_the_data_of_a_rounded_weight_is_read_copied_and_saved_as_a_plain_tensor(tmp_path):
    found = []

    def reads(model):
        data = model.get_parameter("2.weight").data
        torch.save(data, tmp_path / "weight.pt")
        found.append((type(data + 1), type(copy.deepcopy(data)), type(torch.load(tmp_path / "weight.pt")), data.shape))

    four_steps(three_layers(), "bf16", reads)
    assert found[0] == (torch.Tensor, torch.Tensor, torch.Tensor, (16, 16))
