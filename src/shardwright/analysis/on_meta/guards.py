"""Finds conditions that only guard code, such as an assertion that values are finite: one answer leads to ``raise``."""

from __future__ import annotations

import dis
import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType

import torch

_PACKAGE = str(Path(__file__).parents[1])
_NOT_USERS = _PACKAGE, str(Path(torch.__file__).parent)
_OF_TORCH = frozenset(("torch.overrides", "torch.utils._python_dispatch", "torch._ops", "torch._tensor"))
"""Torch modules whose frames lie, like this package's, between the code that asks for a value and its answer."""


def answer_of_guard() -> bool | None:
    """Returns the answer to the condition that code asks for right now, with which the code does not raise.

    The answer is False in ``if value.isnan().any(): raise ...`` and True in ``assert value.isfinite().all()``. It is
    None if the condition is no guard. Then neither or both of its branches begin with a ``raise``, or code around the
    condition may catch the error, in the same function or in one that called it.

    >>> import torch
    >>> from shardwright.analysis.on_meta.meta_values import MetaValues
    >>> from shardwright.analysis.on_meta.module_calls import call_model
    >>> class Layer(torch.nn.Module):
    ...     def forward(self, x):
    ...         if x.isnan().any():
    ...             raise ValueError("not a number")
    ...         assert x.isfinite().all(), "not finite"
    ...         return x + 1
    >>> x = torch.empty(3, device="meta")
    >>> with MetaValues():
    ...     call_model(Layer(), x).shape
    torch.Size([3])
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _answers(frame):
        frame = frame.f_back
    if frame is None:
        return None
    answer = _answer_at(frame.f_code, frame.f_lasti)
    return None if answer is None or _may_be_caught(frame) else answer


def _may_be_caught(frame: FrameType | None) -> bool:
    """Whether the code of a frame, or of a caller up to the call of the model, may catch an error from the frame."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "call_model" and code.co_filename.startswith(_PACKAGE):
            return False
        is_users = not code.co_filename.startswith(_NOT_USERS)
        if is_users and any(start <= frame.f_lasti < stop for start, stop in _guarded(code)):
            return True
        frame = frame.f_back
    return False


@lru_cache(maxsize=1024)
def _guarded(code: CodeType) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of instructions that a handler of the function covers, by a ``try`` or a ``with``."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # dis.Bytecode, which is public, uses it
    return tuple((entry.start, entry.end) for entry in entries)


def _answers(frame: FrameType) -> bool:
    """Whether a frame belongs to code that answers a question for a value, or passes it on."""
    return frame.f_code.co_filename.startswith(_PACKAGE) or frame.f_globals.get("__name__") in _OF_TORCH


@lru_cache(maxsize=1024)
def _answer_at(code: CodeType, offset: int) -> bool | None:
    """Returns the answer of :func:`answer_of_guard` for the instruction at ``offset``, which asks for the condition."""
    instructions = [
        instruction for instruction in dis.get_instructions(code) if instruction.opname not in ("CACHE", "NOT_TAKEN")
    ]
    places = {instruction.offset: number for number, instruction in enumerate(instructions)}
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
    wanted = raises[0] == jump.opname.endswith("IF_TRUE")  # the value that avoids the branch with the raise
    return wanted != negated


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Returns whether instructions come to a ``raise`` before any jump or return."""
    for instruction in instructions:
        if instruction.opname == "RAISE_VARARGS":
            return True
        if (
            "JUMP" in instruction.opname
            or "RETURN" in instruction.opname
            or instruction.opname in ("FOR_ITER", "SEND", "RERAISE")
        ):
            return False
    return False
