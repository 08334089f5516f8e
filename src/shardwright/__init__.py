"""Trains one plain PyTorch model over many devices, and proves the result equal to one."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.checkpoint import load, save
from shardwright.comm import Axis, World, launch, run_on_threads
from shardwright.draws import without_values
from shardwright.layout import Layout
from shardwright.mesh import Mesh
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.parallelize import Run, layer_alone, parallelize
from shardwright.pipeline.costs import time_layers
from shardwright.verify import Verdict, verify

if TYPE_CHECKING:
    from shardwright import global_tensor

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "CrossEntropy",
    "Layout",
    "MeanSquaredError",
    "Mesh",
    "Run",
    "Verdict",
    "World",
    "global_tensor",
    "launch",
    "layer_alone",
    "load",
    "parallelize",
    "run_on_threads",
    "save",
    "time_layers",
    "verify",
    "without_values",
]


def __getattr__(name: str) -> Any:
    if name == "global_tensor":  # loads DTensor, which takes as long as all the rest: only when it is used
        return import_module("shardwright.global_tensor")
    raise AttributeError(f"module 'shardwright' has no attribute '{name}'")
