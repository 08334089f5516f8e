"""The constants of the time model, each with its meaning, unit, bounds, default and the source of its value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shardwright.errors import PlanError, fix_for

Source = Literal["datasheet", "published", "measured", "fitted", "guess"]
"""Where a value is from: "published" values were fitted to published runs of other libraries on the accelerator, and
"fitted" values to runs on the user's own cluster."""

SLOW_START_S = 46e-6
"""The seconds in which Python on a slow host starts an operator.

They were measured on the virtual machine with the H100 in ``benchmarks/gpu``, where steps in bf16 took 46 us for each
operator that they start (median of four: 23 to 51)."""


def _constant(default: float, unit: str, low: float, high: float, meaning: str) -> Any:
    return field(default=default, metadata={"unit": unit, "bounds": (low, high), "meaning": meaning})


@dataclass(frozen=True)
class Constants:
    """The constants by which FLOPs and bytes become predicted seconds, such as the efficiency of matrix products.

    ``sources`` says where each value is from, a :data:`Source`; a constant that is not in it is a guess.

    Raises: PlanError: a value is out of its bounds.

    >>> Constants().matmul_efficiency, Constants().with_values("fitted", matmul_efficiency=0.7).rows()[0]["source"]
    (0.83, 'fitted')
    """

    matmul_efficiency: float = _constant(0.83, "of peak", 0.2, 1.0, "the most that a large matrix product reaches")
    half_depth: float = _constant(60.0, "elements", 0.0, 2000.0, "the summed dim at which a product reaches half of it")
    batched_efficiency: float = _constant(0.6, "of a product", 0.1, 1.0, "batched products beside plain ones")
    attention_efficiency: float = _constant(0.6, "of a product", 0.1, 1.0, "fused attention beside plain products")
    memory_efficiency: float = _constant(
        0.8, "of bandwidth", 0.2, 1.0, "what operators reach of the memory's bandwidth"
    )
    traffic_share: float = _constant(1.0, "of bytes", 0.1, 2.0, "the share of counted bytes that reaches memory")
    launch_s: float = _constant(6e-6, "s", 1e-7, 1e-3, "the time in which the host starts one operator")
    update_launch_s: float = _constant(
        6e-6, "s", 1e-7, 1e-3, "the time in which the host starts one operator of the optimizer"
    )
    in_node_efficiency: float = _constant(0.75, "of the link", 0.2, 1.0, "what messages in a node reach of its link")
    between_efficiency: float = _constant(0.6, "of the link", 0.1, 1.0, "what messages between nodes reach")
    in_node_hop_s: float = _constant(3e-6, "s", 0.0, 1e-3, "the latency of one hop inside a node")
    between_hop_s: float = _constant(10e-6, "s", 0.0, 1e-3, "the latency of one hop between nodes")
    overlap_cost: float = _constant(
        0.0, "of a message", 0.0, 1.0, "the share of a hidden message's time by which computing takes longer"
    )
    host_link_efficiency: float = _constant(0.75, "of the link", 0.1, 1.0, "what copies to and from the host reach")
    host_update_bytes_per_s: float = _constant(
        20e9, "B/s", 1e8, 2e12, "what the host reads and writes in a second to update offloaded state, for each rank"
    )
    step_s: float = _constant(5e-3, "s", 0.0, 0.1, "what every step takes beside all that is counted")
    sources: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows():
            low, high = row["bounds"]
            if not low <= row["value"] <= high:
                raise PlanError(
                    f"the constant '{row['name']}' is out of bounds",
                    given=row["value"],
                    allowed=f"{low:g} to {high:g} ({row['unit']}): {row['meaning']}",
                    fix="leave it out, or measure again",
                )

    def with_values(self, source: Source, **values: float) -> Constants:
        """Returns a copy of the constants in which those named in ``values`` have new values, from ``source``.

        Raises: PlanError: no such constant, or a value that is out of bounds.
        """
        names = [constant.name for constant in fields(self) if constant.name != "sources"]
        for name in values:
            if name not in names:
                raise PlanError("no such constant", given=name, allowed=", ".join(names), fix=fix_for(name, names))
        return replace(self, **values, sources={**self.sources, **dict.fromkeys(values, source)})

    def rows(self) -> list[dict[str, Any]]:
        """Returns every constant as a row: name, value, unit, meaning, bounds, source."""
        return [
            {"name": constant.name, "value": getattr(self, constant.name), **constant.metadata,
             "source": self.sources.get(constant.name, "guess")}
            for constant in fields(self)
            if constant.name != "sources"
        ]  # fmt: skip
