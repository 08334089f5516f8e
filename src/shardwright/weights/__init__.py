"""Weights in and out: a run's parameters and buffers, from and to the files that other programs write and read."""
