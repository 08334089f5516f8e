"""Runs the ``shardwright`` command as ``python -m shardwright.cli``."""

from shardwright.cli.main import main

if __name__ == "__main__":
    main()
