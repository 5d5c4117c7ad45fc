"""Processes that are forked from one that has imported everything, and killed: a start takes milliseconds."""

import mmap
import os
import resource
import signal
import sys
import time

import numpy as np

import polyattn.checkpoint._shards
import polyattn.checkpoint._write
import polyattn.training._folder
import polyattn.training._lock

WRITERS = {
    module.__file__
    for module in (
        polyattn.checkpoint._shards, polyattn.checkpoint._write, polyattn.training._folder, polyattn.training._lock,
    )
}  # fmt: skip
"""The modules that write files."""


def forked(function, prepare=lambda: None, output=os.devnull):
    """Call a function in a new process, which exits with its result, and return the process's number."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    try:
        os.fsync = lambda handle: None  # a kill loses nothing that was written, and syncs take most of the time
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        prepare()
        code = function() or 0
        sys.stdout.flush()
        os._exit(code)
    finally:  # an exception must not go on in the copy of the program
        sys.excepthook(*sys.exc_info())
        os._exit(70)


def ended(process):
    """Wait for a process, and return its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_after(process, seconds):
    """Kill a process after some time, unless it has ended by then; return as :func:`ended`."""
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)  # it is not waited for yet, so the number is still its own
    return ended(process)


class Lines:
    """The lines of the WRITERS that a process executes, counted in memory that it shares with this one."""

    def __init__(self):
        self._count = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    @property
    def count(self):
        """The number of lines of the last process."""
        return int(self._count[0])

    def kill_at(self, number):
        """Return what lets a process count, and kill itself before the ``number``-th line."""

        def trace(frame, event, argument):
            if event == "line":
                self._count[0] += 1
                if self._count[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        def prepare():
            self._count[0] = 0
            sys.settrace(lambda frame, event, argument: trace if frame.f_code.co_filename in WRITERS else None)

        return prepare


def at_byte(number):
    """Return what lets the system end a process when it writes behind the ``number``-th byte of any file."""

    def prepare():
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

    return prepare
