"""The ``shardwright`` command."""

from shardwright.cli.main import main

__all__ = ["main"]
