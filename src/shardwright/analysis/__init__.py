"""Analyzes a user's model before it is parallelized: its operators, module calls, costs and random numbers.

A forward is read in four ways, each on the meta device::

    way         begin with       what it gives                                who asks
    traced      structure        the code as a graph of module calls, by fx   known layers of tensor parallelism,
                call_graph                                                    stages where the code can be traced
    operators   record_forward   every operator of one forward, with shapes   ModelGraph: tensor parallelism on
                recording                                                     parts, random draws, mixing of samples
    calls       forward_events   calls of modules, and of functions between   stages of code that cannot be traced
                events_chunked   them, as events that stages can divide
    shapes      module_calls     the shapes of each module's call             traffic, costs of layers

``model_graph`` keeps the record of operators that all of planning shares. What is derived from it:

- which dims are cut together: ``run_axes``, by the rules of ``operator_dims``, ``view_dims`` and ``dim_letters``;
- which samples each value is computed from: ``sample_selections``, ``sample_mixing``, ``sample_windows``,
  ``sample_loops``, ``loss_means``;
- random numbers: ``draws``, by the functions in ``draw_calls``.

How a forward runs without values: ``meta_device``, ``meta_values`` (small constants keep theirs), ``operator_results``,
``device_moves``, ``code_caches``. Which module's code runs: ``module_log`` during a record, ``running_module`` also in
the backward of a real step.
"""
