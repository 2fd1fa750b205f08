"""The disk as a place for values: one file without a name, and a thread for each direction that copies past the cache.

The threads know addresses, offsets and numbers of bytes, never a tensor: they can neither allocate torch's memory nor
be the last to hold a tensor. Copies go around the page cache (O_DIRECT) through a piece of memory for each direction,
or, where the file system can't do that, through the cache, whose pages are given back piece by piece.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from lowtide.device.mounts import is_memory
from lowtide.errors import PlaceError

PIECE = 2**20  # bytes of one call, and of the memory that a direction copies through: larger ones were no quicker
STAGING = 2 * PIECE  # bytes of memory: the pieces of both directions, or as many pages of the cache
BLOCK = 4096  # bytes: offsets and lengths of direct calls are multiples of it on every disk
WINDOW = 2**22  # bytes of the file that are looked at together
OTHERS = ("/var/tmp",)  # folders that are on a disk where the one for temporary files is in memory
WRITTEN_BACK = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER of linux/fs.h
Direction = Literal["out", "in"]


@dataclass(eq=False)
class Job:
    """A copy between an address and an offset of the file."""

    direction: Direction
    address: int
    offset: int
    nbytes: int
    wanted: bool = True  # a copy that is not is given up at its next piece
    error: OSError | None = None
    asked: float = field(default_factory=time.perf_counter)  # when, in seconds
    seconds: float | None = None  # that it took, once it is done
    done: threading.Event = field(default_factory=threading.Event)


class DiskFlight:
    """A copy that runs."""

    def __init__(self, job: Job, flights: dict[Job, torch.Tensor], folder: str) -> None:
        self.job, self.flights, self.folder = job, flights, folder

    @property
    def seconds(self) -> float | None:
        """What it took since it was asked for and the one before it was done; None: it is not done, or was given up."""
        return self.job.seconds

    def wait(self) -> None:
        """Return when the copy is done; one that failed raises a PlaceError."""
        self.job.done.wait()
        self.flights.pop(self.job, None)
        if (error := self.job.error) is not None:
            how = "written to" if self.job.direction == "out" else "read from"
            raise PlaceError(
                f"{self.job.nbytes:,} bytes could not be {how} the offload file in {self.folder}: {_why(error)}.",
                hint="look at that disk, or choose another folder for the offload file.",
            ) from error


class Disk:
    """So many bytes of a disk, in a file that is gone when this process is, however it ends."""

    def __init__(self, nbytes: int, folder: str | os.PathLike[str] | None = None, *, memory: bool = False) -> None:
        self.folder = str(choose_folder(folder, memory=memory))
        self.nbytes = 0
        self.direct, self._file = _open(self.folder)
        self._close = weakref.finalize(self, os.close, self._file)
        self.staging = STAGING
        self._workers: dict[Direction, _Worker] = {}
        self._flights: dict[Job, torch.Tensor] = {}  # holds what is read or filled, until it has been waited for
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Take room for so many bytes in all, now, so that no copy can find the disk full."""
        nbytes = -(-nbytes // BLOCK) * BLOCK
        if nbytes <= self.nbytes:
            return
        try:
            os.posix_fallocate(self._file, self.nbytes, nbytes - self.nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.nbytes)  # a file system may have given a part of it
            free = free_bytes(self.folder)
            raise PlaceError(
                f"the offload file in {self.folder} needs {nbytes:,} bytes, of which {self.nbytes:,} are there: "
                f"{_why(error)}; {free:,} bytes are free there.",
                hint="free some room, choose another folder for the offload file, or offload less.",
            ) from error
        self.nbytes = nbytes

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file

    def write(self, offset: int, source: torch.Tensor) -> DiskFlight:
        """Start to copy a tensor of bytes to an offset."""
        return self._start("out", offset, source)

    def read(self, offset: int, target: torch.Tensor) -> DiskFlight:
        """Start to fill a tensor of bytes from an offset."""
        return self._start("in", offset, target)

    def settle(self) -> None:
        """Give up copies that have not begun, and return when none runs; an interruption comes out after that."""
        interrupted: KeyboardInterrupt | None = None
        while self._flights:
            try:
                for job in self._flights:
                    job.wanted = False
                for worker in self._workers.values():  # what it was given before this is done when this is
                    last = Job("out", 0, 0, 0)
                    worker.jobs.put(last)
                    last.done.wait()
                self._flights.clear()
            except KeyboardInterrupt as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def resident(self) -> int:
        """The bytes of the file that are in the page cache now."""
        if not self.nbytes:
            return 0
        found = 0
        for offset in range(0, self.nbytes, WINDOW):  # a limit on address space counts what is mapped
            length = min(WINDOW, self.nbytes - offset)
            pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
            with mmap.mmap(self._file, length, offset=offset) as mapped:
                start = (ctypes.c_char * 0).from_buffer(mapped)
                failed = _LIBRARY.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(length), pages)
                del start
            found += 0 if failed else sum(page & 1 for page in pages) * mmap.PAGESIZE
        return found

    def close(self) -> None:
        """Let go of the file; copies that run are finished by whoever started them."""
        for worker in self._workers.values():
            worker.end()
        self._close()

    def _start(self, direction: Direction, offset: int, tensor: torch.Tensor) -> DiskFlight:
        if offset % BLOCK or offset + len(tensor) > self.nbytes:
            raise PlaceError(f"{len(tensor):,} bytes at {offset:,} are not within the {self.nbytes:,} of the file.")
        job = Job(direction, tensor.data_ptr(), offset, len(tensor))
        if direction not in self._workers:
            self._workers[direction] = _Worker(self._file, direct=self.direct, name=f"lowtide-copies-{direction}")
        self._flights[job] = tensor  # before it begins, for an interruption may come between any two lines
        self._workers[direction].jobs.put(job)
        return DiskFlight(job, self._flights, self.folder)


class _Worker:
    """The thread of one direction; it ends with the worker."""

    def __init__(self, file: int, *, direct: bool, name: str) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        copy = os.dup(file)  # the thread's own, so that it closes what it uses
        try:
            staging = mmap.mmap(-1, PIECE) if direct else None
            threading.Thread(target=_work, args=(self.jobs, copy, staging), name=name, daemon=True).start()
        except BaseException as error:
            os.close(copy)
            if isinstance(error, (OSError, RuntimeError)):
                raise PlaceError(f"no thread for copies could be started: {error}.") from error
            raise
        self.end = weakref.finalize(self, self.jobs.put, None)


def _work(jobs: queue.SimpleQueue[Job | None], file: int, staging: mmap.mmap | None) -> None:
    """Copy what is asked for, one after the other, until there is no more."""
    start = 0 if staging is None else ctypes.addressof(ctypes.c_char.from_buffer(staging))
    ended = 0.0
    try:
        while (job := jobs.get()) is not None:
            try:
                begun = max(job.asked, ended)  # that a busy machine lets the thread wait is what the copy takes, too
                _PIECEWISE[job.direction, staging is not None](job, file, start)
                ended = time.perf_counter()
                job.seconds = ended - begun if job.wanted else None
            except OSError as error:
                job.error = error
            finally:
                job.done.set()
            del job
    finally:
        os.close(file)


def _write_direct(job: Job, file: int, start: int) -> None:
    for at in range(0, job.nbytes, PIECE):
        if not job.wanted:
            return
        length = min(PIECE, job.nbytes - at)
        ctypes.memmove(start, job.address + at, length)
        _whole(os.pwrite, file, start, -(-length // BLOCK) * BLOCK, job.offset + at)


def _read_direct(job: Job, file: int, start: int) -> None:
    for at in range(0, job.nbytes, PIECE):
        if not job.wanted:
            return
        length = min(PIECE, job.nbytes - at)
        _whole(_pread_into, file, start, -(-length // BLOCK) * BLOCK, job.offset + at)
        ctypes.memmove(job.address + at, start, length)


def _write_cached(job: Job, file: int, _: int) -> None:
    for at in range(0, job.nbytes, PIECE):
        if not job.wanted:
            return
        length = min(PIECE, job.nbytes - at)
        _whole(os.pwrite, file, job.address + at, length, job.offset + at)
        _give_back(file, job.offset + at, length)


def _read_cached(job: Job, file: int, _: int) -> None:
    for at in range(0, job.nbytes, PIECE):
        if not job.wanted:
            return
        length = min(PIECE, job.nbytes - at)
        _whole(_pread_into, file, job.address + at, length, job.offset + at)
        _give_back(file, job.offset + at, length, written=False)


_PIECEWISE: dict[tuple[Direction, bool], Callable[[Job, int, int], None]] = {
    ("out", True): _write_direct,
    ("in", True): _read_direct,
    ("out", False): _write_cached,
    ("in", False): _read_cached,
}
_LIBRARY = ctypes.CDLL(None, use_errno=True)
Call = Callable[[int, "ctypes.Array[ctypes.c_char]", int], int]


def _whole(call: Call, file: int, address: int, nbytes: int, offset: int) -> None:
    """Call until all bytes are copied: one call may do less."""
    done = 0
    while done < nbytes:
        now = call(file, (ctypes.c_char * (nbytes - done)).from_address(address + done), offset + done)
        if now <= 0:
            raise OSError(errno.EIO, "the file ends before it should")
        done += now


def _pread_into(file: int, buffer: ctypes.Array[ctypes.c_char], offset: int) -> int:
    return os.preadv(file, [buffer], offset)


def _give_back(file: int, offset: int, nbytes: int, *, written: bool = True) -> None:
    """Let no page of these bytes stay in the cache."""
    if written and _LIBRARY.sync_file_range(file, ctypes.c_int64(offset), ctypes.c_int64(nbytes), WRITTEN_BACK):
        os.fdatasync(file)
    with contextlib.suppress(OSError):  # a file system that has nothing to give back
        os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_DONTNEED)


# ------------------------------------------------------------------------------------------------------------ the file


def choose_folder(folder: str | os.PathLike[str] | None, *, memory: bool = False) -> Path:
    """The folder for the file: the one that is asked for, if it is on a disk, or the first of the usual ones that is.

    `memory` admits a folder whose files are in memory, such as a tmpfs.
    """
    if folder is not None:
        found = Path(folder)
        if not found.is_dir():
            raise PlaceError(f"{found} is no folder for an offload file.", hint="make it, or name another.")
        if is_memory(found) and not memory:
            raise PlaceError(
                f"{found} is in memory, not on a disk: what is offloaded there would still take RAM.",
                hint="name a folder on a disk.",
            )
        return found
    for usual in (tempfile.gettempdir(), *OTHERS):
        if os.path.isdir(usual) and os.access(usual, os.W_OK) and (memory or not is_memory(Path(usual))):
            return Path(usual)
    raise PlaceError(
        f"no usual folder for temporary files is on a disk: {', '.join((tempfile.gettempdir(), *OTHERS))}.",
        hint="name a folder on a disk for the offload file.",
    )


def free_bytes(folder: str | os.PathLike[str]) -> int:
    """The bytes that this user can still write to a folder's disk."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _open(folder: str) -> tuple[bool, int]:
    """A new file that only this process can reach, and whether copies can go around the cache."""
    try:
        file = _nameless(folder)
    except OSError as error:
        raise PlaceError(
            f"no offload file can be made in {folder}: {_why(error)}.", hint="name a folder that you can write to."
        ) from error
    return _try_direct(file), file


def _nameless(folder: str) -> int:
    """A file without a name, or one that loses it at once."""
    with contextlib.suppress(OSError):
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    file, path = tempfile.mkstemp(prefix="lowtide-", dir=folder)
    os.unlink(path)
    return file


def _try_direct(file: int) -> bool:
    """Let copies of the file go around the cache, where a first one can."""
    usual = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, usual | os.O_DIRECT)
        with mmap.mmap(-1, BLOCK) as block:
            return os.pwrite(file, block, 0) == os.preadv(file, [block], 0) == BLOCK
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, usual)
        return False


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)
