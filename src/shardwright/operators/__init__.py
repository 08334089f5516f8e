"""Operators on sharded tensors, with their collectives, among which strategies choose."""
