"""The plan: how each tensor and layer of a model is sharded under a layout. Strategies refine it in turn.

Planning sends nothing and gives the same result on every rank, so a ``LayoutError`` is raised on all ranks before the
first message.
"""
