"""The ``shardwright`` command line: train, verify, show, sample, launch, doctor, inspect, export."""

from shardwright.cli.main import main

__all__ = ["main"]
