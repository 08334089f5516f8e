"""The parts of a training step that strategies share: executor, gradient sync, precision, checkpointing, offload."""
