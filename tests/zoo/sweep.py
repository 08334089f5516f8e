"""Measures every class of some kinds that an installed transformers has, and keeps the rows in ``sweep.json``.

``make zoo-sweep`` runs it; ``--only LlamaForCausalLM,BertForMaskedLM`` and ``--layouts tp2`` measure a part. Rows that
were measured on the same source of the library are kept, unless ``--again``. ``docs/models.md`` has their totals.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
from functools import partial
from pathlib import Path

from shardwright.models.model_loss import ModelLoss
from zoo.__main__ import measured
from zoo.models import ZooModel
from zoo.page import PAGE, ROWS, SWEEP, page_of
from zoo.shrinking import built
from zoo.trying import library_digest

LAYOUTS = ("dp2/zero3", "tp2", "pp2/1f1b mb4")

TASKS = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": ("the next token", True),
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": ("a token", False),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": ("to another sequence", False),
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": ("picture", None),
}
"""The lists of classes in transformers: what their models predict, and whether they shift their labels."""


def models() -> dict[str, ZooModel]:
    """Every class of the lists, the first list that has it counting."""
    package, found = importlib.import_module("transformers"), dict[str, ZooModel]()
    listed = importlib.import_module("transformers.models.auto.modeling_auto")
    for name, (task, shifted) in TASKS.items():
        for classes in getattr(listed, name).values():
            for each in [classes] if isinstance(classes, str) else classes:
                if each not in found and hasattr(package, each):
                    loss = partial(ModelLoss, shifted=shifted)
                    found[each] = ZooModel(each, "transformers", task, partial(built, each, task), loss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zoo.sweep", description=__doc__)
    parser.add_argument("--only", help="classes, separated by commas; by default all")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="layouts, separated by commas")
    parser.add_argument("--again", action="store_true", help="measure again what was measured on the same source")
    parser.add_argument("--limit-s", type=float, default=120.0, help="the most seconds of one model and layout")
    options = parser.parse_args()
    every, library, kept = models(), library_digest(), read_rows()
    version = importlib.metadata.version("transformers")
    chosen = options.only.split(",") if options.only else list(every)
    for number, name in enumerate(chosen, 1):
        known = {line: kept.get((name, line), {}) for line in options.layouts.split(",")}
        sources = {line: (row.get("library"), row.get("transformers")) for line, row in known.items()}
        lines = [line for line, source in sources.items() if options.again or source != (library, version)]
        said = list[str]()
        for row in measured(every[name], lines, "train", options.limit_s, library, said.append):
            kept[name, row.layout] = {**row.to_dict(), "transformers": version}
            print(
                f"{number}/{len(chosen)} {name} | {row.layout} | {row.result} {row.why} | {row.seconds} s", flush=True
            )
        for why in said:
            print(f"{number}/{len(chosen)} {name} is left out: {why}", flush=True)
            same = {"model": name, "family": every[name].family, "mode": "train", "library": library}
            for line in lines:
                kept[name, line] = {**same, "layout": line, "result": "left out", "why": why, "transformers": version}
        write_rows(kept, list(every))
    PAGE.write_text(page_of(json.loads(ROWS.read_text()), json.loads(SWEEP.read_text())))


def read_rows() -> dict[tuple[str, str], dict]:
    """The committed rows by class and layout."""
    if not SWEEP.exists():
        return {}
    data = json.loads(SWEEP.read_text())
    return {(row["model"], row["layout"]): {"transformers": data["transformers"], **row} for row in data["rows"]}


def write_rows(kept: dict[tuple[str, str], dict], names: list[str]) -> None:
    """Writes all rows in the order of the lists, one a line, beside the version of transformers."""
    known = sorted((key for key in kept if key[0] in names), key=lambda key: (names.index(key[0]), key[1]))
    lines = ",\n".join(json.dumps(kept[key]) for key in known)
    part = Path(f"{SWEEP}.part")
    version = importlib.metadata.version("transformers")
    part.write_text(f'{{"transformers": "{version}",\n"layouts": {json.dumps(LAYOUTS)},\n"rows": [\n{lines}\n]}}\n')
    part.replace(SWEEP)


if __name__ == "__main__":
    main()
