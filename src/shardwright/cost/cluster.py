"""``Cluster``: nodes of equal accelerators, such as ``a100-80gb:128x8``, and the seconds of messages between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from shardwright.comm.recorder import ring_factor
from shardwright.cost.calibration import Calibration, calibration_in, num_hops
from shardwright.cost.constants import Constants, Source
from shardwright.cost.device import (
    NUMBERS,
    Device,
    device_of,
    figures_of,
    profile,
    profile_table,
    profiles,
    read_table,
)
from shardwright.devices import HOST
from shardwright.errors import LayoutError, PlanError
from shardwright.nodes import Nodes

MOST_OVER = 1.5
"""The factor by which a figure may exceed the profile's figure that it replaces, before a warning is given."""

MOST_LINK = 0.25
"""The largest plausible bandwidth one way of an accelerator's links in a node, as a share of its memory bandwidth.

In the profiles the share is 0.09 to 0.19."""

RANKS_PER_NODE = 8
"""The most ranks of a node, if the nodes are not given."""


@dataclass(frozen=True)
class Cluster:
    """A cluster to price layouts for: nodes of equal accelerators, and the constants of the time model.

    >>> cluster = Cluster.parse("a100-80gb:128x8")
    >>> cluster.num_ranks, cluster.device.name, str(cluster)
    (1024, 'a100-80gb', 'a100-80gb:128x8')
    """

    device: Device
    nodes: Nodes
    constants: Constants = field(default_factory=Constants)
    calibration: Calibration = field(default_factory=Calibration)
    """What was measured on the cluster in addition to constants; empty if nothing was."""
    has_nodes: bool = False
    """Whether a file said how many nodes there are."""

    @classmethod
    def parse(cls, text: str, num_ranks: int | None = None) -> Cluster:
        """Returns the cluster that ``text`` describes.

        ``text`` is a profile's name or the path of a TOML file, alone or followed by ``:NODESxRANKS``. If neither the
        text nor the file gives nodes, the cluster has ``num_ranks`` ranks, on equal nodes of 8 ranks or, if that does
        not divide, of the largest smaller number that does. A file may name a ``profile``, replace its figures and
        constants, and give ``nodes = "128x8"`` and a table ``[constants]``. A file that ``shardwright calibrate`` wrote
        has measured operators, blocks and messages too.

        Raises: PlanError: the text has no nodes and ``num_ranks`` is None, there is no such profile, or the file or a
            value in it cannot be read. LayoutError: the nodes are not written as ``128x8``.
        """
        name, colon, nodes = text.partition(":")
        try:
            is_file = name.endswith(".toml")
            cluster = cls.of_table(name, read_table(Path(name))) if is_file else cls._of_profile(name)
        except PlanError as error:
            if error.given != name or not nodes:
                raise
            fix = f"{error.fix}:{nodes}" if str(error.fix).split()[-1] in profiles() else error.fix
            raise PlanError(error.what, given=text, allowed=error.allowed, fix=fix) from None
        if nodes:
            try:
                return replace(cluster, nodes=Nodes.parse(nodes))
            except LayoutError as error:  # raised again, since its fix names a command line option
                fix = f"write {name}:1x{nodes if nodes.isdecimal() else 8}"
                allowed = f"NAME:NODESxRANKS, {error.allowed}"
                raise LayoutError(error.what, given=text, allowed=allowed, fix=fix) from None
        if cluster.has_nodes:
            return cluster
        if num_ranks is None or colon:
            fix = f"write {name}:1x8"
            raise PlanError(
                "how many nodes the cluster has is not given", given=text, allowed="NAME:NODESxRANKS", fix=fix
            )
        return cluster.with_ranks(num_ranks)

    @classmethod
    def of_table(cls, path: str, table: Mapping[str, Any]) -> Cluster:
        """Returns the cluster that a parsed TOML file describes; ``path`` names the file in errors.

        If the file gives no nodes, the cluster is one node of 8 ranks.

        Raises: PlanError: a key is unknown, or a value is not allowed. LayoutError: the nodes are not written as
            ``128x8``.
        """
        device, constants = _device_in(path, table), _constants_in(path, table)
        text = str(table.get("nodes", ""))
        try:
            nodes = Nodes.parse(text) if text else Nodes(1, RANKS_PER_NODE)
        except LayoutError as error:  # raised again, since its fix names a command line option
            fix = f'write nodes = "1x{text if text.isdecimal() else RANKS_PER_NODE}" into {path}'
            raise LayoutError(error.what, given=f"nodes = {text}", allowed=error.allowed, fix=fix) from None
        return cls(device, nodes, constants, calibration_in(path, table), bool(text))

    @classmethod
    def _of_profile(cls, name: str) -> Cluster:
        """Returns one node of 8 ranks, with the device and the constants of a profile that comes with the library."""
        return cls(profile(name), Nodes(1, RANKS_PER_NODE), constants_of(name))

    @property
    def num_ranks(self) -> int:
        """The number of accelerators, each of which is one rank."""
        return self.nodes.num_nodes * self.nodes.ranks_per_node

    def with_ranks(self, num_ranks: int) -> Cluster:
        """Returns the cluster with ``num_ranks`` ranks, on as few equal nodes as possible.

        A node has at most as many ranks as before.

        >>> str(Cluster.parse("a100-80gb:4x8").with_ranks(12))
        'a100-80gb:2x6'
        """
        in_node = next(n for n in range(min(self.nodes.ranks_per_node, num_ranks), 0, -1) if num_ranks % n == 0)
        return replace(self, nodes=Nodes(num_ranks // in_node, in_node))

    def message_s(self, kind: str, num_bytes: float, ranks: Sequence[int]) -> float:
        """Returns the predicted seconds of one collective or send between ``ranks``, with ``num_bytes`` of payload.

        The ranks form a ring, node by node. All groups along the same axis are taken to send at once, so rings that
        cross between nodes share a node's links. An all-reduce over several nodes with several ranks each has two
        levels at the same time: sums in each node, and rings of one rank of each node. Each node then sends as much as
        in a ring of nodes, which is less than in a ring of ranks. Fewer than two ranks, no bytes, a receive and a
        barrier take 0 seconds. Kinds that were measured take the seconds that were measured for as many bytes.

        >>> cluster = Cluster.parse("a100-80gb:2x8")
        >>> groups = (0, 1), (0, 8), range(16)
        >>> [round(cluster.message_s("all_reduce", 1e9, ranks) * 1e3, 2) for ranks in groups]
        [4.45, 66.69, 8.4]
        """
        size = len(ranks)
        if size < 2 or not num_bytes:
            return 0.0
        by_node = Counter(rank // self.nodes.ranks_per_node for rank in ranks)
        crosses, in_node = len(by_node) > 1, min(by_node.values())
        inner, inner_hop_s = self._link(crosses=False)
        outer, outer_hop_s = self._link(crosses=True)
        measured = self.calibration.message_s(
            kind, num_bytes, "between" if crosses else "in_node", size, abs(ranks[1] - ranks[0]),
            outer_hop_s if crosses else inner_hop_s,
        )  # fmt: skip
        if measured is not None:
            return measured

        def ring_s(size: int, bandwidth: float) -> float:
            return float(ring_factor(kind, size)) * num_bytes / bandwidth

        if not crosses:
            return ring_s(size, inner) + num_hops(kind, size) * inner_hop_s
        if in_node == 1:
            return ring_s(size, outer) + num_hops(kind, size) * outer_hop_s
        if kind == "all_reduce":
            most = max(by_node.values())
            hops_s = num_hops(kind, most) * inner_hop_s + num_hops(kind, len(by_node)) * outer_hop_s
            return max(ring_s(most, inner), ring_s(len(by_node), in_node * outer)) + hops_s
        return ring_s(size, min(inner, in_node * outer)) + num_hops(kind, size) * outer_hop_s

    def _link(self, *, crosses: bool) -> tuple[float, float]:
        """Returns the bytes that a rank sends in a second, inside a node or between nodes, and a hop's latency."""
        device, constants = self.device, self.constants
        if crosses:
            return device.between_nodes_bytes_per_s * constants.between_efficiency, constants.between_hop_s
        return device.in_node_bytes_per_s * constants.in_node_efficiency, constants.in_node_hop_s

    def __str__(self) -> str:
        return f"{self.device.name}:{self.nodes}"


@lru_cache
def constants_of(name: str) -> Constants:
    """Returns the constants of a profile: the defaults, except for those fitted to runs on the accelerator.

    Raises: PlanError: there is no such profile.

    >>> constants_of("h100-80gb").sources["matmul_efficiency"], constants_of("b200") == Constants()
    ('published', True)
    """
    return _constants_in(name, profile_table(name))


def _of_own_figures(path: str, device: Device) -> Device:
    """Returns a device without a profile; a warning is added if its links' bandwidth may be that of both directions."""
    share = device.in_node_bytes_per_s / device.memory_bytes_per_s
    if device.type in HOST or share <= MOST_LINK:
        return device
    note = (
        f"{path}: in_node_GB_per_s = {device.in_node_bytes_per_s / 1e9:g} is {share:.2f} of the memory's bandwidth; "
        f"links of accelerators carry up to {MOST_LINK} of it one way: is it of both ways?"
    )
    return replace(device, notes=(*device.notes, note))


def _device_in(path: str, table: Mapping[str, Any]) -> Device:
    base = table.get("profile")
    if base is None:
        return _of_own_figures(path, device_of(path, table))
    base_device = profile(str(base))
    figures = {"type": base_device.type, "source": f"{base}, changed in {path}", **figures_of(base_device)}
    peaks = table.get("peak_TFLOP_per_s", {})
    if isinstance(peaks, Mapping):  # peaks that the file does not give are taken from the profile
        table = {**table, "peak_TFLOP_per_s": {**figures["peak_TFLOP_per_s"], **peaks}}
    device = replace(device_of(path, {**figures, **table}), name=base_device.name)
    notes = [
        f"{path}: {key} = {table[key]:g} is more than {MOST_OVER} times that of {base}, {figures[key]:g}: "
        "is it of both ways?"
        for key in NUMBERS if key != "between_nodes_GB_per_s"  # a profile has only the usual value for that
        and isinstance(table.get(key), int | float) and table[key] > MOST_OVER * figures[key]
    ]  # fmt: skip
    base_peaks = dict(base_device.peaks)
    notes += [
        f"{path}: a peak of {peak / 1e12:g} TFLOP/s in {name} is more than {MOST_OVER} times that of {base}: "
        "is it with sparsity?"
        for name, peak in device.peaks if peak > MOST_OVER * base_peaks.get(name, peak)
    ]  # fmt: skip
    return replace(device, notes=tuple(notes), assumes_network="between_nodes_GB_per_s" not in table)


def _constants_in(path: str, table: Mapping[str, Any]) -> Constants:
    """Returns the constants of a file; those that it lacks are from its profile, or else the defaults."""
    base, constants = table.get("profile"), table.get("constants", {})
    if not isinstance(constants, Mapping) or not all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for name, value in constants.items()
        if name != "source"
    ):
        allowed = "a table [constants] of numbers, such as matmul_efficiency = 0.8"
        raise PlanError(
            f"the constants in '{path}' are no numbers", given=constants, allowed=allowed, fix="correct them"
        )
    source, numbers = constants.get("source", "guess"), {n: value for n, value in constants.items() if n != "source"}
    if source not in get_args(Source):
        allowed = ", ".join(get_args(Source))
        fix = 'write source = "measured", or leave it out'
        raise PlanError(f"the constants in '{path}' have no such source", given=source, allowed=allowed, fix=fix)
    return (Constants() if base is None else constants_of(str(base))).with_values(source, **numbers)
