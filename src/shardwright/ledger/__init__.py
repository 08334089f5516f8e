"""The ledger: the bytes that a rank's tensors hold over a training step, predicted or measured, by kind of memory.

``predict_memory`` rehearses the step on the meta device, and ``measure_memory`` takes a real one.
"""

from shardwright.ledger.account import measure_memory, predict_memory

__all__ = ["measure_memory", "predict_memory"]
