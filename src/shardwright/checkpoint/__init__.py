"""Checkpoints in one format for all layouts: a checkpoint saved under one layout loads under any other."""
