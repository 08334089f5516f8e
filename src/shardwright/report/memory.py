"""Each rank's memory at its peak, predicted and measured, as data, a table and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwright.comm.launch import Ranks
from shardwright.formatting import format_bytes
from shardwright.layout import Layout
from shardwright.ledger.account import predict_memory
from shardwright.ledger.tracking import ELSEWHERE, KINDS, Account
from shardwright.mesh import Mesh
from shardwright.plan.plan import Job
from shardwright.report.pictures import _INK, _MUTED, _RULE, _figure, _save, _title
from shardwright.report.show import table_of, table_text

MOST_RANKS = 8
"""With more ranks than this, only the first of each stage is listed."""

_SHADES = ("#08519c", "#b3d3e8", "#4a98c9", "#c9ced3", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#7f3c8d")
_COLOURS = dict(zip(KINDS, _SHADES, strict=True))

_HEADS = {"parameters": "params", "gradients": "grads", "optimizer": "AdamW", "activations": "acts"}
"""Shorter names for the heads of columns."""

Accounts = Mapping[int, Account]
"""By rank."""


def ranks_to_rehearse(mesh: Mesh) -> tuple[int, ...]:
    """Returns the ranks whose memory is predicted: all if there are few, else the first rank of each stage.

    The first rank's share of an uneven split is the largest.

    >>> ranks_to_rehearse(Mesh(pp=2, dp=8)), ranks_to_rehearse(Mesh(dp=2))
    ((0, 8), (0, 1))
    """
    if mesh.size <= MOST_RANKS:
        return tuple(range(mesh.size))
    first = dict.fromkeys(mesh.axes, 0)
    coords = mesh.coords([axis for axis in mesh.axes if axis == "pp"])
    return tuple(mesh.rank({**first, **coord}) for coord in coords)


def predicted_accounts(
    job: Job, layout: Layout, batch: tuple[Any, Any], ranks: Ranks = "processes"
) -> dict[int, Account]:
    """Predicts the memory over a step of each rank to list, with AdamW; of ``batch`` only the shapes matter."""
    return {rank: predict_memory(job, layout, rank, batch, ranks=ranks) for rank in ranks_to_rehearse(layout.mesh)}


def memory_data(predicted: Accounts, measured: Accounts | None = None) -> list[dict[str, Any]]:
    """Returns each rank's memory peak as plain data: bytes in total and by kind, the action, the offloaded bytes."""

    def of(account: Account) -> dict[str, Any]:
        found = {"peak_bytes": account.peak_bytes, "action": account.peak.action, "at_peak": account.at_peak()}
        return found | ({"elsewhere": dict(account.elsewhere)} if account.elsewhere else {})

    return [
        {"rank": rank, "predicted": of(account)} | ({"measured": of(measured[rank])} if measured else {})
        for rank, account in predicted.items()
    ]


def unit_of(num_bytes: int) -> tuple[int, str]:
    """Returns the largest of GiB, MiB and KiB that ``num_bytes`` has one of, at least KiB: its bytes and its name."""
    return next(((size, word) for size, word in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= size), (2**10, "KiB"))


def memory_text(predicted: Accounts, measured: Accounts | None = None, width: int = 100) -> str:
    """Returns a table of each rank's memory at its peak; with ``measured``, also the error of the prediction.

    >>> from shardwright.ledger.tracking import MemorySnapshot
    >>> account = Account((MemorySnapshot("0B0", (2048, 0, 4096, 0, 1024, 0, 0, 0, 0)),))
    >>> print(memory_text({0: account}, {0: account}))
    KiB at the peak   when    sum   params   AdamW   acts
    ─────────────────────────────────────────────────────
    0 predicted        0B0   7.00     2.00    4.00   1.00
    0 measured         0B0   7.00     2.00    4.00   1.00
    The prediction is off by +0.00 %, at most.
    """
    rows = [(f"{rank} predicted", account) for rank, account in predicted.items()]
    if measured is not None:
        both = (("predicted", predicted), ("measured", measured))
        rows = [(f"{rank} {name}", accounts[rank]) for rank in predicted for name, accounts in both]
    kinds = [kind for kind in KINDS if any(account.at_peak()[kind] for _, account in rows)]
    unit, word = unit_of(max(account.peak_bytes for _, account in rows))
    table = table_of(f"{word} at the peak", "when", "sum", *(_HEADS.get(kind, kind) for kind in kinds), numbers=True)
    for name, account in rows:
        held = account.at_peak()
        numbers = [account.peak_bytes, *(held[kind] for kind in kinds)]
        table.add_row(name, account.peak.action, *(f"{number / unit:.2f}" for number in numbers))
    text = table_text(table, width)
    for place in ELSEWHERE:
        most = max(account.elsewhere.get(place, 0) for _, account in rows)
        text += f"Offloaded to {place}: up to {format_bytes(most)} per rank.\n" if most else ""
    if measured is not None:
        off = [predicted[rank].peak_bytes / measured[rank].peak_bytes - 1 for rank in predicted]
        text += f"The prediction is off by {100 * max(off, key=abs):+.2f} %, at most.\n"
    return text


def draw_memory(path: Path, title: str, predicted: Accounts, measured: Accounts | None = None) -> Path:
    """Draws the memory of the rank with the highest peak over a step, by kind, predicted and below it measured."""
    rank = max(predicted, key=lambda each: predicted[each].peak_bytes)
    panels = [("predicted", predicted[rank])] + ([("measured", measured[rank])] if measured else [])
    height = 0.55 + 2.9 * len(panels)
    figure = _figure(height)
    _title(figure, f"{title}: rank {rank} over a step", "")
    most = max(account.peak_bytes for _, account in panels)
    for number, (name, account) in enumerate(panels):
        bottom = (0.45 + 2.9 * (len(panels) - 1 - number)) / height
        axes = figure.add_axes((0.1, bottom, 0.72, 2.1 / height))
        _stack(axes, account, most, name)
        if number == 0:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.03), frameon=False, fontsize=10, labelcolor=_INK,
                        reverse=True)  # fmt: skip
    return _save(figure, path)


def _stack(axes: Any, account: Account, most: int, name: str) -> None:
    """Draws the kinds stacked on each other over the moments of a step, one for each operator that allocated."""
    moments = account.moments
    unit, word = unit_of(most)
    columns = list(zip(*(moment.held for moment in moments), strict=True))
    shown = [(kind, [n / unit for n in column]) for kind, column in zip(KINDS, columns, strict=True) if any(column)]
    axes.stackplot(
        range(len(moments)), *(column for _, column in shown), step="post", labels=[kind for kind, _ in shown],
        colors=[_COLOURS[kind] for kind, _ in shown], linewidth=0,
    )  # fmt: skip
    starts = [i for i, moment in enumerate(moments) if i == 0 or moments[i - 1].action != moment.action]
    few = starts[:: -(-len(starts) // 24)]  # at most 24 labels fit below the axis
    axes.set_xticks(few, [moments[i].action for i in few], fontsize=9, color=_MUTED)
    axes.set_xlim(0, max(len(moments) - 1, 1))
    axes.set_ylim(0, most / unit * 1.08)
    axes.set_ylabel(word, color=_MUTED)
    peak = max(range(len(moments)), key=lambda i: moments[i].num_bytes)
    axes.plot([peak], [account.peak_bytes / unit], marker="v", color=_INK, markersize=5, clip_on=False)
    axes.set_title(f"{name}, peak {format_bytes(account.peak_bytes)}", loc="left", fontsize=11.5, color=_INK)
    axes.tick_params(colors=_MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_RULE)
