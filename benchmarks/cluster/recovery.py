"""How long after a node is lost does a run on two nodes make its next step, beside its first start?

Nodes are network namespaces. The node's processes are killed, and the run is started at once on a third node, or on the
same node again; torchrun brings the ranks together again, and they go on from the newest checkpoint.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write_beside
from benchmarks.nodes import ENVIRONMENT, nodes, why_not

from shardwright.train.progress import read_metrics

MOST_S = 300
CAME = sized(("another", "the same"), ("another",))
TIMES = ("start_s", "recovery_s", "beyond_s")
FLAGS = ["--set", "num_layers=1", "--set", "width=16", "--set", "num_heads=4", "--seq", "16", "--batch", "4"]
FLAGS += ["--schedule", "constant", "--steps", "100000", "--save-every", "5"]


@contextmanager
def ranks_of(node, out):
    """Two ranks of the run on a node, which end with the block."""
    train = ["--module", "shardwright.cli", "train", "--layout", "dp2 tp2", *FLAGS, "--out", str(out)]
    with (out.parent / f"said{node.number}").open("w") as said:
        process = subprocess.Popen(node.torchrun(2, 2, *train, restarts=3), start_new_session=True, stdout=said,
                                   stderr=said, env=os.environ | ENVIRONMENT)  # fmt: skip
    try:
        yield process
    finally:
        kill(process)


def kill(process):
    """Ends torchrun on a node and its ranks, as the loss of the node does."""
    if process.poll() is None:
        for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            each.kill()
    process.wait()


def seconds_until(holds, start_s):
    """The seconds from a time until something holds."""
    while not holds():
        if time.time() > start_s + MOST_S:
            sys.exit(f"no step in {MOST_S} s")
        time.sleep(0.02)
    return time.time() - start_s


def goes_on(out, after_s):
    """Whether an attempt that began after that time has made a step; it cuts older rows off at once."""
    begun_s = (out / "run.json").stat().st_mtime
    return begun_s > after_s and (out / "metrics.jsonl").stat().st_mtime > begun_s + 0.2


def lose_a_node(out, came):
    """One run that loses a node: the seconds of its first start, and from the loss to the next step.

    ``came`` is the node that then comes: "another" or "the same".
    """
    with nodes(3) as (head, lost, other), ranks_of(head, out):
        start_s = time.time()
        with ranks_of(lost, out) as process:
            first_s = seconds_until(lambda: read_metrics(out), start_s)
            seconds_until(lambda: len(read_metrics(out)) >= 12, time.time())
            lost_s = time.time()
            kill(process)
        with ranks_of(other if came == "another" else lost, out):
            recovered_s = seconds_until(lambda: goes_on(out, lost_s), lost_s)
    return {"came": came, "start_s": first_s, "recovery_s": recovered_s, "beyond_s": recovered_s - first_s}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=5)
    options = options_of(parser, smallest={"losses": 1})
    facts, rows, left_out = machine(), [], {}
    if reason := why_not():
        print(f"left out: {reason}")
        options.losses, left_out = 0, {"cluster/recovery": reason}
    for came in CAME * options.losses:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(lose_a_node(Path(folder) / "run", came))
        print(came, *(f"{key} {rows[-1][key]:.1f}" for key in TIMES), sep="  ", flush=True)
    table = []
    for came in sorted({row["came"] for row in rows}):
        of = [row for row in rows if row["came"] == came]
        medians = {key: statistics.median(row[key] for row in of) for key in TIMES}
        table.append({"came": came, "losses": len(of), **medians, "beyond_s_max": max(row["beyond_s"] for row in of)})
    write_beside(options, __file__, {"machine": facts, "table": table, "left_out": left_out, "rows": rows})


if __name__ == "__main__":
    main()
