"""Analyses of a user's model before it is parallelized: recorded forwards, traced code, costs, random numbers."""
