"""Finds code in which the samples of a batch meet, so that a rank with some of them computes something else."""
