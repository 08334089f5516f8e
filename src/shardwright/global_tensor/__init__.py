"""Global tensors: DTensor-like tensors with a placement and an sbp, and ``to_global`` between any two layouts.

A user writes tensor code as for one device and gives each tensor a layout. In this package ``boxing`` redistributes
tensors, ``rules`` shards operators, and ``view_tracking`` keeps views consistent after writes.
"""

from shardwright.global_tensor import sbp
from shardwright.global_tensor.boxing_plan import BoxingPlan, plan_to_global
from shardwright.global_tensor.boxing_plan import BoxingPlan as Route  # its name until now
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
