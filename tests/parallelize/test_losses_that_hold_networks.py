"""Losses that hold more than numbers: class weights, target networks, teachers with norms, the model, gradients."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import MeanLoss, launch, parallelize, save, verify
from shardwright.analysis.objects.reached import held_by
from shardwright.errors import PlanError, RankFailedError
from shardwright.layout import Layout

LINES = ("single", "dp2", "tp2", "pp2 mb2")


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).double()


def batches(number=4, size=8):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 6, generator=generator).double(), torch.randint(3, (size,), generator=generator))
        for _ in range(number)
    ]


def losses_of(line, model, made, given=None):
    """The losses of four steps; ``made(run)`` returns a loss and what the loop does before each step."""

    def work(world):
        loss, change = made()
        run = parallelize(model, line, world, loss=loss, example=batches()[0][0])
        optimizer, losses = run.optimizer(torch.optim.SGD, lr=0.1), []
        for number, batch in enumerate(run.shard(batches() if given is None else given)):
            change(number, run)
            losses.append(run.step(batch).item())
            optimizer.step()
        return losses

    return launch(work, Layout.parse(line), ranks="threads")


def plain_losses(model, loss, change, given=None):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number, (x, y) in enumerate(batches() if given is None else given):
        change(number, SimpleNamespace(state_dict=model.state_dict))
        optimizer.zero_grad()
        mean = loss(model(x), y)
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return losses


# ---- tensors and lists that the loop changes


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.betas = [0.0]

    def forward(self, output, targets):
        return functional.cross_entropy(output, targets) + self.betas[0] * output.square().mean()


def changing(how):
    """A loss, and what changes it before each step."""
    if how in ("weight is set", "weight is written"):
        loss = nn.CrossEntropyLoss(weight=torch.ones(3).double())

        def change(number, _):
            weight = 1 + number * torch.arange(3).double()
            if how == "weight is set":
                loss.weight = weight
            else:
                loss.weight.copy_(weight)

        return loss, change
    if how == "list":
        own = Weighted()
        return MeanLoss(own), lambda number, _: own.betas.__setitem__(0, 0.3 * number)
    at = SimpleNamespace(betas=[0.0])
    return MeanLoss(partial(Weighted.forward, at)), lambda number, _: setattr(at, "betas", [0.3 * number])


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("how", ["weight is set", "weight is written", "list", "argument of a partial"])
@pytest.mark.sampled(3)
def test_what_a_loop_changes_in_the_loss_that_it_gave_holds_for_the_next_step(line, how):
    loss, change = changing(how)
    expected = plain_losses(plain(), getattr(loss, "function", loss), change)
    found = losses_of(line, plain(), lambda: changing(how))
    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in found)


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "pp2"])
def test_a_target_network_of_the_loss_takes_over_its_buffers_too(line):
    torch.manual_seed(2)
    own = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()

    def made():
        target = copy.deepcopy(own).requires_grad_(False).eval()

        def loss(output, targets):
            return functional.mse_loss(output, target(targets))

        def change(number, run):
            state = run.state_dict()  # on every rank
            if number == 2:
                target.load_state_dict(state)

        return MeanLoss(loss), change

    given = [(x, x.roll(1, 0)) for x, _ in batches()]
    loss, change = made()
    expected = plain_losses(copy.deepcopy(own), loss.function, change, given)
    found = losses_of(line, own, made, given)
    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in found)


class Teaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 3).double().requires_grad_(False)
        self.net.weight.fill_(0.3), self.net.bias.zero_()

    def forward(self, output, targets):
        return functional.mse_loss(self.net(output), functional.one_hot(targets, 3).double())


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_a_parameter_that_the_loop_puts_in_is_taken_over_and_the_one_before_is_left_as_it_was(line):
    def made():
        loss = Teaching()
        own, averaged = loss.net.weight, nn.Parameter(torch.ones(3, 3).double(), requires_grad=False)
        kept.append((own, own.clone()))
        return loss, lambda number, _: setattr(loss.net, "weight", averaged if number % 2 else own)

    kept = []
    loss, change = made()
    expected = plain_losses(plain(), loss, change)

    def of_run():
        loss, change = made()
        return MeanLoss(loss), change

    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in losses_of(line, plain(), of_run))
    assert all(torch.equal(own, before) for own, before in kept)


def test_an_attribute_of_a_function_that_holds_a_teacher_is_followed():
    def made():
        teacher = Teaching().net

        def loss(output, targets):
            return functional.cross_entropy(output, targets) + loss.beta * (output - teacher(output)).square().mean()

        loss.beta = 0.0
        return loss, lambda number, _: setattr(loss, "beta", 0.3 * number)

    loss, change = made()
    expected = plain_losses(plain(), loss, change)

    def of_run():
        loss, change = made()
        return MeanLoss(loss), change

    assert losses_of("single", plain(), of_run)[0] == pytest.approx(expected, rel=1e-9)


class Popping(nn.Module):
    """Takes a weight from its list in each call."""

    def __init__(self):
        super().__init__()
        self.queue = [0.1, 0.2, 0.3, 0.4, 0.5]

    def forward(self, output, targets):
        return functional.cross_entropy(output, targets) * (1 + self.queue.pop())


def test_the_last_entry_of_a_list_that_the_loss_has_shortened_may_be_written():
    own = Popping()

    def change(number, _):
        if number == 2:
            own.queue[4] = 9.0

    found = losses_of("single", plain(), lambda: (MeanLoss(own), change))
    assert len(found[0]) == 4


@pytest.mark.parametrize("made", [dict.fromkeys, list, deque, set])
def test_a_collection_that_thread_ranks_share_may_grow_while_another_rank_looks_for_what_a_loss_holds(made):
    log = made(("a", "b"))
    grow = {dict: lambda: log.update({len(log): 0}), set: lambda: log.add(len(log))}
    found = []
    for path, _ in held_by(log):
        grow.get(type(log), lambda: log.append(0))()
        found.append(path)
    assert 2 <= len(found) <= 4, "what it had in the beginning"


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float64])
def test_a_teacher_in_another_precision_keeps_it_where_the_loss_casts_to_it(cast):
    torch.manual_seed(3)
    teacher = nn.Linear(3, 3).to(cast).requires_grad_(False)

    def loss(output, targets):
        return functional.mse_loss(output, teacher(functional.one_hot(targets, 3).to(cast)).to(output.dtype))

    verdict = verify(plain().float(), "dp2", batches(2), loss=MeanLoss(loss))
    assert verdict.equal, str(verdict)


# ---- the model that was given


class Balanced(nn.Module):
    """Leaves a term of its loss in an attribute, and has a setting."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 2), nn.Linear(6, 8), nn.Linear(8, 3)
        self.aux_loss, self.classes = 0.0, 3

    def forward(self, x):
        chosen = self.gate(x).softmax(-1)
        self.aux_loss = (chosen * chosen.log()).sum(-1).mean()
        return self.down(torch.relu(self.up(x))) * chosen[:, :1]

    def term(self):
        return self.aux_loss


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("reads", ["attribute", "method", "setting"])
def test_an_attribute_that_the_forward_sets_is_not_read_from_the_model_that_was_given(line, reads):
    torch.manual_seed(0)
    model = Balanced().double()

    def loss(output, targets):
        return functional.cross_entropy(output, targets) + read(model)

    def settings(output, targets):
        return functional.cross_entropy(output.view(-1, model.classes), targets)

    read = {"attribute": lambda model: model.aux_loss, "method": lambda model: model.term()}.get(reads)

    def step():
        return losses_of(line, model, lambda: (MeanLoss(loss if read else settings), lambda *_: None))

    if reads == "setting":
        expected = plain_losses(copy.deepcopy(model), settings, lambda *_: None)
        assert all(rank == pytest.approx(expected, rel=1e-9) for rank in step())
        return
    with pytest.raises((PlanError, RankFailedError), match="the loss reads 'aux_loss' of the model that was given"):
        step()


class Notes(nn.Module):
    """Leaves what it computes in one of several kinds of attributes."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.how = nn.Linear(6, 8), nn.Linear(8, 3), how
        self.terms, self.state, self.last, self.width, self.kind = [], {}, None, 700, {"k": 3}
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        term = hidden.square().mean()
        if self.how == "list":
            self.terms[:] = [term]
        elif self.how == "dict":
            self.state["term"] = term
        elif self.how == "buffer":
            self.load.copy_(term.detach())
        elif self.how == "none":
            self.last = term
        self.width, self.kind = int("700"), {"k": 3}  # other objects, equal to those before
        return self.down(hidden)


READ = {
    "list": lambda model: sum(model.terms),
    "dict": lambda model: model.state.get("term", 0.0),
    "buffer": lambda model: model.load,
    "none": lambda model: model.last,
}


@pytest.mark.filterwarnings("ignore:'the model' takes a mean, with which it changes the buffer 'load'")
@pytest.mark.parametrize(
    ("how", "line"), [(how, line) for how in READ for line in ("dp2", "pp2") if (how, line) != ("buffer", "pp2")]
)
def test_what_the_forward_leaves_in_a_list_a_dict_a_buffer_or_in_place_of_none_is_not_read_either(how, line):
    model, read = Notes(how).double(), READ[how]
    loss = MeanLoss(lambda output, targets: functional.cross_entropy(output, targets) + read(model))
    name = {"list": "terms", "dict": "state", "buffer": "load", "none": "last"}[how]
    with pytest.raises((PlanError, RankFailedError), match=f"the loss reads '{name}' of the model that was given"):
        losses_of(line, model, lambda: (loss, lambda *_: None))


@pytest.mark.parametrize("line", ["dp2", "pp2"])
def test_an_attribute_that_the_forward_sets_to_what_it_was_is_read(line):
    model = Notes("").double()

    def loss(output, targets):
        own = 1.0 if type(model) is Notes else 2.0  # the class of the model is the user's own
        return own * functional.cross_entropy(output, targets) * model.width / 700 + 0.0 * model.kind["k"]

    expected = plain_losses(copy.deepcopy(model), loss, lambda *_: None)
    assert all(
        rank == pytest.approx(expected, rel=1e-9)
        for rank in losses_of(line, model, lambda: (MeanLoss(loss), lambda *_: None))
    )


GLOBAL = Balanced().double()


def loss_of_a_global_model(output, targets):
    return functional.cross_entropy(output, targets) + GLOBAL.aux_loss


@pytest.mark.parametrize("line", ["dp2", "pp2"])
def test_an_attribute_of_a_global_model_is_not_read_either(line):
    with pytest.raises((PlanError, RankFailedError), match="the loss reads 'aux_loss' of the model that was given"):
        losses_of(line, GLOBAL, lambda: (MeanLoss(loss_of_a_global_model), lambda *_: None))


# ---- gradients


class Modulated(nn.Module):
    """Returns an output and a tensor that the layers before it and the last one use."""

    def __init__(self, num_layers=6):
        super().__init__()
        torch.manual_seed(0)
        self.style, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.Sequential(*(each for _ in range(num_layers) for each in (nn.Linear(8, 8), nn.Tanh())))

    def forward(self, x):
        w = self.style(x)
        return self.last(self.layers(w) * w), w


def slope_of(y, w):
    return torch.autograd.grad(y.sum(), w, create_graph=True)[0].square().sum(1).mean()


class WithSlope(nn.Module):
    def slope(self, y, w):
        return torch.autograd.grad(y.sum(), w, create_graph=True)[0].square().sum(1).mean()

    def forward(self, output, targets):
        return functional.cross_entropy(output[0], targets) + self.slope(*output)


WITH_SLOPE = {
    "in the loss": lambda output, targets: (
        functional.cross_entropy(output[0], targets)
        + torch.autograd.grad(output[0].sum(), output[1], create_graph=True)[0].square().sum(1).mean()
    ),
    "in a function": lambda output, targets: functional.cross_entropy(output[0], targets) + slope_of(*output),
    "in a method": WithSlope(),
}


@pytest.mark.parametrize("how", WITH_SLOPE)
def test_a_gradient_by_a_tensor_that_an_earlier_stage_has_computed_is_refused(how):
    loss = MeanLoss(WITH_SLOPE[how])
    assert verify(Modulated(), "dp2", batches(2), loss=loss).equal
    with pytest.raises((PlanError, RankFailedError), match="takes a gradient by a tensor that the model returns"):
        verify(Modulated(), "pp2", batches(2), loss=loss)


@pytest.mark.parametrize("line", ["pp2", "pp2 mb2"])
def test_a_gradient_by_a_tensor_of_the_last_stage_is_that_of_one_device(line):
    def loss(output, targets):
        mean = functional.cross_entropy(output, targets)
        (slope,) = torch.autograd.grad(mean * len(targets), output, create_graph=True)
        return mean + slope.square().sum(1).mean()

    verdict = verify(plain(), line, batches(2), loss=MeanLoss(loss))
    assert verdict.equal, str(verdict)


@pytest.mark.parametrize("line", ["dp2", "pp2"])
def test_a_gradient_within_the_loss_is_that_of_one_device(line):
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).requires_grad_(False)

    def loss(output, targets):
        moved = output + 0.1
        (slope,) = torch.autograd.grad(critic(moved).sum(), moved, create_graph=True)
        return functional.cross_entropy(output, targets) + slope.square().sum(1).mean()

    verdict = verify(plain(), line, batches(2), loss=MeanLoss(loss))
    assert verdict.equal, str(verdict)
    assert verdict.tolerance == 1e-10, "the critic computes in float64 too"


# ---- norms and counters


class Perceptual(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh()).requires_grad_(False)

    def forward(self, output, targets):
        return functional.mse_loss(self.net(output), self.net(functional.one_hot(targets, 3).to(output)))


@pytest.mark.parametrize("line", ["dp2", "tp2"])
@pytest.mark.parametrize("how", ["training", "frozen"])
def test_norms_of_a_network_in_the_loss_are_warned_of_where_ranks_have_other_samples(line, how, recwarn):
    loss = Perceptual().eval() if how == "frozen" else Perceptual()
    verdict = verify(plain(), line, batches(1), loss=MeanLoss(lambda output, targets: loss(output, targets)))
    differs = line == "dp2" and how == "training"
    assert verdict.equal is not differs, str(verdict)
    assert any("holds a BatchNorm1d in training mode" in str(each.message) for each in recwarn) is differs
    assert verdict.tolerance == 1e-10


class Counts:
    """A loss that is no module, and warms up by the number of its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, output, targets):
        self.calls += 1
        return min(1.0, 0.1 * self.calls) * functional.cross_entropy(output, targets)


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_a_counter_of_a_plain_class_is_warned_of_too(line, recwarn):
    losses_of(line, plain(), lambda: (MeanLoss(Counts()), lambda *_: None))
    assert any("the loss changes 'function.calls' in each call" in str(each.message) for each in recwarn) is (
        "mb" in line
    )


@pytest.mark.parametrize("how", ["own statistics", "sum", "size"])
def test_what_is_no_schedule_and_no_error_is_not_warned_of(how, recwarn):
    meter = {"seen": 0}
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8)).double().requires_grad_(False)

    def metered(output, targets):
        meter["seen"] = len(targets) + (meter["seen"] if how == "sum" else 0)
        return functional.cross_entropy(output, targets)

    loss = MeanLoss((lambda output, _: net(output).square().mean()) if how == "own statistics" else metered)
    line = "mb2/own-statistics" if how == "own statistics" else "mb2"
    losses_of(line, plain(), lambda: (loss, lambda *_: None))
    assert not [str(each.message) for each in recwarn if "the loss" in str(each.message)]


@pytest.mark.parametrize("writes", ["the loop", "the loss"])
def test_a_checkpoint_warns_of_buffers_that_the_loss_has_changed_and_not_of_those_that_the_loop_has(
    writes, tmp_path, recwarn
):
    class Moving(nn.CrossEntropyLoss):
        def forward(self, output, targets):
            if writes == "the loss":
                self.weight.mul_(1.1)
            return super().forward(output, targets)

    given, model = Moving(weight=torch.ones(3).double()), plain()

    def work(world):
        run = parallelize(model, "single", world, loss=MeanLoss(given), example=batches()[0][0])
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for number, batch in enumerate(run.shard(batches())):
            if writes == "the loop":
                given.weight.copy_(1 + number * torch.arange(3).double())
            run.step(batch)
            optimizer.step()
        save(tmp_path / "saved", run, optimizer)

    launch(work, Layout.parse("single"), ranks="threads")
    told = [
        str(each.message) for each in recwarn if "a checkpoint does not keep what a loss changes" in str(each.message)
    ]
    assert bool(told) is (writes == "the loss")
