"""``GlobalTensor``: a DTensor subclass with operator rules (``rules/``) and redistribution (``boxing``) of its own.

DTensor carries the local tensor and its spec through autograd; torch's sharding rules and transfers are not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwright.comm.autograd import once
from shardwright.comm.current_world import current_world
from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor.boxing import redistribute_local
from shardwright.global_tensor.boxing_plan import cheapest_plan
from shardwright.global_tensor.geometry import GlobalLayout, is_partial, local_shape
from shardwright.global_tensor.indices import with_lists
from shardwright.global_tensor.placement import Placement, check_placement, mesh_of, placement_of
from shardwright.global_tensor.same_arguments import check_source
from shardwright.global_tensor.sbp import Sbp, Sbps, broadcast, checked_grad_sbp, checked_sbp, is_split, sbp_text
from shardwright.global_tensor.view_tracking import check_fresh, is_stale


class GlobalTensor(DTensor):
    """A DTensor-like tensor that is sharded over the ranks of a placement and computes like a tensor on one device.

    :func:`from_local`, :func:`to_global`, and :func:`randn` and the other creation functions make global tensors.
    """

    _plain: Tensor | None = None
    """The plain 0-d tensor from which an operator's argument was made global, with the same value on every rank."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operator by its sharding rule in ``rules/``."""
        from shardwright.global_tensor.rules import dispatch  # the rules make global tensors: they import this file

        return dispatch(func, args, kwargs or {})

    @property
    def placement(self) -> Placement:
        """The device type and the ranks that hold the tensor."""
        return placement_of(self._spec.mesh)

    @property
    def sbp(self) -> tuple[Sbp, ...]:
        """The sbp (split, broadcast or partial sum) of the tensor along each axis of its placement."""
        return tuple(self._spec.placements)

    def to_global(
        self, placement: Placement | None = None, sbp: Sbps | None = None, *, grad_sbp: Sbps | None = None
    ) -> GlobalTensor:
        """Returns the tensor redistributed to ``placement`` and ``sbp``; an argument left out keeps its value.

        If nothing changes and ``grad_sbp`` is None, the tensor itself is returned, unless it is a partial-sum leaf that
        requires a gradient. Every rank of either placement must call the method; other ranks may. The gradient is
        redistributed back to this tensor's placement with the sbp ``grad_sbp``. By default that is this tensor's sbp,
        with ``broadcast`` in place of ``partial_sum`` if the tensor is no leaf.

        Traffic: as ``plan_to_global`` returns it.
        Raises: LayoutError: a placement that the world does not have, or an sbp that does not fit the placement or the
            tensor. PlanError: the tensor is a gathered view whose base was written to since.
        """
        return to_global(self, placement, sbp, grad_sbp=grad_sbp)

    def to_local(self, *, grad_placements: Sequence[Sbp] | None = None) -> Tensor:
        """Returns this rank's local tensor, which shares memory with the global one; outside the placement it is empty.

        ``grad_placements`` is the sbp of the gradient that the local tensors get. By default it is this tensor's sbp,
        with ``broadcast`` in place of ``partial_sum``: the gradient of a term is the gradient of the sum.

        Raises: LayoutError: ``grad_placements`` does not split the tensor as its sbp does. PlanError: the tensor is a
            gathered view whose base was written to since.
        """
        check_fresh("to_local", [self])
        grad_sbp = grad_placements
        if grad_sbp is not None:
            grad_sbp = checked_grad_sbp(grad_sbp, self.sbp, self.placement, self.ndim)
        return _ToLocal.apply(self, grad_sbp)  # type: ignore[no-any-return]

    def full_tensor(self, *, grad_placements: Sequence[Sbp] | None = None) -> Tensor:
        """Returns the unsharded tensor on every rank of the world: shards are gathered, and partial sums added.

        Every rank of the world must call it. ``grad_placements`` is the sbp of the result's gradient over all ranks,
        ``broadcast`` by default.

        Raises: LayoutError: ``grad_placements`` is a split. PlanError: the tensor is a gathered view whose base was
            written to since.
        """
        return self.to_global(everywhere(self.placement.type), broadcast).to_local(grad_placements=grad_placements)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> GlobalTensor:
        """Returns the tensor redistributed to ``placements`` on ``device_mesh``, with the argument names of DTensor.

        It is :meth:`to_global` with the ranks of ``device_mesh`` as the placement and ``placements`` as the sbp. Other
        options of DTensor's method are ignored.
        """
        placement = self.placement if device_mesh is None else placement_of(device_mesh)
        return self.to_global(placement, self.sbp if placements is None else placements)

    @property
    def data(self) -> Tensor:
        """The tensor without its autograd history. It can be set to one of the same layout, shape and dtype.

        Raises: LayoutError: it is set to any other tensor.
        """
        return super().data

    @data.setter
    def data(self, new: Tensor) -> None:
        expected = (global_layout_of(self), self.shape, self.dtype)
        if not isinstance(new, GlobalTensor) or (global_layout_of(new), new.shape, new.dtype) != expected:
            layout_text = str(global_layout_of(new)) if isinstance(new, DTensor) else "a plain tensor"
            raise LayoutError(
                "'.data' of a global tensor is set to a tensor of another layout, shape or dtype",
                given=f"{layout_text}, {new.dtype} {list(new.shape)}",
                allowed=f"a global tensor on {global_layout_of(self)}, {self.dtype} {list(self.shape)}",
                fix="write x.to_local().copy_(part) for each member's part, or make a new tensor",
            )
        self._local_tensor = new._local_tensor

    def requires_grad_(self, requires_grad: bool = True) -> GlobalTensor:
        """Sets ``requires_grad`` in place, and returns this tensor.

        If it sets True on a leaf without hooks, it also adds one: where the leaf is split and its gradient arrives
        replicated, each rank keeps only its own slice of the gradient.
        """
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf and not self._backward_hooks:
            self.register_hook(partial(_slice_gradient, tuple(self.shape), global_layout_of(self)))
        return self

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(with_lists(self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(with_lists(self, index), value)

    def item(self) -> Any:
        """Returns the value of a one-element tensor as a Python number; every rank must call it.

        Raises: LayoutError: the tensor's placement is not the whole world. PlanError: the tensor is a gathered view
            whose base was written to since.
        """
        return self._read("item").item()

    def tolist(self) -> Any:
        """Returns the values of the unsharded tensor as nested lists, with partial sums added; every rank must call it.

        Raises: LayoutError: the tensor's placement is not the whole world. PlanError: the tensor is a gathered view
            whose base was written to since.
        """
        return self._read("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Returns the unsharded tensor as a NumPy array, with partial sums added; every rank must call it.

        Raises: LayoutError: the tensor's placement is not the whole world. PlanError: the tensor is a gathered view
            whose base was written to since.
        """
        return self._read("numpy").numpy(force=force)

    def __bool__(self) -> bool:
        return bool(self._read("bool()"))

    def __float__(self) -> float:
        return float(self._read("float()"))

    def __int__(self) -> int:
        return int(self._read("int()"))

    def __index__(self) -> int:
        return self.__int__()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.ndim == 0 and spec else repr(self)

    def __repr__(self) -> str:  # type: ignore[override]
        """Returns the shape, dtype, layout and this rank's values as text; nothing is sent."""
        held = "nothing on this rank"
        if is_stale(self):
            held = "a view gathered before its base was written to"
        elif current_world().rank in self.placement:
            held = f"here: {self._local_tensor.detach()}"
        return (
            f"GlobalTensor(shape={list(self.shape)}, dtype={self.dtype}, {self.placement}, "
            f"sbp={sbp_text(self.sbp)}{', requires_grad=True' * self.requires_grad},\n  {held})"
        )

    def share_memory_(self) -> GlobalTensor:
        """Always raises PlanError: a global tensor cannot move to shared memory."""
        raise PlanError(
            "a global tensor cannot be shared between processes: each rank holds a part of it",
            given=str(global_layout_of(self)),
            allowed="to_local().share_memory_(), for the part alone",
            fix="give the part to the other process",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(
            "a global tensor cannot be pickled: each rank holds a part of it",
            given=str(global_layout_of(self)),
            allowed="shardwright.global_tensor.save and load",
            fix="save({'name': tensor}, folder)",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.is_leaf:
            raise PlanError(
                "the result of an operator cannot be deep-copied: the copy would have no gradient to pass on",
                given=f"{list(self.shape)} on {global_layout_of(self)}",
                allowed="leaves: parameters, and tensors that no operator computed",
                fix="write copy.deepcopy(x.detach()), or x.clone() to keep the gradient",
            )
        copy = wrap(self.to_local().detach().clone(), tuple(self.shape), global_layout_of(self), self.stride())
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)  # type: ignore[assignment]
        else:
            copy.requires_grad_(self.requires_grad)
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copy
        return copy

    def _read(self, verb: str) -> Tensor:
        """Returns the unsharded tensor on this rank, for ``verb``, which needs the same values on every rank."""
        if set(self.placement.ranks) != set(range(current_world().size)):
            raise LayoutError(
                f"'{verb}' needs the values on every rank, and some ranks hold none",
                given=f"{self.placement}, a world of {current_world().size}",
                allowed="tensors whose placement is the whole world",
                fix=f"use x.to_global({everywhere(self.placement.type)}, sbp.broadcast), or x.to_local()",
            )
        detached: GlobalTensor = self.detach()  # type: ignore[assignment]
        return detached.full_tensor()


def everywhere(type: str) -> Placement:
    """Returns the placement of all ranks of the world on one axis, with device type ``type``."""
    size = current_world().size
    return Placement(type, tuple(range(size)), (size,))


def global_layout_of(tensor: DTensor) -> GlobalLayout:
    """Returns the layout (placement and sbp) of a global tensor or of another DTensor."""
    return GlobalLayout(placement_of(tensor._spec.mesh), tuple(tensor._spec.placements))


def wrap(
    local: Tensor, shape: Sequence[int], layout: GlobalLayout, stride: Sequence[int] | None = None
) -> GlobalTensor:
    """Returns the global tensor of ``shape`` and ``layout`` whose local tensor on this rank is ``local``.

    Nothing is sent, and only the shape of ``local`` is checked. ``stride`` is the global stride, by default contiguous.
    """
    shape = tuple(shape)
    expected = local_shape(shape, layout, current_world().rank)
    assert tuple(local.shape) == expected, f"a local tensor of {tuple(local.shape)}, {expected} expected: {layout}"
    spec = _spec(shape, None if stride is None else tuple(stride), local.dtype, layout)
    return Tensor._dtensor__new__(GlobalTensor, local, spec, requires_grad=False)


@lru_cache(maxsize=4096)
def _spec(
    shape: tuple[int, ...], stride: tuple[int, ...] | None, dtype: torch.dtype, layout: GlobalLayout
) -> DTensorSpec:
    """Returns torch's spec of a layout, contiguous without ``stride``. It is immutable, so tensors share it."""
    if stride is None:
        stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(mesh_of(layout.placement), layout.sbp, tensor_meta=meta)


def to_global(
    x: Tensor, placement: Placement | None = None, sbp: Sbps | None = None, *, grad_sbp: Sbps | None = None
) -> GlobalTensor:
    """Returns ``x`` as a global tensor redistributed to ``placement`` and ``sbp``.

    Every rank of the world must call the function. A plain tensor is taken as this rank's local tensor, as by
    :func:`from_local`, and needs both arguments. A global tensor or another DTensor keeps its own placement or sbp
    where the argument is left out. ``grad_sbp`` is the sbp of the gradient that flows back to ``x``; see
    :meth:`GlobalTensor.to_global`.

    Raises: LayoutError: an argument that is needed is left out, a placement or sbp does not fit, or a DTensor is not
        cut as ``torch.chunk`` cuts or has a torch placement that is no sbp. PlanError: ``x`` is a gathered view whose
        base was written to since. For a plain tensor also the errors of :func:`from_local`.
    """
    if not isinstance(x, DTensor):
        from shardwright.global_tensor.from_local import from_local  # makes a global tensor: it imports this file

        if placement is None or sbp is None:
            raise LayoutError(
                "a plain tensor has no layout",
                given=f"placement={placement}, sbp={sbp}",
                allowed="both",
                fix="write to_global(x, placement('cpu', ranks=[0]), sbp.broadcast)",
            )
        return from_local(x, placement, sbp, grad_sbp=grad_sbp)
    before = global_layout_of(x)
    placement = before.placement if placement is None else placement
    check_placement(placement)
    if sbp is None and placement.ndim != before.placement.ndim:
        raise LayoutError(
            "a placement with other axes needs an sbp",
            given=f"{before.placement} to {placement}, sbp=None",
            allowed=f"{placement.ndim} of split(dim), broadcast, partial_sum",
            fix=f"write sbp=({', '.join(['sbp.broadcast'] * placement.ndim)},)",
        )
    if not isinstance(x, GlobalTensor):
        check_source(x, before)
    check_fresh("to_global", [x])
    after = GlobalLayout(placement, checked_sbp(before.sbp if sbp is None else sbp, placement, x.ndim))
    is_leaf_of_terms = x.is_leaf and x.requires_grad and is_partial(before)  # so that its gradient gets partial, too
    if after == before and grad_sbp is None and isinstance(x, GlobalTensor) and not is_leaf_of_terms:
        return x
    if grad_sbp is not None:
        back = checked_sbp(grad_sbp, before.placement, x.ndim)
    elif x.is_leaf:
        back = before.sbp  # the leaf's own layout, so that an optimizer adds terms to terms
    else:
        back = without_sums(before.sbp)
    return _ToGlobal.apply(x, after, back)  # type: ignore[no-any-return]


def without_sums(sbp: Sequence[Sbp]) -> tuple[Sbp, ...]:
    """Returns an sbp with ``broadcast`` in place of each ``partial_sum``: the sbp of the gradient of such a tensor.

    The gradient of each term of a sum is the whole gradient of the sum.
    """
    return tuple(broadcast if one.is_partial() else one for one in sbp)


def redistributed_local(x: DTensor, layout: GlobalLayout) -> Tensor:
    """Returns this rank's local tensor of ``x`` redistributed to ``layout``, outside of autograd."""
    return redistribute_local(x._local_tensor, tuple(x.shape), global_layout_of(x), layout)


def check_gradient(grad: Tensor, placement: Placement) -> None:
    """Raises LayoutError unless the gradient ``grad`` is a global tensor on ``placement``, the placement of its tensor.

    For example, a plain tensor passed to ``y.backward`` is refused.
    """
    if not isinstance(grad, GlobalTensor) or grad.placement != placement:
        placement_text = str(grad.placement) if isinstance(grad, GlobalTensor) else "a plain tensor"
        raise LayoutError(
            "the gradient given for a global tensor is not on its placement",
            given=f"{placement_text}, for a tensor on {placement}",
            allowed="a global tensor on the same placement",
            fix="write y.backward(torch.ones_like(y)), or to_global(grad, placement, sbp) for it",
        )


def _slice_gradient(shape: tuple[int, ...], layout: GlobalLayout, grad: GlobalTensor) -> GlobalTensor:
    """Returns a leaf's gradient; if that sends nothing, it is split on axes that split the leaf and broadcast it."""
    check_gradient(grad, layout.placement)
    pairs = zip(layout.sbp, grad.sbp, strict=True)
    sbp = tuple(leaf if is_split(leaf) and one == broadcast else one for leaf, one in pairs)
    after = GlobalLayout(layout.placement, sbp)
    if sbp == grad.sbp or cheapest_plan(shape, global_layout_of(grad), after).moved_elements:
        return grad
    return grad.to_global(sbp=sbp)


class _ToGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, after: GlobalLayout, back: tuple[Sbp, ...]) -> GlobalTensor:
        ctx.back, ctx.placement = GlobalLayout(placement_of(x._spec.mesh), back), after.placement
        ctx.set_materialize_grads(False)
        local = redistributed_local(x, after)
        local = local.clone() if local is x._local_tensor else local.view_as(local)
        return wrap(local, tuple(x.shape), after)

    @staticmethod
    def backward(ctx: Any, grad: GlobalTensor | None) -> Any:
        if grad is None:
            return None, None, None
        check_gradient(grad, ctx.placement)
        return grad.to_global(ctx.back.placement, ctx.back.sbp), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, grad_sbp: tuple[Sbp, ...] | None) -> Tensor:
        ctx.shape, ctx.layout = tuple(x.shape), GlobalLayout(x.placement, grad_sbp or without_sums(x.sbp))
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return wrap(grad, ctx.shape, ctx.layout), None
