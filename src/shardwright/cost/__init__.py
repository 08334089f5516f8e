"""The time model: seconds of operators and of messages on accelerators whose datasheet figures are in profiles."""
