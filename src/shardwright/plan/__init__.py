"""The plan: how each tensor and layer of a model is sharded under a layout. Strategies refine it in turn.

Everything here is pure and equal on every rank, so a ``LayoutError`` is raised before the first message is sent.
"""
