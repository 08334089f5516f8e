"""Published steps of Megatron-LM at scale, predicted by `plan` and corrected by a few of them as anchors.

Narayanan et al. 2021, arXiv:2104.04473: weak scaling of GPTs of 1.7 billion to 1 trillion parameters on 32 to 3,072
A100s (Table 1), and models of 175 and 530 billion on growing numbers of them, by Megatron-LM and by ZeRO-3 (Table 2).
The tables give the FLOP/s of a device; microbatches and chunks of a stage are those of the scripts that the authors
published (``examples/academic_paper_scripts/sc21`` in NVIDIA/Megatron-LM). Nothing is fitted to these rows; how
anchors correct predictions was changed after they were seen. Each layout is rehearsed as this library would run it: in
fp16, with full recomputation and dropout.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.common import machine, options_of, sized, write

import shardwright as sw
from shardwright.models import GPT, GPTConfig
from shardwright.planner.anchors import SecondsByCause, factors_of, parts_of

VOCABULARY, TOKENS, PEAK = 51200, sized(2048, 16), 312e12
ANCHORS = (0, 1, 2, 3)


@dataclass(frozen=True)
class Published:
    """One row: a GPT, its layout on so many A100s, and the FLOP/s of each by the paper's count."""

    table: str
    heads: int
    width: int
    layers: int
    tp: int
    pp: int
    ranks: int
    batch: int
    samples: int
    chunks: int
    tera_flops: float

    @property
    def line(self) -> str:
        copies, words = self.ranks // self.tp // self.pp, []
        if self.pp > 1:
            words.append(
                f"pp{self.pp}/" + (f"interleaved:v{self.chunks}/scatter" if self.chunks > 1 else "1f1b/scatter")
            )
        microbatches = self.batch // copies // self.samples
        words += [f"mb{microbatches}"] if microbatches > 1 else []
        words += [f"dp{copies}" + "/zero3" * ("ZeRO" in self.table)] if copies > 1 else []
        words += [f"tp{self.tp}"] if self.tp > 1 else []
        return " ".join((*words, "fp16 recompute:full"))

    @property
    def flops(self) -> float:
        """The FLOPs of a step, the recomputed forward among them. Source: equation 3 of the paper."""
        return 96 * self.batch * TOKENS * self.layers * self.width**2 * (
            1 + TOKENS / (6 * self.width) + VOCABULARY / (16 * self.layers * self.width)
        )  # fmt: skip

    @property
    def measured_s(self) -> float:
        return self.flops / (self.ranks * self.tera_flops * 1e12)

    def predicted(self) -> dict[str, float]:
        """The seconds of each part of the step as `plan` predicts it."""
        sizes = {"num_layers": self.layers, "width": self.width, "num_heads": self.heads}
        with sw.without_values():
            model = GPT(GPTConfig(**sizes, vocabulary=VOCABULARY, max_tokens=TOKENS, dropout=0.1))
        tokens = torch.empty(self.batch, TOKENS, dtype=torch.long, device="meta")
        cluster = f"a100-80gb:{max(1, self.ranks // 8)}x{min(8, self.ranks)}"
        return dict(sw.plan_layouts(model, cluster, (tokens, tokens), layout=self.line).best.waterfall)


WEAK, STRONG, ZERO = "weak scaling", "more devices, Megatron-LM", "more devices, ZeRO-3"
_GPT_175B, _GPT_530B = (96, 12288, 96), (128, 20480, 105)
LARGE = [
    Published(WEAK, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137), Published(WEAK, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    Published(WEAK, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    Published(WEAK, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    Published(WEAK, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    Published(WEAK, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    Published(WEAK, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    Published(WEAK, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    Published(WEAK, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    Published(WEAK, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
    *(Published(STRONG, *_GPT_175B, 8, 12, ranks, 1536, 1, 1, reached)
      for ranks, reached in ((384, 153), (768, 149), (1536, 141))),
    *(Published(STRONG, *_GPT_530B, 8, 35, ranks, 2240, 1, 1, reached)
      for ranks, reached in ((560, 171), (1120, 167), (2240, 159))),
    *(Published(ZERO, *_GPT_175B, 1, 1, ranks, 1536, samples, 1, reached)
      for ranks, samples, reached in ((384, 4, 144), (768, 2, 88), (1536, 1, 44))),
    *(Published(ZERO, *_GPT_530B, 1, 1, ranks, batch, samples, 1, reached)
      for ranks, batch, samples, reached in ((640, 2560, 4, 138), (1120, 2240, 2, 98), (2240, 2240, 1, 48))),
]  # fmt: skip
TINY = [
    *(Published(WEAK, 2, 32, 3, 1, 1, 2, batch, 2, 1, 1e-6) for batch in (4, 8, 16)),
    *(Published(STRONG, 2, 32, 4, 1, 2, 2, batch, 1, 1, 1e-6) for batch in (4, 8, 16)),
]


def errors_of(rows: Sequence[dict], number: int) -> dict:
    """The errors of all rows that are no anchors, with each choice of so many of a table's rows as anchors.

    The baseline is the share of the peak that the anchors reached, in the mean, by the model's own FLOPs, which are
    three of the four passes that recomputation takes.
    """
    ours, constant = [], []
    for chosen in combinations(range(len(rows)), number):
        anchors = [rows[i] for i in chosen]
        known = [(parts_of(each["parts"]), each["measured_s"]) for each in anchors]
        factors: SecondsByCause = factors_of(known).factors
        share = statistics.mean(each["at_peak_s"] / each["measured_s"] for each in anchors) if anchors else 0.5
        for each in (row for i, row in enumerate(rows) if i not in chosen):
            ours.append(abs(sum(map(mul, factors, parts_of(each["parts"]))) / each["measured_s"] - 1))
            constant.append(abs(each["at_peak_s"] / share / each["measured_s"] - 1))
    return {
        name: {"mean": statistics.mean(found), "median": statistics.median(found)}
        for name, found in (("model", ours), ("constant utilisation", constant))
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    options = options_of(parser, {})
    rows = []
    for run in sized(LARGE, TINY):
        parts = run.predicted()
        rows.append({
            "table": run.table, "width": run.width, "layers": run.layers, "ranks": run.ranks, "batch": run.batch,
            "layout": run.line, "measured_s": run.measured_s, "predicted_s": sum(parts.values()), "parts": parts,
            "at_peak_s": run.flops * 3 / 4 / (run.ranks * PEAK),
        })  # fmt: skip
        print(f"{run.line}: {run.measured_s:.3g} s, predicted {rows[-1]['predicted_s']:.3g}", flush=True)
    table = []
    for name in dict.fromkeys(row["table"] for row in rows):
        of_table = [row for row in rows if row["table"] == name]
        for number in ANCHORS:
            if number < len(of_table):
                table.append({"table": name, "runs": len(of_table), "anchors": number, **errors_of(of_table, number)})
                print(json.dumps(table[-1]), flush=True)
    write(options, __file__, {"machine": machine(), "table": table, "rows": rows})


if __name__ == "__main__":
    main()
