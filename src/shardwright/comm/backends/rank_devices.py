"""Chooses each rank's device and the run's backend; all ranks decide alike, from the devices that every rank found.

Before torch's process group exists, each rank publishes a :class:`RankDevice` in torch's store and reads those of all
other ranks. So a wrong start is the same error on every rank, before the first collective::

    each rank on a card of its own    NCCL, or what torch has for the device type
    several ranks on one card         an error; with device="cuda/gloo" gloo, through host memory
    no rank has a card                gloo
    only some ranks have one          an error
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from shardwright import devices
from shardwright.devices import OPTION
from shardwright.errors import PlanError
from shardwright.formatting import numbered

GLOO = "/gloo"
"""The suffix of a device type whose ranks communicate by gloo, through host memory, and may share a GPU."""


class RankDevice(NamedTuple):
    """The device that one rank was asked to use and the device that it found, as each rank publishes them to all ranks.

    ``host`` is the name of the rank's machine, ``wanted`` the option ``device``, ``kind`` the device type, and
    ``place`` the index of the rank's device among the ``num_visible`` that the rank sees. ``local_rank`` is the rank's
    number on its machine (``LOCAL_RANK``), or None on the CPU and if it is not known. ``card`` identifies the physical
    GPU. It is empty on the CPU, and if the rank has no GPU or cannot tell which of the visible ones is its own.
    ``has_backend`` says whether torch has a collective backend for the type.
    """

    host: str
    wanted: str
    kind: str = "cpu"
    place: int = 0
    num_visible: int = 0
    local_rank: int | None = None
    card: str = ""
    has_backend: bool = True

    @property
    def use(self) -> str:
        """The device type, with the suffix ``/gloo`` if the option ``device`` has that and the type is not "cpu"."""
        return self.kind + (GLOO if self.kind != "cpu" and self.wanted.endswith(GLOO) else "")


def found(wanted: str, host: str, size: int, environment: Mapping[str, str] = os.environ) -> RankDevice:
    """Finds this rank's device, by ``LOCAL_RANK`` among those that the rank sees, and makes it the current one.

    Returns a description to exchange with the other ranks, of type "cpu" if there is no accelerator of the wanted type.
    ``wanted`` is the option ``device`` ("auto" means the variable SHARDWRIGHT_DEVICE, if set), ``host`` this machine's
    name, and ``size`` the number of ranks. A rank that sees only one device takes that, whatever ``LOCAL_RANK`` is:
    Slurm, Kubernetes and MPI may show each rank only its own device.

    >>> found("cpu", "here", 2).use
    'cpu'
    """
    if wanted == "auto":
        wanted = environment.get(OPTION, "auto")
    kind, num_visible = devices.accelerator(), devices.count()
    if wanted not in ("auto", kind, kind + GLOO) or kind == "cpu":
        return RankDevice(host, wanted)
    text = environment.get("LOCAL_RANK")
    local_rank = int(text) if text is not None else 0 if size == 1 else None
    place = 0 if num_visible == 1 else local_rank
    if place is not None and wanted.endswith(GLOO):
        place %= num_visible
    card = ""
    if place is not None and place < num_visible:
        number = local_rank if num_visible == 1 else place  # a device type without UUIDs
        card = devices.identity(devices.select(place)) or f"{host}/{number}"
    return RankDevice(host, wanted, kind, place or 0, num_visible, local_rank, card, devices.has_backend(kind))


def exchanged(mine: RankDevice, store: Any, rank: int, size: int, *, forked: bool = False) -> list[RankDevice]:
    """Returns the :class:`RankDevice` of each rank, exchanged through torch's ``store``; every rank must call it.

    ``mine`` is this rank's. ``forked`` says that one process has forked all ranks, so that they see the same devices.
    If ``mine`` is then the CPU, so is each rank's, and nothing is exchanged.
    """
    if forked and mine.kind == "cpu":
        return [mine] * size
    store.set(f"device/{rank}", json.dumps(mine))
    return [RankDevice(*json.loads(text)) for text in store.multi_get([f"device/{other}" for other in range(size)])]


def decided(ranks: Sequence[RankDevice], rank: int) -> tuple[torch.device, str]:
    """Returns the device of ``rank`` and the name of the backend of all ranks, from the devices that all ranks found.

    The backend is gloo on the CPU and if the option ``device`` ends in ``/gloo``, and otherwise the device type's own,
    such as NCCL. With ``/gloo`` ranks may share a GPU, of which rank 0 warns.

    Raises: PlanError, with the same text on every rank: a wanted device type is missing; only some ranks have an
        accelerator; a rank cannot tell which device is its own, or has none; ranks share a device without ``/gloo``; or
        torch has no backend for the device type.

    >>> ranks = [RankDevice("here", "auto", "cuda", number, 2, number, f"card {number}") for number in range(2)]
    >>> decided(ranks, 1)
    (device(type='cuda', index=1), 'nccl')
    """
    _check_types(ranks)
    mine = ranks[rank]
    if mine.kind == "cpu":
        return torch.device("cpu"), "gloo"
    _check_own(ranks)
    device, shared = torch.device(mine.kind, mine.place), _shared(ranks)
    if mine.use != mine.kind:
        if shared and rank == 0:
            warnings.warn(f"{shared}: they compute in turn, and send through host memory", stacklevel=2)
        return device, "gloo"
    name = devices.backend_of(mine.kind)
    if shared:
        raise PlanError(
            "ranks share a device",
            given=shared,
            allowed=f"a device of its own for each rank, as {name} needs it",
            fix=f"give each rank its own, or set {_others(mine)}",
        )
    if without := [rank for rank, rank_device in enumerate(ranks) if not rank_device.has_backend]:
        raise PlanError(
            f"torch has no {name}, by which ranks on {mine.kind} communicate",
            given=f"torch {torch.__version__} of {_named(ranks, without)}",
            allowed=f"a build of torch with {name}",
            fix=f"install one, or set {_others(mine)}",
        )
    return device, name


def _others(mine: RankDevice) -> str:
    return f"{OPTION}={mine.kind}{GLOO} (several ranks a device, through host memory: slow) or {OPTION}=cpu"


def _check_types(ranks: Sequence[RankDevice]) -> None:
    """Raises PlanError unless every rank has the device that was asked for, and all are of one type."""
    for wanted in sorted({device.wanted for device in ranks if device.kind == "cpu"} - {"auto", "cpu"}):
        raise PlanError(
            f"there is no device '{wanted}'",
            given=_named(ranks, (rank for rank, e in enumerate(ranks) if (e.kind, e.wanted) == ("cpu", wanted))),
            allowed=f"auto, cpu, or an accelerator that torch sees there, such as cuda, or cuda{GLOO}",
            fix=f"see what torch.accelerator says there, or set {OPTION}=cpu",
        )
    uses = sorted({device.use for device in ranks})
    if len(uses) > 1:
        by_use = (f"{use}: {_named(ranks, (r for r, device in enumerate(ranks) if device.use == use))}" for use in uses)
        raise PlanError(
            "ranks are on devices of several kinds",
            given="; ".join(by_use),
            allowed="ranks that are all on the CPU, or all on one kind of accelerator",
            fix=f"give every rank a device, or set {OPTION}=cpu for all",
        )


def _check_own(ranks: Sequence[RankDevice]) -> None:
    """Raises PlanError unless every rank can tell which of the devices that it sees is its own."""
    without = [rank for rank, device in enumerate(ranks) if not device.card]
    if unknown := [rank for rank in without if ranks[rank].local_rank is None]:
        raise PlanError(
            "ranks do not know which of several devices is theirs",
            given=f"no LOCAL_RANK, SLURM_LOCALID, OMPI_COMM_WORLD_LOCAL_RANK or MPI_LOCALRANKID: "
            f"{_named(ranks, unknown)}",
            allowed="one visible device a rank, or each rank's number on its machine",
            fix="start them with torchrun, srun or mpirun, or set LOCAL_RANK",
        )
    if without:
        raise PlanError(
            "there are more ranks than devices",
            given=f"{min(ranks[rank].num_visible for rank in without)} visible; none for {_named(ranks, without)}",
            allowed="a device of its own for each rank",
            fix=f"start fewer ranks on a machine, or set {_others(ranks[0])}",
        )


def _shared(ranks: Sequence[RankDevice]) -> str:
    """Returns a text that names the ranks that share a GPU, or an empty one if none do."""
    by_card: dict[str, list[int]] = {}
    for rank, device in enumerate(ranks):
        by_card.setdefault(device.card, []).append(rank)
    several = [sharers for sharers in by_card.values() if len(sharers) > 1]
    return "; ".join(f"{_named(ranks, sharers)} share one {ranks[0].kind} device" for sharers in several)


def _named(ranks: Sequence[RankDevice], which: Iterable[int]) -> str:
    """Returns the ranks ``which`` as text, by host: "ranks 0 to 3 on a, rank 4 on b"."""
    by_host = groupby(which, key=lambda rank: ranks[rank].host)
    return ", ".join(f"{numbered(list(numbers))} on {host}" for host, numbers in by_host)
