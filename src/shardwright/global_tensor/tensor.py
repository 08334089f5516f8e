"""``GlobalTensor``: torch's DTensor as the carrier, with a placement, an sbp, boxing and rules of our own.

Its operators are in ``rules/``; torch's own rules, and its transfers, are not used.
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
from shardwright.comm.current_world import here
from shardwright.errors import LayoutError, PlanError
from shardwright.global_tensor import sbp as words
from shardwright.global_tensor.agreement import check_source
from shardwright.global_tensor.boxing import move
from shardwright.global_tensor.boxing_plan import route
from shardwright.global_tensor.geometry import GlobalLayout, is_partial, local_shape
from shardwright.global_tensor.indices import with_lists
from shardwright.global_tensor.placement import Placement, check_placement, mesh_of, placement_of
from shardwright.global_tensor.sbp import Sbp, broadcast, is_split
from shardwright.global_tensor.view_tracking import check_fresh, is_stale

Sbps = Sbp | Sequence[Sbp]


class GlobalTensor(DTensor):
    """One tensor that lies over the ranks of a placement, used as on one device.

    Made by :func:`from_local`, :func:`randn` and their like, or by :func:`to_global`.
    """

    _plain: Tensor | None = None
    """The plain tensor that this one stands for in an operator, the same on every rank."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operator by our rules."""
        from shardwright.global_tensor.rules import dispatch  # the rules make global tensors: they import this file

        return dispatch(func, args, kwargs or {})

    @property
    def placement(self) -> Placement:
        """The device type and the ranks it lies on."""
        return placement_of(self._spec.mesh)

    @property
    def sbp(self) -> tuple[Sbp, ...]:
        """How it lies along each axis of its placement."""
        return tuple(self._spec.placements)

    def to_global(
        self,
        placement: Placement | None = None,
        sbp: Sbp | Sequence[Sbp] | None = None,
        *,
        grad_sbp: Sbp | Sequence[Sbp] | None = None,
    ) -> GlobalTensor:
        """The same tensor, lying elsewhere or otherwise; what is left out stays as it is.

        The gradient takes the way back, and lies as this tensor does or by ``grad_sbp``.

        Traffic: ``plan_to_global`` tells it beforehand.
        Raises: LayoutError: an sbp that does not fit the placement or the tensor.
        """
        return to_global(self, placement, sbp, grad_sbp=grad_sbp)

    def to_local(self, *, grad_placements: Sequence[Sbp] | None = None) -> Tensor:
        """This rank's own tensor; an empty one on a rank that is not a member.

        Its gradient is taken to lie as this tensor does; a term of a sum gets the gradient of the sum.
        """
        check_fresh("to_local", [self])
        grad = grad_placements
        if grad is not None:
            grad = words.checked_gradient(grad, self.sbp, self.placement, self.ndim)
        return _ToLocal.apply(self, grad)  # type: ignore[no-any-return, no-untyped-call]

    def full_tensor(self, *, grad_placements: Sequence[Sbp] | None = None) -> Tensor:
        """The whole tensor, on every rank of the world."""
        return self.to_global(everywhere(self.placement.type), broadcast).to_local(grad_placements=grad_placements)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **options: Any) -> GlobalTensor:
        """``to_global`` by the words of DTensor."""
        where = self.placement if device_mesh is None else placement_of(device_mesh)
        return self.to_global(where, self.sbp if placements is None else placements)

    @property
    def data(self) -> Tensor:
        """The same tensor outside of autograd; it may be given another that lies alike."""
        return super().data

    @data.setter
    def data(self, new: Tensor) -> None:
        mine = (global_layout_of(self), self.shape, self.dtype)
        if not isinstance(new, GlobalTensor) or (global_layout_of(new), new.shape, new.dtype) != mine:
            given = str(global_layout_of(new)) if isinstance(new, DTensor) else "a plain tensor"
            raise LayoutError(
                "'.data' of a global tensor is given what does not lie as it does",
                given=f"{given}, {new.dtype} {list(new.shape)}",
                allowed=f"a global tensor on {global_layout_of(self)}, {self.dtype} {list(self.shape)}",
                fix="write x.to_local().copy_(part) for each member's part, or make a new tensor",
            )
        self._local_tensor = new._local_tensor

    def requires_grad_(self, requires_grad: bool = True) -> GlobalTensor:
        """See torch. A leaf that is cut keeps its slice of a gradient that every member has whole."""
        super().requires_grad_(requires_grad)
        if requires_grad and self.is_leaf and not self._backward_hooks:
            self.register_hook(  # type: ignore[no-untyped-call]
                partial(_own_gradient, tuple(self.shape), global_layout_of(self))
            )
        return self

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(with_lists(self, index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(with_lists(self, index), value)

    def item(self) -> Any:
        """The number of a tensor of one element. Raises LayoutError unless its placement is the whole world."""
        return self._read("item").item()

    def tolist(self) -> Any:
        """Its numbers as lists. Raises LayoutError unless its placement is the whole world."""
        return self._read("tolist").tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Its numbers as an array. Raises LayoutError unless its placement is the whole world."""
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
        """What it is and where it lies, with this rank's numbers: nothing is sent."""
        held = "nothing on this rank"
        if is_stale(self):
            held = "a view gathered before its base was written to"
        elif here().rank in self.placement:
            held = f"here: {self._local_tensor.detach()}"
        return (
            f"GlobalTensor(shape={list(self.shape)}, dtype={self.dtype}, {self.placement}, "
            f"sbp={words.text(self.sbp)}{', requires_grad=True' * self.requires_grad},\n  {held})"
        )

    def share_memory_(self) -> GlobalTensor:
        """Refused."""
        raise PlanError(
            "a global tensor is not shared between processes: each rank holds a part of it",
            given=str(global_layout_of(self)),
            allowed="to_local().share_memory_(), for the part alone",
            fix="give the part to the other process",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise PlanError(
            "a global tensor is not pickled: each rank holds a part of it",
            given=str(global_layout_of(self)),
            allowed="shardwright.global_tensor.save and load",
            fix="save({'name': tensor}, folder)",
        )

    def __deepcopy__(self, memo: Any) -> Any:
        if not self.is_leaf:
            raise PlanError(
                "a result of operators is not deep-copied: the copy would have no gradient to pass on",
                given=f"{list(self.shape)} on {global_layout_of(self)}",
                allowed="leaves: parameters, and tensors that nothing computed",
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
        """The whole on this rank, for code that needs the numbers: the same on every rank."""
        if set(self.placement.ranks) != set(range(here().size)):
            raise LayoutError(
                f"'{verb}' needs the numbers on every rank, and some hold none",
                given=f"{self.placement}, a world of {here().size}",
                allowed="tensors whose placement is the whole world",
                fix=f"use x.to_global({everywhere(self.placement.type)}, sbp.broadcast), or x.to_local()",
            )
        whole: GlobalTensor = self.detach()  # type: ignore[assignment]
        return whole.full_tensor()


def everywhere(type: str) -> Placement:
    """The placement of all ranks in a row.

    >>> everywhere("cpu")
    placement("cpu", ranks=[0])
    """
    size = here().size
    return Placement(type, tuple(range(size)), (size,))


def global_layout_of(tensor: DTensor) -> GlobalLayout:
    """Where a tensor lies and how."""
    return GlobalLayout(placement_of(tensor._spec.mesh), tuple(tensor._spec.placements))


def wrap(local: Tensor, shape: Sequence[int], where: GlobalLayout, stride: Sequence[int] | None = None) -> GlobalTensor:
    """A global tensor of ``shape`` around this rank's local tensor; nothing is checked but the local shape."""
    shape = tuple(shape)
    expected = local_shape(shape, where, here().rank)
    assert tuple(local.shape) == expected, f"a local tensor of {tuple(local.shape)} where {expected} lies: {where}"
    if stride is None:
        stride = _dense(shape)
    spec = _spec(shape, tuple(stride), local.dtype, where)
    return Tensor._dtensor__new__(GlobalTensor, local, spec, requires_grad=False)


@lru_cache(maxsize=4096)
def _spec(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, where: GlobalLayout) -> DTensorSpec:
    """Torch's own description of the layout; nothing changes one once it is made."""
    meta = TensorMeta(torch.Size(shape), stride, dtype)
    return DTensorSpec(mesh_of(where.placement), where.sbp, tensor_meta=meta)


@lru_cache(maxsize=4096)
def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def to_global(
    x: Tensor,
    placement: Placement | None = None,
    sbp: Sbp | Sequence[Sbp] | None = None,
    *,
    grad_sbp: Sbp | Sequence[Sbp] | None = None,
) -> GlobalTensor:
    """``x``, lying on ``placement`` as ``sbp`` says: see :meth:`GlobalTensor.to_global`.

    A plain tensor is taken as each rank's own part (:func:`from_local`); a DTensor as it is. Every rank of the world
    calls it for those.
    """
    if not isinstance(x, DTensor):
        from shardwright.global_tensor.from_local import from_local  # makes a global tensor: it imports this file

        if placement is None or sbp is None:
            raise LayoutError(
                "a plain tensor does not say where it lies",
                given=f"placement={placement}, sbp={sbp}",
                allowed="both",
                fix="write to_global(x, placement('cpu', ranks=[0]), sbp.broadcast)",
            )
        return from_local(x, placement, sbp, grad_sbp=grad_sbp)
    here_ = global_layout_of(x)
    where = here_.placement if placement is None else placement
    check_placement(where)
    if sbp is None and where.ndim != here_.placement.ndim:
        raise LayoutError(
            "a placement with other axes needs an sbp",
            given=f"{here_.placement} to {where}, sbp=None",
            allowed=f"{where.ndim} of split(dim), broadcast, partial_sum",
            fix=f"write sbp=({', '.join(['sbp.broadcast'] * where.ndim)},)",
        )
    if not isinstance(x, GlobalTensor):
        check_source(x, here_)
    check_fresh("to_global", [x])
    there = GlobalLayout(where, words.checked(here_.sbp if sbp is None else sbp, where, x.ndim))
    is_leaf_of_terms = x.is_leaf and x.requires_grad and is_partial(here_)  # its gradient is one of terms, too
    if there == here_ and grad_sbp is None and isinstance(x, GlobalTensor) and not is_leaf_of_terms:
        return x
    if grad_sbp is not None:
        back = words.checked(grad_sbp, here_.placement, x.ndim)
    elif x.is_leaf:
        back = here_.sbp  # a leaf's own layout, so that an optimizer adds terms to terms
    else:
        back = without_sums(here_.sbp)
    return _ToGlobal.apply(x, there, back)  # type: ignore[no-any-return, no-untyped-call]


def without_sums(sbp: Sequence[Sbp]) -> tuple[Sbp, ...]:
    """How a gradient lies that each term of a sum needs whole."""
    return tuple(broadcast if one.is_partial() else one for one in sbp)


def moved(x: DTensor, where: GlobalLayout) -> Tensor:
    """The local tensor of ``x`` once it lies there; outside of autograd."""
    return move(x._local_tensor, tuple(x.shape), global_layout_of(x), where)


def check_gradient(grad: Tensor, where: Placement) -> None:
    """Raises LayoutError for a gradient that does not lie where its tensor does: ``y.backward(plain)``."""
    if not isinstance(grad, GlobalTensor) or grad.placement != where:
        given = str(grad.placement) if isinstance(grad, GlobalTensor) else "a plain tensor"
        raise LayoutError(
            "a global tensor is given a gradient that does not lie where it does",
            given=f"{given}, for a tensor on {where}",
            allowed="a global tensor on the same placement",
            fix="write y.backward(torch.ones_like(y)), or to_global(grad, placement, sbp) for it",
        )


def _own_gradient(shape: tuple[int, ...], where: GlobalLayout, grad: GlobalTensor) -> GlobalTensor:
    """A leaf's gradient, cut where the leaf is and the gradient is whole, if that moves nothing."""
    check_gradient(grad, where.placement)
    back = [mine if is_split(mine) and one == broadcast else one for mine, one in zip(where.sbp, grad.sbp, strict=True)]
    there = GlobalLayout(where.placement, tuple(back))
    if there.sbp == grad.sbp or route(shape, global_layout_of(grad), there).moved_elements:
        return grad
    return grad.to_global(sbp=there.sbp)


class _ToGlobal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: DTensor, there: GlobalLayout, back: tuple[Sbp, ...]) -> GlobalTensor:
        ctx.back, ctx.there = GlobalLayout(placement_of(x._spec.mesh), back), there.placement
        ctx.set_materialize_grads(False)
        local = moved(x, there)
        local = local.clone() if local is x._local_tensor else local.view_as(local)
        return wrap(local, tuple(x.shape), there)

    @staticmethod
    def backward(ctx: Any, grad: GlobalTensor | None) -> Any:
        if grad is None:
            return None, None, None
        check_gradient(grad, ctx.there)
        return grad.to_global(ctx.back.placement, ctx.back.sbp), None, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: GlobalTensor, grad_sbp: tuple[Sbp, ...] | None) -> Tensor:
        ctx.shape, ctx.where = tuple(x.shape), GlobalLayout(x.placement, grad_sbp or without_sums(x.sbp))
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return wrap(grad, ctx.shape, ctx.where), None
