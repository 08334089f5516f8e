"""Pipeline parallelism: the model cut into stages, and the schedules that run microbatches through them.

Read ``pipeline`` first; for the plan ``cut_model``, which chooses between ``cut`` (traced code) and ``event_cut`` (a
recorded forward), ``balance``, ``schedules/``, ``schedule_checks`` and ``simulate``; for the run ``pipeline_stage``,
``stage`` (traced) and ``ghost_stage`` with ``ghost_mode`` (recorded), ``messages``, ``p2p``, ``shared_buffers`` and
``same_code``.

What is refused, and where::

    the number of stages or chunks, schedules and their options      pipeline, schedule_checks, schedules/
    names after cut: that the model does not call in this order      cut, event_cut
    modules that change state and that several stages call           pipeline (_check_module_state), cut
    traced code that writes into buffers, or into views of others    call_graph, in_place_writes in analysis/chunks
    code that no trace follows, without an example                   cut_model
    recorded code that writes buffers, has a backward of its own,    event_cut
        or passes values otherwise than by arguments and results
    calls that depend on values which one stage has                  event_cut, in a step ghost_mode
    another forward than the one that was cut, in a step             analysis/chunks/events_chunked, ghost_mode
    code that differs between ranks                                  same_code
"""
