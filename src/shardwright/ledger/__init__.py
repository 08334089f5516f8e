"""The ledger: every byte that a rank holds over a step, predicted on the meta device and measured in a run."""
