"""Operators on sharded operands, each with the collectives it needs; strategies choose among them."""
