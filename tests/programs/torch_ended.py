"""Print the threads of gloo that are left after the end of a group, and what an axis that is not there raises."""

import gc
import os
from pathlib import Path

import torch

from polyattn import ShapeError
from polyattn.distributed.torch import attention, shard, unshard


def main():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    step()
    gc.collect()  # the first step of an optimiser of torch leaves a cycle
    for function in (shard, unshard):
        try:
            function(torch.ones(3))
        except ShapeError as error:
            print(error)
    torch.distributed.destroy_process_group()
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    print([name for name in names if "gloo" in name])


def step():
    layer = torch.nn.Linear(8, 8)
    optimiser = torch.optim.AdamW(layer.parameters())
    x = layer(shard(torch.randn(2, 16, 8)))
    y = attention(x, x, x)
    (y.sum() + unshard(y).sum()).backward()
    optimiser.step()


if __name__ == "__main__":
    main()
