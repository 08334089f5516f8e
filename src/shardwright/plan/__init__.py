"""What a strategy is: one file, one value, three functions; and the ``Plan`` that strategies refine in turn.

Data flows one way. ``place`` is pure and sees the whole plain model, so every ``LayoutError`` comes from here, on
every rank, before anything is sent. ``apply`` changes this rank's part of the model. ``traffic`` prices the plan
and shares no code with what records the calls.
"""
