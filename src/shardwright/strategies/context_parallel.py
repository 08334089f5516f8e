"""Context parallel: sequences sharded over ``cp``. A layout can name the axis; no strategy runs it yet."""

from shardwright.axes import LayoutAxis

AXIS = LayoutAxis("cp", order=20, kind="operators", mesh_axes=(("cp",),), sizes="one number: cp4", keyword="context")
"""The axis over which every sequence is sharded."""
