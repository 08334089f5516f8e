"""Global tensors: a placement, an sbp for each of its axes, and ``to_global`` between any two.

A person writes tensor code as for one device, and says where each tensor lies.
"""

from shardwright.global_tensor import sbp
from shardwright.global_tensor.creation import arange, empty, from_local, full, ones, rand, randn, zeros
from shardwright.global_tensor.module import module_to_global
from shardwright.global_tensor.placement import Placement, placement
from shardwright.global_tensor.routes import Route, plan_to_global
from shardwright.global_tensor.tensor import GlobalTensor, to_global

__all__ = [
    "GlobalTensor",
    "Placement",
    "Route",
    "arange",
    "empty",
    "from_local",
    "full",
    "module_to_global",
    "ones",
    "placement",
    "plan_to_global",
    "rand",
    "randn",
    "sbp",
    "to_global",
    "zeros",
]
