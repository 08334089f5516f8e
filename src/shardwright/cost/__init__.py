"""The time model: predicts the seconds of operators and messages on accelerators from their datasheet figures."""
