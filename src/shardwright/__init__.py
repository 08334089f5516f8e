"""Trains one plain PyTorch model over many devices; ``verify`` compares a layout's result with one device's."""

import shardwright.command_signals  # first: a signal may come while the command imports the rest

# without the next line the import sorter would move the imports that follow above this one
# isort: split
from typing import TYPE_CHECKING, Any

import shardwright.command_start  # noqa: F401
from shardwright.garbage_collection import collection_paused

with collection_paused():
    from shardwright.analysis.chunks.costs import time_layers
    from shardwright.analysis.objects.marked_inputs import packed, per_sample, samples_in, whole
    from shardwright.checkpoint.loading import load
    from shardwright.checkpoint.saving import save
    from shardwright.comm.axis import Axis
    from shardwright.comm.launch import launch, run_on_threads
    from shardwright.comm.world import World
    from shardwright.initial_values import without_values
    from shardwright.layout import Layout
    from shardwright.mesh import Mesh
    from shardwright.models.losses import CrossEntropy, MeanSquaredError
    from shardwright.models.model_loss import MeanLoss, ModelLoss
    from shardwright.parallelize import parallelize
    from shardwright.parallelize.layer_alone import layer_alone
    from shardwright.parallelize.run import Run
    from shardwright.tensor_store import TensorStore, provide_tensor_store
    from shardwright.verify import verify
    from shardwright.verify.verdict import Verdict
    from shardwright.weights.loading import load_weights
    from shardwright.weights.saving import save_weights

if TYPE_CHECKING:
    from shardwright import global_tensor
    from shardwright.planner.plans import plan_layouts
    from shardwright.train.accelerator import Accelerator

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "Axis",
    "CrossEntropy",
    "Layout",
    "MeanLoss",
    "MeanSquaredError",
    "Mesh",
    "ModelLoss",
    "Run",
    "Verdict",
    "World",
    "global_tensor",
    "launch",
    "layer_alone",
    "load",
    "load_weights",
    "packed",
    "parallelize",
    "per_sample",
    "plan_layouts",
    "run_on_threads",
    "samples_in",
    "save",
    "save_weights",
    "time_layers",
    "verify",
    "whole",
    "without_values",
]


def __getattr__(name: str) -> Any:
    if name == "global_tensor":  # loads DTensor, which takes as long as all the rest: only when it is used
        import shardwright.global_tensor as module

        return module
    if name == "Accelerator":
        from shardwright.train import accelerator

        return accelerator.Accelerator
    if name == "plan_layouts":
        from shardwright.planner.plans import plan_layouts as function

        return function
    raise AttributeError(f"module 'shardwright' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def _checkpoint_of_tensors() -> TensorStore:
    from shardwright.checkpoint import tensors  # loads DTensor, too

    return tensors


provide_tensor_store(_checkpoint_of_tensors)
