"""Finds the global batch, among several sizes, with which a model trains the most tokens a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.errors import LayoutError
from shardwright.planner.plan_results import Plans


@dataclass(frozen=True)
class BatchPlans:
    """The plans of several global batches, by number of samples (``plans``).

    ``refused`` has, for each batch for which no layout was found, the text of the error. ``best`` is the batch whose
    best layout trains the most tokens a second of those that fit, and the smallest of equal ones. If none fits, it is
    the smallest that has a layout.
    """

    plans: dict[int, Plans]
    refused: dict[int, str]

    @property
    def best(self) -> int:
        """The number of samples of the batch that trains the most tokens a second of those that fit."""
        fit = [row for row in self.rows() if row["fits"]]
        return max(fit, key=lambda row: (row["tokens_per_s"], -row["batch"]))["batch"] if fit else min(self.plans)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row of plain data for each batch, the smallest first: best layout, expected step, memory, fit.

        In the row of a batch without a layout these are None, ``fits`` is False and ``why`` has the error.
        """
        rows_by_size = {}
        for size, plans in self.plans.items():
            row = plans.row(plans.best)
            keys = ("layout", "step_s_expected", "tokens_per_s", "memory_bytes", "fits", "why")
            rows_by_size[size] = {"batch": size, **{key: row[key] for key in keys}}
        for size, why in self.refused.items():
            empty = {"layout": None, "step_s_expected": None, "tokens_per_s": None, "memory_bytes": None}
            rows_by_size[size] = {"batch": size, **empty, "fits": False, "why": why}
        return [rows_by_size[size] for size in sorted(rows_by_size)]

    def text(self) -> str:
        """Returns a sentence about the best batch, and a table of all, for a terminal."""
        best, rows = self.plans[self.best], self.rows()
        unit = "tokens" if best.tokens > best.batch else "samples"
        width = max(len(str(row["layout"] or "-")) for row in rows)
        lines = [f"of these batches {self.best:,} samples train the most {unit} a second"]
        lines += ["", f"  {'batch':>7}  {'layout':{width}}  {'expected':>8}    {unit + ' a s':>12}  {'memory':>9}"]
        for row in rows:
            if row["layout"] is None:
                lines.append(f"  {row['batch']:>7,}  {'-':{width}}  {row['why'].splitlines()[0]}")
                continue
            lines.append(
                f"  {row['batch']:>7,}  {row['layout']:{width}}  {row['step_s_expected']:>8.3g} s  "
                f"{row['tokens_per_s']:>12,.0f}  {row['memory_bytes'] / 1e9:>6.3g} GB"
                + "  does not fit"
                * (not row["fits"])
            )
        return "\n".join(lines)


def plan_batches(sizes: Sequence[int], plan: Callable[[int], Plans]) -> BatchPlans:
    """Returns the result of ``plan(size)`` for each size of the global batch, and the errors of sizes it refuses.

    Raises: LayoutError: ``plan`` raises it for every size; the error is that of the last one.
    """
    plans, refused = dict[int, Plans](), dict[int, str]()
    for size in sizes:
        try:
            plans[size] = plan(size)
        except LayoutError as error:
            refused[size] = str(error)
            if len(refused) == len({*sizes}):
                raise
    return BatchPlans(plans, refused)


def doublings(least: int, most: int) -> tuple[int, ...]:
    """Returns ``least`` and its doublings below ``most``, and ``most``.

    >>> doublings(8, 40), doublings(3, 3)
    ((8, 16, 32, 40), (3,))
    """
    sizes = [least]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*sizes, most) if most > least else (least,)
