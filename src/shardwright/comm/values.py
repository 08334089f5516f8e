"""Plain values from every member of an axis."""

from __future__ import annotations

import json
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
