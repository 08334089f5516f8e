"""The schema of ``manifest.json``: the allowed entries and values, checked before any of them is used.

A manifest may come from another person. So a file in it can only be named like ``part-00000.safetensors``, without a
path, dtypes are torch's, and optimizer options are plain values: no text of a manifest reaches an import.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import inf, prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

PART = re.compile(r"part-[0-9]{1,12}(\.[0-9]{1,12})?\.safetensors")
DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
TENSOR, VALUES = "tensor", "values"
"""The keys of the table that stands for a tensor inside of an optimizer's options or state."""
KEYS = frozenset({"format", "version", "step", "layout", "seed"} | {"optimizer", "scalars", "groups", "extra"}
                 | {"files", "tensors"})  # fmt: skip
MOST_DIMS = 64
"""The most dims of a tensor in a checkpoint: torch computes with no more, and reading more can take minutes."""

_SHA256 = re.compile("[0-9a-f]{64}")
_PLAIN = (bool, int, float, str, type(None))


def check_schema(content: Any) -> None:
    """Raises ValueError, naming the wrong entry, unless the parsed JSON ``content`` is a valid manifest.

    It must have exactly a manifest's entries but for the checksum, with values of the right types. The stored parts of
    each tensor must lie inside its shape and add up to its size, and must fit into their files. The optimizer's options
    must not be NaN. Its learning rates must not be below 0, and learning rates, ``eps`` and ``weight_decay`` must be
    finite.

    >>> check_schema({"format": "x"})
    Traceback (most recent call last):
    ValueError: no entry 'extra'
    """
    _need(isinstance(content, dict), "no table of entries")
    for key in sorted(KEYS ^ (content.keys() - {"frozen"})):
        raise ValueError(f"{'no' if key in KEYS else 'an unknown'} entry {key!r:.80}")
    rules = {"step": _is_step, "version": _is_version, "seed": _is_int, "layout": _is_text, "optimizer": _is_text}
    for key, rule in rules.items():
        _need(rule(content[key]), f"'{key}' is {content[key]!r:.80}")
    frozen = content.get("frozen", [])
    _need(isinstance(frozen, list) and all(map(_is_text, frozen)), "'frozen' is no list of names")
    for key in ("files", "tensors", "scalars"):
        _need(isinstance(content[key], dict), f"'{key}' is no table")
    for name, entry in content["files"].items():
        _need(PART.fullmatch(name) is not None, f"a file is named {name!r:.200}: it is no part of a checkpoint")
        fits = isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"} and _is_count(entry["bytes"])
        _need(fits and _SHA256.fullmatch(str(entry["sha256"])) is not None, f"file '{name}' has no size and checksum")
    keys: dict[tuple[str, str], int] = {}
    for name, entry in content["tensors"].items():
        _check_tensor(name, entry, content["files"], keys)
    used = Counter[str]()
    for (file, _), num_bytes in keys.items():
        used[file] += num_bytes
    for file, num_bytes in used.items():  # so that reading allocates no more than the files hold
        _need(num_bytes <= content["files"][file]["bytes"], f"'{file}' is too short for its pieces")
    _check_state(content["scalars"], content["groups"])
    _need(bool(content["groups"]) or not content["optimizer"], f"no param groups of {content['optimizer']!r:.80}")


def _check_tensor(name: str, entry: Any, files: Mapping[str, Any], keys: dict[tuple[str, str], int]) -> None:
    """Raises ValueError for a wrong shape or piece of a tensor; adds the pieces' bytes to ``keys``, by file and key."""
    named = f"tensor {name!r:.80}"
    _need(isinstance(entry, dict) and entry.keys() == {"dtype", "shape", "pieces"}, f"{named} has other entries")
    shape, pieces = entry["shape"], entry["pieces"]
    _need(_is_text(entry["dtype"]) and entry["dtype"] in DTYPES, f"{named} has dtype {entry['dtype']!r:.80}")
    fits = isinstance(shape, list) and len(shape) <= MOST_DIMS and all(map(_is_count, shape))
    _need(fits, f"{named} has shape {shape!r:.80}")
    _need(isinstance(pieces, list), f"{named} has no list of pieces")
    count = 0
    for piece in pieces:
        _need(isinstance(piece, list) and len(piece) == 4, f"{named} has a piece {piece!r:.80}")
        start, stop, file, key = piece
        for corner in (start, stop):
            fits = isinstance(corner, list) and len(corner) == len(shape) and all(map(_is_count, corner))
            _need(fits, f"{named} has a piece at {corner!r:.80}")
        inside = all(a < b <= most for a, b, most in zip(start, stop, shape, strict=True))
        _need(inside, f"{named} of shape {shape} has a piece from {start} to {stop}")
        _need(_is_text(file) and file in files, f"{named} is in {file!r:.80}, which is not listed")
        _need(_is_text(key) and (file, key) not in keys, f"{named} shares {key!r:.80} of '{file}' with another piece")
        size = prod(b - a for a, b in zip(start, stop, strict=True))
        keys[file, key] = size * getattr(torch, entry["dtype"]).itemsize
        count += size
    _need(count == prod(shape), f"{named} has {count} elements in its pieces, {prod(shape)} in its shape")


def _check_state(scalars: Mapping[str, Any], groups: Any) -> None:
    """Raises ValueError for a wrong type among the optimizer's scalars and the options of its param groups."""
    for name, entry in scalars.items():
        _need(isinstance(entry, dict), f"the scalars of {name!r:.80} are no table")
        for key, pair in entry.items():
            fits = isinstance(pair, list) and len(pair) == 2 and (pair[0] == "" or pair[0] in DTYPES)
            _need(fits and (_is_number(pair[1]) if pair[0] else _is_plain(pair[1])), f"'{key}' of {name!r:.80}")
            counts = tree_leaves(pair[1]) if key == "step" and pair[0] else [0]
            is_count = len(counts) == 1 and 0 <= counts[0] < 2**63
            _need(is_count, f"the step count of {name!r:.80} is {pair[1]!r:.80}")
    _need(isinstance(groups, list), "'groups' is no list")
    named = Counter[str]()
    for group in groups:
        _need(isinstance(group, dict) and group.keys() == {"parameters", "options"}, "a param group has other entries")
        names, options = group["parameters"], group["options"]
        _need(isinstance(names, list) and all(map(_is_text, names)), "the parameters of a param group are no names")
        named.update(names)
        twice = next((name for name in names if named[name] > 1), "")
        _need(not twice, f"the parameter {twice!r:.80} is in two param groups, or twice in one")
        fits = isinstance(options, dict) and "params" not in options and all(map(_is_plain, options.values()))
        _need(fits, "the options of a param group are no plain values")
        nan = next((key for key, value in options.items() if any(leaf != leaf for leaf in tree_leaves(value))), "")
        _need(not nan, f"the option '{nan}' of a param group is not a number")
        # for a load, torch checks the other options, but it accepts infinite values, so these are refused here
        for rate in (options.get("lr"), options.get("initial_lr")):
            _need(rate is None or (type(rate) in (int, float) and rate >= 0), f"the learning rate is {rate!r:.80}")
        for key in ("lr", "initial_lr", "eps", "weight_decay"):
            is_finite = not any(value in (inf, -inf) for value in tree_leaves(options.get(key)))
            _need(is_finite, f"the option '{key}' of a param group is infinite")


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**64


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_step(value: Any) -> bool:
    return _is_count(value) and value < 2**63


def _is_version(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Returns whether a value is a number, or nested lists of numbers from which torch can make a tensor."""
    return isinstance(value, bool | int | float) or (isinstance(value, list) and all(map(_is_number, value)))


def _is_plain(value: Any) -> bool:
    """Returns whether a value is plain (number, text, None), or a list or table of plain values, as of a tensor."""
    if isinstance(value, dict) and value.keys() == {TENSOR, VALUES}:
        return value[TENSOR] in DTYPES and _is_number(value[VALUES])
    inside = value.values() if isinstance(value, dict) else value
    return isinstance(value, _PLAIN) or (isinstance(value, list | dict) and all(map(_is_plain, inside)))
