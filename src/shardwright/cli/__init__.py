"""The ``shardwright`` command line: init, train, verify, show, plan, evaluate, predict, sample, ..."""

from shardwright.cli.main import main

__all__ = ["main"]
