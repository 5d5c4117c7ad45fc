"""Threads that start together."""

import threading


def run_at_once(work, count):
    """Run ``work(i)`` in threads that start together; raise the first fault."""
    gate, faults = threading.Barrier(count), []

    def guarded(i):
        gate.wait()
        try:
            work(i)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
