"""Finds the random numbers that a recorded forward draws, and the samples that they are for."""
