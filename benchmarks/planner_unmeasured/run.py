"""Steps on machines of which nothing was measured, predicted as ``plan`` does without anchors or a calibration.

The runs are of another runtime (FSDP, all of ZeRO-3) and of its own model. Each is priced as this library would run the
same sizes: rehearsed on the meta device, with the accelerator's profile and the default constants. No constant is
fitted. The rows are not part of this repository: ``--runs FILE`` names them; without it, a tiny model is predicted.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write

import shardwright as sw
from shardwright.models import GPT, GPTConfig

DEVICES = {"a100_40gb": "a100-40gb", "a100_80gb": "a100-80gb", "h100_80gb": "h100-80gb"}
MOST_TOKENS = 8192
"""The longest sequences that are replayed; longer ones take minutes each to rehearse."""

TINY = {
    "model": {"layers": 3, "hidden": 32, "heads": 2, "vocab": 100, "seq": 16},
    "hardware": {"gpu": "h100_80gb", "gpus": 2, "gpus_per_node": 2}, "train": {"global_batch": 8},
    "parallel": {"fsdp": 2, "grad_accum": 2, "micro_batch": 2, "recompute": "none", "precision": "bf16"},
    "derived": {"step_time_s": 0.01},
}  # fmt: skip


def predicted_s(row):
    """The predicted seconds of a published run's step, under the layout that is nearest to the run's."""
    model, parallel, hardware = row["model"], row["parallel"], row["hardware"]
    recompute = " recompute:full" * (parallel["recompute"] == "full")
    layout = f"mb{parallel['grad_accum']} dp{parallel['fsdp']}/zero3 bf16{recompute}"
    sizes = {"num_layers": model["layers"], "width": model["hidden"], "num_heads": model["heads"]}
    with sw.without_values():
        gpt = GPT(GPTConfig(**sizes, vocabulary=model["vocab"], max_tokens=model["seq"], bias=False))
    tokens = torch.empty(row["train"]["global_batch"], model["seq"], dtype=torch.long, device="meta")
    cluster = f"{DEVICES[hardware['gpu']]}:{hardware['gpus'] // hardware['gpus_per_node']}x{hardware['gpus_per_node']}"
    return sw.plan_layouts(gpt, cluster, (tokens, tokens), layout=layout).best.step_s


def replayed(row):
    model, parallel = row["model"], row["parallel"]
    return {
        "gpu": DEVICES[row["hardware"]["gpu"]], "width": model["hidden"], "layers": model["layers"],
        "tokens": model["seq"], "microbatch": parallel["micro_batch"], "recompute": parallel["recompute"],
        "predicted_s": predicted_s(row), "measured_s": row["derived"]["step_time_s"],
    }  # fmt: skip


def summary(rows):
    """How many times as long as predicted steps took: of each accelerator, and of all."""
    found = []
    for gpu in (*sorted({each["gpu"] for each in rows}), "all"):
        ratios = sorted(each["measured_s"] / each["predicted_s"] for each in rows if gpu in (each["gpu"], "all"))
        parts = statistics.quantiles(ratios, n=20, method="inclusive") if len(ratios) > 1 else ratios
        found.append({"gpu": gpu, "runs": len(ratios), "p5": parts[0], "median": statistics.median(ratios),
                      "p95": parts[-1]})  # fmt: skip
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="a JSON file with published runs, under the key rows")
    options = options_of(parser, {"runs": None})
    runs = [TINY]
    if options.runs is not None:
        runs = [row for row in json.loads(options.runs.read_text())["rows"] if row["dataset"] == "mosaic_mpt_fsdp"]
    wanted = [
        row for row in runs
        if row["parallel"]["precision"] in ("bf16", "amp_bf16") and row["model"]["seq"] <= MOST_TOKENS
    ]  # fmt: skip
    rows = []
    for row in wanted:
        rows.append(replayed(row))
        print(json.dumps(rows[-1]), flush=True)
    table = summary(rows)
    print(json.dumps(table))
    write(
        options, __file__, {"machine": machine(), "published": options.runs is not None, "table": table, "rows": rows}
    )


if __name__ == "__main__":
    main()
