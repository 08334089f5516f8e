"""Losses that are no mean over what is counted: the first step says so, whether the loss is beside or in the model."""

import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional

import shardwright as sw
from shardwright.analysis.recorded.record_forward import record_forward
from shardwright.errors import PlanError, RankFailedError
from shardwright.models.given_loss import as_loss
from shardwright.parallelize.loss_of_halves import difference_of_halves

CLASSES, TOKENS, SAMPLES = 11, 6, 8


class Tokens(nn.Module):
    """A model of tokens that draws nothing."""

    def __init__(self):
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(CLASSES, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        return self.head(self.hidden(self.table(x)).relu())


def cross_entropy(output, targets, **options):
    return functional.cross_entropy(output.flatten(0, -2), targets.flatten(), **options)


class Contrasts(nn.Module):
    """Scores of every picture with every text of the batch, as CLIP's."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(5, 8)

    def forward(self, pictures, texts):
        return self.first(pictures) @ self.second(texts).T


@pytest.mark.parametrize("line", ["dp2", "mb2", "dp2/zero3"])
@pytest.mark.parametrize("in_loss", [False, True])
def test_places_in_the_whole_batch_as_targets_are_refused_where_batches_are_cut(line, in_loss):
    def of_scores(output, targets):
        return functional.cross_entropy(output, targets)

    def of_features(output, targets):
        return functional.cross_entropy(output @ output.T, targets)

    inputs = torch.randn(4, 6) if in_loss else (torch.randn(4, 6), torch.randn(4, 5))
    model, loss = (nn.Linear(6, 8), of_features) if in_loss else (Contrasts(), of_scores)
    loss = sw.MeanLoss(loss)

    def work(world):
        run = sw.parallelize(model, line, world, loss=loss)
        for batch in run.shard([(inputs, torch.arange(4))]):
            run.step(batch)

    with (
        warnings.catch_warnings(action="ignore"),  # that samples meet
        pytest.raises(PlanError, match="the loss fails on a part of the batch") as failure,
    ):
        sw.launch(work, line, ranks="threads")
    assert "Target 2 is out of bounds" in str(failure.value)
    assert "torch.arange(len(output))" in str(failure.value)


@pytest.mark.parametrize("line", ["dp2", "mb2"])
def test_an_index_error_of_the_losss_own_is_raised_as_it_is(line):
    def of_names(output, targets):
        return functional.cross_entropy(output, targets) * [1.0][len(targets)]

    model = nn.Linear(6, 8)

    def work(world):
        run = sw.parallelize(model, line, world, loss=sw.MeanLoss(of_names))
        for batch in run.shard([(torch.ones(4, 6), torch.tensor([3, 1, 0, 2]))]):
            run.step(batch)

    with pytest.raises(RankFailedError, match="IndexError: list index out of range"):
        sw.launch(work, line, ranks="threads")


def ragged_batch():
    """Samples of which each ends after another number of targets; the others are -100."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randint(0, CLASSES, (SAMPLES, TOKENS))
    return x, x.where(torch.arange(TOKENS) < TOKENS - torch.arange(SAMPLES)[:, None] % 4, -100)


def loop(output, targets):
    return torch.stack([functional.cross_entropy(y, t) for y, t in zip(output, targets, strict=True)]).mean()


OTHER_MEANS = {
    "shifted by hand": sw.MeanLoss(lambda y, t: cross_entropy(y[:, :-1], t[:, 1:])),
    "of counted targets in place of all": sw.MeanLoss(lambda y, t: cross_entropy(y, t), ignore_index=None),
    "a sum": sw.MeanLoss(lambda y, t: cross_entropy(y, t, reduction="sum")),
    "of selected targets": sw.MeanLoss(lambda y, t: functional.cross_entropy(y[t > 3], t[t > 3])),
    "of one sample after another": sw.MeanLoss(loop),
}

RIGHT_MEANS = {
    "of targets that are not ignored": sw.MeanLoss(cross_entropy),
    "a pair of a shifted sum": lambda y, t: (
        cross_entropy(y[:, :-1], t[:, 1:], reduction="sum"),
        (t[:, 1:] != -100).sum(),
    ),
    "a pair of selected targets": lambda y, t: (cross_entropy(y[t > 3], t[t > 3], reduction="sum"), (t > 3).sum()),
    "that writes to the output": lambda y, t: (cross_entropy(y.mul_(2), t, reduction="sum"), (t != -100).sum()),
    "in half precision": lambda y, t: (cross_entropy(y.bfloat16(), t, reduction="sum"), (t != -100).sum()),
}


def warned(model, line, batch, loss, example=None):
    def work(world):
        run = sw.parallelize(model, line, world, loss=loss, example=example)
        return [run.step(part).item() for part in run.shard([batch])]

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        losses = sw.launch(work, sw.Layout.parse(line).num_ranks, ranks="threads")
    return [str(each.message) for each in found], losses[0]


@pytest.mark.parametrize("line", ["dp2", "pp2/1f1b mb2", "tp2 dp2"])
@pytest.mark.parametrize("name", OTHER_MEANS)
def test_a_loss_that_is_no_mean_of_what_it_counts_is_named(line, name):
    texts, _ = warned(Tokens(), line, ragged_batch(), OTHER_MEANS[name])
    assert texts
    assert all("the loss " in each and "differs from one device" in each for each in texts)


@pytest.mark.parametrize("name", RIGHT_MEANS)
def test_a_mean_of_what_it_counts_is_not_named_and_trains_as_on_one_device(name):
    model, batch = Tokens(), ragged_batch()
    texts, losses = warned(model, "dp2 mb2", batch, RIGHT_MEANS[name])
    total, count = as_loss(RIGHT_MEANS[name])(model(batch[0]).detach(), batch[1])
    assert not texts
    assert losses[0] == pytest.approx(
        float(total / count), rel=4 * torch.finfo(torch.bfloat16).eps if "half" in name else 1e-6
    )


class Counting(nn.Module):
    """A loss with state: it counts its calls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output, targets):
        self.calls += 1
        return cross_entropy(output, targets, reduction="sum"), (targets != -100).sum()


def test_a_loss_with_state_keeps_it():
    loss = Counting()
    assert difference_of_halves(loss, torch.randn(4, 6, CLASSES), ragged_batch()[1][:4]) is None
    assert loss.calls == 0


def test_random_numbers_of_a_loss_and_of_the_caller_stay_what_they_are():
    def noisy(output, targets):
        return (output + torch.randn(output.shape) - targets).square().sum(), len(targets)

    before = torch.random.get_rng_state()
    assert difference_of_halves(as_loss(noisy), torch.zeros(4, 2), torch.ones(4, 2)) is None
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("output", "targets"),
    [(torch.zeros(1, 2), torch.ones(1, 2)), (torch.zeros(4, 2), torch.ones(8, 2)), (torch.zeros(()), torch.ones(()))],
    ids=["one sample", "other numbers of samples", "no samples"],
)
def test_what_cannot_be_halved_is_not_looked_at(output, targets):
    assert difference_of_halves(as_loss(lambda y, t: (y.sum() ** 2, 1)), output, targets) is None


class WithLoss(Tokens):
    """A model that computes its loss itself, in a way of several."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x, mask, labels):
        return {"loss": self.way(super().forward(x), mask, labels)}


def each_of(y, t):
    return cross_entropy(y, t, reduction="none").view(t.shape)


INNER_OTHERS = {
    "over a mask": lambda y, m, t: (each_of(y, t) * m).sum() / m.sum(),
    "over weights": lambda y, m, t: cross_entropy(y, t, weight=torch.arange(CLASSES, device=y.device).to(y.dtype)),
    "a sum": lambda y, m, t: cross_entropy(y, t, reduction="sum"),
    "a mean and a sum": lambda y, m, t: cross_entropy(y, t) + 0.1 * y.square().mean() + y.square().sum(),
}

INNER_MEANS = {
    "over labels": lambda y, m, t: cross_entropy(y, t),
    "over labels by hand": lambda y, m, t: each_of(y, t).sum() / (t != -100).sum(),
    "of means": lambda y, m, t: (y.square() / y.numel()).sum() + cross_entropy(y, t),
}


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3 mb2", "pp2/1f1b mb2"])
@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("name", INNER_OTHERS)
def test_a_model_whose_own_loss_is_no_mean_over_labels_is_named(name, with_example, line):
    x, labels = ragged_batch()
    batch = {"x": x, "mask": (labels != -100).float(), "labels": labels}
    loss, example = sw.ModelLoss(shifted=False), batch if with_example else None
    texts, _ = warned(WithLoss(INNER_OTHERS[name]), line, batch, loss, example)
    assert any("computes a loss that is no mean" in each for each in texts)


@pytest.mark.parametrize("name", INNER_MEANS)
def test_a_model_whose_own_loss_is_a_mean_over_labels_is_not_named(name):
    x, labels = ragged_batch()
    batch = {"x": x, "mask": torch.ones(x.shape), "labels": labels}
    texts, _ = warned(WithLoss(INNER_MEANS[name]), "dp2", batch, sw.ModelLoss(shifted=False))
    assert not texts


def in_a_step(loss, targets=None, line="dp2", samples=8):
    """What a step warns of, on two ranks that are threads."""
    x = torch.randn(samples, 4)
    texts, _ = warned(nn.Linear(4, 3), line, (x, torch.randn(samples, 3) if targets is None else targets), loss)
    return texts


def squares(output, targets):
    return (output - targets).square().sum(), targets.numel()


def sending(world):
    """A loss that adds its targets up over the ranks."""
    axis = world.everyone()

    def loss(output, targets):
        if not output.is_meta:
            axis.all_reduce(targets.sum(0))
        return squares(output, targets)

    return loss


@pytest.mark.parametrize("samples", [8, 3], ids=["as many on each rank", "one on a rank"])
def test_a_loss_that_sends_messages_is_called_for_the_step_alone(samples):
    model, batch = nn.Linear(4, 3), (torch.randn(samples, 4), torch.randn(samples, 3))

    def work(world):
        run = sw.parallelize(model, "dp2", world, loss=sending(world))
        return [run.step(part).item() for part in run.shard([batch])]

    found = sw.launch(work, 2, ranks="threads")
    assert found[0] == found[1]


def test_a_function_that_keeps_count_outside_is_called_for_the_step_alone():
    counts = {"calls": 0}

    def loss(output, targets):
        if not output.is_meta:
            counts["calls"] += 1
        return squares(output, targets)

    assert not in_a_step(loss)
    assert counts["calls"] == 2  # once on each rank


NOTHING_SAID = {
    "targets that all samples share": (
        lambda y, t: (functional.cross_entropy(y, t["y"], reduction="sum") * t["w"].sum().to(y.dtype), len(y)),
        {"y": torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), "w": sw.whole(torch.tensor([1.0, 2.0, 3.0, 4.0]))},
    ),
    "lists of boxes": (
        lambda y, t: (
            sum(functional.mse_loss(a, b["box"].sum(0), reduction="sum") for a, b in zip(y, t, strict=True)),
            len(t),
        ),
        [{"box": torch.rand(4, 3)} for _ in range(8)],
    ),
    "bf16 inside": (
        lambda y, t: (functional.mse_loss(y.bfloat16(), t.bfloat16()).float() * t.numel(), t.numel()),
        None,
    ),
    "terms that cancel": (lambda y, t: ((y.float() - y.float().detach() + 1e-9 * y.float()).sum(), y.numel()), None),
    "targets taken out": (
        lambda y, t: squares(y, t.pop("y")),
        {"y": torch.ones(8, 3)},
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NOTHING_SAID)
def test_nothing_is_said_of_a_right_loss(name):
    loss, targets = NOTHING_SAID[name]
    assert not in_a_step(loss, targets)


class Spoken(nn.Module):
    """A model of frames that computes its CTC loss, as those of speech do."""

    def __init__(self, reduction):
        super().__init__()
        self.layer, self.reduction = nn.Linear(4, 30), reduction

    def forward(self, x, labels):
        frames = self.layer(x).view(-1, 5, 6).log_softmax(2).transpose(0, 1)
        lengths = torch.full((len(x),), 5), torch.full((len(x),), 2)
        return {"loss": functional.ctc_loss(frames, labels, *lengths, reduction=self.reduction)}


@pytest.mark.parametrize(("reduction", "is_named"), [("sum", True), ("mean", False)])
def test_a_sum_of_ctc_losses_is_named(reduction, is_named):
    batch = {"x": torch.randn(8, 4), "labels": torch.randint(1, 6, (8, 2))}
    texts, _ = warned(Spoken(reduction), "dp2", batch, sw.ModelLoss(over="samples"))
    assert bool(texts) is is_named


FURTHER = {
    "a mask with a small number added": (lambda y, m, t: (each_of(y, t) * m).sum() / (m.sum() + 1e-5), True),
    "a metric before the loss": (lambda y, m, t: cross_entropy(y, t), False),
    "a class that no label has": (lambda y, m, t: cross_entropy(y, t.clamp(min=0), ignore_index=CLASSES), False),
    "two means, one over all": (
        lambda y, m, t: cross_entropy(y, t) + functional.cross_entropy(y.mean(1), t[:, 0]),
        True,
    ),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FURTHER)
def test_what_a_models_own_loss_divides_by_is_followed(name):
    way, is_named = FURTHER[name]
    x, labels = ragged_batch()

    class WithMetric(WithLoss):
        def forward(self, x, mask, labels):
            found = super().forward(x, mask, labels)
            return {"total": found["loss"].detach() * len(x), **found}

    batch = {"x": x, "mask": (labels != -100).float(), "labels": labels}
    texts, _ = warned(WithMetric(way), "dp2", batch, sw.ModelLoss(shifted=False))
    assert bool(texts) is is_named


def test_a_mean_over_labels_is_none_over_samples():
    x, labels = ragged_batch()
    batch = {"x": x, "mask": torch.ones(x.shape), "labels": labels}
    texts, _ = warned(WithLoss(INNER_MEANS["over labels"]), "dp2", batch, sw.ModelLoss(over="samples"))
    assert texts


SEEN = []


class Logs(nn.Module):
    """A loss that appends to a list of its Python module."""

    def forward(self, output, targets):
        if not output.is_meta:
            SEEN.append(output.shape)
        return squares(output, targets)


class Writer:
    """What counts the rows that it is given, as writers of logs do."""

    def __init__(self):
        self.rows = 0

    def add(self, value):
        self.rows += 1


WRITER = Writer()


def written(output, targets):
    if not output.is_meta:
        WRITER.add(output.sum())
    return squares(output, targets)


@pytest.mark.parametrize(("loss", "number"), [(Logs(), lambda: len(SEEN)), (written, lambda: WRITER.rows)])
def test_what_a_loss_writes_beside_is_written_for_the_step_alone(loss, number):
    before = number()
    assert not in_a_step(loss)
    assert number() - before == 2  # once on each rank


class Annealed(nn.Module):
    """A loss that counts its steps in an attribute, which its copies have too, and that returns a sum as a mean."""

    def __init__(self):
        super().__init__()
        self.steps = 0

    def forward(self, output, targets):
        self.steps += 1
        return squares(output, targets)[0] * len(output), len(output)


def test_a_module_that_counts_its_own_steps_is_looked_at():
    loss = Annealed()
    assert any("differs from one device" in each for each in in_a_step(loss))


def test_a_half_in_which_a_mean_selects_nothing_is_a_difference():
    def selected(output, targets):
        return functional.cross_entropy(output[targets > 0], targets[targets > 0])

    output = torch.arange(12.0).view(4, 3)
    found = difference_of_halves(as_loss(sw.MeanLoss(selected)), output, torch.tensor([1, 2, 0, 0]))
    assert found is not None
    assert torch.tensor(found).isnan().tolist() == [False, True]
    ignoring = sw.MeanLoss(lambda y, t: functional.cross_entropy(y, t, ignore_index=-100))
    assert difference_of_halves(as_loss(ignoring), output, torch.tensor([1, 2, -100, -100])) is None


class Sending(nn.Module):
    """The mean of cross entropy; it asks the other ranks for the number of their samples, as code for metrics does."""

    def forward(self, output, targets):
        counts = [None] * dist.get_world_size()
        dist.all_gather_object(counts, len(targets))
        assert counts == [4, 4]
        return nn.functional.cross_entropy(output, targets)


def send_in_the_loss(world, line, kind=Sending):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    inputs, targets = torch.ones(8, 6), torch.arange(8) % 3
    run = sw.parallelize(model, line, world, loss=sw.MeanLoss(kind()), example=inputs)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    return [run.step(batch, update=optimizer).item() for batch in run.shard([(inputs, targets)] * 3)]


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3"])
def test_a_loss_that_calls_torch_distributed_is_recorded_by_no_rank(line):
    first, second = sw.launch(send_in_the_loss, 2, line, ranks="processes", timeout_s=30)
    assert first == second
    assert first[2] < first[0]


class SendingByName(Sending):
    """Adds up over the ranks by a functional collective, which is given the name of the group."""

    def forward(self, output, targets):
        loss = nn.functional.cross_entropy(output, targets)
        return loss + 0 * functional_collectives.all_reduce(loss.detach(), "sum", dist.group.WORLD)


@pytest.mark.parametrize(("kind", "name"), [(Sending, "allgather_"), (SendingByName, "all_reduce")])
def test_a_loss_under_pp_that_calls_a_collective_over_all_ranks_is_refused(kind, name):
    with pytest.raises(PlanError, match=f"the loss calls '{name}'"):
        sw.launch(send_in_the_loss, 2, "pp2", kind, ranks="processes", timeout_s=30)


def test_a_collective_of_torch_distributed_is_not_recorded():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(NotImplementedError, match="the code calls 'allreduce_'"):
            record_forward(Reducing(), torch.empty(2, device="meta"))
    finally:
        dist.destroy_process_group()


class Reducing(nn.Module):
    def forward(self, x):
        dist.all_reduce(count := torch.ones(1))
        return x * count


class WarmsUp(nn.Module):
    """Weighs itself by how often it was called, by a number or a buffer; or keeps its last value, to be logged."""

    def __init__(self, way):
        super().__init__()
        self.way, self.calls, self.last = way, 0, 0.0
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, output, targets):
        found = (output - targets).square().sum()
        self.calls += self.way == "number"
        if self.way == "buffer":
            self.steps += 1
        self.last = found.item() if self.way == "log" else self.last
        return found, torch.tensor(targets.numel())


@pytest.mark.parametrize("line", ["mb2", "pp2/1f1b mb2", "dp2"])
@pytest.mark.parametrize("way", ["number", "buffer", "log", "neither"])
def test_a_loss_that_counts_its_calls_is_warned_of_where_a_step_makes_several(way, line):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)

    def work(world):
        run = sw.parallelize(model, line, world, loss=WarmsUp(way))
        run.step(next(run.shard([(x, x)])))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.launch(work, line, ranks="threads")
    said = [each for each in caught if "in each call" in str(each.message)]
    assert len(said) == ("mb2" in line and way in ("number", "buffer"))
