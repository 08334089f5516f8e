"""Datasets of a user's own by package.module:factory, and predictions and evaluations of what was trained on them."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Subset

from shardwright.errors import CheckpointError, PlanError
from shardwright.layout import Layout
from shardwright.models.model_loss import ModelLoss
from shardwright.train import loop
from shardwright.train.config import TrainConfig
from shardwright.train.data import global_batch, open_data
from shardwright.train.loop import train
from shardwright.train.opening import opened
from shardwright.train.predicting import evaluate, predict
from shardwright.train.progress import read_metrics
from shardwright.train.run_file import read_run

DRAW = np.random.default_rng(0)
PICTURES = DRAW.normal(size=(40, 3, 4, 4))  # float64, as numpy has it
CLASSES = DRAW.integers(3, size=40)


class Pictures:
    """A map-style dataset of arrays."""

    def __len__(self):
        return len(PICTURES)

    def __getitem__(self, index):
        return PICTURES[index], int(CLASSES[index])


def tokens(split):
    text = torch.arange(33 if split == "train" else 17) % 7
    return [(text[i : i + 4], text[i + 1 : i + 5]) for i in range(0, len(text) - 4, 4)]


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.GELU(), nn.Linear(8, 3))


def language_model():
    return nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 7))


class Pooled(nn.Module):
    """Adds the mean over all tokens to each, so that an output depends on how far a sample is padded."""

    def __init__(self):
        super().__init__()
        self.token, self.up, self.down = nn.Embedding(7, 8), nn.Linear(8, 16), nn.Linear(16, 7)

    def forward(self, ids):
        x = self.token(ids)
        return self.down(torch.relu(self.up(x + x.mean(1, keepdim=True))))


class OwnsLoss(nn.Module):
    """Returns its loss beside the logits, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.token, self.up, self.down = nn.Embedding(7, 8), nn.Linear(8, 16), nn.Linear(16, 7)

    def forward(self, ids, labels=None):
        logits = self.down(torch.relu(self.up(self.token(ids))))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def owns_loss(shifted=False):
    return OwnsLoss(), ModelLoss(shifted=shifted)


def labelled():
    return [{"ids": (row := (torch.arange(6) + n) % 7).tolist(), "labels": row.roll(-1)} for n in range(40)]


@dataclass
class Named:
    """A sample whose parts have names."""

    input: torch.Tensor
    label: int


def named():
    return [
        Named(torch.from_numpy(picture).float(), int(label)) for picture, label in zip(PICTURES, CLASSES, strict=True)
    ]


class Sentences:
    """Texts of different lengths, of which a batch is padded to its longest."""

    def __init__(self, split, num_left_out=0):
        lengths = (3, 6, 4, 2, 5, 4, 6, 3) if split == "train" else (2, 5, 4, 3)
        self.texts = [(torch.arange(length + 1) + n) % 7 for n, length in enumerate(lengths)]
        self.num_left_out = num_left_out

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]

    def decode(self, ids):
        return bytes(97 + token for token in ids).decode()

    def collate(self, texts):
        texts = texts[self.num_left_out :] if len(texts) > 1 else texts
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
        return padded[:, :-1].clamp(min=0), padded[:, 1:]


@pytest.fixture(autouse=True)
def mine(monkeypatch):
    """A module of this name, as a user's own is."""
    names = {
        "pictures": Pictures, "tokens": tokens, "model": model, "language_model": language_model,
        "splits": lambda: {"train": tokens("train"), "eval": tokens("eval")},
        "two": lambda: [Subset(tokens(split), range(count)) for split, count in (("train", 8), ("eval", 4))],
        "dicts": lambda: [{"x": 1, "z": 2}] * 3, "texts": lambda: [("a", 1)] * 3, "stream": lambda: iter(()),
        "words": lambda: [{"text": "a", "labels": 1}] * 3, "labelled": labelled, "owns_loss": owns_loss, "named": named,
        "OwnsLoss": OwnsLoss, "pooled": Pooled,
        "unlike": lambda: [(torch.ones(n), 1) for n in (2, 3, 2, 3)], "vector_model": lambda: nn.Linear(2, 3),
        "sentences": Sentences, "lacking": lambda split: Sentences(split, 1),
        "empty": list, "fails": lambda: 1 / 0,
    }  # fmt: skip
    monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(**names))


def config(**options):
    return TrainConfig(**{"model": "mine:model", "data": "mine:pictures", "batch": 4, "steps": 3, "seq": 4, **options})


def test_a_dataset_of_arrays_is_read_as_tensors_and_its_end_is_for_evaluation():
    whole = [open_data("mine:pictures", seq=4, model=None, split=split) for split in ("train", "eval")]
    assert [len(each) for each in whole] == [38, 2]
    inputs, target = whole[1].sample(0)
    assert (inputs.dtype, target.dtype, target.item()) == (torch.float32, torch.int64, CLASSES[38])
    torch.testing.assert_close(inputs.double().numpy(), PICTURES[38].astype(np.float32).astype(float))


@pytest.mark.parametrize("name", ["mine:tokens", "mine:splits", "mine:two"])
def test_a_factory_may_make_its_own_splits(name):
    found = [open_data(name, seq=4, model=None, split=split) for split in ("train", "eval")]
    assert [len(each) for each in found] == [8, 4]
    assert found[0].sample(1)[0].tolist() == [4, 5, 6, 0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine:dicts", "a sample with x, z"),
        ("mine:words", "'text' is a str"),
        ("mine:texts", "a pair with a str"),
        ("mine:stream", "with len() and [index]"),
        ("mine:empty", "the train split of 'mine:empty' is empty"),
        ("mine:fails", "ZeroDivisionError"),
        ("mine:nothing", "has no factory 'nothing'"),
    ],
)
def test_a_dataset_that_cannot_be_trained_on_is_refused(tmp_path, name, text):
    with pytest.raises(PlanError) as caught:
        train(config(data=name), tmp_path / "run", ranks="threads")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("names", "shape"), [({}, (2, 3)), ({"model": "mine:language_model", "data": "mine:tokens"}, (4, 4, 7))]
)
def test_what_a_run_predicts_and_its_loss_are_those_of_the_plain_model_under_any_layout(tmp_path, names, shape):
    options = config(layout="dp2", **names)
    train(options, tmp_path / "run", ranks="threads")
    found = {line: evaluate(options, tmp_path / "run", Layout.parse(line)) for line in ("single", "dp2 tp2")}
    one, other = found.values()
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["accuracy"] == other["accuracy"]
    assert (one["samples"], one["step"]) == (shape[0], 3)
    file = tmp_path / "outputs.safetensors"
    predicted = predict(options, tmp_path / "run", Layout.parse("dp2"), num=4, to=file)
    written = load_file(file)
    assert tuple(written["outputs"].shape) == shape
    assert predicted["predictions"] == written["outputs"].argmax(-1).tolist()
    expected = nn.functional.cross_entropy(written["outputs"].flatten(0, -2), written["targets"].flatten())
    assert one["loss"] == pytest.approx(expected.item(), abs=1e-5)
    right = (written["outputs"].argmax(-1) == written["targets"]).float().mean().item()
    assert one["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("names", [
    {"model": "mine:owns_loss", "data": "mine:labelled"}, {"model": "mine:model", "data": "mine:named"},
])  # fmt: skip
def test_samples_with_names_train_by_the_loss_that_the_factory_gives_or_the_model_computes(tmp_path, names):
    losses = {}
    for line in ("single", "dp2", "pp2 mb2"):
        options = config(layout=line, **names)
        summary = train(options, tmp_path / line, ranks="threads")
        losses[line] = [row["loss"] for row in read_metrics(tmp_path / line)]
        unit = "tokens" if names["data"] == "mine:labelled" else "samples"
        assert summary["samples_per_s_median"] > 0
        assert (summary["tokens_per_s_median"] is None) is (unit == "samples")
    assert losses["dp2"] == pytest.approx(losses["single"], abs=1e-5)
    assert losses["pp2 mb2"] == pytest.approx(losses["single"], abs=1e-5)
    found = evaluate(options, tmp_path / "single", Layout.parse("dp2"))
    assert 0 <= found["accuracy"] <= 1
    shapes = {"mine:labelled": (2, 6), "mine:named": (2,)}
    assert (
        np.shape(predict(options, tmp_path / "single", Layout.parse("dp2"), num=2)["predictions"])
        == shapes[names["data"]]
    )


def test_the_loss_that_a_model_computes_is_used_where_samples_have_labels_that_it_takes(tmp_path):
    own = opened(config(model="mine:OwnsLoss", data="mine:labelled")).loss
    assert isinstance(own, ModelLoss)
    assert own.shifted is None
    assert not isinstance(opened(config(model="mine:model", data="mine:named")).loss, ModelLoss)
    with pytest.raises(PlanError, match="returns the pair of its model and this loss"):
        train(config(model="mine:OwnsLoss", data="mine:labelled"), tmp_path / "run", ranks="threads")


def test_samples_of_different_shapes_are_refused_with_both():
    data = open_data("mine:unlike", seq=4, model=None)
    with pytest.raises(PlanError, match=r"\(\[2\], \[\]\) and \(\[3\], \[\]\)"):
        global_batch(data, range(2))


@pytest.mark.sampled(100)
@pytest.mark.parametrize("line", ["single", "pp2 mb2", "dp2/zero3", "tp2", "dp2 tp2/2d"])
def test_a_dataset_that_collates_is_padded_as_one_device_pads_it_under_every_layout(tmp_path, line):
    names = {"model": "mine:pooled", "data": "mine:sentences"}
    options = config(layout=line, eval_every=3, lr=0.0, weight_decay=0.0, **names)
    train(options, tmp_path / "run", ranks="threads")
    row = read_metrics(tmp_path / "run")[-1]
    found = evaluate(options, tmp_path / "run", Layout.parse(line))
    predicted = predict(options, tmp_path / "run", Layout.parse(line), num=4, to=tmp_path / "out.safetensors")
    written = load_file(tmp_path / "out.safetensors")
    inputs, targets = Sentences("eval").collate(Sentences("eval").texts)
    assert torch.equal(written["targets"], targets)
    expected = nn.functional.cross_entropy(written["outputs"].flatten(0, 1), targets.flatten())
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert row["eval_loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert len(predicted["predictions"][0]) == inputs.shape[1] == 5
    assert [len(truth) for _, truth in predicted["texts"]] == [2, 5, 4, 3], "what is padded is no text"
    assert row["tokens_per_s"] is None, "batches of different lengths"


def test_batches_that_lack_samples_and_predictions_of_several_shapes_are_refused(tmp_path):
    options = config(model="mine:language_model", data="mine:lacking", batch=2)
    with pytest.raises(PlanError, match="1 samples in dim 0, of 2"):
        train(options, tmp_path / "run", ranks="threads")
    options = replace(options, data="mine:sentences")
    train(options, tmp_path / "other", ranks="threads")
    with pytest.raises(PlanError, match="write --batch 4"):
        predict(options, tmp_path / "other", Layout.parse("single"), num=4)


def test_a_folder_brings_no_dataset_along_that_the_command_does_not_name(tmp_path):
    train(config(steps=1), tmp_path / "run", ranks="threads")
    with pytest.raises(CheckpointError, match="add --data mine:pictures"):
        read_run(tmp_path / "run", model="mine:model")
    assert read_run(tmp_path / "run", model="mine:model", data="mine:pictures")["data"] == "mine:pictures"


def test_options_of_predictions_out_of_range_are_refused(tmp_path):
    for options, text in (({"num": 0}, "'num' is out of range"), ({"to": tmp_path / "x.csv"}, "x.safetensors")):
        with pytest.raises(PlanError, match=text):
            predict(config(), tmp_path, Layout.parse("single"), **options)


@pytest.mark.parametrize("line", ["single", "dp2"])
def test_each_target_that_is_not_ignored_counts_the_same_in_whichever_batch_it_is(tmp_path, monkeypatch, line):
    data = [(x.clone(), y.clone()) for x, y in tokens("eval")]  # 4 samples of 4 tokens, in batches of 2
    for _, targets in data[:2]:
        targets[1:] = -100
    monkeypatch.setattr(sys.modules["mine"], "ignoring", lambda split: data, raising=False)
    options = config(layout="single", model="mine:language_model", data="mine:ignoring", batch=2, eval_every=3)
    train(options, tmp_path / "run", ranks="threads")
    file = tmp_path / "new" / "outputs.safetensors"  # a folder that is not there yet
    predict(options, tmp_path / "run", Layout.parse(line), num=4, to=file)
    written = load_file(file)
    outputs, targets = written["outputs"].flatten(0, -2), written["targets"].flatten()
    found = evaluate(options, tmp_path / "run", Layout.parse(line))
    expected = nn.functional.cross_entropy(outputs, targets).item()
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    assert read_metrics(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(expected, abs=1e-5)
    kept = targets != -100
    assert found["accuracy"] == pytest.approx((outputs.argmax(-1) == targets)[kept].float().mean().item())


@pytest.mark.parametrize("line", ["single", "dp2 mb2"])
@pytest.mark.parametrize(("most", "num"), [(0, 7), (1, 3), (2, 6), (9, 7)])
def test_all_held_out_data_are_evaluated_or_as_many_batches_as_are_asked_for(tmp_path, monkeypatch, line, most, num):
    data = [(x.clone(), y.clone()) for x, y in (*tokens("eval"), *tokens("train")[:3])]  # 7 samples, in batches of 3
    monkeypatch.setattr(sys.modules["mine"], "seven", lambda split: data, raising=False)
    names = {"model": "mine:language_model", "data": "mine:seven", "batch": 3}
    options = config(layout=line, eval_every=3, eval_batches=most, **names)
    train(options, tmp_path / "run", ranks="threads")
    expected = evaluate(options, tmp_path / "run", Layout.parse("single"), num=num)
    assert expected["samples"] == num
    assert read_metrics(tmp_path / "run")[-1]["eval_loss"] == pytest.approx(expected["loss"], abs=1e-5)


@pytest.mark.parametrize("line", ["single", "dp2/zero3"])
def test_averages_that_a_run_keeps_are_evaluated_and_another_run_starts_from_them(tmp_path, line, capsys):
    names = {"model": "mine:language_model", "data": "mine:tokens", "eval_every": 1, "batch": 2, "warmup": 0, "lr": 0.1}
    options = config(layout=line, ema=0.5, **names)
    train(options, tmp_path / "run", ranks="threads")
    train(replace(options, steps=3, stop_at=2), tmp_path / "parts", ranks="threads")
    capsys.readouterr()
    train(replace(options, layout="tp2"), tmp_path / "parts", ranks="threads", resume=True)
    shown = capsys.readouterr().err
    assert "eval loss of averages" in shown
    assert "decay" not in shown
    found = evaluate(options, tmp_path / "run", Layout.parse("dp2"), averages=True)["loss"]
    last = evaluate(options, tmp_path / "run", Layout.parse("dp2"))["loss"]
    rows = read_metrics(tmp_path / "run")
    assert abs(found - last) > 1e-3
    assert rows[-1]["eval_loss"] == pytest.approx(found, abs=1e-6)
    assert rows[0]["eval_loss"] != pytest.approx(last, abs=1e-3)
    other = [row["eval_loss"] for row in read_metrics(tmp_path / "parts")]
    assert [row["eval_loss"] for row in rows] == pytest.approx(other, abs=1e-5)
    outputs = [predict(options, tmp_path / "run", Layout.parse("single"), averages=each) for each in (False, True)]
    assert outputs[0]["step"] == outputs[1]["step"] == 3
    begun = config(weights=str(tmp_path / "run"), averages=True, **{**names, "lr": 0.0, "eval_batches": 0})
    train(begun, tmp_path / "begun", ranks="threads")
    assert read_metrics(tmp_path / "begun")[-1]["eval_loss"] == pytest.approx(found, abs=1e-5)


def test_a_resumed_run_says_that_its_averages_go_on_by_another_decay(tmp_path, capsys):
    options = config(ema=0.5, stop_at=1)
    train(options, tmp_path / "run", ranks="threads")
    train(replace(options, ema=0.25, stop_at=2), tmp_path / "run", ranks="threads", resume=True)
    assert "the averages go on with the decay 0.25, where it was 0.5; --ema 0.5 keeps it" in capsys.readouterr().err


def test_averages_are_those_of_weights_that_are_named():
    with pytest.raises(PlanError, match="averages without weights"):
        config(averages=True)


def test_a_stop_signal_ends_an_evaluation_before_its_next_batch(tmp_path, monkeypatch):
    read, plain = [], loop.global_batch

    def noted(dataset, indices):
        read.append(len(indices))
        return plain(dataset, indices)

    names = {"model": "mine:language_model", "data": "mine:tokens", "eval_every": 1, "batch": 1}
    monkeypatch.setattr(loop, "global_batch", noted)
    stop = loop.Stop()
    stop.request()
    summary = train(config(layout="single", **names), tmp_path / "run", ranks="threads", stop=stop)
    (row,) = read_metrics(tmp_path / "run")
    assert summary["stopped"]
    assert "eval_loss" not in row
    assert len(read) == 3, "the batch of the step, the first one to evaluate, and what is read for the next step"


def test_a_file_of_another_program_is_replaced_by_force_alone(tmp_path):
    options, file = config(steps=1), tmp_path / "pretrained.safetensors"
    train(options, tmp_path / "run", ranks="threads")
    save_file({"a": torch.ones(2)}, file)
    with pytest.raises(CheckpointError, match="--force"):
        predict(options, tmp_path / "run", Layout.parse("single"), to=file)
    assert list(load_file(file)) == ["a"]
    for force in (True, False):  # what was written here is replaced without
        predict(options, tmp_path / "run", Layout.parse("single"), to=file, force=force)
        assert "outputs" in load_file(file)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_predicted(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "link.safetensors").symlink_to("file")
    for to in (tmp_path / "link.safetensors", tmp_path / "file" / "x.safetensors"):
        with pytest.raises(CheckpointError, match="cannot write"):  # and not that there is no run
            predict(config(), tmp_path / "no run", Layout.parse("single"), to=to)
    assert (tmp_path / "file").read_text() == "kept"
    assert (tmp_path / "link.safetensors").is_symlink()
