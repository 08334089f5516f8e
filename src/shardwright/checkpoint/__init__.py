"""One checkpoint: saved under any layout, loaded under any other, never half written."""

from shardwright.checkpoint.loading import load, read_whole
from shardwright.checkpoint.manifest import Manifest, check_files, find, read, steps_in
from shardwright.checkpoint.saving import save

__all__ = ["Manifest", "check_files", "find", "load", "read", "read_whole", "save", "steps_in"]
