"""Numbers and errors as text: with units for people, and as standard JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any


def json_text(value: Any, indent: int | None = None) -> str:
    """Returns ``value`` as standard JSON text, in which a number that is not finite becomes null.

    >>> json_text({"loss": float("nan"), "steps": (1, float("inf"))})
    '{"loss": null, "steps": [1, null]}'
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError):  # a number that is not finite, or a mapping that is no dict
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;]*m)")  # all control codes but colours


def printable(text: str) -> str:
    """Returns text for a terminal, in which control codes and what is no UTF-8 are written as escapes.

    Otherwise a name in another person's checkpoint or run could move the cursor, or set the title of the window. Tabs,
    newlines and colours stay.

    >>> printable("step 3\\x1b[2J\\n")
    'step 3\\\\x1b[2J\\n'
    """
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text).encode(errors="backslashreplace").decode()


def first_line(failure: object) -> str:
    """Returns the first line of the text of an error (or other object), or the name of its class if it has no text.

    >>> first_line(ValueError("too long\\nfor a line")), first_line(ValueError())
    ('too long', 'ValueError')
    """
    return next(iter(str(failure).strip().splitlines()), type(failure).__name__)


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as text in the largest fitting unit from B to TiB, such as "1.5 KiB".

    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(12), format_bytes(2**20 - 1)
    ('1.5 KiB', '3.0 GiB', '12 B', '1.0 MiB')
    """
    return _in_units(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_decimal_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as text in the units of datasheets, powers of 1000, such as "2.7 GB" or "80 GB".

    >>> format_decimal_bytes(2.74e9), format_decimal_bytes(80e9), format_decimal_bytes(389_400_000)
    ('2.74 GB', '80 GB', '389 MB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= 0.9995 * size:
            value = num_bytes / size
            return f"{value:.3g} {unit}" if abs(value) < 999.5 else f"{value:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """Returns a count as text, from 1000 on with one decimal and a decimal prefix (k, M, G, T).

    >>> format_count(1234), format_count(3_400_000), format_count(7), format_count(999_999)
    ('1.2 k', '3.4 M', '7', '1.0 M')
    """
    return _in_units(count, 1000, ("", "k", "M", "G", "T"))


def _in_units(value: float, step: int, units: Sequence[str]) -> str:
    """Returns a value in the first unit in which its rounded text is less than ``step``, or in the last unit."""
    text = f"{value:.0f} {units[0]}".strip()
    for power, unit in enumerate(units[1:], 1):
        if abs(float(text.partition(" ")[0])) < step:
            break
        text = f"{value / step**power:.1f} {unit}"
    return text


def format_seconds(seconds: float) -> str:
    """Returns a time as text with up to three significant digits, in the largest fitting unit of s, ms, us and ns.

    From 1000 s on it is in whole seconds.

    >>> format_seconds(0.000114), format_seconds(0.0079), format_seconds(-1.5), format_seconds(12345.6)
    ('114 us', '7.9 ms', '-1.5 s', '12346 s')
    """
    if abs(seconds) >= 999.5:
        return f"{seconds:.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def format_duration(seconds: float) -> str:
    """Returns a duration as text in units that suit its length: from milliseconds to hours and minutes.

    >>> format_duration(0.012), format_duration(59.97), format_duration(75), format_duration(4000)
    ('12 ms', '1 min 00 s', '1 min 15 s', '1 h 06 min')
    """
    if not isfinite(seconds):
        return f"{seconds} s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def numbered(ranks: Sequence[int]) -> str:
    """Returns rank numbers as text, in which consecutive numbers are written as a range.

    >>> numbered([0, 1, 2, 5]), numbered([3])
    ('ranks 0 to 2, 5', 'rank 3')
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(parts)}"
