"""Start to first step on 4 ranks: a training run of one step against a bare torchrun script, in turn.

And what ``import shardwright`` takes in a script that has imported torch.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

HERE = Path(__file__).parent
NUM_RANKS, LAYOUT = sized((4, "dp2 tp2"), (2, "dp2"))
BARE = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_RANKS),
        str(HERE / "bare.py")]  # fmt: skip
WARM_UPS = sized(1, 0)
SETTINGS = ["--set", "num_layers=1", "--set", "width=32", "--seq", "32", "--batch", "4"]


def seconds_of(command):
    """From the start of the command until a rank says that it is done; how it ends is not counted."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline().startswith("done")
        found = time.perf_counter() - start
        process.stdout.read()
    assert process.returncode == 0
    return found


def import_of():
    """What a script waits for the library, torch being imported."""
    text = "import time, torch; start = time.perf_counter(); import shardwright; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout)


def first_step_of(out):
    """From the start of the command until the first row of metrics is on disk."""
    command = [sys.executable, "-m", "shardwright.cli", "train", "--layout", LAYOUT, "--steps", "1", "--out", out]
    start = time.perf_counter()
    process = subprocess.Popen([*command, *SETTINGS], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = Path(out) / "metrics.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        time.sleep(0.005)
    found = time.perf_counter() - start
    assert process.wait() == 0
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = options_of(parser, smallest={"rounds": 1}, ours={"rounds": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a person's second start compiles nothing
    facts, rows = machine(), []
    for number in range(options.rounds + WARM_UPS):
        folder = tempfile.mkdtemp()
        row = {
            "bare torchrun": seconds_of(BARE),
            "first step": first_step_of(folder),
            "import shardwright": import_of(),
        }
        shutil.rmtree(folder)
        if number >= WARM_UPS:
            rows.append(row)
    table = []
    for name in rows[0]:
        found = [row[name] for row in rows]
        ratios = [row[name] / row["bare torchrun"] for row in rows]
        table.append({"name": name, "s_median": statistics.median(found), "s_min": min(found), "s_max": max(found),
                      "ratio": statistics.median(ratios)})  # fmt: skip
        print(f"{name:18} {statistics.median(found):.2f} s  {statistics.median(ratios):.2f} x bare")
    write(options, __file__, {"machine": facts, "table": table, "rounds": rows})


if __name__ == "__main__":
    main()
