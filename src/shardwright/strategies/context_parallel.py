"""The layout axis ``cp`` of context parallelism, for which no strategy is built yet: a layout with it is refused.

Each rank of the axis would hold a slice of every sequence.
"""

from shardwright.axes import LayoutAxis

AXIS = LayoutAxis("cp", order=20, kind="operators", mesh_axes=(("cp",),), sizes="one number: cp4", keyword="context")
"""The layout axis ``cp``: its ranks would hold slices of every sequence, as in ring attention."""
