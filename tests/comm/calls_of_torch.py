"""Makes every call of a channel over NCCL on torch's backend that sends nothing: whether torch takes it."""

from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.comm.backends.nccl import NcclChannel
from shardwright.comm.backends.process_groups import ProcessTransport
from shardwright.comm.recorder import Recorder
from shardwright.comm.world import World

dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
with mock.patch.object(dist, "get_backend", return_value="nccl"):
    transport = ProcessTransport(0, 4, Recorder(), timedelta(seconds=60), None, "auto")
    axis = World(0, 4, torch.device("cpu"), transport, Recorder()).everyone()
    assert isinstance(axis.channel, NcclChannel)
    for dtype in (torch.float32, torch.complex64, torch.int16):
        axis.all_reduce(torch.ones(3, dtype=dtype))
        axis.all_reduce_together_async([torch.ones(2, dtype=dtype), torch.ones(3, dtype=dtype)]).wait()
        axis.all_gather(torch.ones(2, dtype=dtype))
        axis.gather_parts_async(torch.ones(2, dtype=dtype), [(2,)] * 4)[1].wait()
        axis.reduce_scatter(torch.ones(8, dtype=dtype))
        axis.reduce_scatter_together_async([torch.ones(5, dtype=dtype), torch.ones(3, dtype=dtype)], [2] * 4).wait()
        axis.all_to_all([torch.ones(2, dtype=dtype)] * 4, [(2,)] * 4)
        axis.broadcast(torch.ones(2, dtype=dtype), 1)
    axis.all_gather(torch.ones(1), 0, [1, 2, 3, 0])
    axis.reduce_scatter(torch.ones(6), 0, [1, 2, 3, 0])
    axis.connect([(0, 1), (1, 2), (2, 0)])
    axis.send(torch.ones(2), 1)
    axis.receive((2,), torch.float32, 2)
    axis.send_and_receive_async({1: torch.ones(2)}, {3: (2,)}, torch.float32).wait()
    axis.subset([2, 0]).all_gather(torch.ones(2))
    axis.barrier()
transport.disconnect()
