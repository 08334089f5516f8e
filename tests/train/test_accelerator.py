"""Scripts in the shape of Accelerate's train as on one device, under any layout."""

from __future__ import annotations

from contextlib import nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import shardwright as sw
from shardwright.errors import PlanError

DRAW = torch.Generator().manual_seed(0)
DATA = [(torch.randn(4, generator=DRAW), int(torch.randint(3, (), generator=DRAW))) for _ in range(12)]


class OneDevice:
    """What Accelerate's Accelerator does on one device, in plain torch, for the scripts below."""

    device, is_main_process, sync_gradients = torch.device("cpu"), True, True

    def __init__(self, num_accumulated=1):
        self.num_accumulated, self.count = num_accumulated, 0

    def prepare(self, model, optimizer, loader, scheduler):
        self.num_batches = len(loader)

        def gated(call):
            return lambda: call() if self.sync_gradients else None

        steps = SimpleNamespace(step=gated(optimizer.step), zero_grad=gated(optimizer.zero_grad))
        return model, steps, loader, SimpleNamespace(step=gated(scheduler.step))

    def accumulate(self, model):
        self.count += 1
        is_last = self.count == self.num_batches
        self.sync_gradients = is_last or self.count % self.num_accumulated == 0
        self.count *= not is_last
        return nullcontext()

    def backward(self, loss):
        (loss / self.num_accumulated).backward()

    def clip_grad_norm_(self, parameters, max_norm):
        return nn.utils.clip_grad_norm_(parameters, max_norm) if self.sync_gradients else None

    def get_state_dict(self, model):
        return model.state_dict()

    def save_state(self, folder):
        pass


class Labelled(nn.Module):
    """A classifier that computes its loss from labels, if it gets some."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels=None):
        logits = self.down(functional.gelu(self.up(x)))
        if labels is None:
            return logits
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def plain():
    torch.manual_seed(0)
    return Labelled()


def script(accelerator, model, form, num_epochs=2, resumed=None):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.05, 0.02], total_steps=12)
    loader = DataLoader(DATA, batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(1))
    loader.sampler.generator = torch.Generator().manual_seed(1)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion, losses = nn.CrossEntropyLoss(), []
    if resumed is not None:
        accelerator.load_state(resumed)
    for _ in range(num_epochs):
        loader.sampler.generator.manual_seed(1)  # each epoch alike, so that a resumed one is known
        for x, y in loader:
            with accelerator.accumulate(model):
                if form == "labels":
                    found = model(x=x, labels=y)
                    loss = found["loss"]
                else:
                    loss = (
                        criterion(model(x), y) if form == "criterion" else functional.cross_entropy(model(x), target=y)
                    )
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses, accelerator.get_state_dict(model), accelerator, model


@pytest.mark.parametrize(
    ("line", "form", "accumulated"),
    [
        ("dp2", "labels", 1),
        ("tp2 dp2/zero3", "criterion", 1),
        ("pp2 mb2", "function", 1),
        ("dp2/zero1", "labels", 2),
        ("pp2 mb2", "criterion", 2),
        ("dp2", "labels", 3),  # of four batches an epoch: the last one updates the parameters alone
    ],
)
def test_a_script_trains_as_on_one_device(line, form, accumulated):
    losses, state, *_ = script(OneDevice(accumulated), plain(), form)
    model = plain()

    def work(world):
        return script(sw.Accelerator(line, world, gradient_accumulation_steps=accumulated), model, form)[:2]

    for found, whole in sw.launch(work, line, ranks="threads"):
        assert found == pytest.approx(losses, abs=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(whole[name], value, atol=1e-4, rtol=1e-4)


def test_a_loop_in_a_loop_and_one_that_breaks_off_know_which_loader_is_at_its_end():
    def work(world):
        accelerator = sw.Accelerator("dp2", world, gradient_accumulation_steps=3)
        model = accelerator.prepare(plain_model)
        train, other = (accelerator.prepare(DataLoader(DATA[:count], batch_size=2)) for count in (8, 4))
        assert (len(train), train.batch_size, train.dataset[0][1]) == (4, 2, DATA[0][1])
        synced = []
        for number, _ in enumerate(train):
            for _ in other:
                if number == 1:
                    break
            with accelerator.accumulate(model):
                synced.append(accelerator.sync_gradients)
        with accelerator.accumulate(model):  # outside of any loop
            synced.append(accelerator.sync_gradients)
        return synced

    plain_model = plain()
    assert sw.launch(work, 2, ranks="threads") == [[False, False, True, True, False]] * 2


def test_a_prepared_model_predicts_whole_batches_in_eval_mode_and_its_loss_is_that_of_all():
    model = plain()
    x, y = torch.stack([x for x, _ in DATA[:5]]), torch.tensor([y for _, y in DATA[:5]])

    def work(world):
        accelerator = sw.Accelerator("dp2", world)
        prepared = accelerator.prepare(model)
        prepared.eval()
        found = prepared(x=x, labels=y)
        return (
            accelerator.gather_for_metrics(found.logits),
            found.loss.item(),
            prepared(x),
            accelerator.unwrap_model(prepared),
        )

    expected = model(x).detach()
    for logits, loss, again, whole in sw.launch(work, 2, ranks="threads"):
        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(again, expected)
        assert loss == pytest.approx(functional.cross_entropy(expected, y).item(), abs=1e-6)
        assert whole is model


def test_a_saved_state_goes_on_under_another_layout(tmp_path):
    losses, *_ = script(OneDevice(), plain(), "labels", num_epochs=3)
    model = plain()

    def first(world):
        script(sw.Accelerator("dp2/zero3", world), model, "labels", 2)[2].save_state(tmp_path)

    def second(world):
        return script(sw.Accelerator("tp2", world), model, "labels", 1, tmp_path)[0]

    sw.launch(first, 2, ranks="threads")
    for found in sw.launch(second, 2, ranks="threads"):
        assert found == pytest.approx(losses[8:], abs=1e-5)


@pytest.mark.parametrize(
    ("use", "fix"),
    [
        (
            lambda a, model, x, y: a.backward(functional.cross_entropy(model(x), y) * 2),
            "leave out what scales the loss",
        ),
        (lambda a, model, x, y: model(x).softmax(-1), "call the loss on model(x) itself"),
        (lambda a, model, x, y: model(x)[0], "call the loss on model(x) itself"),
        (lambda a, model, x, y: model(x).loss, "pass the labels to the model"),
        (lambda a, model, x, y: torch.argmax(model(x)), "call the loss on model(x) itself"),
        (lambda a, model, x, y: a.prepare(nn.Linear(2, 2)), "make another sw.Accelerator"),
    ],
)
def test_what_a_prepared_model_cannot_do_is_refused_with_the_line_to_write(use, fix):
    model = plain()
    x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)

    def work(world):
        accelerator = sw.Accelerator("dp2", world)
        prepared = accelerator.prepare(model)
        with pytest.raises(PlanError) as caught:
            use(accelerator, prepared, x, y)
        return str(caught.value)

    for text in sw.launch(work, 2, ranks="threads"):
        assert fix in text


def test_an_optimizer_without_its_model_and_an_unknown_precision_are_refused():
    with pytest.raises(PlanError, match="prepare\\(model, optimizer, loader\\)"):
        sw.Accelerator().prepare(torch.optim.SGD(plain().parameters(), lr=0.1))
    with pytest.raises(PlanError, match="no such precision"):
        sw.Accelerator(mixed_precision="fp8")
    assert sw.Accelerator("dp2", world=None, mixed_precision="bf16").layout == "dp2 bf16"


def test_a_schedule_that_computes_the_next_rate_from_the_last_goes_on_where_it_was(tmp_path):
    x, y, whole = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64), plain()

    def rates(world, resumed):
        accelerator, model = sw.Accelerator("dp2", world), deepcopy(whole)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        if resumed:
            accelerator.load_state(tmp_path)
        found = []
        for _ in range(2):
            accelerator.backward(functional.cross_entropy(model(x), y))
            optimizer.step()
            schedule.step()
            found.append(optimizer.param_groups[0]["lr"])
        if not resumed:
            accelerator.save_state(tmp_path)
        return found

    assert sw.launch(rates, 2, False, ranks="threads") == [[0.5, 0.25]] * 2
    assert sw.launch(rates, 2, True, ranks="threads") == [[0.125, 0.0625]] * 2


def test_what_a_script_gives_and_what_it_lacks_is_refused_and_not_passed_over(tmp_path):
    x, y, whole = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64), plain()

    def work(world):
        accelerator, model, texts = sw.Accelerator("dp2", world), deepcopy(whole), []

        def refuses(call):
            with pytest.raises(PlanError) as caught:
                call()
            texts.append(str(caught.value))

        for early in (lambda: accelerator.backward(x), lambda: accelerator.clip_grad_norm_([], 1.0),
                      lambda: accelerator.get_state_dict(model), lambda: accelerator.save_state(tmp_path),
                      lambda: accelerator.load_state(tmp_path)):  # fmt: skip
            refuses(early)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        prepared, optimizer = accelerator.prepare(model, optimizer)
        output = prepared(x)
        assert not hasattr(output, "logits")
        assert not hasattr(output, "loss")
        accelerator.backward(functional.cross_entropy(output, y))
        refuses(lambda: accelerator.clip_grad_norm_(prepared.parameters(), 1.0, norm_type=float("inf")))
        refuses(lambda: accelerator.clip_grad_norm_(list(prepared.parameters())[:1], 1.0))
        assert accelerator.clip_grad_norm_(prepared.parameters(), 1.0) is not None
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) is not None
        optimizer.step()
        accelerator.save_state(tmp_path)
        accelerator.prepare(schedule)
        refuses(lambda: accelerator.load_state(tmp_path))
        return texts

    fixes = ["accelerator.prepare(model, optimizer, loader)"] * 5
    fixes += ["leave out norm_type", "clip_grad_norm_(model.parameters(), max_norm)", "prepare 0 schedulers"]
    for texts in sw.launch(work, 2, ranks="threads"):
        assert all(fix in text for fix, text in zip(fixes, texts, strict=True)), texts
