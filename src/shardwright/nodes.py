"""``Nodes``: the number of nodes (machines, containers) and of ranks on each, and which axes cross between nodes.

Ranks are numbered node by node, and the mesh has its slowest axis first, so the axes that send most stay inside a node
if their sizes fit it.
Here each node holds one index of ``pp`` and all indices of the other axes::

    pp2 dp2 tp2 on 2x4      ranks      pp    dp    tp
                  node 0    0 to 3     0     0-1   0-1
                  node 1    4 to 7     1     0-1   0-1
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import LayoutError
from shardwright.mesh import Mesh

_SIZES = (  # variables with the number of ranks, in all and on a node, of torchrun, Slurm and Open MPI
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


@dataclass(frozen=True, slots=True)
class Nodes:
    """A number of nodes, and the ranks on each: ``2x4`` is two nodes of four ranks.

    >>> Nodes.parse("2x4").places(8), str(Nodes(3, 2))
    ((0, 0, 0, 0, 1, 1, 1, 1), '3x2')
    """

    num_nodes: int
    ranks_per_node: int

    @classmethod
    def parse(cls, text: str) -> Nodes:
        """Returns the nodes that a text such as ``2x4`` describes. Raises LayoutError for other text."""
        match = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
        if match is None:
            allowed = "nodes x ranks on each, 1 to 999999 of either, such as 2x4"
            raise LayoutError("no such nodes", given=f"{text:.60}", allowed=allowed, fix="write --nodes 2x4")
        return cls(int(match[1]), int(match[2]))

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], num_ranks: int) -> Nodes | None:
        """Returns the nodes on which torchrun, Slurm or Open MPI started ``num_ranks`` ranks, or None if none did.

        They are read from the variables in ``environment``. Returns None also if these tell of another number of ranks,
        or of a number of ranks per node that does not divide ``num_ranks``.

        >>> Nodes.of_environment({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 8)
        Nodes(num_nodes=2, ranks_per_node=4)
        """
        for world, node in _SIZES:
            here = environment.get(node, "")
            if environment.get(world) == str(num_ranks) and here.isdigit() and int(here) and num_ranks % int(here) == 0:
                return cls(num_ranks // int(here), int(here))
        return None

    def check(self, num_ranks: int) -> None:
        """Raises LayoutError unless all nodes together have ``num_ranks`` ranks."""
        if self.num_nodes * self.ranks_per_node != num_ranks:
            raise LayoutError(
                "the nodes have another number of ranks than the layout",
                given=f"{self}: {self.num_nodes * self.ranks_per_node} ranks, a layout for {num_ranks}",
                allowed=f"nodes x ranks that multiply to {num_ranks}",
                fix=f"write --nodes 1x{num_ranks}, or another layout",
            )

    def places(self, num_ranks: int) -> tuple[int, ...]:
        """Returns the number of each rank's node, from 0, if ranks are numbered node by node."""
        return tuple(rank // self.ranks_per_node for rank in range(num_ranks))

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.ranks_per_node}"


def crosses(mesh: Mesh, axis: str, nodes: Nodes) -> bool:
    """Returns whether any process group along ``axis`` has ranks on two nodes, so that messages use the network.

    >>> [axis for axis in ("pp", "dp", "tp") if crosses(Mesh(pp=2, dp=2, tp=2), axis, Nodes(2, 4))]
    ['pp']
    >>> crosses(Mesh(dp=3, tp=2), "tp", Nodes(2, 3))
    True
    """
    block = 1  # groups of an axis lie inside of aligned blocks of ranks, which its own and the faster axes span
    for name, size in reversed(mesh.sizes):
        block *= size
        if name == axis:
            return size > 1 and nodes.num_nodes > 1 and nodes.ranks_per_node % block != 0
    return False


def share_between(mesh: Mesh, axes: Sequence[str], rank: int, places: Sequence[int], *, ring: bool) -> float:
    """Returns which fraction of the bytes that ``rank`` sends along ``axes`` goes to another node, from 0 to 1.

    ``places`` is the node of each rank. With ``ring`` the rank is taken to send to the next rank of its group, as in a
    ring collective; without it, to the next and the previous rank alike, as a pipeline stage does.

    >>> mesh, places = Mesh(dp=2, tp=2), (0, 0, 1, 1)
    >>> share_between(mesh, ["tp"], 0, places, ring=True), share_between(mesh, ["dp"], 0, places, ring=True)
    (0.0, 1.0)
    """
    group = mesh.group(axes, rank)
    index = group.index(rank)
    to = (
        [group[(index + 1) % len(group)]]
        if ring
        else [*group[max(index - 1, 0) : index], *group[index + 1 : index + 2]]
    )
    return sum(places[other] != places[rank] for other in to) / max(len(to), 1)
