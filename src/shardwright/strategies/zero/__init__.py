"""ZeRO / FSDP: parameters, gradients and optimizer state in flat shards; parameters unsharded while they are used.

::

    groups      which parameters form one flat sequence        state       the events of a run: reduce-scatter, publish
    flat        one sequence: its shard, its unsharded buffer  masters     fp32 master weights of what is not sharded
    window      when a unit is unsharded, resharded            offload     updates of shards in host memory or on disk
    same_order  do ranks make the same calls                   storage     memory in host memory or on disk
    reached     which parameters have no gradient on any rank
"""
