"""The ``shardwright`` command line: train, verify, show, sample, doctor, launch, plan, checkpoint inspect, export."""

from shardwright.cli.main import main

__all__ = ["main"]
