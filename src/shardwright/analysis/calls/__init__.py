"""Describes calls of torch with rules of their own: checkpoints, draws, recurrent layers, and FLOPs of operators."""
