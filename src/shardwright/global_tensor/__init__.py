"""Global tensors: a placement, an sbp for each of its axes, and ``to_global`` between any two.

A person writes tensor code as for one device, and says where each tensor lies.
"""

from shardwright.global_tensor import sbp
from shardwright.global_tensor.boxing_plan import BoxingPlan, plan_to_global
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
