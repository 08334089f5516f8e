"""Ranks that make different calls of the library, as under `if world.rank == 0`, get an error that names the calls."""

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError


@pytest.mark.parametrize(
    ("first", "second"),
    [("sw.save", "sw.save_weights"), ("run.state_dict", "sw.save"), ("run.load_state_dict", "sw.load")],
)
def test_an_error_names_the_call_of_each_rank(tmp_path, first, second):
    model = nn.Linear(4, 3)

    def work(world):
        run = sw.parallelize(model, "dp2", world)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        calls = {
            "sw.save": lambda: sw.save(tmp_path, run, optimizer),
            "sw.save_weights": lambda: sw.save_weights(run, tmp_path / "w.safetensors"),
            "sw.load": lambda: sw.load(tmp_path, run, optimizer),
            "run.state_dict": run.state_dict,
            "run.load_state_dict": lambda: run.load_state_dict(model.state_dict()),
        }
        with pytest.raises(PlanError, match="ranks make different calls") as failure:
            calls[second if world.rank else first]()
        return str(failure.value)

    texts = sw.launch(work, 2, ranks="threads")
    assert texts[0] == texts[1]
    assert f"rank 0: {first}\n" in texts[0]
    assert f"rank 1: {second}\n" in texts[0]
    assert f"{first}: call it on every rank" in texts[0]
