"""The plan (how each tensor and layer of a model is sharded under a layout), refined by strategies; and its parts.

Everything here is pure and equal on every rank: a ``LayoutError`` comes before the first message.
"""
