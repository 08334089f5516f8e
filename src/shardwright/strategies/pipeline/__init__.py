"""Pipeline parallelism: the model cut into stages, and the schedules that run microbatches through them.

Read ``pipeline`` first; for the plan ``cut``, ``schedules/``, ``schedule_checks`` and ``simulate``; for the run
``stage``, ``messages``, ``p2p``, ``shared_buffers`` and ``same_code``. Models whose code cannot be traced are cut by
``event_cut`` and run by ``ghost_stage``.
"""
