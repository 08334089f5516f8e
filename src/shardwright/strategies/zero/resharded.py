"""The class that a parameter has while it is resharded: its shape can be read, and its values raise an error.

A resharded parameter keeps its shape, with one NaN for all its elements. Without this class, code that computes with
``run.model.parameters()`` between steps, such as a norm, an average or ``parameters_to_vector``, would get NaN, and
what it writes there would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ShardError
from shardwright.runtime.proxy_parameter import DATA, DROP_GRAD, GRAD, SET_GRAD, ProxyParameter, ReadOnlyData

_PROPERTIES = (
    *("dtype", "device", "shape", "ndim", "layout", "itemsize", "nbytes", "names", "requires_grad", "is_leaf"),
    *("grad_fn", "retains_grad", "output_nr", "_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    *(name for name in dir(Tensor) if name.startswith("is_") and not callable(getattr(Tensor, name))),
    "grad_dtype",
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "is_shared", "data_ptr", "untyped_storage"),
    *("register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "get_device", "__hash__", "__len__"),
    *("__repr__", "__dir__", "has_names", "sym_numel", "sym_size", "_is_view", "is_pinned", "__format__"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor"),
)
_FUNCTIONS = (
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.result_type),
)


class ShardedParameter(nn.Parameter):
    """A parameter of a run's model while this rank holds only a shard of it; made by :meth:`hide`.

    Attributes:
        path: its name in the plain model.
        shard: the part that this rank stores and the optimizer updates, whose ``grad`` is that of the last step.

    >>> weight = nn.Parameter(torch.ones(2, 3))
    >>> ShardedParameter.hide(weight, "up.weight", nn.Parameter(torch.ones(3)))
    >>> weight.shape, weight.numel(), weight.grad
    (torch.Size([2, 3]), 6, None)
    >>> weight.norm()
    Traceback (most recent call last):
    shardwright.errors.ShardError: norm of 'up.weight' outside of a step: this rank holds only a shard of it
      ...
    """

    path: str
    shard: nn.Parameter

    @staticmethod
    def hide(parameter: nn.Parameter, path: str, shard: nn.Parameter) -> None:
        """Gives ``parameter`` this class; setting ``__class__`` back to its own shows its values again."""
        parameter.__class__ = ShardedParameter
        vars(parameter).update(path=path, shard=shard)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Runs ``func`` if it reads nothing but metadata. Raises ShardError for anything else.

        Dropping the gradient (``.grad = None``) drops that of the shard, which the optimizer updates.
        """
        drops = func == DROP_GRAD or (func == SET_GRAD and args[1] is None)
        if not drops and func not in _ALLOWED:
            _refuse(func, args)
        if drops and isinstance(args[0].shard, Tensor):
            args[0].shard.grad = None
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func == GRAD and result is None and getattr(args[0].shard, "grad", None) is not None:
                _refuse(func, args)
        return result


class GatheredParameter(ProxyParameter):
    """A parameter of a run's model that code has read as an attribute between steps: it is whole until it is resharded.

    Its gradient is on the shard, as with :class:`ShardedParameter`. Dropping the gradient here drops that of the shard;
    reading or setting it is an error. The attributes are those of :class:`ShardedParameter`.
    """

    path: str
    shard: nn.Parameter
    keeps_writes: bool
    """Whether the shard is a part of this tensor, so that what is written into its ``data`` is not lost."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Runs ``func``. Raises ShardError if it reads or sets the gradient, or makes a write that would be lost."""
        own = args[0] if args and isinstance(args[0], GatheredParameter) else None
        if own is not None and func == SET_GRAD and args[1] is not None:
            _refuse(func, args)
        if own is not None and func in (SET_GRAD, DROP_GRAD) and isinstance(own.shard, Tensor):
            own.shard.grad = None
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if own is not None and func == GRAD and result is None and getattr(own.shard, "grad", None) is not None:
                _refuse(func, args)
            if own is not None and func is Tensor.detach and sys._getframe(1).f_code is nn.Parameter.__new__.__code__:
                result = result.as_subclass(GatheredParameter)  # nn.Parameter(p) expects a result of p's class
                vars(result).update(vars(own))
            if own is not None and func == DATA and not own.keeps_writes:
                return ReadOnlyData.of(result, partial(_lost_data, own.path))
            return result


_FIELDS: Mapping[str, Any] = {name: getattr(Tensor, name) for name in ("grad", *_PROPERTIES) if hasattr(Tensor, name)}
_ALLOWED: frozenset[Any] = frozenset(
    [field.__get__ for field in _FIELDS.values()]
    + [_FIELDS["requires_grad"].__set__]
    + [getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)]
    + [*_FUNCTIONS]
)


def _refuse(func: Callable[..., Any], args: Sequence[Any]) -> None:
    """Raises ShardError for a call with a resharded parameter."""
    name = getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", str(func))
    leaves = [leaf for arg in args for leaf in (arg if isinstance(arg, list | tuple) else [arg])]
    kinds = ShardedParameter | GatheredParameter
    path = next((leaf.path for leaf in leaves if isinstance(leaf, kinds)), "a parameter")
    if func in (GRAD, SET_GRAD):  # by ==: torch passes a new object each time
        fix = f"write run.parameters['{path}'].grad; to clip, write run.clip_grad_norm_(max_norm)"
    else:
        fix = (
            f"write run.state_dict()['{path}'] for the whole, on every rank, or run.parameters['{path}'] for this "
            "rank's shard, and run.changed() after writing to it; the layout says the dtype"
        )
    raise ShardError(
        f"{name} of '{path}' outside of a step: this rank holds only a shard of it",
        given="a parameter of run.model, which ZeRO shards",
        allowed="run.state_dict() for whole tensors, run.parameters for this rank's shards, and sums over ranks",
        fix=fix,
    )


def _lost_data(path: str) -> ShardError:
    return ShardError(
        f"what is written into '{path}' of run.model outside of a step would be lost: this rank stores only a shard",
        given="a write into the data of a parameter of run.model, which ZeRO has gathered to be read",
        allowed="writes to run.parameters, and whole tensors by name with run.load_state_dict",
        fix=f"write to run.parameters['{path}'], this rank's shard, then run.changed(); or "
        "run.load_state_dict({...}, strict=False)",
    )
