"""Bubbles of pipeline schedules in the tables of the zero-bubble papers, computed by the simulator that plans.

The seconds of a forward, of both parts of a backward and of a transfer are not published with them, so three ratios are
fitted for each model, to its column with the fewest microbatches; the other columns are held out. Nothing is timed. The
rows are not part of this repository: ``--runs FILE`` names them; without it, ratios are found again in tables of which
they are known.
"""

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from math import exp, log
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from benchmarks.planner.fitting import simplex

from shardwright.strategies.pipeline.schedules import build
from shardwright.strategies.pipeline.schedules.auto import search
from shardwright.strategies.pipeline.simulate import ChunkMemory, ChunkTimes, ends_of

SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-V": "zb-v"}
SEARCHED = {"ZB-1p": 1, "ZB-2p": 2}
"""Schedules that the paper searches for, with the memory of so many microbatches for each stage."""

LAYERS = {"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64}
"""The layers of each model, of which the paper counts the embedding and the head as two."""

START = {"input": 1.0, "weight": 0.9, "transfer": 0.05}
"""Where a fit begins: both parts of a backward and a transfer, as multiples of a stage's forward."""


@cache
def scheduled(name, stages, microbatches, chunks):
    return build(name, stages, microbatches, chunks)


@dataclass(frozen=True)
class Step:
    """A simulated step: when each stage begins and ends, and how long one works, in forwards of a stage."""

    starts: list[float]
    ends: tuple[float, ...]
    works: float

    @property
    def bubble(self):
        """The share of its time that the stage which takes longest waits, from its first action to its last.

        The papers count so, since an optimizer's step need not wait for other stages: 1 - m (F + I + W) / cost.
        """
        return 1 - self.works / max(end - start for start, end in zip(self.starts, self.ends, strict=True))

    @property
    def whole_bubble(self):
        """The share of time that a stage waits, from the first action of all stages to the last."""
        return 1 - self.works / max(self.ends)

    @property
    def least_whole_bubble(self):
        """The least of one chunk a stage: the last begins when the first microbatch arrives, and never waits."""
        return 1 - self.works / (self.starts[-1] + self.works)


def simulated(ratios, schedule, model, stages, microbatches):
    input_s, weight_s, transfer_s = ratios
    chunks = {"1F1B-I": LAYERS[model] // stages, "ZB-V": 2}.get(schedule, 1)
    times = ChunkTimes.equal(stages * chunks, 1 / chunks, input_s / chunks, weight_s / chunks, transfer_s)
    if schedule in SEARCHED:
        held, limit = ChunkMemory.equal(stages), SEARCHED[schedule] * stages
        found = search(stages, microbatches, times, held, limit, max_chunks_per_stage=1)[0]
    else:
        found = scheduled(SCHEDULES[schedule], stages, microbatches, chunks)
    starts = [stage * (1 / chunks + transfer_s) for stage in range(stages)]  # a stage begins with its first forward
    return Step(starts, ends_of(found, times)[0].ends_s, microbatches * (1 + input_s + weight_s))


def bubbles(rows):
    """The bubbles of each model, beside the published ones; ``fitted`` says which ones chose the ratios."""
    tables = {}
    for row in rows:
        tables.setdefault((row["dataset"], row["model"]["name"], row["parallel"]["pp"]), []).append(row)
    found = []
    for (dataset, model, stages), table in tables.items():
        fewest = min(row["parallel"]["num_microbatches"] for row in table)
        training = [
            row for row in table
            if row["parallel"]["num_microbatches"] == fewest and row["parallel"]["schedule"] not in SEARCHED
        ]  # fmt: skip

        def step_of(point, row, model=model, stages=stages):
            ratios = [exp(min(each, 3.0)) for each in point]
            parallel = row["parallel"]
            return simulated(ratios, parallel["schedule"], model, stages, parallel["num_microbatches"])

        def error(point, training=training, step_of=step_of):
            return statistics.mean(abs(step_of(point, row).bubble - row["expected"]["bubble_rate"]) for row in training)

        best = simplex(error, [log(each) for each in START.values()], steps=150)
        ratios = dict(zip(START, map(exp, best), strict=True))
        for row in table:
            step = step_of(best, row)
            found.append({
                "table": dataset, "model": model, "stages": stages, "schedule": row["parallel"]["schedule"],
                "microbatches": row["parallel"]["num_microbatches"], "published": row["expected"]["bubble_rate"],
                "computed": step.bubble, "whole_step": step.whole_bubble, "least_whole_step": step.least_whole_bubble,
                "fitted": any(row is each for each in training), "ratios": ratios,
            })  # fmt: skip
        print(dataset, model, stages, ratios, flush=True)
    return found


def summary(found):
    """How far bubbles are off, in points: of columns that were fitted, held out, and of schedules that are searched."""
    rows = []
    for said, chosen in (
        ("fitted", [each for each in found if each["fitted"]]),
        ("held out", [each for each in found if not each["fitted"] and each["schedule"] not in SEARCHED]),
        *((name, [each for each in found if each["schedule"] == name]) for name in SEARCHED),
    ):
        off = [100 * abs(each["computed"] - each["published"]) for each in chosen]
        if off:
            rows.append({"what": said, "bubbles": len(off), "mean": statistics.mean(off), "worst": max(off)})
    return rows


def made():
    """A table of which the ratios are known: 1.5, 0.8 and 0.04."""
    rows = []
    for schedule in (*SCHEDULES, *SEARCHED):
        for microbatches in (8, 12):
            rate = simulated((1.5, 0.8, 0.04), schedule, "1.5B", 4, microbatches).bubble
            rows.append({
                "dataset": "made", "model": {"name": "1.5B"}, "expected": {"bubble_rate": rate},
                "parallel": {"pp": 4, "num_microbatches": microbatches, "schedule": schedule},
            })  # fmt: skip
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="a JSON file with published tables, under the key rows")
    options = options_of(parser, {"runs": None})
    rows = made()
    if options.runs is not None:
        rows = [row for row in json.loads(options.runs.read_text())["rows"] if row["dataset"].startswith("zero_bubble")]
    found = bubbles(rows)
    table = summary(found)
    print(json.dumps(table, indent=1))
    write(
        options, __file__, {"machine": machine(), "published": options.runs is not None, "table": table, "rows": found}
    )


if __name__ == "__main__":
    main()
