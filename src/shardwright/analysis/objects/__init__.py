"""Reads and copies the objects that a model and its batch hold: attributes, caches, closures, marks of inputs."""
