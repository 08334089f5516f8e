"""Tensor parallelism over one axis or a 2D, 2.5D or 3D grid of ranks: its plan, sharded forwards and traffic.

Each kind of operator is one file, with what is cut, its forward on a rank and its traffic: ``linear``, ``norm``,
``embedding``, ``attention``, ``multihead_attention``, ``sequence`` (attention to tokens of other ranks),
``convolution``, ``loss``, and ``gather`` where whole features are needed. Read ``strategy``, ``mode``, ``roles`` and
``note`` first, then ``linear``; ``place``, ``apply`` and ``traffic`` go over all operators. ``on_shards`` runs models
whose layers are not known.
"""
