"""Training by the command ``shardwright train``: options, data, training loop, progress and reports."""
