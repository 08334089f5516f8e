"""``--layout auto-fit``: fits a layout to the ranks available by changing its number of data-parallel replicas."""

from __future__ import annotations

from dataclasses import replace

from shardwright.errors import LayoutError
from shardwright.layout import Factor, Layout

AUTO_FIT = "auto-fit"


def refitted(line: str, earlier: str | None, num_ranks: int | None) -> str:
    """Returns the layout line for ``num_ranks`` ranks: only the size of ``dp`` changes, and all else is kept.

    ``line`` is ``auto-fit``, which takes the layout of the run that is continued (``earlier``; without one, dp alone),
    or a layout with ``auto-fit`` behind it. If ``num_ranks`` is None, the layout keeps its own number of ranks. A
    ``dp`` of two sizes gets one size if its number of ranks changes.

    Raises: LayoutError: the ranks are no multiple of what one replica of the model needs, or there is no such layout.

    >>> refitted("auto-fit", "pp2 mb4 dp4/zero1 tp2", 12), refitted("dp2 tp2 auto-fit", None, 6)
    ('pp2 mb4 dp3/zero1 tp2', 'dp3 tp2')
    >>> refitted("auto-fit", "dp4 tp2", 3)
    Traceback (most recent call last):
    shardwright.errors.LayoutError: the ranks that are there make no whole number of model replicas
      given:   3 ranks, and dp4 tp2 needs 2 for each replica
      allowed: a multiple of 2 ranks
      fix:     start 2 ranks, or give a --layout with another tp or pp
    """
    own = " ".join(word for word in line.split() if word != AUTO_FIT)
    layout = Layout.parse(own or earlier or "single")
    if num_ranks is None:
        return str(layout)
    dp = layout.factor("dp")
    replica = layout.num_ranks // (dp.size if dp is not None else 1)
    if num_ranks % replica:
        fits = max(num_ranks // replica, 1) * replica
        raise LayoutError(
            "the ranks that are there make no whole number of model replicas",
            given=f"{num_ranks} ranks, and {layout} needs {replica} for each replica",
            allowed=f"a multiple of {replica} ranks",
            fix=f"start {fits} ranks, or give a --layout with another tp or pp",
        )
    others = tuple(factor for factor in layout.factors if factor is not dp)
    size = num_ranks // replica
    if dp is None and size == 1:
        return str(layout)
    same = dp is not None and dp.size == size  # a dp of two sizes keeps its grid where it fits
    fitted = dp if same and dp is not None else Factor("dp", (size,), dp.options if dp is not None else ())
    return str(replace(layout, factors=(*others, fitted)))
