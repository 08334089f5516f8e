"""Where tensors lie: boxes, pieces, layouts over a mesh, and the planner of transfers between layouts."""
