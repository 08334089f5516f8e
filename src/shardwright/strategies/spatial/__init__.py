"""Spatial parallelism (``tpN/spatial``): pictures and feature maps are sharded by rows, with halo exchange."""
