"""Checks, in a debug run, that all ranks of a group make the same call before any of them makes it.

Each call costs some messages through torch's store, so the check is off in ordinary runs: ``verify`` on processes,
tests and ``--debug`` turn it on. The store stays small: a rank deletes its entry for a call when all members of the
group have reached a later call.
"""

from __future__ import annotations

import time

import torch.distributed as dist

from shardwright.comm.collective_call import FIX_CALLS, SAME_CALLS, CollectiveCall, disagreement
from shardwright.errors import CommunicationError, aligned

_RECHECK_S = 0.5


class CallChecker:
    """Publishes a rank's collective calls in torch's store, and compares them with those of the other ranks."""

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.store = dist.distributed_c10d._get_default_store()
        self._num_calls = 0
        self._written: dict[tuple[int, ...], str] = {}

    def check(self, call: CollectiveCall, ranks: tuple[int, ...], number: str) -> None:
        """Waits until every rank of the group ``ranks`` is about to make the same collective call as this rank.

        ``number`` is text: the name of the group, and the number of the call in it.

        Raises: CommunicationError: another rank makes a different call, waits for this rank in another group (itself,
            or through further ranks), has returned from its work, or does not make the call within ``timeout_s``
            seconds. The error names both ranks.
        """
        self._num_calls += 1
        mine, waited = str(call._replace(source="")).removesuffix(" for "), False
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
                raise disagreement(call.axis, self.rank, mine, other, theirs)
        if waited:
            self.store.set(f"at/{self.rank}", "")
        if ranks in self._written:  # all ranks are in this call, so all have read the last entry
            self.store.delete_key(self._written[ranks])
        self._written[ranks] = f"{key}/{self.rank}"

    def leave(self) -> None:
        """Records in torch's store that this rank makes no more calls; a rank that waits for it then gets an error."""
        self.store.set(f"at/{self.rank}", "returned")

    def _wait_for(self, key: str, other: int, call: CollectiveCall) -> None:
        start = time.monotonic()
        look_at, pause_s = start + _RECHECK_S, 2e-4
        last_chain: list[tuple[int, str]] = []
        self.store.set(f"at/{self.rank}", f"{self._num_calls}|{other}|{call}")
        while not self.store.check([key]):
            now = time.monotonic()
            if now > start + self.timeout_s:
                raise CommunicationError(
                    f"rank {other} did not reach {call} within {self.timeout_s:.0f} s",
                    given=f"rank {self.rank}, which waits in that call, and no call of rank {other}",
                    allowed=SAME_CALLS,
                    fix=f"see what rank {other} does meanwhile; if it only takes long, set a longer --timeout-s",
                )
            if now > look_at:
                chain = self._chain(other)
                if chain and chain == last_chain and not self.store.check([key]):  # no rank of the chain has moved
                    at = chain[0][1]
                    where = "has returned already" if at == "returned" else f"waits in {at.split('|', 2)[2]}"
                    raise CommunicationError(
                        f"ranks {self.rank} and {other} wait for each other",
                        given=aligned([f"rank {self.rank}: waits in {call}", f"rank {other}: {where}"]),
                        allowed=SAME_CALLS,
                        fix=FIX_CALLS,
                    )
                last_chain, look_at = chain, now + _RECHECK_S
            time.sleep(pause_s)  # polls: the store cannot wait for one of two things
            pause_s = min(2 * pause_s, 0.02)

    def _chain(self, other: int) -> list[tuple[int, str]]:
        """Follows who waits for whom, from rank ``other`` on; returns the pairs (rank, where it waits) up to the end.

        The chain ends before this rank, or with a rank that has returned. It is [] if it ends at neither.
        """
        chain: list[tuple[int, str]] = []
        rank = other
        while rank != self.rank:
            at = self.store.get(f"at/{rank}").decode() if self.store.check([f"at/{rank}"]) else ""
            if not at or rank in (waiting_rank for waiting_rank, _ in chain):
                return []
            chain.append((rank, at))
            if at == "returned":
                break
            rank = int(at.split("|")[1])
        return chain
