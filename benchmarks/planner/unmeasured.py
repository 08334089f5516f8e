"""Runs on machines of which nothing was measured, predicted as ``plan`` does without anchors or a calibration.

The runs are of another runtime (FSDP, all of ZeRO-3) and of its own model. Each is priced as this library would run the
same sizes: rehearsed on the meta device, with the accelerator's profile and the default constants. No constant is fitted.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import shardwright as sw
from shardwright.models import GPT, GPTConfig

DEVICES = {"a100_40gb": "a100-40gb", "a100_80gb": "a100-80gb", "h100_80gb": "h100-80gb"}


def predicted(row: Mapping[str, Any]) -> float:
    """Returns the predicted seconds of a published run's step, under the layout that is nearest to the run's."""
    model, parallel, hardware = row["model"], row["parallel"], row["hardware"]
    batch, recompute = row["train"]["global_batch"], " recompute:full" * (parallel["recompute"] == "full")
    layout = f"mb{parallel['grad_accum']} dp{parallel['fsdp']}/zero3 bf16{recompute}"
    config = GPTConfig(
        num_layers=model["layers"], width=model["hidden"], num_heads=model["heads"], vocabulary=model["vocab"],
        max_tokens=model["seq"], bias=False,
    )  # fmt: skip
    with sw.without_values():
        gpt = GPT(config)
    tokens = torch.empty(batch, model["seq"], dtype=torch.long, device="meta")
    cluster = f"{DEVICES[hardware['gpu']]}:{hardware['gpus'] // hardware['gpus_per_node']}x{hardware['gpus_per_node']}"
    return sw.plan_layouts(gpt, cluster, (tokens, tokens), layout=layout).best.step_s


def unmeasured(runs: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields each run in a precision that the library has, with its predicted and its measured seconds."""
    for row in runs:
        if row["parallel"]["precision"] in ("bf16", "amp_bf16"):
            model, parallel = row["model"], row["parallel"]
            yield {
                "gpu": DEVICES[row["hardware"]["gpu"]], "width": model["hidden"], "layers": model["layers"],
                "tokens": model["seq"], "microbatch": parallel["micro_batch"], "recompute": parallel["recompute"],
                "predicted_s": predicted(row), "measured_s": row["derived"]["step_time_s"],
            }  # fmt: skip


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns how long steps took, as shares of what was predicted: the median, and a tenth and nine tenths of runs."""
    ratios = sorted(each["measured_s"] / each["predicted_s"] for each in rows)
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return {"median": statistics.median(ratios), "p10": tenths[0], "p90": tenths[-1]}
