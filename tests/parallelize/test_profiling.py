"""Profiles of steps: named ranges of layers, calls and actions, one trace of all ranks, and nothing left behind."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.errors import PlanError
from shardwright.parallelize.profiling import merged

BATCH = torch.randn(4, 4), torch.zeros(4, dtype=torch.int64)


PLAIN = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))


def hooks_of(run):
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in run.model.modules())


def profile(world, line, path):
    run = sw.parallelize(PLAIN, line, world)
    before = hooks_of(run)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    (part,) = run.shard([BATCH])
    run.step(part, update=optimizer)
    with run.profile(path):
        run.step(part, update=optimizer)
    changed = [kind for channel in world.recorder.channels for kind in vars(channel) if kind.startswith("all_")]
    return hooks_of(run) == before, changed, "take" in vars(run._step)


def ranges(path):
    """The names of ranges by the name of their process."""
    events = json.loads(path.read_text())["traceEvents"]
    process = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    found = {}
    for event in events:
        if event.get("cat") == "user_annotation":
            found.setdefault(process[event["pid"]], []).append((event["ts"], event["dur"], event["name"]))
    return found, events


def check(found, num_ranks):
    ranks = {name: each for name, each in found.items() if name.startswith("rank")}
    assert len(ranks) == num_ranks
    for spans in ranks.values():
        names = [name for *_, name in spans]
        assert names.count("step 1") == 1
        for kind in ("layer ", "call ", "wait ", "action "):
            assert any(name.startswith(kind) for name in names), kind
        step = next(span for span in spans if span[2] == "step 1")  # what a step does lies inside of its range
        inside = [span for span in spans if span[2].startswith(("layer ", "action "))]
        assert all(step[0] <= at and at + lasts <= step[0] + step[1] + 1 for at, lasts, _ in inside)
    return ranks


@pytest.mark.parametrize("line", ["dp2 tp2", "pp2 mb2"])
def test_one_trace_has_a_process_for_each_rank_with_named_ranges_and_no_hook_stays(tmp_path, line):
    path = tmp_path / "trace.json"
    left = sw.launch(profile, line, line, path, ranks="threads")
    assert left == [(True, [], False)] * len(left)
    found, events = ranges(path)
    names = check(found, sw.Layout.parse(line).num_ranks)
    assert {name.split(maxsplit=2)[2] for name in names} == (
        {"pp0", "pp1"} if "pp" in line else {"dp0 tp0", "dp0 tp1", "dp1 tp0", "dp1 tp1"}
    )
    assert any(event["name"].startswith("aten::") for event in events)
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_goes_into_a_folder_that_exists(tmp_path):
    with pytest.raises(PlanError, match="make the folder"):
        sw.launch(profile, "dp2", "dp2", tmp_path / "none" / "trace.json", ranks="threads")


def test_clocks_of_other_nodes_are_set_so_that_ranks_begin_together():
    def part(rank, at, base=0):
        event = {"ph": "X", "pid": 9, "tid": 9, "name": f"rank {rank}", "ts": at, "dur": 1.0, "cat": "user_annotation"}
        return {"traceEvents": [event], "baseTimeNanoseconds": base}

    parts = {0: part(0, 10.0), 1: part(1, 11.0, base=2000), 2: part(2, 900.0), 3: part(3, 905.0)}
    found = merged(parts, {rank: str(rank) for rank in parts}, shared=False, nodes=(0, 0, 1, 1))
    starts = {each["pid"] // 1000: each["ts"] for each in found["traceEvents"] if each["ph"] == "X"}
    assert starts == {0: 10.0, 1: 13.0, 2: 10.0, 3: 15.0}
