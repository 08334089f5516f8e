"""A profile of ranks that are processes: each writes its trace, and the first merges them into one."""

from __future__ import annotations

import json

import torch
from torch import nn

import shardwright as sw

PLAIN = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3))
BATCH = torch.ones(4, 4), torch.zeros(4, dtype=torch.int64)


def work(world, line, path):
    run = sw.parallelize(PLAIN, line, world)
    (part,) = run.shard([BATCH])
    with run.profile(path):
        run.step(part)


def test_traces_of_processes_become_one_on_one_clock(tmp_path):
    path = tmp_path / "trace.json"
    sw.launch(work, "pp2 mb2", "pp2 mb2", path, ranks="processes")
    events = json.loads(path.read_text())["traceEvents"]
    process = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert sorted(process.values()) == ["rank 0 pp0", "rank 1 pp1"]
    spans = {(process[e["pid"]], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X"}
    # the second stage's forward begins after the first's ends, and the first's backward after the second's ends
    assert spans["rank 1 pp1", "action 1F0"][0] >= spans["rank 0 pp0", "action 0F0"][1] - 1
    assert spans["rank 0 pp0", "action 0B1"][0] >= spans["rank 1 pp1", "action 1B1"][0]
    assert ("rank 0 pp0", "layer 0: Linear") in spans
    assert ("rank 1 pp1", "layer 2: Linear") in spans
    assert list(tmp_path.iterdir()) == [path]
