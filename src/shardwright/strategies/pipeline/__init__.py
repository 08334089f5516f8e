"""Schedules as data, and the one executor that runs any of them."""
