"""Training: the loop, the data, the optimizers, the precision and the progress."""
