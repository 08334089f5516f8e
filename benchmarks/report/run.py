"""The report page of a long run on many ranks: 10,000 steps, 256 ranks. How large it is, and how fast it is shown.

The metrics are made up; they have the form and the size that a run of that length writes. The page is written by
``shardwright report`` and loaded in Chromium, if that and ``.venv-browser`` are here (``make test-browser`` makes it).
"""

import argparse
import json
import math
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = sized(10_000, 100)
LAYOUTS = sized(["pp4/1f1b mb8 dp8/zero1 tp8", "dp32 tp8"], ["dp2 tp8", "dp4 tp4"])
NUM_RANKS = sized(256, 16)
BROWSER_PYTHON = ROOT / ".venv-browser" / "bin" / "python"


def make_run(out: Path) -> None:
    """Writes a run folder of two parts, whose rows have made-up metrics of all ranks."""
    from shardwright.train.config import TrainConfig
    from shardwright.train.run_file import RunPart, parts_of, write_run

    out.mkdir(parents=True)
    earlier = []
    for place, line in enumerate(LAYOUTS):
        config = TrainConfig(layout=line, batch=256, steps=NUM_STEPS, settings={"width": 64, "num_heads": 8})
        write_run(out, RunPart(config, place * NUM_STEPS // 2, NUM_RANKS, {}, f"shardwright train --layout '{line}'"),
                  {}, earlier)  # fmt: skip
        earlier = parts_of(out)
    draw, held = random.Random(0), [40 * 2**30 + 2**27 * (rank % 8) for rank in range(NUM_RANKS)]
    with (out / "metrics.jsonl").open("w") as file:
        for step in range(1, NUM_STEPS + 1):
            now = [each + draw.randrange(2**28) for each in held]
            row = {
                "step": step, "loss": 2 + 9 * math.exp(-step / 900) + draw.gauss(0, 0.05), "lr": 1e-3, "step_ms": 412.0,
                "grad_norm": abs(draw.gauss(0.8, 0.2)), "tokens_per_s": 1e6 + draw.gauss(0, 2e4), "time_s": step * 0.4,
                "memory_bytes": [each + 2**28 for each in held], "held_bytes": now,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")


def written(out: Path) -> dict:
    """Writes the page with the command; returns CPU seconds, of which Python's start is a part, and bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    command = [sys.executable, "-m", "shardwright.cli", "report", str(out), "--json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "metrics_bytes": (out / "metrics.jsonl").stat().st_size,
        "page_bytes": (out / "report.html").stat().st_size,
        "write_cpu_s": cpu_s,
        "write_s": time.perf_counter() - start,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    options = options_of(parser, smallest={})
    facts, left_out = machine(), {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        make_run(out)
        row = {"name": f"{NUM_STEPS:,} steps, {NUM_RANKS} ranks", **written(out)}
        command = [str(BROWSER_PYTHON), str(Path(__file__).with_name("in_chromium.py")), str(out / "report.html")]
        found = None
        if BROWSER_PYTHON.exists():
            found = subprocess.run(command, capture_output=True, text=True, check=False)
        if found is None:
            left_out["in Chromium"] = "there is no .venv-browser: make test-browser makes it"
        elif found.returncode:
            left_out["in Chromium"] = (found.stderr.strip().splitlines() or ["failed"])[-1]
        else:
            row |= json.loads(found.stdout.splitlines()[-1])
    for key, value in row.items():
        if key != "loads":
            print(f"{key:20} {value if isinstance(value, str) else f'{value:,.1f}'}")
    write(options, __file__, {"machine": facts, "table": [row], "left_out": left_out})


if __name__ == "__main__":
    main()
