"""Every operator against the same on one device, forward and backward, over layouts of 1-D 2, 3, 4 ranks and 2x2."""

import argparse
import os
import sys
from pathlib import Path

import shardwright as sw

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from cases.operators import sweep
from cases.rarer_operators import EVERY


def swept(world, most, nth):
    rows = []
    for operator in EVERY[::nth]:
        tried, wrong, refused = sweep(world, operator, most)
        rows.append({"name": operator.name, "tried": tried, "wrong": wrong, "refused": len(refused)})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--most", type=int, default=400, help="layouts of each placement; 400 is all of most operators")
    parser.add_argument("--nth", type=int, default=1, help="takes each nth operator only")
    options = options_of(parser, smallest={"most": 1, "nth": 20})
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    facts = machine()
    found = sw.launch(swept, 4, options.most, options.nth)
    rows = found[0]
    for row, *others in zip(*found, strict=True):  # what one rank finds wrong with its copy is wrong
        row["wrong"] = sorted({each for other in (row, *others) for each in other["wrong"]})
    for row in rows:
        if row["wrong"] or row["refused"]:
            print(row)
    print(sum(row["tried"] for row in rows), "layouts,", sum(len(row["wrong"]) for row in rows), "wrong")
    write(options, __file__, {"machine": facts, "most": options.most, "operators": rows})


if __name__ == "__main__":
    main()
