"""What torch refuses only when it computes: found out on a rank that computes nothing, so that all raise alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from shardwright.global_tensor.rules.call import OperatorCall

MOST_ELEMENTS = 2**20
"""Larger tensors are not tried: what members find wrong, others then learn when a partner is gone."""

_TRIED: set[Any] = set()


def try_out(call: OperatorCall) -> None:
    """Runs the operator on ones of the whole shapes, once for each kind of call; where ones are no indices, on zeros.

    Raises: what torch does for these dtypes and plain arguments, which meta tensors do not show.
    """
    num = sum(x.numel() for x in (*call.tensors, *call.outputs) if x is not None)
    if call.key is None or call.key in _TRIED or num > MOST_ELEMENTS:
        return
    try:
        _run(call, 1)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass  # of the numbers, and not of their kind
    except Exception:
        if all(x.dtype.is_floating_point for x in call.tensors):
            raise
        _run(call, 0)
    if len(_TRIED) > 10_000:
        _TRIED.clear()
    _TRIED.add(call.key)


def _run(call: OperatorCall, whole_number: int) -> None:
    def plain(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        same: Tensor | None = getattr(x, "_plain", None)
        if same is not None:
            return same.clone()
        value = whole_number if not x.dtype.is_floating_point else 1
        return torch.full(x.shape, value, dtype=x.dtype, device=x._local_tensor.device)

    call.func(*tree_map(plain, call.args), **tree_map(plain, call.kwargs))
