"""Does a run of 20,000 steps hold more and more memory, descriptors or threads?

``train`` with a tiny model, checkpoints beside training and evaluations; its ranks are looked at from outside.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write_beside

LAYOUTS = sized(["dp2 tp2", "pp2/1f1b mb4 dp2/zero3"], ["dp2"])
FLAGS = ["--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=4", "--set", "dropout=0.1", "--seq", "16"]
FLAGS += ["--batch", "8", "--schedule", "constant", "--save-async"]
WARM_UP = 0.25
"""The share of the steps before which growth does not count: caches and allocators fill."""


def last_step(out):
    """The number of the last step in the metrics of a run."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] if lines and lines[-1].startswith(b"{") else 0


def held_by(process):
    """What a rank holds: bytes of its own, bytes that are resident, descriptors and threads."""
    memory = process.memory_full_info()
    return {"own_bytes": memory.uss, "resident_bytes": memory.rss, "descriptors": process.num_fds(),
            "threads": process.num_threads()}  # fmt: skip


def soak(layout, steps, every, seconds, base):
    """The rows of one run: each so many steps, what each rank holds."""
    out, folder, rows = base / "run", base / "tmp", []
    folder.mkdir()
    command = [sys.executable, "-m", "shardwright.cli", "train", "--layout", layout, *FLAGS, "--steps", str(steps)]
    command += ["--save-every", str(every), "--eval-every", str(every), "--eval-batches", "4", "--out", str(out)]
    end, environment = time.monotonic() + seconds, os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    with (base / "said").open("w") as said:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environment)
    ranks = []
    while process.poll() is None and time.monotonic() < end:
        step = last_step(out)
        if step >= every * (len(rows) + 1):
            try:
                ranks = ranks or [
                    psutil.Process(int(path.read_text()))
                    for path in sorted(folder.glob("shardwright-run-*/*.pid"), key=lambda path: int(path.stem))
                ]
                rows.append({"layout": layout, "step": step, "ranks": [held_by(rank) for rank in ranks]})
            except psutil.Error:  # the run ends
                break
            print(layout, step, " ".join(f"{each['own_bytes'] / 2**20:.1f}" for each in rows[-1]["ranks"]), flush=True)
        time.sleep(0.05)
    if process.poll() is None and time.monotonic() > end:
        process.terminate()
    if process.wait() and time.monotonic() < end:
        sys.exit((base / "said").read_text())
    return rows


def slope_of(rows, rank, key):
    """How much more a rank holds after each thousand steps, once it is warm: the slope of a straight line."""
    late = [row for row in rows if row["step"] >= WARM_UP * rows[-1]["step"]]
    steps = [row["step"] / 1000 for row in late]
    return (
        statistics.linear_regression(steps, [row["ranks"][rank][key] for row in late]).slope if len(late) > 1 else 0.0
    )


def summary_of(layout, rows):
    """What a run's ranks held: the growth of the rank that grew most, and of counts the first and the last."""
    ranks = range(len(rows[-1]["ranks"]))
    warm = next(row for row in rows if row["step"] >= WARM_UP * rows[-1]["step"])
    counts = {
        f"{key}_{name}": max(each[key] for each in row["ranks"])
        for key in ("descriptors", "threads") for name, row in (("warm", warm), ("end", rows[-1]))
    }  # fmt: skip
    growth = {f"{key}_per_1000": max(slope_of(rows, rank, key) for rank in ranks)
              for key in ("own_bytes", "resident_bytes")}  # fmt: skip
    return {"layout": layout, "steps": rows[-1]["step"], **growth, **counts,
            "own_bytes_end": max(each["own_bytes"] for each in rows[-1]["ranks"])}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two looks")
    parser.add_argument("--seconds", type=float, default=7200.0, help="end a run after so long")
    parser.add_argument("--layout", action="append", help="in place of both; repeat for more")
    options = options_of(parser, smallest={"steps": 60, "every": 10})
    facts, rows, table = machine(), [], []
    for layout in options.layout or LAYOUTS:
        with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as base:
            found = soak(layout, options.steps, options.every, options.seconds, Path(base))
        rows += found
        table.append(summary_of(layout, found))
        print("  ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
    write_beside(options, __file__, {"machine": facts, "table": table, "rows": rows})


if __name__ == "__main__":
    main()
