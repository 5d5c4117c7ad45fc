"""The lock of a run's folder: the system releases it when the process that holds it ends, however it ends."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError
from ._config import OptionError

__all__ = ["LOCK", "locked"]

LOCK = ".polyattn.lock"
"""The file in the folder that is locked. A killed process leaves the file, and it is not locked any more."""

HELD = (errno.EAGAIN, errno.EACCES, errno.EDEADLK)
WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)

if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> None:
        os.lseek(handle, 1 << 30, os.SEEK_SET)  # behind the text, which another process could not read otherwise
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
else:
    import fcntl

    def _lock(handle: int) -> None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(folder: Path) -> Iterator[str]:
    """Hold the lock of an existing folder; yield what the user should know, usually nothing.

    Raises
    ------
    OptionError
        If another run holds it, in this process or in another one.
    CheckpointError
        If the lock cannot be taken for another reason.
    """
    path = folder / LOCK
    try:
        handle, note = _taken(path)
    except OSError as cause:
        raise CheckpointError(
            f"{path}: cannot be locked: {cause.strerror or cause}; choose another --output, or free the folder"
        ) from cause
    try:
        yield note
    finally:
        if os.name == "nt":  # an open file cannot be deleted there, and one that another process opened stays
            os.close(handle)
        with contextlib.suppress(OSError):
            path.unlink()
        if os.name != "nt":
            os.close(handle)


def _taken(path: Path) -> tuple[int, str]:
    """Return the handle of the locked file, and a note if the file system has no locks."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            note = _attempt(handle, path)
            # The process that held the lock may have deleted the file after it was opened here.
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                _sign(handle)
                return handle, note
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _attempt(handle: int, path: Path) -> str:
    try:
        _lock(handle)
    except OSError as cause:
        if cause.errno in HELD:
            os.lseek(handle, 0, os.SEEK_SET)
            holder = os.read(handle, 300).decode(errors="replace").strip() or "another process"
            raise OptionError(
                f"--output: {path.parent} is in use by {holder}; wait until it ends, or choose another --output"
            ) from cause
        if cause.errno in WITHOUT_LOCKS:
            return f"{path.parent} is on a file system without locks: let no other process train in this folder"
        raise
    return ""


def _sign(handle: int) -> None:
    """Write who holds the lock, for the message to another process; a full disk does not matter here."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, f"process {os.getpid()} on {platform.node()}".encode())
