"""``SearchResult``: the prices that a search has found, and why it has left out all other layouts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.planner.price import Price


@dataclass
class SearchResult:
    """What a search has found: prices that fit the memory, prices that do not, and why other layouts were left out.

    ``searched`` is the number of layouts that were looked at. ``rejected`` counts layouts by the reason why they were
    left out, misfits included, and ``nearest`` has the first layout line for each reason.
    """

    fit: list[Price] = field(default_factory=list)
    misfits: list[Price] = field(default_factory=list)
    searched: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    nearest: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    """By reason, the numbers of the layout in ``nearest``, such as "91 of 74 GB"; some reasons have none."""
    remedies: dict[str, str] = field(default_factory=dict)
    """The ``fix`` of the LayoutError or PlanError, for each reason that is the text of such an error."""
    most: int = 0
    """The most layouts that the search was to price."""
    unpriced: int = 0
    """The layouts that might be better than the best, by their estimates, and were not priced."""
    failure: PlanError | None = None
    """The first error of the model itself, such as code that cannot be rehearsed; None if there was none."""

    @property
    def priced(self) -> int:
        """The number of layouts that were priced."""
        return len(self.fit) + len(self.misfits)

    def reject(self, reason: str, layout: Layout | str, detail: str = "") -> None:
        """Counts a layout as left out for ``reason``, and keeps the first layout for each reason as an example.

        ``detail`` has the numbers of this layout. Callers reject the layouts that are nearest to being allowed first.
        """
        self.rejected[reason] += 1
        if self.nearest.setdefault(reason, str(layout)) == str(layout) and detail:
            self.details.setdefault(reason, detail)

    def refused(self, error: LayoutError | PlanError, layout: Layout | str) -> None:
        """Counts a layout as left out because of ``error``."""
        self.reject(error.what, layout)
        self.remedies.setdefault(error.what, str(error.fix))
        if isinstance(error, PlanError) and self.failure is None:
            self.failure = error
