"""Analyzes a user's model before it is parallelized: its operators, module calls, costs and random numbers.

A forward is read in four ways, each on the meta device::

    way        begin with               what it gives                                who asks
    traced     traced/structure         the code as a graph of module calls, by fx   known layers of tensor parallelism,
               chunks/call_graph                                                     stages, where code can be traced
    operators  recorded/record_forward  every operator of one forward, with shapes   ModelGraph: tensor parallelism on
               recorded/recording                                                    parts, draws, mixing of samples
    calls      chunks/forward_events    calls of modules, and of functions between   stages, where code cannot be traced
               chunks/events_chunked    them, as events that stages can divide
    shapes     on_meta/module_calls     the shapes of each module's call             traffic, costs of layers

``model_graph`` keeps the record of operators that all of planning shares. Each folder imports only from those below it:

- ``chunks``: stages of a pipeline, from traced code or from a record of its calls, by their cost;
- ``model_graph``: one recorded run, and what is asked of it;
- ``random_numbers``: which random numbers a forward draws, and for which samples;
- ``samples``: where the samples of a batch meet;
- ``dims``: which dims are cut together, by a rule for each operator, and which hold the samples;
- ``recorded``: every operator of one forward;
- ``on_meta``: how a forward runs without values (small constants keep theirs);
- ``traced``: the code of modules, traced, and the layers in it;
- ``calls``: calls of torch with rules of their own; ``objects``: what a model and a batch hold, and copies of it.
"""
