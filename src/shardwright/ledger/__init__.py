"""The ledger: every byte that a rank holds over a step, predicted on the meta device or measured in a run."""

from shardwright.ledger.account import measure_memory, predict_memory

__all__ = ["measure_memory", "predict_memory"]
