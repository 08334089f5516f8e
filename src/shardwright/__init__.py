"""Trains one plain PyTorch model over many devices, and proves the result equal to one."""

from shardwright.checkpoint import load, save
from shardwright.comm import Axis, World, launch, run_on_threads
from shardwright.draws import without_values
from shardwright.layout import Layout
from shardwright.mesh import Mesh
from shardwright.models.losses import CrossEntropy, MeanSquaredError
from shardwright.parallelize import Run, layer_alone, parallelize
from shardwright.pipeline.costs import time_layers
from shardwright.verify import Verdict, verify

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
