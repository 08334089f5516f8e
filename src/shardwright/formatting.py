"""Numbers as text: with units for people, as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns standard JSON: a number that is not finite becomes null.

    >>> json_text({"loss": float("nan"), "steps": (1, float("inf"))})
    '{"loss": null, "steps": [1, null]}'
    """
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def format_bytes(num_bytes: float) -> str:
    """Formats bytes in the largest binary unit of which there is at least one.

    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(12)
    ('1.5 KiB', '3.0 GiB', '12 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Formats a count with a decimal prefix.

    >>> format_count(1234), format_count(3_400_000), format_count(7)
    ('1.2 k', '3.4 M', '7')
    """
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f}"


def format_duration(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds, or in milliseconds when it is short.

    >>> format_duration(0.012), format_duration(75), format_duration(4000)
    ('12 ms', '1 min 15 s', '1 h 06 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"
