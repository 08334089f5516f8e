"""Analyzes a user's model before it is parallelized: its operators, module calls, costs and random numbers."""
