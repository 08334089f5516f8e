"""The ledger: every byte that a rank holds over a step, predicted on the meta device and measured in a run."""

from shardwright.ledger.account import measure_memory, predict_memory
from shardwright.ledger.tracking import ELSEWHERE, KINDS, Account, Moment, Tracker

__all__ = ["ELSEWHERE", "KINDS", "Account", "Moment", "Tracker", "measure_memory", "predict_memory"]
