"""The witness of a debug run: every rank tells each call before it makes it, and none makes one alone.

It costs some messages through the store for each call, so it watches ``verify``, tests and ``--debug`` only. The store
stays small: a rank takes back what it wrote for a call once all members have come to a later one.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from shardwright.comm.axis import CollectiveCall
from shardwright.errors import CommunicationError

_LOOK_AGAIN_S = 0.5


class CallChecker:
    """One rank's side: it writes down its own call and reads what the other members of the group wrote."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.store = dist.distributed_c10d._get_default_store()
        self._num_calls = 0
        self._written: dict[tuple[int, ...], str] = {}

    def check(self, call: CollectiveCall, ranks: tuple[int, ...], number: str) -> None:
        """Returns once every member is about to make the same call.

        Raises: CommunicationError: two ranks make different calls, wait for each other in different groups, or
            one has returned; both are named.
        """
        self._num_calls += 1
        mine, waited = _text(call), False
        key = f"call/{'-'.join(map(str, ranks))}/{call.axis}/{number}"
        self.store.set(f"{key}/{self.rank}", mine)
        for other in ranks:
            if other == self.rank:
                continue
            if not self.store.check([f"{key}/{other}"]):
                waited = True
                self._wait_for(f"{key}/{other}", other, call)
            theirs = self.store.get(f"{key}/{other}").decode()
            if theirs != mine:
                (a, first), (b, second) = sorted([(self.rank, mine), (other, theirs)])
                raise CommunicationError(
                    f"ranks {a} and {b} disagree on a call over axis '{call.axis}'\n"
                    f"  rank {a}: {first}\n  rank {b}: {second}\n"
                    "  fix:    let every rank of an axis make the same calls in the same order"
                )
        if waited:
            self.store.set(f"at/{self.rank}", "")
        if ranks in self._written:  # all members are here, so all have read what was written for the call before
            self.store.delete_key(self._written[ranks])
        self._written[ranks] = f"{key}/{self.rank}"

    def leave(self) -> None:
        """Tells the others that this rank makes no more calls."""
        self.store.set(f"at/{self.rank}", "returned")

    def _wait_for(self, key: str, other: int, call: CollectiveCall) -> None:
        start = time.monotonic()
        look_at, pause_s = start + _LOOK_AGAIN_S, 2e-4
        before: list[tuple[int, str]] = []
        self.store.set(f"at/{self.rank}", f"{self._num_calls}|{other}|{call}")
        while not self.store.check([key]):
            now = time.monotonic()
            if now > start + self.timeout_s:
                raise CommunicationError(f"rank {other} did not come to {call} within {self.timeout_s:.0f} s")
            if now > look_at:
                chain = self._chain(other)
                if chain and chain == before and not self.store.check([key]):  # nobody in it has moved
                    raise CommunicationError(_two_waits(self.rank, call, other, chain[0][1]))
                before, look_at = chain, now + _LOOK_AGAIN_S
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)

    def _chain(self, other: int) -> list[tuple[int, str]]:
        """Who waits for whom, from ``other`` on, if that leads back here or to a rank that has returned; else nothing.

        A rank that is only late is waited for: it will come.
        """
        chain: list[tuple[int, str]] = []
        rank = other
        while rank != self.rank:
            at = self.store.get(f"at/{rank}").decode() if self.store.check([f"at/{rank}"]) else ""
            if not at or rank in (seen for seen, _ in chain):
                return []
            chain.append((rank, at))
            if at == "returned":
                break
            rank = int(at.split("|")[1])
        return chain


def _two_waits(rank: int, call: CollectiveCall, other: int, at: str) -> str:
    where = "has returned already" if at == "returned" else f"waits in {at.split('|', 2)[2]}"
    return (
        f"ranks {rank} and {other} wait for each other\n"
        f"  rank {rank}: waits in {call}\n  rank {other}: {where}\n"
        "  fix:    let every rank of an axis make the same calls in the same order"
    )


def _text(call: CollectiveCall) -> str:
    return str(call._replace(source="")).removesuffix(" for ")
