"""The backends of process groups: threads, shared memory, gloo, NCCL, and a fake one that sends nothing."""
