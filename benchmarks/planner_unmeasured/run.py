"""Steps on machines of which nothing was measured here: the constants of profiles, and how far predictions are off.

The runs are of another runtime (FSDP, all of ZeRO-3) and of its own model. Each is priced as this library would run the
same sizes: rehearsed on the meta device. Two constants of each kind of accelerator, the efficiencies of matrix products
and of fused attention, are fitted to its runs; all others stay at their defaults. Runs of one width are held out at a
time, so what is said of errors is of models that were not fitted. The rows are not part of this repository: ``--runs
FILE`` names them; without it, tiny models are predicted.
"""

import argparse
import json
import random
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, write
from benchmarks.planner.fitting import fitted

import shardwright as sw
from shardwright.cost.cluster import Cluster
from shardwright.cost.constants import Constants
from shardwright.models import GPT, GPTConfig
from shardwright.planner.anchors import FITTED
from shardwright.planner.price import Price, Pricing

DEVICES = {"a100_40gb": "a100-40gb", "a100_80gb": "a100-80gb", "h100_80gb": "h100-80gb"}
MOST_TOKENS = 8192
"""The longest sequences that are replayed; longer ones take minutes each to rehearse."""

SEED, DRAWS = 0, 20
"""How often the anchors of each accelerator are drawn, and from which seed."""


@dataclass(frozen=True)
class Replay:
    """One published run: its row, and the rehearsal of the layout that is nearest to it."""

    row: Any
    cluster: Cluster
    price: Price

    @classmethod
    def of(cls, row: Any) -> "Replay":
        model, parallel, hardware = row["model"], row["parallel"], row["hardware"]
        recompute = " recompute:full" * (parallel["recompute"] == "full")
        layout = f"mb{parallel['grad_accum']} dp{parallel['fsdp']}/zero3 bf16{recompute}"
        sizes = {"num_layers": model["layers"], "width": model["hidden"], "num_heads": model["heads"]}
        with sw.without_values():
            gpt = GPT(GPTConfig(**sizes, vocabulary=model["vocab"], max_tokens=model["seq"], bias=False))
        tokens = torch.empty(row["train"]["global_batch"], model["seq"], dtype=torch.long, device="meta")
        nodes = f"{hardware['gpus'] // hardware['gpus_per_node']}x{hardware['gpus_per_node']}"
        plans = sw.plan_layouts(gpt, f"{DEVICES[hardware['gpu']]}:{nodes}", (tokens, tokens), layout=layout)
        return cls(row, plans.cluster, plans.best)

    @property
    def device(self) -> str:
        return self.cluster.device.name

    @property
    def kind(self) -> str:
        """The accelerator without its memory, such as "a100"."""
        return self.device.partition("-")[0]

    @property
    def width(self) -> int:
        return int(self.row["model"]["hidden"])

    @property
    def measured_s(self) -> float:
        return float(self.row["derived"]["step_time_s"])

    @property
    def peak_share(self) -> float:
        """The share of the peak FLOP/s that the run reached, by the usual count: of all pairs of tokens, causal or not.

        Recomputed forwards are counted. Source: Narayanan et al. 2021, arXiv:2104.04473, equation 3.
        """
        layers, hidden, seq, vocabulary = (self.row["model"][key] for key in ("layers", "hidden", "seq", "vocab"))
        passes = 4 if self.row["parallel"]["recompute"] == "full" else 3
        flops = 24 * passes * self.row["train"]["global_batch"] * layers * seq * hidden**2 * (
            1 + seq / (6 * hidden) + vocabulary / (12 * layers * hidden) * 3 / passes
        )  # fmt: skip
        return flops / (self.measured_s * self.cluster.device.peak("bf16") * self.row["hardware"]["gpus"])

    def step_s(self, constants: Constants) -> float:
        pricing = Pricing(replace(self.cluster, constants=constants))
        return pricing.price(self.price.layout, replace(self.price.records)).step_s


def fit(runs):
    return fitted(FITTED, lambda c: [run.step_s(c) for run in runs], [run.measured_s for run in runs], Constants())


def values(constants):
    return {name: round(getattr(constants, name), 3) for name in FITTED}


def replayed(runs):
    """A row for each run of one kind of accelerator: measured, and predicted in three ways.

    With the default constants, with constants fitted to runs of other widths, and by the median share of the peak that
    runs of other widths reached.
    """
    rows = []
    for width in sorted({run.width for run in runs}):
        rest = [run for run in runs if run.width != width] or runs
        constants, share = fit(rest), statistics.median(run.peak_share for run in rest)
        for run in runs:
            if run.width == width:
                model, parallel = run.row["model"], run.row["parallel"]
                rows.append({
                    "gpu": run.device, "width": width, "layers": model["layers"], "tokens": model["seq"],
                    "microbatch": parallel["micro_batch"], "recompute": parallel["recompute"],
                    "measured_s": run.measured_s, "default_s": run.step_s(Constants()),
                    "predicted_s": run.step_s(constants), "constant_s": run.peak_share * run.measured_s / share,
                    "constants": values(constants),
                })  # fmt: skip
    return rows


def quantiles(ratios):
    ratios = sorted(ratios)
    parts = statistics.quantiles(ratios, n=20, method="inclusive") if len(ratios) > 1 else ratios
    return {"runs": len(ratios), "p5": parts[0], "median": statistics.median(ratios), "p95": parts[-1]}


PREDICTED_BY = {
    "default_s": "default constants",
    "predicted_s": "constants fitted to other widths",
    "constant_s": "constant utilisation",
}


def summary(rows):
    """How many times as long as predicted steps took: by accelerator, and of all."""
    return [
        {"gpu": gpu, "predicted_by": PREDICTED_BY[key],
         **quantiles([each["measured_s"] / each[key] for each in rows if gpu in (each["gpu"], "all")])}
        for key in ("default_s", "predicted_s") for gpu in (*sorted({each["gpu"] for each in rows}), "all")
    ]  # fmt: skip


def errors(rows):
    """The relative errors of each kind of prediction, by accelerator; with one anchor, of the runs that it corrects."""
    found = []
    for gpu in sorted({each["gpu"] for each in rows}):
        of_gpu = [each for each in rows if each["gpu"] == gpu]
        for key, said in PREDICTED_BY.items():
            for anchors in (0, 1):
                off, draw = [], random.Random(SEED)
                for _ in range(DRAWS if anchors else 1):
                    anchor = draw.choice(of_gpu) if anchors else None
                    scale = anchor["measured_s"] / anchor[key] if anchor else 1.0
                    off += [abs(scale * e[key] / e["measured_s"] - 1) for e in of_gpu if e is not anchor]
                found.append({"gpu": gpu, "predicted_by": said, "anchors": anchors, "mean": statistics.mean(off or [0]),
                              "median": statistics.median(off or [0])})  # fmt: skip
    return found


def tiny(gpu, width):
    return {
        "model": {"layers": 3, "hidden": width, "heads": 2, "vocab": 100, "seq": 16},
        "hardware": {"gpu": gpu, "gpus": 2, "gpus_per_node": 2}, "train": {"global_batch": 8},
        "parallel": {"fsdp": 2, "grad_accum": 2, "micro_batch": 2, "recompute": "none", "precision": "bf16"},
        "derived": {"step_time_s": 0.01},
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="a JSON file with published runs, under the key rows")
    options = options_of(parser, {"runs": None})
    published = [tiny(gpu, width) for gpu in ("a100_80gb", "h100_80gb") for width in (32, 64)]
    if options.runs is not None:
        published = [row for row in json.loads(options.runs.read_text())["rows"] if row["dataset"] == "mosaic_mpt_fsdp"]
    kinds: dict[str, list[Replay]] = {}
    for row in published:
        if row["parallel"]["precision"] in ("bf16", "amp_bf16") and row["model"]["seq"] <= MOST_TOKENS:
            run = Replay.of(row)
            kinds.setdefault(run.kind, []).append(run)
            print(run.device, row["model"], run.measured_s, flush=True)
    constants = {kind: fit(runs) for kind, runs in kinds.items()}
    rows = [row for runs in kinds.values() for row in replayed(runs)]
    result = {
        "constants": {kind: values(each) for kind, each in constants.items()},
        "table": summary(rows), "errors": errors(rows),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    write(options, __file__, {"machine": machine(), "published": options.runs is not None, **result, "rows": rows})


if __name__ == "__main__":
    main()
