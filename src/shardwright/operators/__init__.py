"""Operators on cut operands, each with the collectives it needs; the strategies choose among them."""
