"""Batches, losses and calls of the model as people write them: they work, or are refused with the line to write."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from math import isfinite

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardwright import CrossEntropy, MeanLoss, launch, parallelize, verify
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.parallelize.planning import rows


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


X, Y = torch.randn(6, 4), torch.randint(3, (6,))


def on_ranks(line, work, model=None, **options):
    model = plain() if model is None else model
    return launch(lambda world: work(parallelize(model, line, world, **options)), Layout.parse(line), ranks="threads")


def refused(call, *args, **named):
    with pytest.raises(PlanError) as caught:
        call(*args, **named)
    return str(caught.value)


# ---- batches


@pytest.mark.parametrize(
    ("batch", "given", "fix"),
    [
        ({"x": X, "labels": Y}, "dict with x, labels", "write run.shard(batches, targets='labels')"),
        (OrderedDict(a=X, b=Y), "OrderedDict with a, b", "targets='b'"),
        ((X, X, Y), "tuple of Tensor [6, 4], Tensor [6, 4], Tensor [6]", "targets=-1"),
        (torch.zeros(2, 4), "Tensor [2, 4]", "(b, b)"),  # two rows would be taken apart as inputs and targets
    ],
)
def test_a_batch_that_is_no_pair_is_refused_with_the_pair_to_write(batch, given, fix):
    for text in on_ranks("dp2", lambda run: refused(next, run.shard([batch]))):
        assert f"given:   {given}\n" in text
        assert fix in text


class Named(nn.Module):
    """Takes its input by name and returns a mapping, as models of language libraries do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, scale=1.0):
        return OrderedDict(logits=self.layer(x) * scale, hidden=x)


@pytest.mark.parametrize(
    ("model", "inputs", "fix"),
    [
        (None, (X, Y), "write run.predict(inputs), for inputs, targets = batch"),
        (Named(), {"x": X, "labels": Y}, "write run.predict({'x': batch['x']})"),
        (Named(), {"input_ids": X}, "name them x, scale"),
        (None, "part", "write run.predict(inputs) with the inputs of the global batch, or run.evaluate(batch)"),
    ],
)
def test_predictions_of_a_batch_with_its_labels_are_refused_with_the_line_to_write(model, inputs, fix):
    def work(run):
        return refused(run.predict, next(run.shard([(X, Y)])) if inputs == "part" else inputs)

    for text in on_ranks("dp2", work, model):
        assert fix in text


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_predictions_with_labels_that_the_model_takes_have_no_loss(line):
    class OwnLoss(Named):
        def forward(self, x, labels=None):
            logits = self.layer(x)
            return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}

    torch.manual_seed(0)
    model = OwnLoss()
    for found in on_ranks(line, lambda run: run.predict({"x": X, "labels": Y}), model):
        assert found["loss"] is None
        torch.testing.assert_close(found["logits"], model(X)["logits"])


def test_a_mapping_of_another_library_is_cut_like_a_dict():
    batch = UserDict(x=X, scale=2.0)  # pytrees take it for one leaf

    def work(run):
        (part,) = run.shard([(batch, Y)])
        assert len(part.inputs["x"]) == len(part.targets) == 3
        return run.step(part).item(), run.predict(batch)["logits"].shape

    def of_logits(output, targets):
        return CrossEntropy()(output["logits"], targets)

    torch.manual_seed(0)
    model = Named()
    expected = nn.functional.cross_entropy(model(X, 2.0)["logits"], Y).item()
    assert on_ranks("dp2", work, model, loss=of_logits) == [(pytest.approx(expected), (6, 3))] * 2


def test_an_output_that_is_a_mapping_is_refused_with_the_loss_to_write():
    for loss, line in (
        (None, "sw.CrossEntropy()"),
        (nn.CrossEntropyLoss(), "sw.CrossEntropy()"),
        (
            nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1),
            "sw.CrossEntropy(ignore_index=0, label_smoothing=0.1)",
        ),
        (nn.MSELoss(), "sw.MeanLoss(torch.nn.MSELoss(...))"),
    ):
        (text, _) = on_ranks("dp2", lambda run: refused(run.step, next(run.shard([(X, Y)]))), Named(), loss=loss)
        assert f"{line}(output['logits'], targets)" in text


def test_batches_of_a_loader_given_to_evaluate_all_say_the_line_to_write():
    for text in on_ranks("dp2", lambda run: refused(run.evaluate_all, [(X, Y)])):
        assert "fix:     write run.evaluate_all(run.shard(batches)), of several batches" in text


def test_a_forward_by_hand_with_dropout_says_what_to_write():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    for text in on_ranks("dp2", lambda run: refused(run.model, X), model):
        assert "where run.model is called by hand, write run.step(batch) to train or run.predict(inputs)" in text


def test_a_hook_whose_handle_the_model_keeps_is_copied_with_it():
    model = plain()
    handle = model[0].register_forward_hook(lambda *call: call[2] * 2)
    model.handle = handle  # as transformers' gradient_checkpointing_enable keeps one
    expected = model(X).detach()

    def work(run):
        found = run.predict(X)
        run.model.handle.remove()
        return found, run.predict(X)

    for found, without in on_ranks("dp2", work, model):
        torch.testing.assert_close(found, expected)
        assert not torch.equal(found, without)
    torch.testing.assert_close(model(X).detach(), expected)  # its own hook stays


@pytest.mark.parametrize(
    ("inputs", "given"),
    [(np.zeros((6, 4)), "ndarray of (6, 4)"), ((X, torch.tensor(3.0)), "a tensor without dims")],
)
def test_what_ranks_could_not_cut_is_refused(inputs, given):
    assert all(f"given:   {given}\n" in t for t in on_ranks("dp2", lambda run: refused(next, run.shard([(inputs, Y)]))))


def test_a_loader_that_splits_the_samples_itself_is_refused():
    data = TensorDataset(X, Y)

    def work(run):
        sampler = DistributedSampler(data, num_replicas=2, rank=run.world.rank)
        assert len(list(run.shard(DataLoader(data, batch_size=2)))) == 3
        return refused(next, run.shard(DataLoader(data, batch_size=2, sampler=sampler)))

    for text in on_ranks("dp2", work):
        assert "DistributedSampler(num_replicas=2)" in text
        assert "write DataLoader(data, batch_size=<global>" in text


def test_a_generator_over_such_a_loader_is_refused_too():
    data = TensorDataset(X, Y)

    def work(run):
        sampler = DistributedSampler(data, num_replicas=2, rank=run.world.rank)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        assert len(list(run.shard((x, y) for x, y in DataLoader(data, batch_size=2)))) == 3
        return refused(next, run.shard((x, y) for x, y in loader))

    assert all("DistributedSampler(num_replicas=2)" in text for text in on_ranks("dp2", work))


@pytest.mark.parametrize("method", ["step", "evaluate", "timeline", "accumulate"])
def test_a_plain_pair_in_place_of_a_part_is_refused(method):
    def work(run):
        call = getattr(run, method)
        return refused(call, [(X, Y)]) if method == "accumulate" else refused(call, (X, Y))

    for text in on_ranks("dp2", work):
        assert "given:   tuple of Tensor [6, 4], Tensor [6]\n" in text
        several = method == "accumulate"
        assert (
            "run.accumulate(run.shard(batches))" if several else "for batch in run.shard([(inputs, targets)])"
        ) in text


def test_parts_that_are_given_to_shard_again_are_refused():
    work = lambda run: refused(next, run.shard(run.shard([(X, Y)])))  # noqa: E731
    assert all("write run.shard(batches) once" in text for text in on_ranks("dp2", work))


def test_targets_that_are_no_classes_are_told_of_the_loss_that_was_forgotten():
    work = lambda run: refused(run.step, next(run.shard([(X, X)])))  # noqa: E731
    assert all("loss=torch.nn.MSELoss()" in text for text in on_ranks("dp2", work, plain()))


def test_inputs_and_targets_as_two_arguments_of_a_step_are_refused():
    for text in on_ranks("dp2", lambda run: refused(run.step, X, Y)):
        assert "given:   Tensor [6, 4], and then Tensor [6]\n" in text


# ---- losses


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2 mb2"])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=1, label_smoothing=0.1),
        lambda output, targets: (nn.functional.cross_entropy(output, targets, reduction="sum"), targets.numel()),
    ],
    ids=["torch's", "torch's with weights", "lambda"],
)
def test_losses_of_torch_and_functions_are_those_of_one_device(loss, line):
    model, x = plain().double(), X.double()
    if isinstance(loss, nn.Module):
        expected = nn.functional.cross_entropy(
            model(x), Y, loss.weight if loss.weight is None else loss.weight.double(), ignore_index=loss.ignore_index,
            label_smoothing=loss.label_smoothing,
        )  # fmt: skip
    else:
        expected = nn.functional.cross_entropy(model(x), Y)
    found = on_ranks(line, lambda run: run.step(next(run.shard([(x, Y)]))).item(), model, loss=loss)
    assert found == [pytest.approx(expected.item(), rel=1e-12)] * 2
    assert verify(model, line, [(x, Y)], loss=loss)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()], ids=lambda loss: type(loss).__name__
)
def test_losses_of_elements_are_those_of_one_device(loss):
    model, targets = plain(), torch.rand(6, 3)
    expected = loss(model(X), targets).item()
    found = on_ranks("dp2", lambda run: run.step(next(run.shard([(X, targets)]))).item(), model, loss=loss)
    assert found == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("classes_last", [True, False])
def test_cross_entropy_of_torch_takes_sequences_with_the_classes_in_either_dim(classes_last):
    layer, x, targets = nn.Linear(4, 5), torch.randn(6, 7, 4), torch.randint(5, (6, 7))
    expected = nn.functional.cross_entropy(layer(x).flatten(0, 1), targets.flatten()).item()

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x) if classes_last else self.layer(x).transpose(1, 2)

    work = lambda run: run.step(next(run.shard([(x, targets)]))).item()  # noqa: E731
    assert on_ranks("dp2", work, Turned(), loss=nn.CrossEntropyLoss()) == [pytest.approx(expected, rel=1e-5)] * 2


def test_sizes_that_do_not_tell_where_the_classes_are_are_refused():
    x, targets = torch.randn(6, 5, 4), torch.randint(5, (6, 5))
    work = lambda run: refused(run.step, next(run.shard([(x, targets)])))  # noqa: E731
    for text in on_ranks("dp2", work, nn.Linear(4, 5), loss=nn.CrossEntropyLoss()):
        assert "write loss=sw.CrossEntropy() for classes in the last dim" in text


@pytest.mark.parametrize(
    ("loss", "fix"),
    [
        (nn.CrossEntropyLoss, "write loss=CrossEntropyLoss()"),
        ("cross_entropy", "write loss=torch.nn.CrossEntropyLoss()"),
        (nn.CrossEntropyLoss(reduction="sum"), "leave out reduction"),
        (nn.TripletMarginLoss(), "write loss=lambda output, targets"),
        (lambda output: output.mean(), "write loss=lambda output, targets"),
    ],
)
def test_what_is_no_loss_is_refused_before_anything_is_sent(loss, fix):
    model = plain()

    def work(world):
        with world.recorder.recording() as records:
            text = refused(parallelize, model, "dp2", world, loss=loss)
        return text, len(records)

    for text, num_sent in launch(work, 2, ranks="threads"):
        assert fix in text
        assert num_sent == 0


def test_a_function_that_returns_a_mean_is_refused_with_the_line_to_write():
    work = lambda run: refused(run.step, next(run.shard([(X, Y)])))  # noqa: E731
    for text in on_ranks("dp2", work, loss=lambda output, targets: nn.functional.cross_entropy(output, targets)):
        assert "for a mean over the targets write loss=sw.MeanLoss(function)" in text


# ---- what shard yields, and what step returns, used as a loop of torch would use them


@pytest.mark.parametrize(
    ("use", "given"),
    [
        (lambda part: [*part], "unpacked, as in for inputs, targets in run.shard(loader)"),
        (lambda part: part[0], "batch[0]"),
        (lambda part: part["x"], "batch['x']"),
    ],
)
def test_a_part_that_is_taken_for_a_pair_says_the_line_to_write(use, given):
    for text in on_ranks("dp2", lambda run: refused(use, next(run.shard([({"x": X}, Y)]))), Named()):
        assert f"given:   {given}\n" in text
        assert "fix:     write for batch in run.shard(loader): loss = run.step(batch)" in text
        assert "batch.inputs['x'] and batch.targets are this rank's" in text


def test_a_pair_unpacked_in_the_loop_says_the_line_to_write():
    def work(run):
        for inputs, targets in run.shard([(X, Y)]):
            raise AssertionError(inputs, targets)

    for text in on_ranks("dp2", lambda run: refused(work, run)):
        assert "what run.shard yields is this rank's part of a batch, and no pair" in text


def test_the_backward_of_a_steps_loss_says_that_the_step_has_run_it():
    def work(run):
        with pytest.raises(RuntimeError) as before:
            torch.ones(1).sum().backward()
        loss = run.step(next(run.shard([(X, Y)])))
        texts = refused(loss.backward), refused((loss / 4).backward), refused(lambda: torch.autograd.backward([loss]))
        with pytest.raises(RuntimeError) as twice:
            torch.ones(2, requires_grad=True).backward()  # torch's own, of another kind
        return type(before.value), texts, str(twice.value)

    for kind, texts, other in on_ranks("dp2", work):
        assert kind is RuntimeError  # no step so far
        assert all("the step has run forward and backward" in text for text in texts)
        assert all("fix:     leave out loss.backward()" in text for text in texts)
        assert "grad can be implicitly created only for scalar outputs" in other


def losses_of(layout, batches, *, updates, **options):
    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=float("inf"))
        found = []
        for part in run.shard(batches):
            found.append(run.step(part).item())
            if updates:
                optimizer.step()
        return found

    return on_ranks(layout, work, **options)


def test_a_run_that_goes_on_from_a_loss_that_is_not_finite_says_so_once():
    with pytest.warns(UserWarning, match="a loss is not finite, and training goes on from it, in step 2") as caught:
        (_, *found), _ = losses_of("dp2", [(X, Y)] * 5, updates=True)
    assert not any(map(isfinite, found))
    assert len(caught) == 1
    assert "write sw.parallelize(..., stop_at_nan=True)" in str(caught[0].message)


def test_a_loss_that_is_not_finite_is_the_users_where_no_update_was_made_from_it():
    bad = (torch.full_like(X, float("nan")), Y)
    found = losses_of("dp2", [(X, Y), bad, (X, Y)], updates=False)[0]  # a warning would be an error here
    assert [isfinite(loss) for loss in found] == [True, False, True]


# ---- the model, called by hand


@pytest.mark.parametrize("line", ["single", "dp2", "dp2/zero3", "tp2", "tp2/spatial"])
def test_the_model_may_be_called_by_hand_where_that_gives_its_output(line):
    model = plain() if "spatial" not in line else nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten())
    x = X if "spatial" not in line else torch.randn(2, 1, 8, 4)
    expected = model(x).detach()
    for found in on_ranks(line, lambda run: run.model(x).detach(), model):
        torch.testing.assert_close(found, expected) if "spatial" not in line else None


@pytest.mark.parametrize("line", ["tp2", "tp3 dp2"])
def test_the_model_called_by_hand_gives_all_classes_where_the_loss_takes_them_cut(line):
    mlp = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    model, x = nn.Sequential(nn.Embedding(22, 8), *mlp, nn.Linear(8, 22)), torch.arange(6)
    expected = model(x).detach()

    def work(run):
        assert run.plan.activations["(output)"], "the head's classes are cut"
        before = run.model(x)
        with torch.no_grad():
            return before.detach(), run.model(x), run.predict(x)

    for each in on_ranks(line, work, model, example=x):
        for found in each:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("line", ["pp2 mb2", "tp2x2/2d", "tp2/sp"])
def test_the_model_called_by_hand_is_refused_where_that_would_be_wrong(line):
    for text in on_ranks(line, lambda run: refused(run.model, X)):
        assert "write output = run.predict(inputs)" in text


@pytest.mark.parametrize("line", ["dp2", "dp2/zero3", "tp2"])
def test_a_backward_by_hand_is_refused_on_several_ranks_since_its_gradients_are_not_summed(line):
    def work(run):
        run.step(next(run.shard([(X, Y)])))
        loss = nn.functional.cross_entropy(run.model(X), Y)
        return refused(loss.backward)

    assert all("run.step(batch)" in text for text in on_ranks(line, work))


def test_a_backward_by_hand_is_that_of_torch_on_one_rank():
    def work(run):
        nn.functional.cross_entropy(run.model(X), Y).backward()
        by_hand = [p.grad.clone() for p in run.parameters.values()]
        run.step(next(run.shard([(X, Y)])))
        for one, p in zip(by_hand, run.parameters.values(), strict=True):
            torch.testing.assert_close(p.grad, one)

    on_ranks("single", work)


def test_the_parts_of_a_batch_are_views_and_a_write_to_one_does_not_change_the_version_of_another():
    batch = {"ids": torch.arange(4), "x": torch.zeros(4, 2)}
    first, second = rows(batch, 0, 2), rows(batch, 2, 4)
    first["ids"].add_(1)
    first["x"].fill_(2.0)
    assert batch["ids"].tolist() == [1, 2, 2, 3]
    assert batch["x"][:, 0].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert (second["ids"]._version, second["x"]._version) == (0, 0)
    ids = torch.arange(8).view(4, 2)
    twice = rows({"ids": ids, "labels": ids, "first": ids[:, 0]}, 1, 3)
    twice["labels"].add_(1)  # autograd must see that the other entries have changed as well
    assert twice["ids"]._version == twice["first"]._version == 1
    assert (twice["ids"].tolist(), twice["first"].tolist()) == ([[3, 4], [5, 6]], [3, 5])
    learns = torch.zeros(4, requires_grad=True)
    assert rows(learns, 0, 2).requires_grad


class ShiftsItsInput(nn.Module):
    """Normalizes its input in place."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x.sub_(0.5).div_(0.5))


def shifted(output, targets):
    targets -= 1
    return nn.functional.cross_entropy(output, targets)


@pytest.mark.parametrize("what", ["input", "targets", "prediction"])
@pytest.mark.parametrize("line", ["dp2", "tp2", "tp2x2/2d", "pp2"])
@pytest.mark.sampled(3)
def test_what_is_written_in_place_is_no_other_ranks_where_ranks_are_threads(line, what):
    torch.manual_seed(0)
    own, loss = ShiftsItsInput().double(), shifted if what == "targets" else nn.functional.cross_entropy
    own = own.net if what == "targets" else own
    generator, first = torch.Generator().manual_seed(1), int(what == "targets")
    data = [
        (torch.rand(8, 4, generator=generator).double(), torch.randint(first, first + 3, (8,), generator=generator))
        for _ in range(3)
    ]
    expected, other = [], copy.deepcopy(own)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for x, y in data:
        if what == "prediction":
            expected.append(own(x.clone()).tolist())
            continue
        plain.zero_grad()
        mean = loss(other(x.clone()), y.clone())
        expected.append(mean.item())
        mean.backward()
        plain.step()

    def work(world):
        run = parallelize(own, line, world, loss=MeanLoss(loss), example=torch.rand(8, 4).double())
        if what == "prediction":
            return [run.predict(x).tolist() for x, _ in data]
        optimizer, found = run.optimizer(torch.optim.SGD, lr=0.1), []
        for batch in run.shard(data):
            found.append(run.step(batch).item())
            optimizer.step()
        return found

    for found in launch(work, Layout.parse(line), ranks="threads"):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-6)


class ShiftsWhileItTrains(ShiftsItsInput):
    def forward(self, x):
        return self.net(x.sub_(0.5) if self.training else x)


def losses_from(model, line, data, before):
    def work(world):
        loss = MeanLoss(nn.functional.cross_entropy)
        run = parallelize(model, line, world, loss=loss, example=torch.rand(8, 4).double())
        before(run)
        optimizer, found = run.optimizer(torch.optim.SGD, lr=0.1), []
        for batch in run.shard(data):
            found.append(run.step(batch).item())
            optimizer.step()
        return found

    return launch(work, Layout.parse(line), ranks="threads")


def plain_losses_of(model, data):
    model, found = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        mean = nn.functional.cross_entropy(model(x), y)
        found.append(mean.item())
        mean.backward()
        optimizer.step()
    return found


def samples(number):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.rand(8, 4, generator=generator).double(), torch.randint(3, (8,), generator=generator))
        for _ in range(number)
    ]


def test_an_evaluation_does_not_tell_whether_training_writes_to_its_inputs():
    torch.manual_seed(0)
    own, (other, *data) = ShiftsWhileItTrains().double(), samples(4)
    found = losses_from(own, "tp2", data, lambda run: [run.evaluate(batch) for batch in run.shard([other])])
    expected = plain_losses_of(own, samples(4)[1:])
    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in found)


def test_ranks_that_hold_other_samples_write_into_the_batch_that_was_given_as_one_device_does():
    torch.manual_seed(0)
    own = ShiftsItsInput().double()
    found = losses_from(own, "dp2", samples(1) * 4, lambda run: None)
    expected = plain_losses_of(own, samples(1) * 4)
    assert all(rank == pytest.approx(expected, rel=1e-9) for rank in found)
