"""Weights go from files to a device and back to files, to the bit."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.layout import Layout
from weights.plain_models import evaluated, same, tied_gpt


def _there_and_back(world, line, plain, folder):
    run = sw.parallelize(plain, line, world)
    evaluated(run)
    sw.load_weights(run, folder / "given.pt")
    expected = tied_gpt(values=True).state_dict()
    assert same(run.state_dict(), expected)
    sw.save_weights(run, folder / "new", format="dcp")
    part = {name: tensor.clone() for name, tensor in run.state_dict(full=False).items()}
    assert any(tensor.device == world.device for tensor in part.values()) or run.offload is not None
    for state, options in [
        ({name: torch.zeros_like(tensor) for name, tensor in expected.items()}, {}),
        (expected if world.rank == 0 else {}, {"from_rank": 0}),
        ({name: torch.zeros_like(tensor) for name, tensor in part.items()}, {"full": False}),
        (part, {"full": False}),
    ]:
        run.load_state_dict(state, **options)
    return same(run.state_dict(), expected)


@pytest.mark.parametrize("line", ["dp2/zero3 bf16", "pp2 mb2 tp2", "dp2/zero1/offload"])
def test_weights_go_from_files_to_a_device_and_back(accelerator, tmp_path, line):
    torch.save(tied_gpt(values=True).state_dict(), tmp_path / "given.pt")
    plain = tied_gpt(values=False)
    options = {"ranks": "threads", "device": accelerator.device}
    found = sw.launch(_there_and_back, Layout.parse(line), line, plain, tmp_path, **options)
    assert all(found)
    sw.save_weights(tmp_path / "new", tmp_path / "new.pt")
    assert same(torch.load(tmp_path / "new.pt", weights_only=True), tied_gpt(values=True).state_dict())
