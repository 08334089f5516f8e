"""Checks of a user's model and data before a plan or a run starts."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwright.cli.main import app
from shardwright.train.fitting import failure_on_meta

OWN = """
import torch
from torch import nn

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2**20, 128)
        self.head = nn.Linear(128, 8)

    def forward(self, ids, mask):
        x = self.table(ids)
        if not mask.all():
            raise ValueError("no padding, please")
        return self.head(x).mean(1)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"ids": torch.arange(WIDTH) + index, "mask": torch.ones(WIDTH).long(), "labels": torch.tensor(index % 8)}

def build():
    return Masked()

def data():
    return Data()
"""


class _Reads(nn.Module):
    """Code that decides by a value of its inputs, and fails where it is false."""

    def forward(self, x):
        if x.sum() > 0:
            return x
        raise ValueError("negative")


def test_code_that_reads_values_fails_on_meta_and_not_as_a_plan_runs_it():
    batch = torch.ones(2, 3), torch.zeros(2, 3)
    model = _Reads().to("meta")
    assert isinstance(failure_on_meta(model, nn.MSELoss(), batch), RuntimeError)
    assert failure_on_meta(model, nn.MSELoss(), batch, guesses=True) is None
    wrong = nn.Sequential(_Reads(), nn.Linear(4, 3)).to("meta")
    assert failure_on_meta(wrong, nn.MSELoss(), batch, guesses=True) is not None


@pytest.mark.parametrize("command", ["plan", "show"])
def test_a_large_model_that_asks_whether_a_mask_is_all_ones_is_planned_on_its_data(tmp_path, monkeypatch, command):
    (tmp_path / f"masked_{command}.py").write_text(OWN.replace("WIDTH", "16"))
    monkeypatch.syspath_prepend(tmp_path)
    own = ["--model", f"masked_{command}:build", "--data", f"masked_{command}:data", "--batch", "8"]
    found = CliRunner().invoke(app, [command, *own, "--layout", "dp2", "--json"])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    if command == "plan":
        assert said["num_parameters"] == 2**20 * 128 + 128 * 8 + 8


VECTORS = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5))

def data():
    return [(torch.arange(12.0) * number, torch.tensor(number % 5)) for number in range(64)]
"""


@pytest.mark.parametrize(
    "command", ["show --layout dp2", "plan --layout dp2 --cluster a100-80gb:1x2", "train --layout dp2 --steps 1"]
)
def test_a_batch_norm_of_vectors_is_tried_on_two_samples(command, tmp_path, monkeypatch):
    (tmp_path / "vectors.py").write_text(VECTORS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    line = f"{command} --model vectors:build --data vectors:data --batch 8"
    more = ["--out", "run", "--ranks", "threads"] if command.startswith("train") else []
    found = CliRunner().invoke(app, [*line.split(), *more])
    assert found.exit_code == 0, found.output
