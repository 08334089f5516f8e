"""Describes single calls of torch: what a checkpoint, a draw or a recurrent layer is given, and an operator's FLOPs."""
