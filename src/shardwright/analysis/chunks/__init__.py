"""Divides a forward into chunks for pipeline stages, from traced code or from a record of its calls, by their cost."""
