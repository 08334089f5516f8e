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
    spans = sorted((e["ts"], e["ts"] + e["dur"], process[e["pid"]], e["name"]) for e in events if e["ph"] == "X")

    def of(rank, name):
        return [(begin, end) for begin, end, at, each in spans if at.startswith(f"rank {rank} ") and each == name]

    # no message has come before it is sent: of two clocks that differ by more than an exchange takes, one is early
    for sender, receiver in ((0, 1), (1, 0)):
        for what in ("over pp (core)", "over pp (pipeline)"):
            sent, came = of(sender, f"call send {what}"), of(receiver, f"wait receive {what}")
            assert len(sent) == len(came) >= 2  # one for each microbatch at least
            assert all(end >= begin - 1 for (begin, _), (_, end) in zip(sent, came, strict=True))
    assert of(0, "layer 0: Linear")
    assert of(1, "layer 2: Linear")
    assert list(tmp_path.iterdir()) == [path]
