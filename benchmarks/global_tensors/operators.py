"""Every operator against the same on one device, forward and backward, over layouts of 1-D 2, 3, 4 ranks and 2x2."""

import argparse
import os
import sys
from pathlib import Path

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, write
from tests_dist.operators import sweep
from tests_dist.rarer_operators import EVERY


def swept(world, most):
    rows = []
    for operator in EVERY:
        tried, wrong, refused = sweep(world, operator, most)
        rows.append({"name": operator.name, "tried": tried, "wrong": wrong, "refused": len(refused)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=400, help="layouts of each placement; 400 is all of most operators")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    found = sw.launch(swept, 4, options.most)
    rows = found[0]
    for row, *others in zip(*found, strict=True):  # what one rank finds wrong with its copy is wrong
        row["wrong"] = sorted({each for other in (row, *others) for each in other["wrong"]})
    for row in rows:
        if row["wrong"] or row["refused"]:
            print(row)
    print(sum(row["tried"] for row in rows), "layouts,", sum(len(row["wrong"]) for row in rows), "wrong")
    if options.write:
        write(Path(__file__).parent, {"machine": facts, "most": options.most, "operators": rows})


if __name__ == "__main__":
    main()
