"""Code with conditions on values, in a file whose assertions pytest leaves as they are."""

from __future__ import annotations

import contextlib

import torch


def raises_if(x):
    if x.isnan().any():
        raise ValueError(f"{x.shape} is not a number")


def raises_unless(x):
    if not (x > 0).any():
        raise ValueError("none")


def raises_else(x):
    if x.isfinite().all():
        x = x + 1
    else:
        raise ValueError("not finite")


def asserts(x):
    assert x.isfinite().all()
    assert not x.isnan().any(), "not a number"


def one_of_two(x):
    if x.isnan().any() or not x.isfinite().all():
        raise ValueError("not finite")


def all_of_two(x):
    assert (x > 0).any() and not x.isnan().any(), "none"  # noqa: PT018


def by_a_call(x):
    if bool(x.isnan().any()):
        raise ValueError("not a number")
    if not x.isfinite().all().item():
        raise ValueError("not finite")
    if not torch.equal(x, x.detach()):
        raise ValueError("other values")


def in_a_function(x):
    torch._assert(x.isfinite().all(), "not finite")


def chooses(x):
    return x + 1 if x.isnan().any() else x - 1


def raises_later(x):
    if x.isnan().any():
        if x.dim() > 1:
            return
        raise ValueError("not a number")


def raises_either_way(x):
    if x.isnan().any():
        raise ValueError("not a number")
    raise TypeError("a number")


def catches_itself(x):
    try:
        if x.isnan().any():
            raise ValueError("not a number")
    except ValueError:
        return x - 1
    return x + 1


def is_caught(x):
    try:
        raises_if(x)
    except ValueError:
        return x - 1
    return x + 1


def suppresses(x):
    with contextlib.suppress(ValueError):
        raises_if(x)
    return x
