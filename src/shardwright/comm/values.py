"""Plain values from every member of an axis, and whether they are equal."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from shardwright.comm.axis import Axis


def gather_json(axis: Axis, value: Any) -> list[Any]:
    """Every member's value, as JSON takes it, in the order of the members.

    >>> from shardwright import Mesh, run_on_threads
    >>> run_on_threads(Mesh(dp=2), lambda axes: gather_json(axes["dp"], {"rank": axes["dp"].index}))[0]
    [{'rank': 0}, {'rank': 1}]
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    device = axis.device
    sizes = axis.all_gather(torch.tensor([text.numel()], device=device)).tolist()
    joined = axis.all_gather(text.to(device), sizes=sizes).cpu()
    return [json.loads(bytes(part.tolist())) for part in joined.split(sizes)]


def digest(text: str) -> int:
    """A short stand-in for a text; 56 bits, so that its negative fits a number of 64 too.

    >>> digest("split(0)") == digest("split(0)") != digest("split(1)")
    True
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def first_unlike(lines: Sequence[str], others: Sequence[str]) -> tuple[int, str, str]:
    """The first place at which two lists differ, counted from 1, and what each has there.

    >>> first_unlike(["a", "b"], ["a"])
    (2, 'b', 'nothing')
    """
    pairs = enumerate(zip_longest(lines, others, fillvalue="nothing"), 1)
    return next((place, first, second) for place, (first, second) in pairs if first != second)


def difference(axis: Axis, lines: Sequence[str]) -> str | None:
    """The first lines that differ, and whose they are; None if all members have the same.

    Traffic: one all-reduce of two numbers; where they differ, all lines.

    >>> from shardwright import Mesh, run_on_threads
    >>> run_on_threads(Mesh(pp=2), lambda axes: difference(axes["pp"], ["same", f"member {axes['pp'].index}"]))[1]
    "rank 0 has 'member 0', rank 1 'member 1'"
    """
    number = digest("\n".join(lines))
    most = axis.all_reduce(torch.tensor([number, -number], device=axis.device), "max").tolist()
    if most[0] == -most[1]:
        return None
    every = gather_json(axis, list(lines))
    other = next(member for member, theirs in enumerate(every) if theirs != every[0])
    _, first, second = first_unlike(every[0], every[other])
    return f"rank {axis.ranks[0]} has '{first:.200}', rank {axis.ranks[other]} '{second:.200}'"
