"""For every test: one core for each rank, and no deadline, since ranks may be threads that wait for each other."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("shardwright", deadline=None)
settings.load_profile("shardwright")
