"""Which rank holds which elements of a tensor: boxes, pieces, layouts over a mesh, and transfers between layouts."""
