"""Tensor parallelism in one to three dimensions: the roles of layers, the plan, sharded forwards and traffic."""
