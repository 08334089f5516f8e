"""Whether all ranks were told the same, found out before anything else is sent: a different call elsewhere hangs."""

from __future__ import annotations

import hashlib

import torch

from shardwright.comm.here import everyone_here
from shardwright.errors import LayoutError, explain


def digest(said: object) -> str:
    """A short stand-in for what a rank was told.

    >>> digest("split(0)") == digest("split(0)") != digest("split(1)")
    True
    """
    return hashlib.blake2b(str(said).encode(), digest_size=8).hexdigest()


def check_alike(what: str, told: list[str]) -> None:
    """Raises LayoutError when ranks were told other things than rank 0; ``told`` holds what each was."""
    others = [rank for rank, each in enumerate(told) if each != told[0]]
    if others:
        raise LayoutError(
            explain(
                f"ranks disagree on {what}",
                given=f"ranks {others} give another than rank 0",
                allowed="the same on every rank, members or not",
                fix="compute it without looking at the rank",
            )
        )


def check_everywhere(what: str, said: object) -> None:
    """The same for what every rank says now. Traffic: 8 bytes from each rank."""
    axis = everyone_here()
    mine = torch.tensor([int(digest(said), 16) - 2**63]).to(axis.device)
    check_alike(what, [str(each) for each in axis.all_gather(mine).tolist()])
