"""Axes, collectives, messages and who runs them: the only folder that names ``torch.distributed``."""
