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
    """By reason, what the constraint is for the layout in ``nearest``, as "91 GB of 74"; not for all reasons."""
    remedies: dict[str, str] = field(default_factory=dict)
    """By reason, the ``fix`` of the LayoutError or PlanError that left layouts out; other reasons are no errors."""
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

        ``detail`` says what the constraint is for this layout. Layouts that are nearest to being allowed come first.
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
