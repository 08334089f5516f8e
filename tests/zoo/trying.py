"""Tries one model of the zoo under one layout with ``verify``, and says in one row what came of it."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import shardwright
from shardwright import verify
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.errors import LayoutError, PlanError
from shardwright.plan.event_stages import UNEVEN
from shardwright.plan.plan import Plan
from zoo.building import Batch
from zoo.least import least_shares
from zoo.models import ZooModel

LAYOUTS = (
    "single", "dp2", "tp2", "tp2/sp", "tp4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "pp2/1f1b mb4", "pp4/zb-v mb8",
    "dp2/zero3", "pp2/1f1b mb2 dp2/zero1 tp2", "dp2 bf16",
)  # fmt: skip
"""The columns of the table."""

EQUAL, DIFFERS, REFUSED, ERROR, TIMEOUT = "equal", "NOT equal", "refused", "error", "timeout"
LONGEST = 200
"""The most characters of a reason that are kept."""

IN_BLOCK = re.compile(r"\.\d+\.")
"""Parameters of a list of blocks have a number in their name."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of one model under one layout; ``mode`` is "train", or "eval" without dropout.

    ``dtype`` is float64, or float32 for a model that plain torch runs in float32 alone.
    ``off`` is the largest error that verify found. ``cut`` is the share of parameter elements in tensors that tensor
    parallelism cuts, ``cut_in_blocks`` the same of the model's repeated blocks, ``largest`` the largest pipeline
    stage's share of parameter elements, ``least`` the least that any cut can give it, and ``least_even`` the least of
    cuts whose work is even. ``library`` is a digest of the source that was measured.
    """

    model: str
    package: str
    family: str
    layout: str
    mode: str
    result: str
    dtype: str = ""
    why: str = ""
    off: float | None = None
    cut: float | None = None
    cut_in_blocks: float | None = None
    largest: float | None = None
    least: float | None = None
    least_even: float | None = None
    seconds: float = 0.0
    library: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The row without what it does not know."""
        return {key: value for key, value in asdict(self).items() if value not in (None, "")}


def library_digest() -> str:
    """Names the library's source by its content: rows with one digest were measured on the same code."""
    digest = hashlib.sha256()
    for path in sorted(Path(shardwright.__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def tried(model: ZooModel, layout: str, mode: str = "train", library: str = "") -> Row:
    """Trains two steps under a layout and on one device, on threads. Raises ModuleNotFoundError: no such package."""
    plans: list[Plan] = []
    start, found = time.perf_counter(), {}
    dtype = runs_in(model)
    module, loss, batch = model.build()
    module.train(mode == "train")
    note = {"alter": lambda run: plans.append(run.plan), "dtype": dtype}
    try:
        verdict = verify(module, with_own_statistics(layout, module), [batch, turned(batch)], loss=loss, **note)
        equal = verdict.equal
        found = {"result": EQUAL if equal else DIFFERS, "off": float(f"{verdict.max_relative_error:.1e}")}
        if not equal:
            found["why"] = f"at {verdict.first_difference or 'the loss'}, loss off by {verdict.loss_error:.0e}"
            found["off"] = float(f"{max(verdict.max_relative_error, verdict.loss_error):.1e}")
    except Exception as failure:
        found = reason_of(failure)
    shares = shares_of(plans[0]) if plans else {}
    if "largest" in shares and shares["largest"] * plans[0].mesh["pp"] > UNEVEN:
        shares |= least_shares(model, plans[0])
    seconds = round(time.perf_counter() - start, 1)
    return Row(
        model=model.name, package=model.package, family=model.family, layout=layout, mode=mode, seconds=seconds,
        library=library, dtype=str(dtype).removeprefix("torch."), **found, **shares,
    )  # fmt: skip


def with_own_statistics(layout: str, module: nn.Module) -> str:
    """The layout, in which microbatches have batch statistics of their own where the model computes such."""
    has_any = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
    return re.sub(r"\bmb(\d+)", r"mb\1/own-statistics", layout) if has_any else layout


def runs_in(model: ZooModel) -> torch.dtype:
    """Float64, if plain torch runs the model in it, or else float32: some kernels and masks are for float32 alone."""
    module, loss, batch = model.build()
    inputs, targets = tree_map_only(
        Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch
    )
    try:
        found = loss(call_model(module.double(), inputs), targets)[0]
        found.backward()
    except (RuntimeError, TypeError, ValueError):
        return torch.float32
    if any(each.dtype == torch.float32 for each in module.parameters()):  # its forward converts them
        return torch.float32
    return torch.float64 if found.isfinite() else torch.float32


def turned(batch: Batch) -> Batch:
    """The batch with its samples in the opposite order: the second step's batch."""
    other: Batch = tree_map_only(Tensor, lambda tensor: tensor.flip(0).clone(), batch)
    return other


def reason_of(failure: BaseException) -> dict[str, str]:
    """Whether an exception is the library's refusal, and its first line."""
    if failure.__cause__ is not None and not isinstance(failure, LayoutError | PlanError):
        return reason_of(failure.__cause__)  # a rank's failure, which the launcher raised again
    first = next(iter(str(failure).strip().splitlines()), "")[:LONGEST]
    if isinstance(failure, LayoutError | PlanError):
        return {"result": REFUSED, "why": first}
    return {"result": ERROR, "why": f"{type(failure).__name__}: {first}"}


def shares_of(plan: Plan) -> dict[str, float]:
    """The shares of parameter elements that tensor parallelism cuts, in all and in blocks, and of the largest stage."""
    coords = plan.mesh.coords()
    held = {name: [layout.num_elements(at) for at in coords] for name, layout in plan.compute.items()}
    sizes = {name: prod(layout.shape) for name, layout in plan.compute.items()}
    found = {}
    if set(plan.mesh.axes) - {"pp", "dp", "replica"}:
        cut = {name for name, counts in held.items() if max(counts) < sizes[name]}
        found["cut"] = share_of(sizes, cut, sizes)
        in_blocks = {name for name in sizes if IN_BLOCK.search(name)} or set(sizes)
        found["cut_in_blocks"] = share_of(sizes, cut & in_blocks, in_blocks)
    if "pp" in plan.mesh.axes:
        stages = [
            {
                name
                for name, counts in held.items()
                if any(c for c, at in zip(counts, coords, strict=True) if at["pp"] == i)
            }
            for i in range(plan.mesh["pp"])
        ]
        found["largest"] = max(share_of(sizes, stage, sizes) for stage in stages)
    return found


def share_of(sizes: Mapping[str, int], some: Iterable[str], every: Iterable[str]) -> float:
    """What part of the elements of ``every`` those of ``some`` are."""
    return round(sum(sizes[name] for name in some) / max(1, sum(sizes[name] for name in every)), 3)
