"""Reports each rank's peak memory, predicted and measured, as data, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwright import devices
from shardwright.axes import mesh_axes
from shardwright.comm.limits import Ranks
from shardwright.formatting import format_bytes
from shardwright.layout import Layout
from shardwright.ledger.account import predict_memory
from shardwright.ledger.tracking import ELSEWHERE, KINDS, MemoryAccount
from shardwright.mesh import Coord, Mesh
from shardwright.parallelize.planning import StepTraffic, make_plan
from shardwright.plan.plan import Job, Plan
from shardwright.report.drawing import INK, MUTED, RULE, WIDTH, add_title, new_figure, save_figure
from shardwright.report.show import table_of, table_text

if TYPE_CHECKING:  # matplotlib takes a second to import, so the functions that draw import it themselves
    from matplotlib.figure import Figure

MOST_RANKS = 8
"""The number of ranks above which only the first rank of each pipeline stage is listed."""

_SHADES = ("#08519c", "#b3d3e8", "#4a98c9", "#c9ced3", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#7f3c8d")
_COLOURS = dict(zip(KINDS, _SHADES, strict=True))

_PANEL, _LETTER = 0.72, 0.085
"""The share of a picture's width below its curves, and the inches that a letter of their tick labels takes."""

_HEADS = {"parameters": "params", "gradients": "grads", "optimizer": "AdamW", "activations": "acts"}
"""Shorter names of kinds of memory, for the heads of columns."""

_BESIDE = {
    "rounding": "rounding", "segments": "free in segments", "workspace": "cuBLAS's workspace", "nccl": "NCCL's buffers",
}  # fmt: skip

Accounts = Mapping[int, MemoryAccount]
"""The memory account of each listed rank, by rank."""


def ranks_to_rehearse(mesh: Mesh) -> tuple[int, ...]:
    """Returns the ranks whose memory is predicted: all of up to eight, else the first rank of each pipeline stage.

    The first rank's share of an uneven split is the largest.

    >>> ranks_to_rehearse(Mesh(pp=2, dp=8)), ranks_to_rehearse(Mesh(dp=2))
    ((0, 8), (0, 1))
    """
    if mesh.size <= MOST_RANKS:
        return tuple(range(mesh.size))
    first = dict.fromkeys(mesh.axes, 0)
    coords = mesh.coords([axis for axis in mesh.axes if axis in mesh_axes("stages")])
    return tuple(mesh.rank({**first, **coord}) for coord in coords)


def predicted_accounts(
    job: Job, layout: Layout, batch: tuple[Any, Any], ranks: Ranks = "processes"
) -> dict[int, MemoryAccount]:
    """Returns, by rank, the predicted memory over a step with AdamW; of ``batch`` only shapes and dtypes are read.

    With more than eight ranks, only the first rank of each pipeline stage is listed. Of listed ranks that hold, send
    and receive alike, one is predicted for all. Ranks that are processes are predicted for this machine's accelerator,
    or for the device that SHARDWRIGHT_DEVICE names; threads, for the CPU.
    """
    device = devices.wanted() if ranks == "processes" else "cpu"
    plan, strategies = make_plan(job, layout)
    traffic, by_class = StepTraffic(job, plan, strategies, batch[0]), dict[Hashable, MemoryAccount]()
    accounts = {}
    for rank in ranks_to_rehearse(layout.mesh):
        key = _memory_class(plan, traffic, plan.mesh.coord(rank))
        if key not in by_class:
            by_class[key] = predict_memory(job, layout, rank, batch, ranks=ranks, device=device)
        accounts[rank] = by_class[key]
    return accounts


def _memory_class(plan: Plan, traffic: StepTraffic, coord: Coord) -> Hashable:
    """Returns a key that is equal for ranks that hold equally many bytes in a step.

    Such ranks send alike, and store equally many elements of each tensor. Ranks with index 0 on an axis are classed
    apart: of what all ranks along the axis compute, only they hold the gradients.
    """
    states = (layout for state in plan.state.values() for layout in (state.parameter, state.gradient, state.optimizer))
    stored = tuple(layout.num_elements(coord) for layout in states)
    return tuple(traffic.like(coord).values()), stored, tuple(index == 0 for index in coord.values())


def memory_data(predicted: Accounts, measured: Accounts | None = None) -> list[dict[str, Any]]:
    """Returns the peak memory of each rank as plain data for JSON, predicted and, if given, measured.

    For each it has the bytes at the peak, in total and by kind (parameters, gradients, ...), and the action in which
    the peak occurs, such as a microbatch's forward. If there are any, it also has the offloaded bytes, and an estimate
    of what an accelerator holds beside tensors.
    """

    def of(account: MemoryAccount) -> dict[str, Any]:
        entry = {"peak_bytes": account.peak_bytes, "action": account.peak.action, "at_peak": account.at_peak()}
        entry |= {"elsewhere": dict(account.elsewhere)} if account.elsewhere else {}
        return entry | ({"beside": dict(account.beside)} if account.beside else {})

    return [
        {"rank": rank, "predicted": of(account)} | ({"measured": of(measured[rank])} if measured else {})
        for rank, account in predicted.items()
    ]


def unit_of(num_bytes: int) -> tuple[int, str]:
    """Returns (bytes, name) of the largest of KiB, MiB and GiB that fits into ``num_bytes``; KiB if none does."""
    return next(((size, word) for size, word in ((2**30, "GiB"), (2**20, "MiB")) if num_bytes >= size), (2**10, "KiB"))


def memory_text(predicted: Accounts, measured: Accounts | None = None, width: int = 100) -> str:
    """Returns a table of each rank's memory at its peak; with ``measured``, also the error of the prediction.

    >>> from shardwright.ledger.tracking import MemorySnapshot
    >>> account = MemoryAccount((MemorySnapshot("0B0", (2048, 0, 4096, 0, 1024, 0, 0, 0, 0)),))
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
    beside = {name: max(account.beside.get(name, 0) for _, account in rows) for name in rows[0][1].beside}
    if beside:
        parts = ", ".join(f"{_BESIDE[name]} {format_bytes(num_bytes)}" for name, num_bytes in beside.items())
        text += f"Beside tensors the device holds, as an estimate: {parts}.\n"
    if measured is not None:
        off = [predicted[rank].peak_bytes / measured[rank].peak_bytes - 1 for rank in predicted]
        text += f"The prediction is off by {100 * max(off, key=abs):+.2f} %, at most.\n"
    return text


def draw_memory(path: Path, title: str, predicted: Accounts, measured: Accounts | None = None) -> Path:
    """Draws the memory over a step, by kind, of the rank with the highest predicted peak, as the PNG ``path``.

    Measured memory, if given, is drawn below the predicted memory. Returns the path.
    """
    return save_figure(memory_figure(title, predicted, measured), path)


def memory_figure(title: str, predicted: Accounts, measured: Accounts | None = None) -> Figure:
    """Returns the matplotlib figure that :func:`draw_memory` saves."""
    rank = max(predicted, key=lambda candidate: predicted[candidate].peak_bytes)
    panels = [("predicted", predicted[rank])] + ([("measured", measured[rank])] if measured else [])
    height = 0.55 + 2.9 * len(panels)
    figure = new_figure(height)
    add_title(figure, f"{title}: rank {rank} over a step", "")
    most = max(account.peak_bytes for _, account in panels)
    for number, (name, account) in enumerate(panels):
        bottom = (0.45 + 2.9 * (len(panels) - 1 - number)) / height
        axes = figure.add_axes((0.1, bottom, _PANEL, 2.1 / height))
        _stack(axes, account, most, name)
        if number == 0:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.03), frameon=False, fontsize=10, labelcolor=INK,
                        reverse=True)  # fmt: skip
    return figure


def _apart(places: Sequence[int], labels: Sequence[str], inches: float) -> list[int]:
    """Returns the places to label, chosen from the last on so that no labels touch; a place is ``inches`` wide.

    >>> _apart([0, 1, 20], ["begin", "0F0", "0F1"], inches=0.05)
    [1, 20]
    """
    kept: list[int] = []
    edge = float("inf")
    for place, label in sorted(zip(places, labels, strict=True), reverse=True):
        half = (len(label) + 1) * _LETTER / 2
        if place * inches + half <= edge:
            kept.append(place)
            edge = place * inches - half
    return kept[::-1]


def _stack(axes: Any, account: MemoryAccount, most: int, name: str) -> None:
    """Draws the kinds of memory stacked on each other over the snapshots of a step."""
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
    few = _apart(few, [moments[i].action for i in few], _PANEL * WIDTH / max(len(moments) - 1, 1))
    axes.set_xticks(few, [moments[i].action for i in few], fontsize=9, color=MUTED)
    axes.set_xlim(0, max(len(moments) - 1, 1))
    axes.set_ylim(0, most / unit * 1.08)
    axes.set_ylabel(word, color=MUTED)
    peak = max(range(len(moments)), key=lambda i: moments[i].num_bytes)
    axes.plot([peak], [account.peak_bytes / unit], marker="v", color=INK, markersize=5, clip_on=False)
    axes.set_title(f"{name}, peak {format_bytes(account.peak_bytes)}", loc="left", fontsize=11.5, color=INK)
    axes.tick_params(colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(RULE)
