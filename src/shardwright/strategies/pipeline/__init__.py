"""Pipeline parallel. Read ``pipeline`` first; for the plan ``cut``, ``schedules/``, ``schedule_checks``, ``simulate``;
for the run ``stage``, ``messages``, ``p2p``, ``shared_buffers``, ``agreement``."""
