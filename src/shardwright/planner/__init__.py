"""The planner: what a layout costs on a cluster, before a device is rented."""
