"""Calls that are interrupted at random moments: ``python interrupted.py BACKEND KIND COUNT SEED [SUBJECT]``.

The kind "signal" is a KeyboardInterrupt in the main thread, by a timer of the system; "exception" is one that another
thread raises in the thread that calls. After each, everything must be whole: the next call gives the same bits as ever,
what a statement replaces is replaced or is not, and nothing that the process shares is left changed. Prints how many
calls were interrupted, and how many were not, because the interrupt came before or after.
"""

import ctypes
import itertools
import json
import queue
import signal
import sys
import threading
import time
from statistics import median

import numpy as np
from whole import equal, shared

import polyattn as pa

NAME, KIND, COUNT, SEED = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
CHOSEN = sys.argv[5:]
rng = np.random.default_rng(SEED)


def arrays(*shape, count=1):
    """Return arrays of the backend's library."""
    made = [pa.to_backend(rng.standard_normal(shape).astype(np.float32), NAME) for _ in range(count)]
    return made if count > 1 else made[0]


# ---- subjects: ``call`` is interrupted, then ``whole`` says whether everything is as it must be ----


class Pure:
    """A function without state: it gives the same bits afterwards."""

    def __init__(self, call):
        self.call, self.want = call, call()

    def whole(self):
        return equal(self.call(), self.want)


def attention(*shape, **arguments):
    q, k, v = arrays(*shape, count=3)

    def call():
        out, cache = pa.attention_forward(q, k, v, causal=True, **arguments)
        return out, *pa.attention_backward(out, cache)[:3]

    return Pure(call)


def layer():
    block = pa.TransformerBlock(16, num_heads=2, hidden=32, backend=NAME)
    x = arrays(2, 5, 16)

    def call():
        y, cache = block.forward(x, causal=True)
        return block.backward(y, cache)

    return Pure(call)


def scopes():
    x = np.ones((2, 3), np.float32)

    def call():
        with pa.transfers() as outer, pa.use_backend("numpy"), pa.use_backend(NAME), pa.transfers("log") as inner:
            y = pa.functional.softmax(x)
        return y, np.asarray([outer.count, inner.count])

    return Pure(call)


class Default:
    """The selection of the process: the one before, or the new one."""

    def __init__(self):
        self.names = itertools.cycle(["numpy", NAME])

    def call(self):
        pa.set_backend(next(self.names), "cpu")

    def whole(self):
        found = pa.get_backend()
        pa.set_backend(None)
        return found is None or (found.backend in ("numpy", NAME) and found[1:] == ("cpu", "set_backend"))


class Decoding:
    """A cache that is appended to and rewound, and one that is not interrupted: both hold the same positions."""

    def __init__(self, create):
        self.create = create
        self.q = arrays(2, 2, 1, 4)
        self.cache, self.mirror, self.done = create(), create(), 0
        self.plan()

    def plan(self):
        """Choose the next step: to rewind one position, or to append some."""
        least = -1 if self.done > 0 and self.cache.position > 1 else 1
        self.step = int(rng.integers(least, 4)) if self.cache.position else 2
        self.new = arrays(2, 2, max(self.step, 0), 4, count=2)

    def after(self, cache):
        k, v = self.new
        return cache.append(k, v) if self.step >= 0 else cache.rewind(1)

    def call(self):
        self.cache = self.after(self.cache)

    def whole(self):
        if self.cache.position != self.mirror.position:
            self.mirror, self.done = self.after(self.mirror), self.step
        same = self.cache.position == self.mirror.position
        if same and self.cache.position > 1:
            before = (x.copy().rewind(1) for x in (self.cache, self.mirror))
            same = equal(*(x.attention(self.q) for x in (self.cache, self.mirror)))
            same = same and equal(*(x.attention(self.q) for x in before))
        if self.cache.position > 40:
            self.cache, self.mirror = self.create(), self.create()
        self.plan()
        return same


class Optimiser:
    """Parameters and the state of an optimiser: of the step before, or of the next one."""

    def __init__(self, optimiser):
        self.optimiser = optimiser
        self.grads = {"a": arrays(3, 4), "b": arrays(70, 70)}
        params = {"a": arrays(3, 4), "b": arrays(70, 70)}
        self.now = self.mirror = params, optimiser.init(params)

    def call(self):
        params, state = self.now
        self.now = self.optimiser.update(self.grads, state, params)

    def whole(self):
        if not equal(self.now[1]["step"], self.mirror[1]["step"]):
            params, state = self.mirror
            self.mirror = self.optimiser.update(self.grads, state, params)
        return equal(self.now, self.mirror)


class Loading:
    """The parameters of a layer with children: all of the one set, or all of the other."""

    def __init__(self):
        self.layer, other = (pa.TransformerBlock(16, num_heads=2, hidden=32, seed=i, backend=NAME) for i in (0, 1))
        self.sets = self.layer.parameters(), other.parameters()
        self.turn = itertools.cycle(reversed(self.sets))

    def call(self):
        self.layer.load_parameters(next(self.turn))

    def whole(self):
        return any(equal(self.layer.parameters(), one) for one in self.sets)


def caches(kind, **sizes):
    shape = {"batch": 2, "head_dim": 4, "kv_heads": 2, "backend": NAME}
    return Decoding(lambda: kind.create(**shape, **sizes))


SUBJECTS = {
    "attention": lambda: attention(2, 2, 8, 4),
    "attention in threads": lambda: attention(1, 4, 300, 16),
    "a layer": layer,
    "scopes": scopes,
    "the default": Default,
    "KVCache": lambda: caches(pa.KVCache, capacity=64),
    "PagedKVCache": lambda: caches(pa.PagedKVCache, pages=24, page_size=4),
    "SlidingKVCache": lambda: caches(pa.SlidingKVCache, window=5, sink_tokens=1, chunk=4),
    "AdamW": lambda: Optimiser(pa.optim.AdamW(1e-3)),
    "SGD": lambda: Optimiser(pa.optim.SGD(1e-3, momentum=0.9)),
    "load_parameters": Loading,
}


# ---- interrupts ----


class Stopped(BaseException):
    """What another thread raises in this one."""


class Signals:
    """Interrupts the main thread by a timer."""

    def __init__(self):
        self.armed = False
        signal.signal(signal.SIGALRM, self.interrupt)

    def interrupt(self, number, frame):
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt

    def interrupted(self, call, delay):
        """Call, and return whether that was interrupted after so many seconds."""
        try:
            self.armed = True
            signal.setitimer(signal.ITIMER_REAL, delay)
            call()
            self.armed = False
        except KeyboardInterrupt:
            return True
        except SystemError as error:  # of NumPy, which goes on in dtype() although there was an exception
            if not isinstance(error.__cause__, KeyboardInterrupt):
                raise
            return True
        return False


class Exceptions:
    """Raises an exception in the thread that calls, from another one."""

    def __init__(self):
        sys.setswitchinterval(1e-5)
        self.thread = ctypes.c_ulong(threading.get_ident())
        self.delays = queue.SimpleQueue()  # of C, so that no interrupt divides what it does
        self.lead = 1e-4  # the seconds that the other thread needs to wake up
        threading.Thread(target=self.inject, daemon=True).start()

    def inject(self):
        while True:
            time.sleep(self.delays.get())
            ctypes.pythonapi.PyThreadState_SetAsyncExc(self.thread, ctypes.py_object(Stopped))

    def interrupted(self, call, delay):
        """Call, and return whether that was interrupted after about so many seconds."""
        stage = "before"
        try:
            self.delays.put(delay)
            begin = time.perf_counter() + self.lead
            while time.perf_counter() < begin:
                pass
            stage = "meanwhile"
            call()
            stage = "after"
            for _ in range(1000):
                time.sleep(1e-4)
            return False  # NumPy ignores what is raised in some of its functions, as ``dtype(int)``
        except (Stopped, SystemError) as error:
            if not isinstance(error, Stopped) and not isinstance(error.__cause__, Stopped):  # as above
                raise
            self.lead = max(self.lead + {"before": -1e-5, "meanwhile": 0, "after": 1e-5}[stage], 0)
            return stage == "meanwhile"


def duration(subject):
    """Return the usual seconds of a call."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        subject.call()
        times.append(time.perf_counter() - start)
        assert subject.whole()
    return median(times)


def tried(name, interrupts, before):
    """Interrupt calls of a subject, and return how many were interrupted, and how many ended before."""
    subject = SUBJECTS[name]()
    outcomes = {True: 0, False: 0}
    seconds = duration(subject)
    for i in range(COUNT):
        interrupted = interrupts.interrupted(subject.call, max(rng.uniform(0, 1.1) * seconds, 2e-6))
        outcomes[interrupted] += 1
        assert subject.whole(), f"{name}: call {i} of seed {SEED} left something else"
        now = shared()
        assert now == before, f"{name}: call {i} of seed {SEED} left {now}, before it was {before}"
    return outcomes[True], outcomes[False]


def main():
    interrupts = {"signal": Signals, "exception": Exceptions}[KIND]()
    attention(2, 2, 8, 4)
    before, threads = shared(), threading.active_count()
    found = {name: tried(name, interrupts, before) for name in CHOSEN or SUBJECTS}
    assert threading.active_count() <= threads + 4, threading.enumerate()
    print(json.dumps(found))


main()
