"""Runs a model's code on the meta device, where tensors have shapes and no values."""
