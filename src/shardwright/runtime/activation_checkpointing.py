"""Activation checkpointing: autograd keeps only the inputs of a block, and the backward runs its forward again.

torch's own checkpointing (``torch.utils.checkpoint``) does the same, but imports torch's compiler with the first call,
and does not expect that collectives overwrite results in place. What is saved, and what is recomputed::

    forward     x --> [ norm . product . gelu . product ] --> y      saved: x; selective: also the products' results
    backward    x --> [ norm . product . gelu . product ]            recomputed at the first use of a missing tensor

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198 (selective).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwright.analysis.calls.reentrant_checkpoints import is_without_reentry, without_reentry
from shardwright.analysis.traced.structure import BATCH_NORMS, kind_of
from shardwright.axes import mesh_axes
from shardwright.comm.autograd import refuses_hooks
from shardwright.errors import PlanError
from shardwright.forward_stack import Rung, wrap
from shardwright.plan.plan import Job, Plan
from shardwright.runtime.compiled_blocks import compiled_blocks_in

COSTLY = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""The operators whose results selective checkpointing keeps: matrix products, convolutions and attention."""


def checkpoint_activations(job: Job, plan: Plan) -> None:
    """Puts activation checkpointing around the modules that the plan lists as ``recomputed``, in place.

    Ranks that compute operators together (tensor parallelism) recompute a block to its end, so that all make the same
    collective calls; other ranks stop as soon as the backward has all saved tensors.
    """
    snapshots = tuple(state.snapshot for state in (job.rng, job.batch_shard, job.frame) if state is not None)
    selective = plan.layout.recompute == "selective"
    shared = any(plan.mesh[axis] > 1 for axis in mesh_axes("operators"))
    for path in plan.recomputed:
        module = job.model.get_submodule(path)
        all_snapshots = (*snapshots, *(block.snapshot for block in compiled_blocks_in(module)))
        around = partial(CheckpointedBlock, path, module, snapshots=all_snapshots, selective=selective, shared=shared)
        wrap(module, Rung.RECOMPUTE, f"recompute:{plan.layout.recompute}", by="core", around=around)


class _StopRecompute(Exception):  # noqa: N818  # torch calls a module's ``always_call`` hooks for an Exception alone
    """Raised to end a recomputation once all saved tensors are recomputed."""


def _versions_of(tree: Any) -> list[int]:
    """Returns the version of each tensor, a number that a write into the tensor raises."""
    return [leaf._version for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _alias(tensor: Tensor) -> Tensor:
    """Returns a tensor with the storage of ``tensor`` whose version counts later writes to it."""
    # inside of a dispatch mode ``detach`` would make a version counter of its own
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class _KeepCostly(TorchDispatchMode):
    """Keeps the results of costly operators, in order, for :class:`_ReplayCostly`.

    With ``copies`` it keeps copies, because collectives overwrite results in place.
    """

    def __init__(self, kept: list[Any], copies: bool) -> None:
        super().__init__()
        self.kept, self.copies = kept, copies
        self._storages: dict[int, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        # a kept result that is about to be overwritten is replaced by a copy
        for argument in tree_leaves((args, named)) if self._storages and function._schema.is_mutable else ():
            if isinstance(argument, Tensor):
                for number in self._storages.pop(argument.untyped_storage()._cdata, ()):
                    kept = tree_map_only(Tensor, Tensor.clone, self.kept[number][0])
                    self.kept[number] = kept, _versions_of(kept)
        result = function(*args, **named)
        if function.overloadpacket.__name__ in COSTLY and not function._schema.is_mutable:
            keep = Tensor.clone if self.copies else _alias
            for tensor in tree_leaves(result) if not self.copies else ():
                if isinstance(tensor, Tensor):
                    self._storages.setdefault(tensor.untyped_storage()._cdata, []).append(len(self.kept))
            kept = tree_map_only(Tensor, keep, result)
            self.kept.append((kept, _versions_of(kept)))
        return result


class _ReplayCostly(TorchDispatchMode):
    """Returns the kept results of costly operators, in order, instead of computing them again."""

    def __init__(self, kept: Sequence[Any]) -> None:
        super().__init__()
        self._left = iter(kept)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        if function.overloadpacket.__name__ in COSTLY and not function._schema.is_mutable:
            kept, versions = next(self._left)
            if versions == _versions_of(kept):  # else the model's code has written into it after the block's call
                return kept
        return function(*args, **(named or {}))


def _leaf(tensor: Tensor) -> Tensor:
    """Returns a detached tensor from which the recomputation starts, with the attributes (tags) of ``tensor``."""
    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    leaf.__dict__.update(tensor.__dict__)
    return leaf


@dataclass
class _Call:
    """One call of a checkpointed block: its inputs, the specs of tensors saved for autograd, and what is recomputed."""

    block: CheckpointedBlock
    args: tuple[Any, ...]
    named: dict[str, Any]
    saved: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    restore: tuple[Callable[[], None], ...] = ()
    versions: tuple[int, ...] = ()
    modes: tuple[TorchFunctionMode, ...] = ()
    autocasts: tuple[tuple[str, torch.dtype, bool, bool], ...] = ()
    reenters: bool = True
    recomputed: dict[int, Tensor] | None = None
    is_over: bool = False

    def forward(self, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs the block on its inputs, and keeps the state, such as random numbers, that a recomputation restores."""
        self.restore = tuple(snapshot() for snapshot in self.block.snapshots)
        self.versions = self._versions()
        # a mode that follows the calls between modules (GhostMode) does not look inside of a block
        self.modes = tuple(m for m in _get_current_function_mode_stack() if not getattr(m, "takes_draws", False))
        self.autocasts, self.reenters = self._autocasts(), not is_without_reentry()
        buffers = {name: buffer._version for name, buffer in self.block.other_buffers()}
        keep = _KeepCostly(self.kept, self.block.shared) if self.block.selective else nullcontext()
        try:
            with saved_tensors_hooks(self._save, self._load), keep:
                result = self.block.forward(*args, **named)
        except RuntimeError as failure:
            if refuses_hooks(failure):
                raise self.block.transformed() from failure
            raise
        # a gradient taken inside the forward may have recomputed the tensors saved until then, but more are saved now
        self.recomputed, self.is_over = None, True
        written = [name for name, buffer in self.block.other_buffers() if buffer._version != buffers.get(name)]
        if written or self._versions() != self.versions:
            raise self.block.refused(written[0] if written else "")
        return result

    def _tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor)]

    def _versions(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self._tensors())

    def _autocasts(self) -> tuple[tuple[str, torch.dtype, bool, bool], ...]:
        """Returns arguments of ``torch.autocast`` that restore its current state, by device type of the inputs."""
        return tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled())
            for kind in sorted({"cpu", *(tensor.device.type for tensor in self._tensors())})
            if torch.amp.is_autocast_available(kind)
        )

    def _save(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def _load(self, number: int) -> Tensor:
        """Returns a saved tensor, recomputed; it stays in memory if another backward over this graph may follow."""
        keep = not self.is_over or _get_current_graph_task_keep_graph()
        if self.recomputed is None or number not in self.recomputed:
            if self.block.shared and not self.is_over:  # ranks would make different collective calls
                raise self.block.too_early()
            self.recomputed = {}
            self._recompute(self.recomputed, keep)
        return self.recomputed[number] if keep else self.recomputed.pop(number)

    def _recompute(self, tensors: dict[int, Tensor], keep: bool) -> None:
        """Runs the block again with the state of the first run; without ``keep`` its inputs are then dropped."""
        if self._versions() != self.versions:
            raise self.block.refused("")

        stopped = False

        def save(tensor: Tensor) -> int:
            nonlocal stopped
            number = len(tensors)
            if stopped:  # the model's code has caught the exception
                raise _StopRecompute
            if number == len(self.saved) or self.saved[number] != (tensor.shape, tensor.dtype):
                raise self.block.changed()
            tensors[number] = tensor.detach()
            if len(tensors) == len(self.saved) and not self.block.shared:
                stopped = True
                raise _StopRecompute
            return number

        now = [snapshot() for snapshot in self.block.snapshots]
        for restore in self.restore:
            restore()
        # Inputs are detached, so that autograd records a new graph. A tensor that is passed twice stays one tensor.
        leaves = {id(tensor): _leaf(tensor) for tensor in self._tensors()}
        args, named = tree_map_only(Tensor, lambda leaf: leaves[id(leaf)], (self.args, self.named))
        replay = _ReplayCostly(self.kept) if self.block.selective else nullcontext()
        saving = saved_tensors_hooks(save, tensors.__getitem__)
        try:
            with ExitStack() as stack, torch.enable_grad(), saving, replay, self.block.frozen_statistics():
                for mode in self.modes:  # autograd's thread does not have the modes of the forward
                    stack.enter_context(mode)
                if not self.reenters:
                    stack.enter_context(without_reentry())
                for autocast in self.autocasts if self.autocasts != self._autocasts() else ():
                    stack.enter_context(torch.autocast(*autocast))
                self.block.forward(*args, **named)
        except Exception:  # the model's code may turn _StopRecompute into another exception
            if not stopped:
                raise
        finally:
            if not keep:
                self.args, self.named = (), {}
                self.kept.clear()
            for restore in now:
                restore()
        if len(tensors) != len(self.saved):
            raise self.block.changed()


@dataclass(frozen=True, eq=False)
class CheckpointedBlock:
    """A module's forward under activation checkpointing; a call with gradients disabled runs the plain forward.

    ``snapshots`` return functions that restore state which a forward reads and changes beside its inputs, such as
    random numbers: a recomputation starts with the state of the first run. With ``selective``, the results of matrix
    products, convolutions and attention are kept instead of recomputed. ``shared`` means that other ranks take part: a
    recomputation then runs to its end, so that all make the same collective calls.

    >>> layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> block = CheckpointedBlock("layers", layers, layers.forward)
    >>> layers.forward = block
    >>> layers(torch.ones(1, 4)).sum().backward()
    >>> layers[0].weight.grad.shape
    torch.Size([4, 4])
    """

    path: str
    module: nn.Module
    forward: Callable[..., Any]
    snapshots: tuple[Callable[[], Callable[[], None]], ...] = ()
    selective: bool = False
    shared: bool = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the module's own forward, and returns its result; the backward runs the forward again.

        Raises: PlanError: gradients are enabled, and the forward writes into its inputs or into a buffer other than the
            running statistics of BatchNorms, or takes a gradient by ``torch.func``.
        """
        if not torch.is_grad_enabled():
            return self.forward(*args, **named)
        kept = tree_map(lambda leaf: leaf, (args, named))  # new lists: code may append to its own, as DenseNet does
        return _Call(self, *kept).forward(args, named)

    def other_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) of the block's buffers, except the running statistics of BatchNorms."""
        for path, module in self.module.named_modules():
            if kind_of(module) not in BATCH_NORMS:
                for name, buffer in module.named_buffers(recurse=False):
                    yield f"{self.path}.{path}.{name}".replace("..", "."), buffer

    @contextmanager
    def frozen_statistics(self) -> Iterator[None]:
        """Returns a context for recomputations, in which BatchNorms in training update copies of their statistics.

        The running statistics themselves were updated by the first forward.
        """
        norms = [module for module in self.module.modules() if kind_of(module) in BATCH_NORMS and module.training]
        before = [dict(norm._buffers) for norm in norms]
        for norm in norms:
            for name, buffer in norm._buffers.items():
                norm._buffers[name] = None if buffer is None else buffer.clone()
        try:
            yield
        finally:
            for norm, buffers in zip(norms, before, strict=True):
                norm._buffers.update(buffers)

    def refused(self, buffer: str) -> PlanError:
        """Returns the error for a block whose forward writes into ``buffer`` or, if that is empty, into its inputs."""
        return self._error(
            f"cannot be recomputed: its forward writes into {f'the buffer {buffer!r}' if buffer else 'its inputs'}",
            given="to be recomputed in the backward",
            allowed="blocks that leave inputs and buffers as they are; BatchNorms may update their statistics",
        )

    def transformed(self) -> PlanError:
        """Returns the error for a block whose forward calls ``torch.func.grad`` or another such transform."""
        return self._error(
            "takes a gradient by torch.func in its forward, beside which torch keeps no hooks on saved tensors",
            given="which calls torch.func.grad, vjp, jacrev or hessian",
            allowed="torch.autograd.grad in blocks that are recomputed",
        )

    def too_early(self) -> PlanError:
        """Returns the error for a block whose forward calls ``torch.autograd.grad``, under tensor parallelism."""
        return self._error(
            "takes a gradient in its forward, and is recomputed by several ranks together",
            given="which calls torch.autograd.grad under tp",
            allowed="gradients inside of blocks that each rank computes alone",
            other_fix=", or use dp in place of tp",
        )

    def changed(self) -> PlanError:
        """Returns the error for a block whose recomputation saves other tensors than its first run."""
        return self._error(
            "computes something else when it is recomputed",
            given="which saved other tensors for the backward the first time",
            allowed="code that depends on its inputs, its parameters and nn.Dropout alone",
        )

    def _error(self, what: str, given: str, allowed: str, other_fix: str = "") -> PlanError:
        return PlanError(
            f"'{self.path}' {what}",
            given=f"{type(self.module).__name__}, {given}",
            allowed=allowed,
            fix=f"name other modules, recompute:PATTERN, or leave out recompute{other_fix}",
        )
