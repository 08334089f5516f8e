"""Tensor parallelism over one axis or a 2D, 2.5D or 3D grid of ranks: its plan, sharded forwards and traffic.

Each kind of operator is one file, with what is cut, its forward on a rank and its traffic: ``linear``, ``norm``,
``embedding``, ``attention``, ``multihead_attention``, ``sequence`` (attention to tokens of other ranks),
``convolution``, ``loss``, and ``gather`` where whole features are needed. Read ``strategy``, ``mode``, ``roles`` and
``note`` first, then ``linear``; ``place``, ``apply`` and ``traffic`` go over all operators.

Models whose layers are not known run their own code on shards of tensors: ``graph_cuts`` chooses what is cut from a
record of the forward, ``shards_plan`` puts it into the plan, ``on_shards`` wraps the modules, ``shards_mode`` runs each
function by a plan of ``call_plans``, ``output_shards`` the loss, and ``shards_traffic`` states what is sent. Read them
in this order.
"""
