"""The layout of GPT-3: 64 stages, 6 model copies and 8 tensor-parallel ranks, planned and drawn, and run scaled down.

``python examples/gpt3_layout/run.py whole`` plans the layout on the 3,072 accelerators of ``cluster.toml``, without any
of them, and draws its ranks and its schedule. ``... small`` runs the same shape on 16 ranks of this machine, and prints
what was predicted beside what was measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from shardwright.comm.limits import Ranks
from shardwright.cost.cluster import Cluster
from shardwright.ledger import measure_memory, predict_memory
from shardwright.models import GPT, CrossEntropy, GPTConfig
from shardwright.parallelize.auto import tokens_of
from shardwright.parallelize.planning import StepTraffic, job_for, make_plan
from shardwright.plan.schedule import Action, Schedule
from shardwright.planner.price import Pricing
from shardwright.report.description import describe, timeline_of
from shardwright.report.pictures import draw_layout
from shardwright.report.timelines import write_timelines
from shardwright.runtime.executor import Events
from shardwright.runtime.timeline import Timeline
from shardwright.strategies.pipeline.simulate import ChunkTimes, simulate

HERE = Path(__file__).parent
GPT3 = {"num_layers": 96, "width": 12288, "num_heads": 96, "vocabulary": 51200, "max_tokens": 2048}
"""The model of 175 billion parameters; its global batch is 1,536 samples, 3.1 million tokens."""
WHOLE = "pp64/1f1b/scatter mb256 dp6/zero1 tp8 bf16"
COPIES = "pp64/1f1b mb256 dp6/zero1 tp8 bf16"  # each tensor-parallel rank sends the whole activation

SMALL = ("pp4/1f1b/scatter mb8 dp2/zero1 tp2", "pp2/1f1b/scatter mb4 dp2/zero1 tp2x2/2d")
"""The same shape on 16 ranks, with tensor parallelism over one axis and over a grid. The first is the anchor."""
SIZES = {"num_layers": 8, "width": 64, "num_heads": 4, "vocabulary": 256, "max_tokens": 32}
TINY = {"num_layers": 4, "width": 16, "num_heads": 4, "vocabulary": 32, "max_tokens": 8}
BATCH, ASIDE = 32, ("core", "loss", "clip")


# ---- the whole layout, of which nothing runs


def command(name: str, *words: str) -> dict[str, float]:
    """Runs a command of shardwright, its output into a file of the current folder; returns what it took."""
    line = [sys.executable, "-m", "shardwright.cli", *words]
    print("$ shardwright " + " ".join(f"'{word}'" if " " in word else word for word in words), flush=True)
    with open(name, "w") as out:
        process = subprocess.Popen(line, stdout=out, env={"SHARDWRIGHT_DEVICE": "cpu", **os.environ})
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if status:
        raise SystemExit(f"{name}: the command failed")
    found = {"cpu_s": used.ru_utime + used.ru_stime, "peak_MB": used.ru_maxrss * 1024 / 1e6}
    print(f"  {name}: {found['cpu_s']:.1f} CPU s, {found['peak_MB']:.0f} MB at the peak", flush=True)
    return found


def whole(out: Path, sizes: Mapping[str, int] = GPT3, batch: int = 1536, lines: Sequence[str] = (COPIES, WHOLE),
          cluster: str = str(HERE / "cluster.toml"), shows: bool = False) -> None:  # fmt: skip
    """Plans the layout with and without ``scatter``, and draws its ranks and its schedule, into the folder ``out``.

    With ``shows``, ``shardwright show --json`` also writes what each rank holds and sends.
    """
    out.mkdir(parents=True, exist_ok=True)
    words = [word for name, size in sizes.items() for word in ("--set", f"{name}={size}")]
    model = ["--model", "gpt", *words, "--batch", str(batch), "--seq", str(sizes["max_tokens"])]
    took = {}
    for name, line in zip(("copies", "scatter"), lines, strict=True):
        took[name] = command(f"{out}/{name}.json", "plan", *model, "--cluster", cluster, "--layout", line, "--json")
        (price,) = json.loads((out / f"{name}.json").read_text())["layouts"]
        parts = sorted(price["waterfall"].items(), key=lambda each: -each[1])[:5]
        print(f"  {price['step_s']:.2f} s a step, {price['memory_bytes'] / 1e9:.1f} GB; seconds: "
              + ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts))  # fmt: skip
    begun = time.process_time()
    draw(out, sizes, batch, lines[-1], cluster)
    took["pictures"] = {"cpu_s": time.process_time() - begun}
    print(f"drawn: {out}/ranks.png and {out}/schedule.png, in {took['pictures']['cpu_s']:.1f} CPU s", flush=True)
    if shows:
        took["show"] = command(f"{out}/show.json", "show", *model, "--layout", lines[-1], "--json")
    (out / "took.json").write_text(json.dumps(took, indent=1) + "\n")


def draw(out: Path, sizes: Mapping[str, int], batch: int, line: str, cluster: str) -> None:
    """Draws the grid of ranks of a layout, and its schedule at the seconds that are predicted for the cluster."""
    layout = sw.Layout.parse(line)
    inputs = torch.empty(batch, sizes["max_tokens"], dtype=torch.long, device="meta")
    job = job_for(plain(sizes), CrossEntropy(), layout, inputs, tokens_of(inputs, layout))
    price = sw.plan_layouts(job.model, cluster, (inputs, inputs), layout=layout).best
    timeline = Pricing(Cluster.parse(cluster)).timeline(layout, price.records)
    write_timelines(out / "schedule.png", [timeline], line)
    draw_layout(describe(job, layout), out / "ranks.png")


# ---- the same shape, run


def data(sizes: Mapping[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (BATCH, sizes["max_tokens"] + 1)
    tokens = torch.randint(sizes["vocabulary"], shape, generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def plain(sizes: Mapping[str, int]) -> GPT:
    with sw.without_values():
        return GPT(GPTConfig(**sizes))


def run_steps(world: sw.World, line: str, sizes: Mapping[str, int], steps: int) -> dict[str, Any]:
    """Trains on one rank: its losses, bytes sent by axis, seconds of steps and of actions, and peak memory."""
    run = sw.parallelize(plain(sizes), line, world, example=data(sizes)[0])
    optimizer, (batch,) = run.optimizer(torch.optim.AdamW, lr=1e-3), run.shard([data(sizes)])
    losses, seconds, sent = [], [], Counter[str]()
    for _ in range(2 + steps):
        run.axes["world"].for_strategy("core").barrier()
        begun = time.perf_counter()
        with world.recorder.recording() as records:
            losses.append(run.step(batch).item())
        optimizer.step()
        run.axes["world"].for_strategy("core").barrier()
        seconds.append(time.perf_counter() - begun)
    for record in records:
        if record.source not in ASIDE:
            sent[record.axis] += record.num_bytes
    spent: dict[tuple[str, int], list[float]] = {}

    @contextmanager
    def clocked(action: Action) -> Iterator[None]:
        begun = time.thread_time()  # CPU seconds: ranks that share a core stop each other's clocks on the wall
        yield
        spent.setdefault((action.kind, action.chunk), []).append(time.thread_time() - begun)

    with run.observed(Events(during=clocked)):
        run.step(batch)
    optimizer.step()
    actions = {key: statistics.median(each) for key, each in spent.items()}
    held = measure_memory(run, batch, optimizer)
    found = {"losses": losses, "seconds": seconds[1:], "sent": dict(sent), "actions": actions}
    return {**found, "memory_bytes": held.peak_bytes - held.at_peak()["shared"]}


def predicted(line: str, sizes: Mapping[str, int], ranks: Ranks) -> dict[str, Any]:
    """The bytes that each rank sends by axis, and the peak memory of the first rank of each stage, without a run."""
    layout, inputs = sw.Layout.parse(line), data(sizes)[0]
    job = job_for(plain(sizes), CrossEntropy(), layout, inputs, tokens_of(inputs, layout))
    plan, strategies = make_plan(job, layout)
    traffic, sent, memory = StepTraffic(job, plan, strategies, inputs), [], {}
    for rank in range(layout.num_ranks):
        by_axis = Counter[str]()
        for each in (each for calls in traffic.at(plan.mesh.coord(rank)).values() for each in calls):
            by_axis[each.axis] += each.num_bytes * each.times
        sent.append(dict(by_axis))
        coord = plan.mesh.coord(rank)
        if not any(index for axis, index in coord.items() if axis != "pp"):
            account = predict_memory(job, layout, rank, data(sizes), ranks=ranks)
            memory[rank] = account.peak_bytes - account.at_peak()["shared"]
    timeline = timeline_of(describe(job, layout))
    assert timeline is not None, "the layout has stages"
    return {"sent": sent, "memory_bytes": memory, "bubble": timeline.bubble, "schedule": plan.schedule}


def as_measured(schedule: Schedule | None, found: Sequence[Mapping[str, Any]]) -> Timeline:
    """A schedule whose actions take the CPU seconds that ranks have measured, as on ranks with a core each."""
    assert schedule is not None, "the layout has stages"
    taken = {}
    for key in {key for rank in found for key in rank["actions"]}:
        taken[key] = statistics.median(rank["actions"][key] for rank in found if key in rank["actions"])
    chunks = range(schedule.num_chunks)
    forward, backward = (tuple(taken[kind, chunk] for chunk in chunks) for kind in "FB")
    return simulate(schedule, ChunkTimes(forward, backward, (0.0,) * len(chunks)))


def small(ranks: Ranks, sizes: Mapping[str, int] = SIZES, steps: int = 5) -> list[dict[str, Any]]:
    """Runs the two small layouts, and returns for each what was predicted and what was measured."""
    rows: list[dict[str, Any]] = []
    anchors: dict[str, float] = {}
    for line in SMALL:
        price = sw.plan_layouts(plain(sizes), str(HERE / "box.toml"), data(sizes), layout=line, anchors=anchors).best
        said, found = predicted(line, sizes, ranks), sw.launch(run_steps, 16, line, sizes, steps, ranks=ranks)
        seconds = [max(each) for each in zip(*(rank["seconds"] for rank in found), strict=True)]
        timeline = as_measured(said["schedule"], found)
        rows.append({
            "layout": line, "losses": found[0]["losses"],
            "bytes": {"predicted": said["sent"], "measured": [rank["sent"] for rank in found]},
            "memory": {str(r): {"predicted": m, "measured": found[r]["memory_bytes"]}
                       for r, m in said["memory_bytes"].items()},
            "bubble": {"predicted": said["bubble"], "measured": timeline.bubble},
            "step_s": {"predicted": price.step_s if anchors else None, "measured": timeline.makespan_s},
            "clock_s": seconds,
        })  # fmt: skip
        anchors[line] = timeline.makespan_s
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What was predicted beside what was measured, as lines of text."""
    lines = []
    for row in rows:
        both, memory = row["bytes"], row["memory"]
        equal = sum(a == b for a, b in zip(both["predicted"], both["measured"], strict=True))
        total = Counter[str]()
        for each in both["measured"]:
            total.update(each)
        off = [each["predicted"] / each["measured"] - 1 for each in memory.values()]
        said = row["step_s"]["predicted"]
        lines += [
            row["layout"],
            f"  bytes    equal on {equal} of {len(both['measured'])} ranks; of all ranks "
            + ", ".join(f"{axis} {size:,}" for axis, size in sorted(total.items())),
            "  memory   " + ", ".join(f"{m['predicted']:,} ({m['measured']:,})" for m in memory.values())
            + f" bytes on each stage, predicted (measured): {min(off):+.2%} to {max(off):+.2%}",
            f"  bubble   {row['bubble']['predicted']:.1%} predicted, {row['bubble']['measured']:.1%} as measured",
            f"  seconds  {row['step_s']['measured']:.3f} of measured actions"
            + (", the anchor" if said is None else f", {said:.3f} predicted from the anchor")
            + f"; {statistics.median(row['clock_s']):.3f} by the clock of these shared cores",
        ]  # fmt: skip
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("whole", "small"))
    parser.add_argument("--out", type=Path, default=Path("runs/gpt3_layout"), help="where files are written")
    parser.add_argument("--ranks", choices=("processes", "threads"), default="processes")
    parser.add_argument("--show", action="store_true", help="whole: write what each rank holds and sends, too")
    parser.add_argument("--tiny", action="store_true", help="a smaller model and fewer steps")
    options = parser.parse_args()
    if options.part == "whole":
        whole(options.out, shows=options.show)
        return
    rows = small(options.ranks, *((TINY, 1) if options.tiny else ()))
    print(table(rows))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "small.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
