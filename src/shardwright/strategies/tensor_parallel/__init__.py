"""Tensor parallelism over one axis or a 2D, 2.5D or 3D grid of ranks: its plan, sharded forwards and traffic.

Read ``strategy``, ``mode`` and ``roles`` first, then ``place`` (the plan) and ``apply`` (forwards on a rank);
``on_parts`` runs models whose layers are not known.
"""
