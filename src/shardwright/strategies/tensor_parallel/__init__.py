"""Tensor parallelism in one to three dimensions: roles for every layer, the plan, forwards and traffic."""
