"""Operators on sharded tensors, such as linear layers and attention, together with the collectives that they need."""
