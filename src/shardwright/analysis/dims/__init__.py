"""Relates the dims of all tensors of a recorded forward: which must be cut together, and which hold the samples."""
