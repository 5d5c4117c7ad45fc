"""Four processes compute attention, and one is killed within a step; prints what the others are told as JSON."""

import datetime
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed, multiprocessing

import polyattn as pa
from polyattn.distributed import _block as block
from polyattn.distributed.torch import attention

TIMEOUT, LOST = 30, 2


def work(rank, folder):
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, 4, 256, 16, requires_grad=True) for _ in range(3))
    attention(q, k, v).sum().backward()  # a whole step, after which all are connected
    if rank == LOST:
        blocks, own = [], block.backward

        def until_killed(*arguments):
            blocks.append(1)
            if len(blocks) == 2:  # in the second step of the ring: the first transfer is over, the next one under way
                os.kill(os.getpid(), signal.SIGKILL)
            return own(*arguments)

        block.backward = until_killed
    began = time.perf_counter()
    try:
        while True:
            attention(q, k, v).sum().backward()
    except pa.EngineError as error:
        with open(os.path.join(folder, f"{rank}.json"), "w") as file:
            json.dump([str(error), time.perf_counter() - began], file)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        start = multiprocessing.get_context("spawn").Process
        processes = [start(target=work, args=(rank, folder)) for rank in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(3 * TIMEOUT)
        told = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    print(json.dumps({"ends": [process.exitcode for process in processes], "told": told}))
    sys.stdout.flush()
