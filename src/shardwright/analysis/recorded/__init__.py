"""Records one forward of a model on the meta device: every operator, its tensors, and the module that called it."""
