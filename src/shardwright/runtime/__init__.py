"""What every training step runs, under any strategy: executor, gradient sync, precision, checkpointing, offload."""
