"""Keeps the output of a model on tensor shards in shards, from the output head to the loss.

Where the classes of the logits are cut, the loss needs three numbers of each token from every rank
(``vocabulary_on_shards``), and no logits: of a vocabulary of 128,000 tokens those of one token take half a megabyte on
every rank, and their gradient as much again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.function import BackwardCFunction
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.calls.autograd_graph import nodes_behind
from shardwright.analysis.on_meta.meta_device import meta_copy, on_meta
from shardwright.analysis.traced.structure import has_hooks_of_user
from shardwright.dispatch_mode import without_dispatch_modes
from shardwright.forward_stack import Forward, Rung, rename, wrap
from shardwright.models.model_loss import ModelLoss
from shardwright.operator_schemas import writes
from shardwright.plan.schedule import Action
from shardwright.sharding.tensor_shard import TensorShard, tagged
from shardwright.strategies.tensor_parallel.shards_mode import ShardsMode

OWN_CODE = "its own code on shards of tensors"
"""What ``run.explain`` says of a loss whose code gets shards of the logits."""


class OutputShards:
    """Decides whether a model on tensor shards returns its output as shards or whole, and runs the loss on shards.

    It returns shards in a forward with gradients of a training step, if the model computes the loss itself, or if the
    loss calls ``F.cross_entropy`` on logits whose classes are cut. To find that out a copy of the loss runs once on
    meta tensors, with class targets for each token. Everywhere else the output is all-gathered: in predictions and
    evaluations, where the loss reads the logits otherwise, writes in place, or has code of its own in the backward, and
    where a user has registered a hook on the model, the loss, or all modules; the record of the loss then says so.
    ``in_step`` says that every forward with gradients is one of a step, as it is in pipeline stages; else
    :meth:`during` says which are.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, mode: ShardsMode, by: str, in_step: bool = False) -> None:
        self.model, self.loss, self.mode, self._in_step = model, loss, mode, in_step
        self._last = True  # whether the last output stayed in shards
        self._taken: dict[tuple[tuple[bytes | None, ...], ...], bool] = {}  # keyed by the cuts alone
        if not isinstance(loss, ModelLoss):
            self._on_meta = meta_copy(loss)  # a call of it changes no state of the loss
            wrap(loss, Rung.ON_SHARDS, OWN_CODE, by=by, around=partial(_on_shards, mode))

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Returns a context around an action of a step, in which the output may leave the model as shards."""
        before, self._in_step = self._in_step, True
        try:
            yield
        finally:
            self._in_step = before

    def give(self, output: Any) -> Any:
        """Returns the model's output as the loss takes it: as shards, or all-gathered.

        Traffic: one all-gather for each dim that is cut; none if the output stays in shards.
        """
        if self._in_step and torch.is_grad_enabled() and self._takes_shards(output):
            return output
        return tree_map_only(Tensor, self.mode.whole, output)

    def give_outside(self, output: Any) -> Any:
        """Returns the output of a module that code outside of the model's forward has called: whole outside of a step.

        So a ``generate`` that calls an inner module gets what one device gives. In a step it is a recomputation in the
        backward, which runs on shards as the forward did.

        Traffic: as :meth:`give`.
        """
        return output if self._in_step else tree_map_only(Tensor, self.mode.whole, output)

    def _takes_shards(self, output: Any) -> bool:
        shards = _shards_of(output)
        if not shards:
            return False
        # a user's hook would get shards, or return tensors that are not marked as shards
        if _has_any_global_hook() or has_hooks_of_user(self.model) or has_hooks_of_user(self.loss):
            return self._told(False, "a hook of the model, the loss or all modules would see shards")
        key = tuple(shard.cuts for shard in shards)
        if key not in self._taken:
            self._taken[key] = isinstance(self.loss, ModelLoss) or _takes_classes(self._on_meta, output, shards)
        return self._told(self._taken[key], "the loss is not F.cross_entropy on the logits alone")

    def _told(self, takes: bool, why: str) -> bool:
        """Returns ``takes``; writes into the loss's entry of ``run.explain`` why its logits are gathered, if so."""
        if takes != self._last:
            self._last = takes
            rename(
                self.loss, Rung.ON_SHARDS, OWN_CODE if takes else f"its own code on the whole output, gathered: {why}"
            )
        return takes


def starts_of(loss: nn.Module, output: Any) -> list[Tensor]:
    """Returns the tensors from which a rehearsed forward's backward starts: the loss of a rank's shard, or the outputs.

    ``output`` is what the model gives in a step, on the meta device.
    """
    shards = _shards_of(output)
    if shards and not isinstance(loss, ModelLoss):
        output = loss(output, _class_targets(shards[0]))[0]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _class_targets(logits: TensorShard) -> Tensor:
    """Returns class targets on the meta device for logits cut by classes: the shape is that without their dim."""
    shape = [size for size, cut in zip(logits.shape, logits.cuts, strict=True) if cut is None]
    return torch.zeros(shape, dtype=torch.int64, device="meta")


def _shards_of(output: Any) -> list[TensorShard]:
    shards = (tagged(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    return [shard for shard in shards if shard is not None]


def _on_shards(mode: ShardsMode, forward: Forward) -> Forward:
    """Wraps a loss to run on tensor shards, if the output that it gets has any."""

    @wraps(forward)
    def on_shards(output: Any, targets: Any) -> Any:
        if not _shards_of(output):
            return forward(output, targets)
        with mode:
            return tree_map_only(Tensor, mode.whole, forward(output, targets))

    return on_shards


class _LossCalls(TorchFunctionMode):
    """Notes whether a loss calls ``F.cross_entropy`` with as many classes as logits that are cut have.

    It also notes what shards do not allow: writes in place, hooks and gradients inside of the loss, and saved-tensor
    hooks. The latter stand for a recomputation in the backward, which would not know that its tensors are shards.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes, self.called, self.needs_whole = num_classes, False, False
        self._hooks = _top_saved_tensors_default_hooks(True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_VALUES:
            raise NotImplementedError("the loss takes values and not classes")  # ends the trial: logits are gathered
        if func is functional.cross_entropy:
            logits = args[0] if args else (kwargs or {})["input"]
            self.called |= logits.shape[min(1, logits.dim() - 1)] == self.num_classes
        self.needs_whole |= func in _NEEDS_WHOLE or _top_saved_tensors_default_hooks(True) != self._hooks
        self.needs_whole |= writes(func) and isinstance(args[0], Tensor) and args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


_OF_VALUES = frozenset((functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss))
"""Losses that take values as targets. On the class targets of the trial, torch would warn of another shape."""

_NEEDS_WHOLE = frozenset((Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad))


def _takes_classes(loss: nn.Module, output: Any, shards: list[TensorShard]) -> bool:
    """Returns whether a loss calls ``F.cross_entropy`` on the only output of which ranks hold shards, cut by classes.

    ``loss`` is a copy on the meta device.
    """
    (logits, *others) = shards
    cut = [size for size, cut in zip(logits.shape, logits.cuts, strict=True) if cut is not None]
    if others or len(cut) > 1:
        return False

    def as_meta(x: Tensor) -> Tensor:
        shard = tagged(x)
        meta = torch.empty(x.shape if shard is None else shard.shape, dtype=x.dtype, device="meta")
        return meta.requires_grad_(x.requires_grad).view_as(meta)  # like an output no leaf, so code may write to it

    seen = _LossCalls(cut[0])
    try:
        # a rehearsal's modes count the tensors and operators of a step, and this trial is no part of the step
        with torch.enable_grad(), without_dispatch_modes(), on_meta(loss, guess=False):
            output = tree_map_only(Tensor, as_meta, output)
            with seen:
                loss_value = loss(output, _class_targets(logits))
        behind = nodes_behind(leaf for leaf in tree_leaves(loss_value) if isinstance(leaf, Tensor))
        has_own_backward = any(isinstance(node, BackwardCFunction) for node in behind)
    except Exception:  # of a user's loss, which may read values: whatever it raises, its logits are gathered
        return False
    return seen.called and not seen.needs_whole and not has_own_backward
