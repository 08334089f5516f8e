"""``checkpoint export`` writes what other programs read, and ``train --weights`` starts from what they wrote."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shardwright as sw
from shardwright import verify
from shardwright.cli.main import app
from shardwright.models import GPT, GPTConfig

SIZES = {"num_layers": 1, "num_heads": 2, "width": 8}
TINY = [*(word for key, value in SIZES.items() for word in ("--set", f"{key}={value}")), "--seq", "8", "--batch", "2"]


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def done(*words):
    found = run(*words, "--json")
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def plain() -> GPT:
    return GPT(GPTConfig(**SIZES))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    done("train", "--layout", "dp2/zero3", "--steps", 2, "--ranks", "threads", "--out", out, *TINY)
    return out


def exported(trained, to, *words):
    found = done("checkpoint", "export", trained, to, *words)
    assert found["file"] == str(to)
    assert all(len(found[key]) if key == "files" else found[key] for key in ("files", "tensors", "bytes"))
    return found


def test_a_pt_is_a_pt_that_the_plain_model_loads_with_its_tie(trained, tmp_path):
    found = exported(trained, tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    model = plain()
    model.load_state_dict(state)
    assert found["tensors"] == len(state) == len(model.state_dict())
    assert "head.weight" in state


def test_each_format_has_the_same_values(trained, tmp_path):
    exported(trained, tmp_path / "a.safetensors")
    expected = load_file(tmp_path / "a.safetensors")
    for to, words in [("b", []), ("c", ["--format", "dcp"]), ("d.pt", ["--max-file-gb", "1"])]:
        exported(trained, tmp_path / to, *words)
        exported(tmp_path / to, tmp_path / f"{to}.safetensors")  # a file of any kind can be given, too
        found = load_file(tmp_path / f"{to}.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_folder_from_which_the_weights_came_is_replaced_only_by_force(trained, tmp_path):
    folder = tmp_path / "pretrained"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    words = ["checkpoint", "export", trained, folder, "--format", "transformers", "--config", folder]
    found = run(*words)
    assert found.exit_code == 2
    assert "--force" in found.stderr
    assert list(load_file(folder / "model.safetensors")) == ["a"]
    done(*words, "--force")
    assert "a" not in load_file(folder / "model.safetensors")


def test_verify_compares_with_weights_that_are_given(trained, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        sys.modules["shardwright.cli.main"],
        "compare",
        lambda plain, *rest, **named: seen.append(plain) or verify(plain, *rest, **named),
    )
    words = ["verify", "--layout", "dp2/zero3", "--steps", 1, *TINY]
    exported(trained, tmp_path / "a.safetensors", "--prefix", "model.")
    assert done(*words, "--weights", tmp_path / "a.safetensors", "--weights-prefix", "model.")["equal"]
    state = seen[0].state_dict()
    for name, values in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(state[name.removeprefix("model.")], values)
    found = run(*words, "--weights", tmp_path / "a.safetensors")
    assert found.exit_code == 2
    assert "do not fit the model" in found.stderr


def test_a_prefix_and_a_dtype_are_written(trained, tmp_path):
    exported(trained, tmp_path / "a.safetensors", "--prefix", "model.", "--dtype", "bfloat16")
    found = load_file(tmp_path / "a.safetensors")
    assert {name.partition(".")[0] for name in found} == {"model"}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


@pytest.mark.sampled(0)
def test_a_run_starts_from_weights_and_a_resumed_run_from_its_checkpoint(trained, tmp_path):
    exported(trained, tmp_path / "a.safetensors", "--prefix", "model.")
    words = ["--layout", "tp2", "--ranks", "threads", "--out", tmp_path / "run", *TINY, "--lr", "0", "--seed", "3"]
    weights = ["--weights", tmp_path / "a.safetensors", "--weights-prefix", "model."]
    done("train", *words, "--steps", 1, *weights)  # with a rate of 0, what was loaded is what is saved
    exported(tmp_path / "run", tmp_path / "b.safetensors")
    exported(trained, tmp_path / "c.safetensors")
    found, expected = load_file(tmp_path / "b.safetensors"), load_file(tmp_path / "c.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    (tmp_path / "a.safetensors").unlink()
    resumed = done("train", "--steps", 2, "--resume", "--ranks", "threads", "--out", tmp_path / "run")
    assert resumed["steps"] == 2, "the file of the start is not needed any more"
    again = run("train", "--resume", "--ranks", "threads", "--out", tmp_path / "run")
    assert "all 2 steps of this run are done: --steps 4 adds 2 more" in again.stderr


def test_weights_that_are_given_are_evaluated_before_the_first_step(trained, tmp_path):
    exported(trained, tmp_path / "a.safetensors")
    words = ["--layout", "dp2", "--ranks", "threads", "--out", tmp_path / "run", *TINY, "--lr", "0"]
    found = run(
        "train", *words, "--steps", 1, "--eval-every", 1, "--eval-batches", 1, "--weights", tmp_path / "a.safetensors"
    )
    (before,) = re.findall(r"before the first step: eval loss (\S+)", found.stderr)
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert before == f"{row['eval_loss']:.4f}"  # with a rate of 0, the step has changed nothing


def test_averages_of_a_checkpoint_are_exported(tmp_path):
    def work(world):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        run = sw.parallelize(model, "dp2/zero1", world, loss=sw.MeanSquaredError())
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        averages = run.average(optimizer, decay=0.5)
        for part in run.shard([(torch.ones(2, 2), torch.zeros(2, 1))] * 3):
            run.step(part, update=optimizer)
        sw.save(tmp_path / "run", run, optimizer)
        with averages.applied():
            return run.state_dict()["weight"]

    average = sw.launch(work, 2, ranks="threads")[0]
    exported(tmp_path / "run", tmp_path / "last.pt")
    exported(tmp_path / "run", tmp_path / "averaged.pt", "--averages")
    last, averaged = (torch.load(tmp_path / file, weights_only=True)["weight"] for file in ("last.pt", "averaged.pt"))
    assert torch.equal(averaged, average)
    assert not torch.equal(averaged, last)


@pytest.mark.sampled(0)
def test_each_command_that_reads_a_run_takes_its_averages(trained, tmp_path):
    words = ["--ranks", "threads", "--out", tmp_path / "run", "--eval-every", "3", "--eval-batches", "2", *TINY]
    done("train", *words, "--layout", "dp2", "--steps", 3, "--lr", "0.1", "--warmup", "0", "--ema", "0.5")
    given = [tmp_path / "run", "--layout", "tp2"]
    for words in (
        ["evaluate", *given, "--num", "2"],
        ["predict", *given, "--num", "1"],
        ["sample", *given, "--num", 3],
    ):
        last, averaged = done(*words), done(*words, "--averages")
        assert averaged.keys() == last.keys()
        assert words[0] != "evaluate" or averaged["loss"] != last["loss"]
        refused = run(words[0], trained, *words[2:], "--averages")
        assert refused.exit_code == 2
        assert "has no averages of parameters" in refused.stderr
    weights = ["--weights", tmp_path / "run", "--averages"]
    assert done("verify", "--layout", "dp2", "--steps", 1, *TINY, *weights)["equal"]
    assert "add --weights RUN" in run("verify", "--layout", "dp2", *TINY, "--averages").stderr


@pytest.mark.sampled(0)
def test_an_evaluation_of_loaded_weights_goes_on_where_the_run_was(trained, tmp_path):
    words = ["--ranks", "threads", "--steps", 1, "--lr", "0", *TINY]
    once = done("train", *words, "--out", tmp_path / "one", "--weights", trained, "--layout", "dp2 bf16")
    twice = done("train", *words, "--out", tmp_path / "two", "--weights", tmp_path / "one", "--layout", "dp2 bf16")
    other = done("train", *words, "--out", tmp_path / "three", "--layout", "dp2 bf16")
    assert once["first_loss"] == twice["first_loss"] != other["first_loss"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["checkpoint", "export", "{run}", "{new}", "--format", "gguf"], "no such format"),
        (["checkpoint", "export", "{run}", "{new}", "--format", "transformers"], "needs a config"),
        (["checkpoint", "export", "{run}", "{new}", "--dtype", "int8"], "no such dtype"),
        (["checkpoint", "export", "{run}", "{new}", "--max-file-gb", "0"], "too small"),
        (["checkpoint", "export", "{run}", "{new}", "--averages"], "leave out averages=True, or --averages"),
        (["checkpoint", "export", "nowhere", "{new}"], "No such file"),
        (["checkpoint", "export", "{run}", "{run}"], "a folder with files of another kind"),
        (["train", "--weights", "nowhere", "--out", "{new}", "--ranks", "threads"], "No such file"),
        (
            ["train", "--weights", "{run}", "--weights-prefix", "x.", "--out", "{new}", "--ranks", "threads"],
            "(x.token.weight)",
        ),
        (["train", "--weights", "{run}", "--out", "{new}", "--ranks", "threads", "--set", "width=4"], "has shape"),
    ],
)
def test_what_cannot_be_is_refused_with_exit_code_2(trained, tmp_path, words, text):
    given = [word.format(run=trained, new=tmp_path / "new") for word in words]
    found = run(*given, *(TINY if words[0] == "train" and "--set" not in words else []))
    assert found.exit_code == 2, found.output
    assert text in found.stderr
    assert not (tmp_path / "new" / "checkpoints").exists()
