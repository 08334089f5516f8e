"""The backends that send messages: threads, processes, shared memory, and a fake one for rehearsals."""
