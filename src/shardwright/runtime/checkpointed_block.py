"""Regions: parts of a forward of which autograd keeps nothing but what goes in, and that run again in the backward.

torch's own checkpointing (``torch.utils.checkpoint``) does the same, but imports torch's compiler with the first call,
and knows of no results that other ranks go on to overwrite in place::

    forward     x --> [ norm . product . gelu . product ] --> y      kept: x, and of selective regions the products
    backward    x --> [ norm . product . gelu . product ]            again, when the first of what is missing is wanted

Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198 (selective).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwright.analysis.structure import BATCH_NORMS, kind_of
from shardwright.errors import PlanError

COSTLY = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
"""The operators whose results a selective region keeps: products, convolutions and attention."""


class Restorable(Protocol):
    """State that a forward reads beside its inputs and moves on, such as random numbers."""

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that restores the state to what it is now."""
        ...


class _Enough(BaseException):
    """All that the backward wants of a region is there."""


class _Keeps(TorchDispatchMode):
    """Keeps the results of costly operators, in order; with ``copies`` as copies, for others write into them."""

    def __init__(self, kept: list[Any], copies: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept, self.copies = kept, copies
        self._storages: dict[int, list[int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        named = named or {}
        if self._storages and function._schema.is_mutable:
            self._before_write(tree_leaves((args, named)))
        result = function(*args, **named)
        if function.overloadpacket.__name__ in COSTLY and not function._schema.is_mutable:
            keep = Tensor.clone if self.copies else Tensor.detach
            for tensor in tree_leaves(result) if not self.copies else ():
                if isinstance(tensor, Tensor):
                    self._storages.setdefault(tensor.untyped_storage()._cdata, []).append(len(self.kept))
            self.kept.append(tree_map_only(Tensor, keep, result))
        return result

    def _before_write(self, arguments: Iterable[Any]) -> None:
        """What is about to be overwritten is kept as a copy."""
        for argument in arguments:
            if isinstance(argument, Tensor):
                for number in self._storages.pop(argument.untyped_storage()._cdata, ()):
                    self.kept[number] = tree_map_only(Tensor, Tensor.clone, self.kept[number])


class _Gives(TorchDispatchMode):
    """Gives the results that were kept, in the same order, in place of computing them."""

    def __init__(self, kept: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = iter(kept)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        if function.overloadpacket.__name__ in COSTLY and not function._schema.is_mutable:
            return next(self._left)
        return function(*args, **(named or {}))


class _Cast(NamedTuple):
    """How ``torch.autocast`` is set for a type of device."""

    device: str
    enabled: bool
    dtype: torch.dtype
    cached: bool

    @classmethod
    def now(cls, device: str) -> _Cast:
        """In this thread, at this moment."""
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(device, enabled, dtype, torch.is_autocast_cache_enabled())

    def again(self) -> AbstractContextManager[Any]:
        """While it lasts, it is set like this."""
        found: AbstractContextManager[Any] = torch.autocast(self.device, self.dtype, self.enabled, self.cached)
        return found


@dataclass
class _Region:
    """One call of a block: what autograd would have kept of it, made again when the first of it is asked for."""

    block: CheckpointedBlock
    args: tuple[Any, ...]
    named: dict[str, Any]
    saved: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    restore: tuple[Callable[[], None], ...] = ()
    versions: tuple[int, ...] = ()
    modes: tuple[TorchFunctionMode, ...] = ()
    casts: tuple[_Cast, ...] = ()
    found: dict[int, Tensor] | None = None
    is_over: bool = False

    def forward(self) -> Any:
        """The first run."""
        self.restore = tuple(each.snapshot() for each in self.block.states)
        self.versions, self.modes = self._versions(), tuple(_get_current_function_mode_stack())
        self.casts = self._casting()
        buffers = {name: buffer._version for name, buffer in self.block.other_buffers()}
        with saved_tensors_hooks(self._save, self._load), self._keeping():
            result = self.block.forward(*self.args, **self.named)
        self.found, self.is_over = None, True  # what a gradient inside has asked for was not yet all
        written = [name for name, buffer in self.block.other_buffers() if buffer._version != buffers.get(name)]
        if written or self._versions() != self.versions:
            raise self.block.refused(written[0] if written else "")
        return result

    def _keeping(self) -> AbstractContextManager[Any]:
        return _Keeps(self.kept, self.block.shared) if self.block.selective else nullcontext()

    def _versions(self) -> tuple[int, ...]:
        return tuple(leaf._version for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor))

    def _casting(self) -> tuple[_Cast, ...]:
        """How ``torch.autocast`` is set now, for the devices that take part."""
        leaves = [leaf for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor)]
        devices = sorted({"cpu", *(leaf.device.type for leaf in leaves)})
        return tuple(_Cast.now(device) for device in devices if torch.amp.is_autocast_available(device))

    def _save(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        return len(self.saved) - 1

    def _load(self, number: int) -> Tensor:
        """What was saved; it stays where a forward takes a gradient, and the step's own backward is still to come."""
        stays = not self.is_over or _get_current_graph_task_keep_graph()
        if self.found is None or number not in self.found:
            if self.block.shared and not self.is_over:  # ranks that stop half way might miss each other
                raise self.block.too_early()
            self.found = {}
            self._again(self.found, stays)
        return self.found[number] if stays else self.found.pop(number)

    def _again(self, found: dict[int, Tensor], stays: bool) -> None:
        """The second run, at the moment of the first; where it ``stays``, it may not be the last."""
        if self._versions() != self.versions:
            raise self.block.refused("")

        def save(tensor: Tensor) -> int:
            number = len(found)
            if number == len(self.saved) or self.saved[number] != (tensor.shape, tensor.dtype):
                raise self.block.changed()
            found[number] = tensor.detach()
            if len(found) == len(self.saved) and not self.block.shared:
                raise _Enough
            return number

        now = [each.snapshot() for each in self.block.states]
        for back in self.restore:
            back()
        given = {id(leaf): leaf for leaf in tree_leaves((self.args, self.named)) if isinstance(leaf, Tensor)}
        leaves = {key: leaf.detach().requires_grad_(leaf.requires_grad) for key, leaf in given.items()}
        apart = tree_map_only(Tensor, lambda leaf: leaves[id(leaf)], (self.args, self.named))  # one stays one
        gives = _Gives(self.kept) if self.block.selective else nullcontext()
        saving = saved_tensors_hooks(save, found.__getitem__)
        try:
            with ExitStack() as stack, torch.enable_grad(), saving, gives, self.block.counting_nothing():
                for mode in self.modes:  # autograd does not bring them along
                    stack.enter_context(mode)
                for cast in self.casts if self.casts != self._casting() else ():
                    stack.enter_context(cast.again())
                self.block.forward(*apart[0], **apart[1])
        except _Enough:
            pass
        finally:
            if not stays:
                self.args, self.named = (), {}
                self.kept.clear()
            for back in now:
                back()
        if len(found) != len(self.saved):
            raise self.block.changed()


@dataclass(frozen=True, eq=False)
class CheckpointedBlock:
    """A module whose calls are regions; a forward without gradients is none.

    ``states`` are taken back to the moment of the first run for the second, and then to where they were. ``shared``
    says that other ranks take part: then all of the forward is run again, so that all make the same calls.

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
    states: tuple[Restorable, ...] = ()
    selective: bool = False
    shared: bool = False

    def __call__(self, *args: Any, **named: Any) -> Any:
        """The module's own forward."""
        if not torch.is_grad_enabled():
            return self.forward(*args, **named)
        return _Region(self, args, named).forward()

    def other_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers but for the statistics of BatchNorms, which are counted once."""
        for path, module in self.module.named_modules():
            if kind_of(module) not in BATCH_NORMS:
                for name, buffer in module.named_buffers(recurse=False):
                    yield f"{self.path}.{path}.{name}".replace("..", "."), buffer

    @contextmanager
    def counting_nothing(self) -> Iterator[None]:
        """While it lasts, BatchNorms keep their statistics in copies."""
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
        """A block that changes what it would be computed from again."""
        return PlanError(
            f"'{self.path}' cannot be computed again: its forward writes into "
            + (f"the buffer '{buffer}'" if buffer else "what is given to it"),
            given=f"{type(self.module).__name__}, to be computed again in the backward",
            allowed="blocks that leave inputs and buffers as they are; BatchNorms may keep their statistics",
            fix="name other modules, recompute:PATTERN, or leave out recompute",
        )

    def too_early(self) -> PlanError:
        """A block that takes a gradient before its forward is over, where other ranks take part."""
        return PlanError(
            f"'{self.path}' takes a gradient in its forward, and is computed again by several ranks together",
            given=f"{type(self.module).__name__}, which calls torch.autograd.grad under tp",
            allowed="gradients inside of blocks that each rank computes alone",
            fix="name other modules, recompute:PATTERN, leave out recompute, or use dp in place of tp",
        )

    def changed(self) -> PlanError:
        """A block whose code does something else the second time."""
        return PlanError(
            f"'{self.path}' does something else when it is computed again",
            given=f"{type(self.module).__name__}, which made other tensors for the backward the first time",
            allowed="code that follows from its inputs, its parameters and nn.Dropout alone",
            fix="name other modules, recompute:PATTERN, or leave out recompute",
        )
