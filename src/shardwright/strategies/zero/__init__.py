"""ZeRO / FSDP. Read ``zero`` first, then ``flat_groups``, ``flat_parameter``, ``prefetch``, ``sharded_state`` (a run's
events) and ``offloaded_update``."""
