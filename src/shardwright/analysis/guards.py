"""Finds conditions that only guard code, as an assertion that values are finite: one answer leads to a ``raise``."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = str(Path(__file__).parents[1])
_OF_TORCH = frozenset(("torch.overrides", "torch.utils._python_dispatch", "torch._ops", "torch._tensor"))
"""The modules whose functions stand, beside this package's, between code that asks for a value and what answers it."""


def answer_of_guard() -> bool | None:
    """Returns the answer with which the code that asks for a condition's value right now goes on.

    That is False in ``if value.isnan().any(): raise ...`` and True in ``assert value.isfinite().all()``. None if the
    condition is no guard: neither of its branches, or both, begin with a ``raise``.

    >>> import torch
    >>> from shardwright.analysis.meta_values import MetaValues
    >>> def layer(x):
    ...     if x.isnan().any():
    ...         raise ValueError("not a number")
    ...     assert x.isfinite().all(), "not finite"
    ...     return x + 1
    >>> x = torch.empty(3, device="meta")
    >>> with MetaValues():
    ...     layer(x).shape
    torch.Size([3])
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _answers(frame):
        frame = frame.f_back
    return None if frame is None else _answer_at(frame.f_code, frame.f_lasti)


def _answers(frame: FrameType) -> bool:
    """Whether a frame is of code that answers, or passes on, a question for a value."""
    return frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_globals.get("__name__") in _OF_TORCH


@lru_cache(maxsize=1024)
def _answer_at(code: CodeType, offset: int) -> bool | None:
    """Returns the answer of :func:`answer_of_guard` to the instruction at ``offset`` of a code object."""
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "NOT_TAKEN")]
    places = {each.offset: number for number, each in enumerate(instructions)}
    number, negated = places.get(offset, len(instructions)), False
    while number < len(instructions) and "JUMP" not in instructions[number].opname:
        name = instructions[number].opname
        if name != "UNARY_NOT" and name != "TO_BOOL" and not name.startswith(("CALL", "PRECALL")):
            return None
        negated ^= name == "UNARY_NOT"
        number += 1
    jump = instructions[number] if number < len(instructions) else None
    if jump is None or not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    goes_on, jumps = number + 1, places.get(jump.argval, len(instructions))
    raises = _raises(instructions[goes_on:]), _raises(instructions[jumps:])
    if raises[0] == raises[1]:
        return None
    wanted = raises[0] == jump.opname.endswith("IF_TRUE")  # to jump where going on raises
    return wanted != negated


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Returns whether instructions come to a ``raise`` before any jump or return."""
    for each in instructions:
        if each.opname == "RAISE_VARARGS":
            return True
        if "JUMP" in each.opname or "RETURN" in each.opname or each.opname in ("FOR_ITER", "SEND", "RERAISE"):
            return False
    return False
