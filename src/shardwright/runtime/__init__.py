"""What every step runs, whatever the strategies: executor, gradient sync, precision, activation checkpointing."""
