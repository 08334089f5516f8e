"""Context parallelism, not built yet: the axis ``cp``, over which sequences would be sharded.

Naming it is an error so far.
"""

from shardwright.axes import LayoutAxis

AXIS = LayoutAxis("cp", order=20, kind="operators", mesh_axes=(("cp",),), sizes="one number: cp4", keyword="context")
"""The layout axis ``cp``: its ranks would hold slices of every sequence, as in ring attention."""
