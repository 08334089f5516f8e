"""Cases that tests prove and benchmarks count: operators on global tensors, and transfers between layouts."""
