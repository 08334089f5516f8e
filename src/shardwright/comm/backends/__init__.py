"""How ranks talk: threads, processes, shared memory, and a fake backend for rehearsals."""
