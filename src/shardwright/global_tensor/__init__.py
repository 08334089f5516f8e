"""Global tensors: like torch's DTensor, tensors that are sharded over ranks and compute like one tensor on one device.

A user writes code as for one device, and gives each tensor a placement (a device type and a grid of ranks) and an sbp
(split, broadcast or partial sum, for each axis of the grid). ``to_global`` redistributes a tensor between any two such
layouts. In this package ``boxing`` redistributes tensors, ``rules`` runs operators on shards, and ``view_tracking``
makes it an error to read a gathered copy of a view after its base was written to.
"""

from shardwright.global_tensor import sbp
from shardwright.global_tensor.boxing_plan import BoxingPlan, plan_to_global
from shardwright.global_tensor.boxing_plan import BoxingPlan as Route  # the earlier name of the class
from shardwright.global_tensor.creation import arange, empty, full, ones, rand, randn, zeros
from shardwright.global_tensor.from_local import from_local
from shardwright.global_tensor.module_to_global import module_to_global
from shardwright.global_tensor.placement import Placement, placement
from shardwright.global_tensor.saving import load, save
from shardwright.global_tensor.tensor import GlobalTensor, to_global

__all__ = [
    "BoxingPlan",
    "GlobalTensor",
    "Placement",
    "Route",
    "arange",
    "empty",
    "from_local",
    "full",
    "load",
    "module_to_global",
    "ones",
    "placement",
    "plan_to_global",
    "rand",
    "randn",
    "save",
    "sbp",
    "to_global",
    "zeros",
]
