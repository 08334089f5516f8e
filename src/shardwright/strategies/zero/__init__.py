"""ZeRO / FSDP: parameters, gradients and optimizer state sharded over the data-parallel ranks.

Read ``zero`` first, then ``flat_groups``, ``flat_parameter``, ``prefetch``, ``sharded_state`` (what happens at each
event of a training step) and ``offloaded_update``.
"""
