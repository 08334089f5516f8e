"""Prices the layouts of docs/which_layout.md, and writes them to docs/plans.json, from which its tables are built.

It takes half a minute, so `make plans` does it and not `make tables`; a test compares one row with what the code says.
"""

import json
from pathlib import Path
from typing import Any

import torch

import shardwright as sw
from shardwright.models import GPT, GPTConfig

OUT = Path(__file__).resolve().parents[1] / "docs" / "plans.json"
SETTINGS = {"style": "llama", "num_layers": 40, "width": 5120, "num_heads": 40, "vocabulary": 32000, "max_tokens": 4096}
CLUSTER, BATCH, SEQ = "a100-80gb:1x8", 64, 4096
LAYOUTS = (
    "dp8 bf16",
    "dp8/zero1 bf16",
    "dp8/zero3 bf16",
    "dp8/zero3 mb8 bf16",
    "dp8/zero3 recompute:full bf16",
    "dp8/zero1 mb8 recompute:full bf16",
    "tp8/sp mb8 recompute:full bf16",
    "pp8/1f1b mb64 bf16",
    "pp2/1f1b mb32 tp4 recompute:full bf16",
)


def price(layout: str = "", most_priced: int = 1) -> Any:
    """Returns what the planner says about one layout, or about the best of all."""
    with sw.without_values():
        model = GPT(GPTConfig(**SETTINGS))
    tokens = torch.empty(BATCH, SEQ, dtype=torch.int64, device="meta")
    return sw.plan_layouts(model, CLUSTER, (tokens, tokens), layout=layout or None, most_priced=most_priced)


def row_of(layout: str) -> dict[str, Any]:
    """Returns the price of one layout as plain numbers."""
    plans = price(layout)
    row = plans.row(plans.best)
    kinds = row["memory_by_kind"]
    return {
        "layout": layout,
        "step_s": row["step_s"],
        "step_s_expected": row["step_s_expected"],
        "memory_bytes": row["memory_bytes"],
        "fits": row["fits"],
        "most": max(kinds, key=kinds.get),
    }


def main() -> None:
    flags = " ".join(f"--set {key}={value}" for key, value in SETTINGS.items())
    command = f"shardwright plan {flags} --cluster {CLUSTER} --batch {BATCH} --seq {SEQ} --most-priced 1"
    found = {"command": command, "text": price().text(), "rows": [row_of(layout) for layout in LAYOUTS]}
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    print(f"wrote {OUT.name}")


if __name__ == "__main__":
    main()
