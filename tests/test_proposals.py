"""An error proposes a word in place of a mistyped one where a known word is alike, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright import Layout, Mesh, launch, parallelize, plan_layouts
from shardwright.cost.constants import Constants
from shardwright.cost.device import device_of
from shardwright.layout import Factor
from shardwright.models import load_named
from shardwright.models.mlp import MLPConfig
from shardwright.models.settings import read_config
from shardwright.strategies import choose
from shardwright.strategies.pipeline.schedules import build
from shardwright.train.loggers import check_loggers

TWO = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
BATCH = (torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
ALLOWED = "write one of those allowed"


def run_with(line, work=None, **options):
    def on_rank(world):
        run = parallelize(TWO, line, world, **options)
        return work(run) if work else run

    return launch(on_rank, line, ranks="threads")


PLACES = {
    "mesh": (lambda word: Mesh(**{word: 2}), "ppp", "write pp", ALLOWED),
    "axis of a factor": (lambda word: Factor(word, (2,)), "ppp", "pp4", ALLOWED),
    "precision": (lambda word: Layout((), precision=word), "bf61", "write bf16", ALLOWED),
    "option": (lambda word: choose(Layout.parse(f"dp2/{word} tp2")), "zero33", "write dp2/zero3 tp2", "write dp2 tp2"),
    "option with swapped letters": (
        lambda word: choose(Layout.parse(f"tp2/{word}")),
        "ps",
        "write tp2/sp",
        "write tp2",
    ),
    "option with a value": (
        lambda word: choose(Layout.parse(f"pp2/{word}:v2 mb4")),
        *("interleved", "write pp2/interleaved:v2 mb4", "write pp2 mb4"),
    ),
    "schedule": (
        lambda word: build(word, 2, 2),
        *("1f1bb", "write 1f1b, or file:PATH for a schedule of your own"),
        f"{ALLOWED}, or file:PATH for a schedule of your own",
    ),
    "logger": (lambda word: check_loggers([word]), "tensorbord", "write --logger tensorboard", ALLOWED),
    "factory": (
        lambda word: load_named(f"graphlib:{word}"),
        *("TopologicSorter", "write graphlib:TopologicalSorter"),
        "write graphlib: with one of CycleError, TopologicalSorter, or define it there",
    ),
    "value": (lambda word: read_config(MLPConfig, {"activation": word}), "gelo", "write activation=gelu", ALLOWED),
    "setting": (
        lambda word: read_config(MLPConfig, {word: 1}),
        *("dropuot", "write dropout", "leave out qqqqqqqq, or write one of those allowed"),
    ),
    "constant": (lambda word: Constants().with_values("guess", **{word: 1.0}), "launch", "write launch_s", ALLOWED),
    "key of a device": (lambda word: device_of("x", {word: 1.0}), "tpye", "write type", ALLOWED),
    "word left out of a search": (
        lambda word: plan_layouts(TWO, "a100-80gb:2", BATCH, without=[word]),
        *("zero33", "write zero3", ALLOWED),
    ),
    "recompute": (
        lambda word: run_with(f"recompute:{word}"),
        *("0.00", "write recompute:0.0", "leave it out: single; or write one of 0, 0.0, 1, 1.0"),
    ),
    "role": (lambda word: run_with("tp2", roles={"0.0": word}), "colum", "write 0.0 = column", ALLOWED),
    "name of a role": (
        lambda word: run_with("tp2", roles={word: "column"}),
        *("0.00", "write 0.0", "write one of 0, 0.0, 1, 1.0"),
    ),
    "cut": (lambda word: run_with(f"pp2/cut:{word}"), "1.00", "write 1.0", ALLOWED),
    "seconds": (
        lambda word: run_with("pp2", seconds={word: 1.0}),
        *("1.00", "write 1.0", "give what time_layers() returns"),
    ),
    "explain": (lambda word: run_with("single", lambda run: run.explain(word)), "1.00", "write 1.0", ALLOWED),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_word_is_proposed_where_one_is_alike_and_only_there(place):
    call, mistyped, proposed, otherwise = PLACES[place]
    for word, fix in ((mistyped, proposed), ("qqqqqqqq", otherwise)):
        with pytest.raises(ValueError, match="fix: ") as caught:
            call(word)
        assert caught.value.fix == fix
