"""Looks at single calls of torch: checkpoints, random draws, recurrent layers, scripted functions; and counts FLOPs."""
