"""Does a run under ``torchrun --max-restarts`` recover every time that a rank is killed?

One run, killed again and again: a random rank each time. It must go on from its newest checkpoint, and at the end its
losses must be those of a run that nothing disturbed.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write_beside

from shardwright.checkpoint.manifest import steps_in
from shardwright.train.config import TrainConfig
from shardwright.train.loop import train
from shardwright.train.progress import read_metrics

NUM_RANKS, TOLERANCE, MOST_S = 2, 1e-4, 300
TINY = {"settings": {"num_layers": 1, "width": 16, "num_heads": 4, "dropout": 0.1}, "seq": 16, "batch": 5}
FLAGS = [word for key, value in TINY["settings"].items() for word in ("--set", f"{key}={value}")]
FLAGS += ["--seq", "16", "--batch", "5", "--schedule", "constant", "--steps", "100000", "--save-every", "2"]


def command(out, kills):
    """The run under torchrun, with enough restarts."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--monitor-interval", "0.1"]
    torchrun += ["--max-restarts", str(kills + 1), "--nproc-per-node", str(NUM_RANKS), "--module", "shardwright.cli"]
    return [*torchrun, "train", "--layout", f"dp{NUM_RANKS}", *FLAGS, "--out", str(out)]


def reaches(process, out, step, after_s):
    """Waits until an attempt that began after that time has made a step; returns whether it did."""
    end = time.monotonic() + MOST_S
    while time.monotonic() < end and process.poll() is None:
        begun = (out / "run.json").exists() and (out / "run.json").stat().st_mtime > after_s
        if begun and read_metrics(out)[step - 1 :] and (out / "metrics.jsonl").stat().st_mtime > begun_s(out):
            return True
        time.sleep(0.02)
    return False


def begun_s(out):
    """When the present attempt began to train; it cuts older rows off at once after that."""
    return (out / "run.json").stat().st_mtime + 0.2


def ranks_of(process):
    """The environments of the ranks that run now, by process."""
    found = {}
    for child in psutil.Process(process.pid).children():
        try:
            found[child] = child.environ()
        except psutil.Error:
            continue
    return {child: values for child, values in found.items() if "RANK" in values}


def kill_again_and_again(out, process, kills, seconds):
    """Yields one row for each kill."""
    end = time.monotonic() + seconds
    assert reaches(process, out, 3, 0.0), "the run did not start"
    for attempt in range(1, kills + 1):
        rank, newest = random.randrange(NUM_RANKS), int(steps_in(out / "checkpoints")[-1].name[5:])
        victims = [child for child, values in ranks_of(process).items() if values["RANK"] == str(rank)]
        start, killed_s = time.monotonic(), time.time()
        for victim in victims:
            victim.kill()
        recovered = reaches(process, out, newest + 2, killed_s)
        row = {"attempt": attempt, "rank": rank, "checkpoint": newest, "recovered": recovered}
        yield {**row, "recovery_s": time.monotonic() - start}
        if not recovered or time.monotonic() > end:
            return
        reaches(process, out, newest + 4, killed_s)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=7200.0, help="no kill after so long")
    options = options_of(parser, smallest={"kills": 1})
    os.environ["OMP_NUM_THREADS"] = "1"
    random.seed(0)
    facts, rows = machine(), []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with (Path(folder) / "said").open("w") as said:
            process = subprocess.Popen(command(out, options.kills), start_new_session=True, stdout=said, stderr=said)
        try:
            for row in kill_again_and_again(out, process, options.kills, options.seconds):
                rows.append(row)
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            process.terminate()
            process.wait(timeout=60)
        finally:
            for child in (*ranks_of(process), process) if process.poll() is None else ():
                child.kill()
        losses = [row["loss"] for row in read_metrics(out)]
        config = TrainConfig(steps=100000, schedule="constant", stop_at=len(losses), **TINY)
        train(config, Path(folder) / "plain", ranks="threads")
        plain = [row["loss"] for row in read_metrics(Path(folder) / "plain")]
    difference = max(abs(mine - one) / abs(one) for mine, one in zip(losses, plain, strict=True))
    table = [{
        "kills": len(rows), "recovered": sum(row["recovered"] for row in rows), "steps": len(losses),
        "divergence": difference, "recovery_s_median": statistics.median(row["recovery_s"] for row in rows),
        "recovery_s_max": max(row["recovery_s"] for row in rows),
    }]  # fmt: skip
    print(table[0])
    write_beside(options, __file__, {"machine": facts, "table": table, "rows": rows})
    if table[0]["recovered"] < len(rows) or difference > TOLERANCE:
        sys.exit("a restart did not recover")


if __name__ == "__main__":
    main()
