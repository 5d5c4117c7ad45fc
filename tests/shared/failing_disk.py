"""A file system that fails at a chosen byte or call, or loses its power, below the code that writes.

``open`` and the functions of ``os`` are replaced while a disk is entered; what they do to files outside of its folder
is left alone.
"""

import builtins
import contextlib
import errno
import functools
import io
import os

import pytest


class Disk(contextlib.AbstractContextManager):
    """The file system below a folder, in which the ``at``-th event fails: a byte, or a call that changes a file.

    ``lasting`` lets all later events fail as well. A ``code`` of None is a KeyboardInterrupt. A sync only counts as an
    event, because a real one takes most of the time.
    """

    def __init__(self, folder, at=None, code=errno.EIO, lasting=False):
        self.folder, self.at, self.code, self.lasting = str(folder), at, code, lasting
        self.count, self.failed, self._patches = 0, False, pytest.MonkeyPatch()

    def spend(self, wanted=1, path=None):
        """Count events, and return how many of them succeed; raise if none does."""
        left = wanted if self.at is None else max(self.at - self.count, 0)
        if self.failed:
            left = 0 if self.lasting else wanted
        if left == 0:
            self.failed = True
            if self.code is None:
                raise KeyboardInterrupt
            raise OSError(self.code, os.strerror(self.code), *([] if path is None else [str(path)]))
        self.count += min(wanted, left)
        return min(wanted, left)

    def sync(self, handle):
        """Count a sync."""
        self.spend()

    def __enter__(self):
        opened, original = builtins.open, {name: getattr(os, name) for name in ("open", "replace", "rename", "mkdir")}

        def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
            if not (set(mode) & set("wxa+") and str(file).startswith(self.folder)):
                return opened(file, mode, buffering, encoding, errors, newline, **more)
            binary = io.BufferedWriter(_File(self, file, mode.strip("bt")))
            return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

        def counted(name, path, *arguments, **more):
            reads = name == "open" and not arguments[0] & (os.O_WRONLY | os.O_RDWR)
            if str(path).startswith(self.folder) and not reads:
                self.spend(path=path)
            return original[name](path, *arguments, **more)

        self._patches.setattr(builtins, "open", open_file)
        self._patches.setattr(io, "open", open_file)
        self._patches.setattr(os, "fsync", self.sync)
        for name in original:
            self._patches.setattr(os, name, functools.partial(counted, name))
        return self

    def __exit__(self, *_):
        self._patches.undo()


class _File(io.FileIO):
    """A file whose opening, bytes and closing are events."""

    def __init__(self, disk, path, mode):
        disk.spend(path=path)
        super().__init__(path, mode)
        self.disk = disk

    def write(self, data):
        data = memoryview(data).cast("B")
        return super().write(data[: self.disk.spend(len(data))])

    def close(self):
        if not self.closed:
            super().close()  # the system closes a file even if it reports an error
            self.disk.spend()


class PowerLoss(Disk):
    """The file system below a folder, and what a loss of power at each of its events would leave of the folder.

    What was not synced is lost: the bytes of files, and either all or none of the names that changed since the folder
    was synced.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.left, self._held = [], []
        self._bytes = {entry.inode(): _content(entry.path) for entry in os.scandir(folder)}
        self._names = _content(folder)
        self._hold()

    def spend(self, wanted=1, path=None):
        """Record what a loss of power would leave."""
        self._hold()
        for names in (self._names, _content(self.folder)):
            files = {name: self._bytes.get(inode, b"") for name, inode in names.items()}
            if files not in self.left:
                self.left.append(files)
        return super().spend(wanted, path)

    def sync(self, handle):
        """Keep the bytes of a file, or the names of a folder."""
        self.spend()
        path = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.isdir(path):
            self._names = _content(path)
        else:
            self._bytes[os.fstat(handle).st_ino] = _content(path)

    def _hold(self):
        """Keep all files open: the system would use the number of a deleted one again."""
        known = {os.fstat(file.fileno()).st_ino for file in self._held}
        for entry in os.scandir(self.folder):
            if entry.inode() not in known:
                self._held.append(io.FileIO(entry.path))

    def __exit__(self, *arguments):
        super().__exit__(*arguments)
        for file in self._held:
            file.close()


def _content(path):
    """Return the bytes of a file, or the numbers of the files in a folder by name."""
    if os.path.isdir(path):
        return {entry.name: entry.inode() for entry in os.scandir(path)}
    with io.FileIO(path) as file:
        return file.readall()
