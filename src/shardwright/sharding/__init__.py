"""Describes which rank holds which elements of a tensor: boxes, pieces, layouts, and transfers between layouts."""
