"""``Plans``: the predicted prices of layouts on a cluster, the best first, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwright.axes import layout_axes, mesh_axes
from shardwright.cost.cluster import Cluster
from shardwright.cost.constants import SLOW_START_S
from shardwright.devices import HOST
from shardwright.planner.anchors import INTERVAL, StepTimes, TimeScale, published_times
from shardwright.planner.explain import PriceDifference
from shardwright.planner.memory import host_bytes, offloaded_bytes
from shardwright.planner.plan_text import notes_of, text_of, warnings_of
from shardwright.planner.price import LEFT, UTILISATION, Price
from shardwright.planner.search import host_fits
from shardwright.planner.search_result import SearchResult


@dataclass(frozen=True, repr=False)
class Plans:
    """The predicted prices of layouts on a cluster, the best layout first; ``print`` shows them as the command does.

    ``batch`` is the number of samples and ``tokens`` that of tokens in a global batch. ``memory_limit`` is the share of
    a device's memory that a layout may take. ``seconds`` has the CPU seconds that the prediction took: "records" for
    rehearsals, and "search" for the rest.
    """

    cluster: Cluster
    layouts: tuple[Price, ...]
    batch: int
    tokens: int
    memory_limit: float = LEFT
    seconds: Mapping[str, float] = field(default_factory=dict)
    found: SearchResult = field(default_factory=SearchResult)
    """What the search looked at and left out; empty for one layout alone."""
    scale: TimeScale = field(default_factory=TimeScale)
    """The factors that correct the prices, found from runs that the user has measured (anchors); 1 without anchors."""
    top: int | None = None
    """The most layouts that tables list; ``layouts`` has all."""
    ways_out: tuple[str, ...] = ()
    """Sentences on what to change so that a layout fits; empty unless a search has found none that does."""
    num_parameters: int = 0
    """The elements of all parameters of the model; one that several modules share counts once."""
    narrow: str = ""
    """The dtype of most of the model's parameters, such as "bfloat16", if it is narrower than float32."""

    def __repr__(self) -> str:
        return f"Plans({self.cluster}, {len(self.layouts)} layouts, best '{self.best.layout}')"

    def __str__(self) -> str:
        return self.text()

    def interval(self, step_s: float) -> tuple[float, float]:
        """Returns the seconds between which nine in ten measured steps lie, for the predicted ``step_s``.

        Where nothing was measured on the cluster, they come from published runs of another library. If constants were
        fitted to such runs on this accelerator, the interval is no narrower than :data:`INTERVAL` around their median,
        since all these runs had eight ranks and one strategy. On other accelerators even the lower end is above
        ``step_s``, since steps priced with default constants took longer than predicted.
        """
        times = self.published
        if times is None:
            return step_s / (1 + self.scale.error), step_s / (1 - self.scale.error)
        low, high = times.low, times.high
        if times.is_fitted:
            low, high = min(low, times.median / (1 + INTERVAL)), max(high, times.median / (1 - INTERVAL))
        return step_s * low, step_s * high

    def expected_s(self, step_s: float) -> float:
        """Returns the seconds to expect of a step of which the parts add up to ``step_s``.

        Where nothing was measured on the cluster, they are ``step_s`` times the median of published runs, in multiples
        of the prediction (:attr:`published`); else they are ``step_s``.
        """
        times = self.published
        return step_s if times is None else step_s * times.median

    @property
    def published(self) -> StepTimes | None:
        """How long published runs took, as multiples of the prediction: those on this accelerator, if there are some.

        It is None if something was measured on the cluster, or if its file sets other values for the constants that
        published runs fit (:data:`~.anchors.FITTED`).
        """
        return None if self.is_measured else published_times(self.cluster.device.name, self.cluster.constants)

    @property
    def is_measured(self) -> bool:
        """Whether some constants were measured on the cluster, or fitted to runs there that were given as anchors."""
        return self.scale != TimeScale() or bool({row["source"] for row in self.constants()} & {"measured", "fitted"})

    @property
    def basis(self) -> str:
        """A phrase that says what predicted seconds are based on."""
        if self.is_measured:
            return "some constants measured or from your runs"
        times = self.published
        if times is None:
            return "by the datasheet and the constants of the cluster file"
        if times.is_fitted:
            return f"by the datasheet and what published runs on {times.runs_on} reached"
        return f"by the datasheet and guesses, which published runs on {times.runs_on} exceeded"

    @property
    def knows_starts(self) -> bool:
        """Whether the seconds to launch an operator are more than a guess, or do not matter since the host computes."""
        return self.cluster.device.type in HOST or "launch_s" in self.cluster.constants.sources

    def host_s(self, price: Price) -> float:
        """Returns the seconds in which a slow host would launch a step's operators (:data:`SLOW_START_S` each).

        It is 0 if the host of the cluster is known, or if the step takes longer than that anyway.
        """
        seconds = SLOW_START_S * price.starts
        return 0.0 if self.knows_starts or seconds <= price.step_s else seconds

    @property
    def listed(self) -> tuple[Price, ...]:
        """The best layouts, at most ``top`` of them; all if ``top`` is None."""
        return self.layouts[: self.top]

    @property
    def best(self) -> Price:
        """The price of the best layout, whose ``layout`` can be passed to ``parallelize``.

        If none that was priced fits the memory, it is the one with the lowest :func:`~.search.misfit_s`: it exceeds the
        memory by little, and is not much slower than others.
        """
        return self.layouts[0]

    def to_dict(self) -> dict[str, Any]:
        """Returns the listed prices and the summary of the search as plain data for JSON."""
        others = self.layouts[1:]
        return {
            "cluster": str(self.cluster), "num_parameters": self.num_parameters, "batch": self.batch,
            "memory_limit_bytes": self.cluster.device.memory_bytes * self.memory_limit, "best": str(self.best.layout),
            "layouts": [self.row(price) for price in self.listed],
            "runner_up": str(others[0].layout) if others and self.fits(others[0]) else None,
            "searched": self.found.searched or len(self.layouts), "priced": self.found.priced or len(self.layouts),
            "simulated": self.found.priced or len(self.layouts),
            "unpriced": self.found.unpriced,
            "fit": len(self.found.fit) if self.found.searched else sum(map(self.fits, self.layouts)),
            "rejected": self.rejected(), "ways_out": list(self.ways_out),
            "seconds": dict(self.seconds), "baseline_step_s": self.baseline_s(self.best),
            "constants": self.constants(), "warnings": self.warnings(),
            "notes": [f"{name}: {said}" for name, said in self.notes()],
        }  # fmt: skip

    def rejected(self) -> list[dict[str, Any]]:
        """Returns why layouts were left out, the most frequent reason first.

        Each entry has the ``reason``, the ``count`` of layouts and, as ``nearest``, the first layout left out for it;
        ``detail`` has the numbers of that layout, such as "91 of 74 GB", or is "".
        """
        result = self.found
        return [
            {"reason": why, "count": n, "nearest": result.nearest[why], "detail": result.details.get(why, "")}
            for why, n in result.rejected.most_common()
        ]

    def fits(self, price: Price) -> bool:
        """Returns whether a layout fits the memory limit, and the state that it offloads the memory of a node's host.

        A host whose memory is not known counts as large enough.
        """
        return price.fits(self.cluster.device.memory_bytes, self.memory_limit) and self.host_fits(price) is not False

    def host_fits(self, price: Price) -> bool | None:
        """Returns whether a node's host has the memory for what its ranks offload to it; None if that is not known."""
        return host_fits(price, self.cluster)

    def baseline_s(self, price: Price) -> float:
        """Returns the seconds of a step at 40 % of the device's peak FLOP/s, as a baseline."""
        return price.flops / (self.cluster.device.peak(price.layout.precision) * UTILISATION)

    def utilisation(self, price: Price) -> float:
        """Returns the model FLOPs utilization: the share of the device's peak FLOP/s that the expected step reaches.

        Recomputed FLOPs are not counted.
        """
        return price.flops / (self.cluster.device.peak(price.layout.precision) * self.expected_s(price.step_s))

    def row(self, price: Price) -> dict[str, Any]:
        """Returns one layout's price as plain data for JSON: seconds by part, memory, traffic, and whether it fits."""
        heaviest = max(price.memory, key=lambda memory: memory.num_bytes)
        stage = price.memory.index(heaviest)
        axes = [axis for axis in layout_axes() if axis in price.waterfall]
        low, high = self.interval(price.step_s)
        expected_s = self.expected_s(price.step_s)
        return {
            "layout": str(price.layout), "step_s": price.step_s, "step_s_expected": expected_s, "step_s_low": low,
            "step_s_high": high, "tokens_per_s": self.tokens / expected_s,
            "utilisation": self.utilisation(price), "memory_bytes": price.memory_bytes,
            "memory_rank": price.layout.mesh.first_rank(mesh_axes("stages"), stage),
            "memory_by_kind": {**heaviest.by_kind, "beside tensors": heaviest.beside},
            "memory_by_stage": [memory.num_bytes for memory in price.memory],
            "offloaded_bytes": offloaded_bytes(price.records),
            "host_bytes": host_bytes(price.records, self.cluster.nodes.ranks_per_node),
            "traffic_bytes": sum(price.traffic_by_axis.values()), "traffic_by_axis": dict(price.traffic_by_axis),
            "exposed_s_by_axis": {axis: price.waterfall[axis] for axis in axes}, "bubble": price.bubble,
            "waterfall": dict(price.waterfall), "limit": self.limit(price), "fits": self.fits(price),
            "why": self.why(price), "rehearsals": price.records.num_rehearsals,
        }  # fmt: skip

    def compare(self, price: Price) -> PriceDifference:
        """Returns the comparison of a layout with the best one, which says why it is slower or does not fit.

        ``price`` may come from another call, such as ``plan_layouts(..., layout=LINE).best``.
        """
        return PriceDifference(self.best, price, self.cluster.device.memory_bytes * self.memory_limit)

    def limit(self, price: Price) -> str:
        """Returns the name of the longest part of a layout's step, such as "matmul", or "memory" if it does not fit.

        "memory" is also the name of a part: the operators limited by memory bandwidth.
        """
        if not self.fits(price):
            return "memory"
        return max(price.waterfall, key=lambda name: price.waterfall[name])

    def why(self, price: Price) -> str:
        """Returns one sentence about a layout: the expected step with its range, memory, and share of the peak FLOP/s.

        The sentence ends with where the constants come from, and begins with "does not fit" if the layout does not.
        """
        low, high = self.interval(price.step_s)
        known = self.basis
        if not self.is_measured:
            never = f"never measured on {self.cluster.device.name} with this library"
            known = f"its parts add up to {price.step_s:.3g} s, {self.basis}; {never}"
        nothing = "" if self.fits(price) else "does not fit: "
        host_s = self.host_s(price)
        slow = f", or {host_s:.3g} where the host is as slow as one that was measured" if host_s > high else ""
        return (
            f"{nothing}{price.layout}: expect {self.expected_s(price.step_s):.3g} s a step "
            f"({low:.3g} to {high:.3g}{slow}), {price.memory_bytes / 1e9:.3g} of "
            f"{self.cluster.device.memory_bytes / 1e9:.3g} GB, {self.utilisation(price):.0%} of peak; {known}"
        )

    def constants(self) -> list[dict[str, Any]]:
        """Returns every constant behind the prices as a row: its name, value, unit, meaning and source.

        The peaks, memory and bandwidths of the device's profile come first, with the datasheet as their meaning.
        Factors from anchors other than 1 come last.
        """
        device = self.cluster.device
        figures = [(f"peak_{name}", peak, "FLOP/s") for name, peak in device.peaks]
        figures += [("memory", device.memory_bytes, "B"), ("memory_bandwidth", device.memory_bytes_per_s, "B/s"),
                    ("in_node", device.in_node_bytes_per_s, "B/s"),
                    ("between_nodes", device.between_nodes_bytes_per_s, "B/s"),
                    ("host", device.host_bytes_per_s, "B/s")]  # fmt: skip
        sources = {"between_nodes": "guess"} if device.assumes_network else {}
        sources |= self.cluster.calibration.sources
        rows = [{"name": n, "value": v, "unit": u, "meaning": device.source, "source": sources.get(n, "datasheet")}
                for n, v, u in figures]  # fmt: skip
        scale = [{"name": f"anchored_{name}", "value": value, "unit": "times", "meaning": "from runs given as anchors",
                  "source": "fitted"}
                 for name, value in zip(("products", "memory", "messages"), self.scale.factors, strict=True)
                 if value != 1.0]  # fmt: skip
        return [*rows, *self.cluster.constants.rows(), *scale]

    def warnings(self) -> list[str]:
        """Returns what to know before trusting the prices, as sentences; see :func:`~.plan_text.warnings_of`."""
        return warnings_of(self)

    def notes(self) -> list[tuple[str, str]]:
        """Returns what to know of the prices, each as a word and a text; see :func:`~.plan_text.notes_of`."""
        return notes_of(self)

    def text(self) -> str:
        """Returns the prices as text for a terminal; see :func:`~.plan_text.text_of`."""
        return text_of(self)
