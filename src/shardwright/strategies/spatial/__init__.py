"""Spatial parallelism: pictures and feature maps cut in rows."""
