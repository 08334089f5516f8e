"""The committed benchmarks: each folder asks one question."""
