"""Training loops as people write them: batches of their loaders, losses that are means, averages, callbacks."""

from __future__ import annotations

import warnings
from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import shardwright as sw
from shardwright.errors import CheckpointError, LayoutError, PlanError

VOCABULARY, LENGTH = 11, 5


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


class Row(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor


X, Y = torch.randn(5, 4), torch.randint(3, (5,))


class Scaled(nn.Module):
    """A classifier that takes a second argument."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x, weight=None):
        return self.layer(x) if weight is None else self.layer(x) * weight[:, None]


def on_ranks(line, work, model, **options):
    return sw.launch(lambda world: work(sw.parallelize(model, line, world, **options)), line, ranks="threads")


def refused(call):
    with pytest.raises(PlanError) as caught:
        call()
    return str(caught.value)


# ---- batches


@pytest.mark.parametrize(
    ("batch", "targets"),
    [
        ({"x": X, "y": Y}, "y"),
        (UserDict(y=Y, x=X), "y"),
        (Sample(X, Y), "y"),
        (Row(X, Y, torch.full((5,), 2.0)), "y"),
        ((X, torch.full((5,), 2.0), Y), -1),
        ([Y, X], 0),
        ((X, {"label": Y}), lambda batch: (batch[0], batch[1]["label"])),
        ((X, Y), None),
    ],
    ids=["dict", "mapping", "dataclass", "named tuple", "tuple", "list", "function", "pair"],
)
def test_the_batches_of_any_loader_are_trained_on_once_their_targets_are_named(batch, targets):
    model = Scaled()
    weighted = isinstance(batch, tuple) and len(batch) == 3
    expected = functional.cross_entropy(model(X, torch.full((5,), 2.0) if weighted else None), Y).item()
    found = on_ranks("dp2", lambda run: run.step(next(run.shard([batch], targets))).item(), model)
    assert found == [pytest.approx(expected, abs=1e-6)] * 2


def test_a_data_loader_of_dicts_is_read_by_the_name_of_its_targets():
    data = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]

    def work(run):
        return [run.step(batch).item() for batch in run.shard(DataLoader(data, batch_size=2), targets="y")]

    model = Scaled()
    expected = [functional.cross_entropy(model(X[i : i + 2]), Y[i : i + 2]).item() for i in (0, 2, 4)]
    assert on_ranks("dp2", work, model) == [pytest.approx(expected, abs=1e-6)] * 2


@pytest.mark.parametrize(
    ("batch", "targets", "fix"),
    [
        ({"x": X, "y": Y}, "labels", "write run.shard(batches, targets='y')"),
        (Sample(X, Y), None, "write run.shard(batches, targets='y')"),
        ({"y": Y}, "y", "targets='y'"),
        ((X, X, Y), 3, "write run.shard(batches, targets=-1)"),
        (X, -1, "targets=lambda b: (b, b)"),
        ((X, X, Y), lambda batch: batch, "return (inputs, targets)"),
    ],
)
def test_targets_that_a_batch_does_not_have_are_refused_with_the_line_to_write(batch, targets, fix):
    assert fix in refused(lambda: on_ranks("dp2", lambda run: next(run.shard([batch], targets)), Scaled()))


# ---- losses that are means


class LanguageModel(nn.Module):
    """Computes its loss as causal models of transformers do: the mean over the next tokens that are not ignored."""

    loss_type = "ForCausalLM"

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.down = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.down(functional.gelu(self.up(self.embed(input_ids)))))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def tokens(num_samples):
    draw = torch.Generator().manual_seed(num_samples)
    ids = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=draw)
    labels = ids.clone()
    labels[0, :4] = -100
    labels[-1] = -100  # a rank may have this sample alone
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("line", ["dp2", "dp3 mb2", "tp2 dp2/zero3", "pp2 mb2"])
@pytest.mark.parametrize("num_samples", [2, 5])
def test_a_loss_that_the_model_computes_from_its_labels_equals_one_device(line, num_samples):
    model, batch = LanguageModel(), tokens(num_samples)
    wanted = model(**batch)["loss"]
    wanted.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=1.0)
        loss = run.step(next(run.shard([UserDict(batch)])))
        optimizer.step()
        return loss.item(), run.state_dict()

    found = on_ranks(line, work, model, loss=sw.ModelLoss(), example=batch)
    for loss, state in found:
        assert loss == pytest.approx(wanted.item(), abs=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(state[name], parameter.detach() - expected[name], atol=1e-6, rtol=1e-5)


def test_verify_proves_a_loss_that_the_model_computes():
    assert sw.verify(LanguageModel(), "dp2 tp2", [tokens(5)], loss=sw.ModelLoss()).equal


def test_labels_of_sequences_are_refused_where_the_model_does_not_say_whether_it_shifts_them():
    model = LanguageModel()
    model.loss_type = None

    def steps(loss):
        return on_ranks("dp2", lambda run: run.step(next(run.shard([tokens(4)]))).item(), model, loss=loss)

    assert "write loss=sw.ModelLoss(shifted=True)" in refused(lambda: steps(sw.ModelLoss()))
    expected = model(**tokens(4))["loss"].item()
    assert steps(sw.ModelLoss(shifted=True)) == [pytest.approx(expected, abs=1e-6)] * 2
    # what a wrong count does: the mean of means that shardwright exists to avoid
    assert steps(sw.ModelLoss(shifted=False))[0] != pytest.approx(expected, abs=1e-4)


def test_a_mean_over_samples_has_no_labels_that_are_shifted():
    assert 'write loss=sw.ModelLoss(over="samples")' in refused(lambda: sw.ModelLoss(over="samples", shifted=True))
    assert "over='rows'" in refused(lambda: sw.ModelLoss(over="rows"))
    loss_sum, count = sw.ModelLoss(over="samples")({"loss": torch.tensor(2.0)}, torch.full((3, 4), -100))
    assert (loss_sum.item(), count.item()) == (6.0, 3)


def test_a_batch_without_labels_and_an_output_without_a_loss_are_refused():
    batch = {"input_ids": torch.zeros(2, LENGTH, dtype=torch.int64)}

    def step(run):
        return run.step(next(run.shard([batch])))

    assert "a batch has no 'labels'" in refused(lambda: on_ranks("dp2", step, LanguageModel(), loss=sw.ModelLoss()))

    def pair(run):
        return run.step(next(run.shard([(batch, batch["input_ids"])])))

    text = refused(lambda: on_ranks("dp2", pair, LanguageModel(), loss=sw.ModelLoss()))
    assert "the model's output has no loss" in text
    assert "dict with loss, logits" in text


def test_a_loss_of_the_model_is_refused_where_sequences_are_cut():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True), 1)
    with pytest.raises(LayoutError, match="ModelLoss under tp2x1/2d/seq"):  # a shift would cross ranks
        on_ranks("tp2x1/2d/seq", lambda run: run, model, loss=sw.ModelLoss())


@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        sw.MeanLoss(functional.cross_entropy),
        sw.MeanLoss(lambda output, targets: functional.cross_entropy(output, targets)),
        nn.CrossEntropyLoss(),
    ],
    ids=["function of torch", "MeanLoss", "lambda", "module of torch"],
)
def test_losses_that_are_means_leave_out_ignored_targets(loss):
    targets = torch.tensor([0, -100, -100, -100, 2])
    expected = functional.cross_entropy(Scaled()(X), targets).item()
    found = on_ranks("dp3", lambda run: run.step(next(run.shard([(X, targets)]))).item(), Scaled(), loss=loss)
    assert found == [pytest.approx(expected, abs=1e-6)] * 3


def test_a_mean_that_is_none_is_refused():
    def each(output, targets):
        return functional.cross_entropy(output, targets, reduction="none")

    text = refused(
        lambda: on_ranks("dp2", lambda run: run.step(next(run.shard([(X, Y)]))), Scaled(), loss=sw.MeanLoss(each))
    )
    assert "a loss that is a mean is one number" in text


# ---- averages of parameters


def one_device(model, batches, decay, lr=0.1):
    """Averages and parameters after steps of plain torch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    averaged = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        averaged.update_parameters(model)
    return averaged.module.state_dict(), model.state_dict()


BATCHES = [(torch.randn(5, 4), torch.randint(3, (5,))) for _ in range(4)]


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


@pytest.mark.parametrize("line", ["dp2", "dp2/zero1", "tp2 dp2/zero3", "pp2 mb2", "dp2/zero2 bf16"])
def test_averages_are_those_of_torch_on_one_device_and_leave_the_parameters(line):
    averaged, values = one_device(two_layers(), BATCHES, 0.5)

    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        averages = run.average(optimizer, decay=0.5)
        for batch in run.shard(BATCHES):
            run.step(batch)
            optimizer.step()
        with averages.applied():
            inside, predicted = run.state_dict(), run.predict(X)
        return inside, run.state_dict(), predicted, run.predict(X)

    for found, after, predicted, later in on_ranks(line, work, two_layers()):
        exact = {"atol": 0.2, "rtol": 0.2} if "bf16" in line else {"atol": 1e-4, "rtol": 1e-3}
        for name in averaged:
            torch.testing.assert_close(found[name], averaged[name], **exact)
            torch.testing.assert_close(after[name], values[name], **exact)
        assert not torch.equal(predicted, later)
        other = two_layers()
        other.load_state_dict(found)
        tolerance = 5e-2 if "bf16" in line else 1e-5
        torch.testing.assert_close(other(X), predicted.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("line", ["dp2/zero1", "tp2 dp2/zero3", "pp2 mb2"])
def test_averages_start_from_the_initial_values_if_asked(line):
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    averaged = {name: p.detach().clone() for name, p in model.named_parameters()}
    for x, y in BATCHES:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        for name, p in model.named_parameters():
            averaged[name].lerp_(p.detach(), 0.1)

    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        averages = run.average(optimizer, decay=0.9, from_initial=True)
        assert averages is run.average(optimizer, decay=0.9, from_initial=True)
        for batch in run.shard(BATCHES):
            run.step(batch, update=optimizer)
        with averages.applied():
            return run.state_dict(), refused(lambda: run.average(optimizer, decay=0.9))

    for found, text in on_ranks(line, work, two_layers()):
        assert "write run.average(optimizer, 0.9, from_initial=True)" in text
        for name, value in averaged.items():
            torch.testing.assert_close(found[name], value, atol=1e-4, rtol=1e-3)


def test_averages_are_saved_with_the_optimizer_and_load_under_another_layout(tmp_path):
    def first(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        run.average(optimizer, decay=0.5)
        for batch in run.shard(BATCHES[:2]):
            run.step(batch, update=optimizer)
        sw.save(tmp_path, run, optimizer)

    def second(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        averages = run.average(optimizer, decay=0.5)
        sw.load(tmp_path, run, optimizer)
        for batch in run.shard(BATCHES[2:]):
            run.step(batch, update=optimizer)
        with averages.applied():
            return run.state_dict()

    on_ranks("dp2/zero3", first, two_layers())
    expected, _ = one_device(two_layers(), BATCHES, 0.5)
    for found in on_ranks("tp2", second, two_layers()):
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=1e-3)


class Rich(nn.Module):
    """A parameter without dims, one that is frozen, one that is tied, and a buffer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.layers = nn.Parameter(torch.tensor(1.5)), two_layers()
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.layers(x) * self.scale + self.shift


@pytest.mark.parametrize("line", ["dp2/zero3", "pp2 mb2", "tp2 bf16"])
def test_averages_of_a_checkpoint_are_exported_and_loaded_in_place_of_the_parameters(line, tmp_path):
    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        averages = run.average(optimizer, decay=0.5)
        for batch in run.shard(BATCHES):
            run.step(batch, update=optimizer)
        sw.save(tmp_path / "checkpoints", run, optimizer)
        with averages.applied():
            return run.state_dict()

    expected = on_ranks(line, work, Rich())[0]
    sw.save_weights(tmp_path, tmp_path / "averaged.pt", averages=True)
    sw.save_weights(tmp_path, tmp_path / "last.pt")
    averaged, last = (torch.load(tmp_path / name, weights_only=True) for name in ("averaged.pt", "last.pt"))
    assert averaged.keys() == last.keys() == expected.keys()
    for name in expected:
        assert torch.equal(averaged[name], expected[name]), name
        assert torch.equal(averaged[name], last[name]) == (name in ("shift", "layers.0.bias")), name

    def again(run):
        sw.load_weights(run, tmp_path, averages=True)
        return run.state_dict()

    for found in on_ranks("dp2 tp2", again, Rich()):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_averages_that_a_source_has_not_are_said_to_be_missing(tmp_path):
    def work(run):
        sw.save(tmp_path / "checkpoints", run, run.optimizer(torch.optim.SGD, lr=0.1))
        assert "write with averages.applied(): sw.save_weights(run, to)" in refused(
            lambda: sw.save_weights(run, tmp_path / "x.pt", averages=True)
        )

    on_ranks("dp2", work, two_layers())
    with pytest.raises(CheckpointError, match="has no averages of parameters\n  given:   the state of SGD, of step 0"):
        sw.save_weights(tmp_path, tmp_path / "averaged.pt", averages=True)
    sw.save_weights(tmp_path, tmp_path / "last.pt")
    with pytest.raises(CheckpointError, match="is no checkpoint of this library, and has no averages"):
        sw.save_weights(tmp_path / "last.pt", tmp_path / "averaged.pt", averages=True)
    with pytest.raises(CheckpointError, match="has no averages of parameters"):
        on_ranks("dp2", lambda run: sw.load_weights(run, tmp_path, averages=True), two_layers())


def saved(folder, *, averages):
    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        if averages:
            run.average(optimizer, decay=0.5)
        for batch in run.shard(BATCHES[:2]):
            run.step(batch, update=optimizer)
        sw.save(folder, run, optimizer)

    on_ranks("dp2", work, two_layers())


def resumed(line, folder, *averaged):
    """A run that resumes, and averages where ``averaged`` says: before the load, after it, or nowhere."""

    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        if "before" in averaged:
            run.average(optimizer, decay=0.5)
        sw.load(folder, run, optimizer)
        if "after" in averaged:
            run.average(optimizer, decay=0.5)
        for batch in run.shard(BATCHES[2:]):
            run.step(batch, update=optimizer)
        return any("average" in state for state in optimizer.state.values())

    return on_ranks(line, work, two_layers())


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_resumes_with_averages_says_that_the_checkpoint_has_none(when, tmp_path):
    saved(tmp_path, averages=False)
    with pytest.warns(UserWarning, match="has no averages of parameters: they begin with the values after the next"):
        assert resumed("dp2", tmp_path, when) == [True, True]


def test_a_run_that_resumes_without_averages_says_that_those_of_the_checkpoint_end(tmp_path):
    saved(tmp_path, averages=True)
    assert resumed("dp2", tmp_path, "before") == resumed("dp2", tmp_path, "after") == [True, True]
    with pytest.warns(
        UserWarning, match=r"(?s)the averages.*end here.*write averages = run.average\(optimizer, decay\)"
    ):
        assert resumed("dp2", tmp_path) == [False, False]
    with pytest.warns(UserWarning, match=r"(?s)has averages.*not loaded.*a run under dp2/zero1/offload:disk"):
        assert resumed("dp2/zero1/offload:disk", tmp_path) == [False, False]
    with pytest.warns(
        UserWarning, match=r"(?s)has averages.*not loaded.*write sw.load_weights\(run, path, averages=True"
    ):
        on_ranks("dp2", lambda run: sw.load(tmp_path, run), two_layers())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        on_ranks("dp2", lambda run: sw.load_weights(run, tmp_path), two_layers())


@pytest.mark.parametrize("line", ["single", "dp2", "tp2", "pp2 mb2", "dp2/zero3"])
def test_steps_inside_one_autocast_block_train_as_steps_with_a_block_each(line):
    """Torch keeps casts of parameters until its outermost block ends, so a plain loop inside of one trains nothing."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    batch = torch.randn(4, 4), torch.randint(3, (4,))

    def losses(world, outer):
        run = sw.parallelize(model, line, world)
        optimizer, found = run.optimizer(torch.optim.SGD, lr=0.1), []
        with torch.autocast("cpu", torch.bfloat16, enabled=outer):
            for part in run.shard([batch] * 3):
                with torch.autocast("cpu", torch.bfloat16):
                    found.append(run.step(part, update=optimizer).item())
        return found

    each, one = (sw.launch(losses, sw.Layout.parse(line), outer, ranks="threads")[0] for outer in (False, True))
    assert each == one
    assert each[0] > each[1] > each[2]


def test_a_step_that_fp16_skips_moves_no_average():
    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        averages = run.average(optimizer, decay=0.5)
        (part,) = run.shard([(X, Y)])
        for _ in range(2):  # after one step alone the average is the parameter
            run.loss_scale.value = 1.0
            run.step(part, update=optimizer)
        with averages.applied():
            before = run.state_dict()
        run.loss_scale.value = 2.0**40
        run.step(part, update=optimizer)
        with averages.applied():
            return run.num_skipped, before, run.state_dict()

    for skipped, before, after in on_ranks("dp2 fp16", work, two_layers()):
        assert skipped == 1
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_parameter_that_gets_its_first_gradient_late_is_averaged_from_its_first_value():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, late):
            return self.a(x) + (self.b(x) if late else 0.0)

    torch.manual_seed(0)
    model = Late()
    start = model.b.weight.detach().clone()

    def work(run):
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        averages = run.average(optimizer, decay=0.5)
        for batch in run.shard([((X, False), Y), ((X, True), Y)]):
            run.step(batch, update=optimizer)
        with averages.applied():
            averaged = run.state_dict()["b.weight"]
        return averaged, run.state_dict()["b.weight"]

    for averaged, value in on_ranks("dp2", work, model):
        assert not torch.equal(value, start)
        torch.testing.assert_close(averaged, (start + value) / 2)


def test_averages_that_cannot_be_are_refused():
    def of_others(run):
        return run.average(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))

    def of_offloaded(run):
        return run.average(run.optimizer(torch.optim.SGD, lr=0.1))

    def inside(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        with run.average(optimizer).applied():
            run.step(next(run.shard([(X, Y)])))
            optimizer.step()

    assert "write optimizer = run.optimizer(torch.optim.SGD" in refused(lambda: on_ranks("dp2", of_others, Scaled()))
    offloaded = refused(lambda: on_ranks("dp2/zero3/offload:disk", of_offloaded, Scaled()))
    assert "leave out /offload" in offloaded
    assert "end the block before the next step" in refused(lambda: on_ranks("dp2", inside, Scaled()))


def test_an_optimizer_has_one_average_and_is_not_saved_or_loaded_while_it_is_applied(tmp_path):
    def work(run):
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        averages = run.average(optimizer, 0.5)
        texts = []

        def refuses(call):
            with pytest.raises(PlanError) as caught:
                call()
            texts.append(str(caught.value))

        assert run.average(optimizer, 0.5) is averages  # a cell of a notebook that runs again
        refuses(lambda: run.average(optimizer, 0.9))
        for batch in run.shard(BATCHES[:2]):
            run.step(batch, update=optimizer)
        with averages.applied():
            refuses(lambda: sw.save(tmp_path / "in", run, optimizer))
            refuses(lambda: sw.load(tmp_path / "in", run, optimizer))
            refuses(lambda: averages.applied().__enter__())
            sw.save(tmp_path / "in", run)  # the averages as a model
            inside = run.state_dict()
        sw.save(tmp_path / "after", run, optimizer)
        again = run.optimizer(torch.optim.SGD, lr=0.1)
        loaded = run.average(again, 0.5)
        sw.load(tmp_path / "after", run, again)
        with loaded.applied():
            assert all(torch.equal(value, inside[name]) for name, value in run.state_dict().items())
        return texts

    for texts in on_ranks("dp2", work, two_layers()):
        fixes = ("run.average(optimizer, 0.5)", "call save after the block", "call load after", "leave out the inner")
        assert all(fix in text for fix, text in zip(fixes, texts, strict=True))


@pytest.mark.parametrize(
    ("kind", "shifted"),
    [("ForCausalLM", True), ("ForMaskedLM", False), ("ForConditionalGeneration", None), ("ForSomething", None)],
)
def test_a_kind_of_model_of_which_some_shift_their_labels_and_some_do_not_is_asked_for(kind, shifted):
    model = nn.Linear(2, 2)
    model.loss_type = kind
    assert sw.ModelLoss().for_model(model).shifted is shifted
    assert sw.ModelLoss(shifted=True).for_model(model).shifted is True


def ForCausalLMLoss():  # the name in transformers
    """Stands for the loss of causal language models."""


class CallsLoss(nn.Module):
    """A model without a kind, as GPT-2 of transformers is, whose forward calls the loss that it was given."""

    loss_type = None

    def __init__(self, loss):
        super().__init__()
        self.loss_function = loss

    def forward(self, ids, labels):
        return self.loss_function(ids, labels)


class CallsNone(CallsLoss):
    def forward(self, ids, labels):
        return ids.sum()


def test_a_model_without_a_kind_that_calls_the_loss_of_language_models_shifts():
    assert sw.ModelLoss().for_model(CallsLoss(ForCausalLMLoss)).shifted is True
    assert sw.ModelLoss().for_model(nn.Sequential(CallsLoss(ForCausalLMLoss))).shifted is True  # as peft wraps it
    assert sw.ModelLoss().for_model(CallsLoss(nn.functional.cross_entropy)).shifted is None
    assert sw.ModelLoss().for_model(CallsNone(ForCausalLMLoss)).shifted is None


SCHEDULES = torch.optim.lr_scheduler


def in_sequence(optimizer):
    warm = SCHEDULES.LinearLR(optimizer, 0.1, total_iters=2)
    return SCHEDULES.SequentialLR(optimizer, [warm, SCHEDULES.CosineAnnealingLR(optimizer, 2)], [2])


LOOPS = {
    "a sequence of schedules": {"schedule": in_sequence},
    "one cycle": {"schedule": lambda optimizer: SCHEDULES.OneCycleLR(optimizer, 0.1, total_steps=5)},
    "a plateau": {"schedule": lambda optimizer: SCHEDULES.ReduceLROnPlateau(optimizer, patience=0)},
    "groups": {"decay": lambda name, shape: {"weight_decay": 0.1 if len(shape) > 1 else 0.0}},
    "frozen": {"frozen": ("0.weight", "0.bias", "4.bias")},
    "clipped": {"clip": 0.1},
}


@pytest.mark.parametrize("line", ["dp2", "tp2", "pp2/1f1b mb2", "dp2/zero3"])
@pytest.mark.parametrize("loop", LOOPS)
def test_schedules_groups_freezing_and_clipping_train_as_on_one_device(line, loop):
    options = LOOPS[loop]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))
    for name in options.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    batches = [(torch.randn(6, 6), torch.randint(4, (6,))) for _ in range(4)]

    def work(world, line):
        run = sw.parallelize(model, line, world)
        optimizer = run.optimizer(torch.optim.AdamW, parameters=options.get("decay"), lr=0.01, eps=1e-3)
        schedule = options.get("schedule", lambda optimizer: None)(optimizer)
        found = []
        for batch in run.shard(batches):
            loss = run.step(batch)
            if "clip" in options:
                found.append(run.clip_grad_norm_(options["clip"]).item())
            optimizer.step()
            if schedule is not None:
                schedule.step(*([loss] if loop == "a plateau" else []))
            found += [loss.item(), *(group["lr"] for group in optimizer.param_groups[:1])]
        return found

    (expected,) = sw.launch(work, "single", "single", ranks="threads")
    for found in sw.launch(work, line, line, ranks="threads"):
        assert found == pytest.approx(expected, abs=1e-5)


class Centred(nn.Module):
    """A loss with a running mean of the scores, as self-distillation has: each call changes it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, output, targets):
        loss = (output - self.centre).square().sum()
        self.centre = 0.5 * self.centre + 0.5 * output.detach().mean(0)
        return loss, len(output)


def test_ranks_that_are_threads_share_no_buffer_of_a_loss_and_leave_the_users_as_it_is():
    batch, loss = (torch.linspace(-1, 1, 18).view(6, 3), torch.zeros(6)), Centred()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
    verdict = sw.verify(plain, "tp2", [batch] * 3, loss=loss)
    assert verdict.equal, str(verdict)
    assert loss.centre.tolist() == [0, 0, 0]
