"""The planner: predicts the step time, memory and traffic of layouts on a cluster, before any device is rented."""
