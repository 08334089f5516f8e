"""``Device``: the datasheet figures of one accelerator, read from a profile."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from shardwright.cost.calibration import KEYS
from shardwright.devices import NATIVE, backend_of
from shardwright.errors import PlanError, fix_for
from shardwright.text_files import read_text

MOST_TOML_BYTES = 2**17
DENSE = (60, 350)
"""The range, in FLOPs per byte of memory bandwidth, of bf16 or fp16 peaks that datasheets give without sparsity."""

NUMBERS = ("memory_GB", "memory_GB_per_s", "num_multiprocessors", "in_node_GB_per_s", "between_nodes_GB_per_s")
HOST_LINK, USUAL_HOST_GB_PER_S = "host_GB_per_s", 16.0
"""The key of the link to the host's memory, and its default bandwidth, which is that of 16 lanes of PCIe 3."""
HOST_MEMORY = "host_memory_GB"
"""The key of the memory of a node's host, which no profile has, because nodes differ."""
PRECISIONS = ("fp32", "bf16", "fp16")
"""The precisions for which a file gives peaks: the ones that layouts run in."""
MOST = 1e7
"""A bound on every figure in GB or GB/s: a larger figure was probably given in bytes."""


@dataclass(frozen=True)
class Device:
    """The figures of one accelerator: dense peaks in FLOP/s by precision, memory, bandwidths and multiprocessors.

    Memory is in bytes. Bandwidths are in bytes per second one way: that of the memory, of the links to accelerators of
    the same node, of the accelerator's link to other nodes, and of its link to the host's memory. ``host_memory_bytes``
    is the memory of a node's host, None if it is not known. ``type`` is the device type of torch, and ``source`` names
    the datasheet. ``assumes_network`` says that the bandwidth between nodes is not from the datasheet, but that of a
    usual network. ``notes`` are warnings of the file's reader. :func:`profile` returns a device by name.

    >>> device = profile("a100-80gb")
    >>> device.peak("bf16") == 312e12, device.memory_bytes == 80e9, device.warnings
    (True, True, ())
    """

    name: str
    type: str
    source: str
    peaks: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bytes_per_s: float
    num_multiprocessors: int
    in_node_bytes_per_s: float
    between_nodes_bytes_per_s: float
    host_bytes_per_s: float = USUAL_HOST_GB_PER_S * 1e9
    host_memory_bytes: float | None = None
    notes: tuple[str, ...] = ()
    assumes_network: bool = False

    def peak(self, precision: str) -> float:
        """Returns the peak FLOP/s in a precision (fp32, bf16, fp16), or that in fp32 if the profile lacks it."""
        peaks = dict(self.peaks)
        return peaks.get(precision, peaks["fp32"])

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about unlikely figures, such as a peak with sparsity or a bandwidth summed over both directions."""
        narrow = [peak for name, peak in self.peaks if name != "fp32"]
        intensity = max(narrow, default=0.0) / self.memory_bytes_per_s
        if not narrow or DENSE[0] <= intensity <= DENSE[1]:
            return self.notes
        return (
            *self.notes,
            f"{self.name}: a peak of {max(narrow) / 1e12:.0f} TFLOP/s is {intensity:.0f} FLOP for each byte of memory "
            f"bandwidth; accelerators have {DENSE[0]} to {DENSE[1]}: is it with sparsity, or a bandwidth both ways?",
        )


def figures_of(device: Device) -> dict[str, Any]:
    """Returns a device's figures by their key in a TOML file, in the units of the key, without its type and source.

    The memory of the host is left out too if it is not known.

    >>> figures_of(profile("a100-80gb"))["host_GB_per_s"]
    32.0
    """
    return {
        "memory_GB": device.memory_bytes / 1e9, "memory_GB_per_s": device.memory_bytes_per_s / 1e9,
        "num_multiprocessors": device.num_multiprocessors, "in_node_GB_per_s": device.in_node_bytes_per_s / 1e9,
        "between_nodes_GB_per_s": device.between_nodes_bytes_per_s / 1e9,
        HOST_LINK: device.host_bytes_per_s / 1e9,
        **({} if device.host_memory_bytes is None else {HOST_MEMORY: device.host_memory_bytes / 1e9}),
        "peak_TFLOP_per_s": {name: peak / 1e12 for name, peak in device.peaks},
    }  # fmt: skip


def profiles() -> dict[str, Any]:
    """Returns the TOML files of all device profiles that come with the library, by accelerator name."""
    folder = resources.files("shardwright.cost") / "profiles"
    return {file.name.removesuffix(".toml"): file for file in folder.iterdir() if file.name.endswith(".toml")}


def profile(name: str) -> Device:
    """Returns the :class:`Device` of a profile by name, such as ``a100-80gb``. Raises: PlanError: no such profile.

    >>> profile("a100-80")
    Traceback (most recent call last):
    shardwright.errors.PlanError: no such accelerator
      given:   a100-80
      allowed: a100-40gb, a100-80gb, b200, h100-80gb, h200-141gb, v100-32gb, or a TOML file
      fix:     write a100-80gb
    """
    return replace(device_of(name, profile_table(name)), assumes_network=True)


def profile_table(name: str) -> dict[str, Any]:
    """Returns the parsed TOML file of a profile by name: figures, and constants. Raises: PlanError: no such profile.

    >>> profile_table("h200-141gb")["memory_GB"]
    141
    """
    known = profiles()
    if name not in known:
        allowed = f"{', '.join(sorted(known))}, or a TOML file"
        raise PlanError("no such accelerator", given=name, allowed=allowed, fix=fix_for(name, sorted(known)))
    return tomllib.loads(known[name].read_text(encoding="utf-8"))


def device_of(name: str, table: Mapping[str, Any]) -> Device:
    """Returns the device called ``name`` that a parsed TOML table describes, in the units that end the table's keys.

    Raises: PlanError: a figure is missing or is not a number above zero and below :data:`MOST`, the number of
        multiprocessors is below 1, a peak is of an unknown precision, ranks cannot be on such a device, or the table
        has an unknown key.
    """
    known = {"type", "source", "profile", "nodes", "constants", "peak_TFLOP_per_s"}
    known |= {HOST_LINK, HOST_MEMORY, *NUMBERS, *KEYS}
    for key in table.keys() - known:
        raise PlanError(
            f"'{name}' has a key that means nothing",
            given=key,
            allowed=", ".join(sorted(known)),
            fix=fix_for(key, sorted(known)),
        )
    peaks = table.get("peak_TFLOP_per_s")
    if not isinstance(peaks, Mapping) or "fp32" not in peaks or not all(map(_is_positive, peaks.values())):
        raise _wrong(name, "peak_TFLOP_per_s", peaks, "a table [peak_TFLOP_per_s] with fp32 = 19.5 and others")
    for key in peaks.keys() - set(PRECISIONS):
        raise PlanError(
            f"'{name}' has a peak in a precision that no layout runs in",
            given=f"{key} = {peaks[key]:g}",
            allowed=", ".join(PRECISIONS),
            fix=f"leave out {key}",
        )
    kind = str(table.get("type", "cpu"))
    if kind != "cpu" and backend_of(kind) not in NATIVE:
        raise PlanError(
            f"'{name}' is of a type of device that ranks cannot be on",
            given=f'type = "{kind}"',
            allowed="cpu, and accelerators that torch has collectives for, such as cuda",
            fix='write type = "cuda", or leave it out beside a profile',
        )
    table = {HOST_LINK: USUAL_HOST_GB_PER_S, **table}
    for key in (*NUMBERS, HOST_LINK, *({HOST_MEMORY} & table.keys())):
        if not _is_positive(table.get(key)) or table[key] > MOST:
            raise _wrong(name, key, table.get(key), f"{key} = a number above zero, and not above {MOST:,.0f}")
    if table["num_multiprocessors"] < 1:
        raise _wrong(name, "num_multiprocessors", table["num_multiprocessors"], "num_multiprocessors = 1 or more")
    return Device(
        name, kind, str(table.get("source", "")),
        tuple((key, value * 1e12) for key, value in peaks.items()), table["memory_GB"] * 1e9,
        table["memory_GB_per_s"] * 1e9, int(table["num_multiprocessors"]), table["in_node_GB_per_s"] * 1e9,
        table["between_nodes_GB_per_s"] * 1e9, table[HOST_LINK] * 1e9,
        table[HOST_MEMORY] * 1e9 if HOST_MEMORY in table else None,
    )  # fmt: skip


def read_table(path: Path) -> dict[str, Any]:
    """Returns the parsed TOML file of a cluster or device. Raises: PlanError: it cannot be read, or is not TOML."""
    try:
        return tomllib.loads(read_text(path, MOST_TOML_BYTES, "utf-8-sig"))
    except OSError as failure:
        fix = "check the path"
        raise PlanError(f"cannot read '{path}'", given=str(failure), allowed="a TOML file", fix=fix) from failure
    except (ValueError, RecursionError) as failure:
        fix = "correct that line"
        raise PlanError(f"'{path}' is not TOML", given=str(failure), allowed="key = value", fix=fix) from failure


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12


def _wrong(name: str, key: str, given: Any, allowed: str) -> PlanError:
    fix = f"write {key} into the file" if given is None else f"correct {key} in the file"
    return PlanError(f"'{name}' has no '{key}' that can be used", given=given, allowed=allowed, fix=fix)
