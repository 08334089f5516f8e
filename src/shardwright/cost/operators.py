"""The seconds of operators on a device: matrix products, attention, and operators limited by memory bandwidth."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from types import MappingProxyType
from typing import NamedTuple

from shardwright.cost.constants import Constants
from shardwright.cost.device import Device

TILE = 128
"""The side of the tiles into which a matrix product is cut for the multiprocessors."""

MESSAGE_STARTS = 2
"""How many operators the host could start in the time in which it starts a message on an accelerator.

In published steps on one node that are bound by the host (``benchmarks/planner``), six all-reduces make a block take
longer by the time of 13 to 17 operator starts.
"""

PARTS = ("matmul", "attention", "memory")
"""The kinds of operators among which a step's time is divided."""


class OperatorRecord(NamedTuple):
    """One operator of a training step: its kind, FLOPs, bytes read and written, precision, dims and kernel launches.

    ``part`` is its kind: "matmul", "attention", or "memory" if its bytes alone determine its time. ``dims`` of a matrix
    product are (batch, m, n, k): the number of products, the rows and columns of each result, and the size that is
    summed over. ``name`` is torch's name of the operator, such as "aten::mm", by which measured factors are found.
    """

    part: str
    flops: int
    num_bytes: int
    precision: str = "fp32"
    dims: tuple[int, int, int, int] = (1, 1, 1, 1)
    launches: int = 1
    name: str = ""


def operator_s(
    operator: OperatorRecord, device: Device, constants: Constants, factors: Mapping[str, float] = MappingProxyType({})
) -> float:
    """Returns the seconds that an operator takes on a device, without the host's time to launch it.

    A matrix product or attention takes as long as its FLOPs or its bytes, whichever is longer. A product's tiles fill
    the multiprocessors in waves, of which the last may be partly empty. Any other operator takes as long as its bytes.
    ``factors`` maps the operator's name to its measured time divided by that time.

    >>> from shardwright.cost.device import profile
    >>> big = OperatorRecord("matmul", 2 * 4096**3, 3 * 2 * 4096**2, "bf16", (1, 4096, 4096, 4096))
    >>> round(2 * 4096**3 / operator_s(big, profile("a100-80gb"), Constants()) / 312e12, 2)
    0.78
    """
    return _by_formula(operator, device, constants) * factors.get(operator.name, 1.0)


def _by_formula(operator: OperatorRecord, device: Device, constants: Constants) -> float:
    bytes_s = operator.num_bytes / (device.memory_bytes_per_s * constants.memory_efficiency)
    if operator.part == "memory":
        return bytes_s * constants.traffic_share
    if not operator.flops:  # a product of no rows
        return bytes_s
    efficiency = constants.matmul_efficiency
    batch, m, n, k = operator.dims
    if operator.part == "attention":
        efficiency *= constants.attention_efficiency
    else:
        tiles = batch * ceil(m / TILE) * ceil(n / TILE)
        waves = ceil(tiles / device.num_multiprocessors)
        efficiency *= tiles / (device.num_multiprocessors * waves) * k / (k + constants.half_depth)
        efficiency *= constants.batched_efficiency if batch > 1 else 1.0
    return max(operator.flops / (device.peak(operator.precision) * efficiency), bytes_s)


def smooth_max(first: float, second: float) -> float:
    """Returns the fourth root of ``first**4 + second**4``: the larger of two times, or up to 19 % more.

    It models the time of two queues that sometimes wait for each other.

    >>> smooth_max(1.0, 0.0), round(smooth_max(1.0, 1.0), 3)
    (1.0, 1.189)
    """
    return float((first**4 + second**4) ** 0.25)
