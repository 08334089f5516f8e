"""What planning a model of a real size takes, without values: seconds, memory, and how even its stages are.

Each model is planned in a process of its own, forked from one that has loaded torch and transformers. ``plan`` is what
``parallelize`` does before it places values; ``show`` also prices what every rank holds and sends in a step.
"""

import argparse
import os
import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write
from benchmarks.real_sizes.models import MODELS, load
from torch import nn

from shardwright.layout import Layout
from shardwright.models import CrossEntropy
from shardwright.parallelize.planning import job_for, make_plan
from shardwright.plan.shares import shares
from shardwright.report.description import describe
from shardwright.report.show import show_text

LAYOUTS = ("tp4", "pp4/1f1b mb8", "dp2/zero3 tp4")
WORK = ("plan", "show")


def planned(job, layout, inputs):
    plan, _ = make_plan(job, layout)
    assert job.graph is not None, "there are inputs"
    _ = job.graph.draws  # as parallelize asks for
    found = {"cut": {each.factor: each.share for each in shares(plan)}}
    if plan.stages is not None:
        works = [cost.work for cost in plan.stages.costs]
        found["stages"] = [work / sum(works) for work in works]
    return found


def shown(job, layout, inputs):
    return {"lines": len(show_text(describe(job, layout, inputs=inputs)).splitlines())}


def measured(name, line, work):
    """One row: a model, a layout, the seconds and the memory that the work takes."""
    model, inputs = MODELS[name]()
    if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):  # each microbatch has its own statistics
        line = line.replace("mb8", "mb8/own-statistics")
    layout = Layout.parse(line)
    row = {"name": name, "layout": line, "work": work, "parameters": sum(p.numel() for p in model.parameters())}
    job, before = job_for(model, CrossEntropy(), layout, inputs), most_memory()
    start, cpu = time.perf_counter(), time.process_time()
    try:
        row |= (planned if work == "plan" else shown)(job, layout, inputs)
    except Exception as failure:  # it stays a row
        row["failed"] = f"{type(failure).__name__}: {str(failure).splitlines()[0]}"
    row |= {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    return row | {"mb": (most_memory() - before) / 1e6}


def most_memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def into(pipe, *case):
    pipe.send(measured(*case))


def apart(*case):
    """The row of a case, measured in a process of its own; one that takes longer than MOST_S has no numbers."""
    context = get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=into, args=(theirs, *case))
    process.start()
    theirs.close()
    row = ours.recv() if ours.poll(MOST_S) else dict(zip(("name", "layout", "work"), case, strict=True))
    process.kill()
    process.join()
    return row


MOST_S = 600


def text_of(row):
    if "s" not in row:
        return f"more than {MOST_S} s"
    found = f"{row['s']:6.2f} s, {row['cpu_s']:6.2f} CPU seconds, {row['mb']:4.0f} MB"
    found += "".join(f", {factor} cuts {share:.1%}" for factor, share in row.get("cut", {}).items())
    found += ", stages of " + ", ".join(f"{each:.1%}" for each in row["stages"]) if "stages" in row else ""
    return found + (f", failed: {row['failed']}" if "failed" in row else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--layouts", nargs="+", default=list(sized(LAYOUTS, LAYOUTS[:1])))
    options = options_of(parser, smallest={"models": ["our GPT, tiny"]})
    os.environ["OMP_NUM_THREADS"] = "1"
    facts, table = {**machine(), "transformers": load()}, []
    for name in options.models:
        for line in options.layouts:
            for work in WORK:
                table.append(apart(name, line, work))
                print(f"{name:14} {line:14} {work}  {text_of(table[-1])}", flush=True)
        write(options, __file__, {"machine": facts, "table": table})


if __name__ == "__main__":
    main()
