"""A lock that holds between hosts: a file that its owner keeps changing.

`flock` says nothing to other hosts on NFS. The file is created exclusively, and names its owner; a
counter in it is the owner's heartbeat. One whose owner is on this host is free as soon as that
process has ended. Of any other, it can only be seen whether it changes: it is free once it has not
done so for a while on the observer's own clock. Clocks of two hosts are never compared.

An owner that was stopped for longer than that may have lost its lock without knowing. So it must
look at it again before it commits, and must never write where the next owner writes.
"""

import contextlib
import json
import os
import pathlib
import platform
import secrets
import threading
import time
from typing import Any

from reshard.errors import DestinationError

# How often an owner changes its lock; and how long it must not have changed to be free.
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
_MOST_BYTES = 4096


class Lock:
    """A lock that this process holds until `release`. The heartbeat ends with the process.

    Args:
      path: its file, in a directory that is there.
      subject: what is locked, for messages.

    Attributes:
      token: a name that no other lock has.

    Raises:
      DestinationError: another job holds it.
      FileNotFoundError: the directory is gone.
    """

    def __init__(self, path: pathlib.Path, subject: pathlib.Path):
        self.token = secrets.token_hex(8)
        self._subject = subject
        self._file = LockFile(path)
        self._owner = {
            "host": platform.node(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "token": self.token,
        }
        self._beats = 0
        _wait_until_free(self._file, self._content(), subject)
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="reshard-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises DestinationError unless the lock is still this one's."""
        if _token(self._file.read()) != self.token:
            raise DestinationError(
                f"the lock on `{self._subject}` is no longer this job's",
                [f"a job that gives no sign for {STALE_SECONDS:g} s is taken to be dead"],
                ["run it again when no other job writes there"],
            )

    def release(self) -> None:
        """Frees the lock, if it is still this one's."""
        self._released.set()
        self._thread.join()
        with contextlib.suppress(OSError):  # what cannot be removed is stale in a while
            seen = self._file.read()
            if seen is not None and _token(seen) == self.token:
                self._file.remove(seen)
        self._file.close()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            self._beats += 1
            with contextlib.suppress(OSError):  # `check` tells what has become of it
                self._file.write(self._content())

    def _content(self) -> bytes:
        """As many bytes each time."""
        return json.dumps({**self._owner, "beat": f"{self._beats:012}"}).encode()


def _wait_until_free(file: "LockFile", content: bytes, subject: pathlib.Path) -> None:
    """Creates the file, or raises DestinationError as soon as it is seen that its owner lives."""
    first, since = None, 0.0
    while not file.create(content):
        seen = file.read()
        if seen is None:  # released since
            continue
        owner = _parsed(seen)
        here = owner is not None and owner["machine"] == _machine() != ""
        ended = owner is not None and here and _has_ended(owner["pid"], owner["started"])
        if (here and not ended) or (first is not None and seen != first):
            elsewhere = [f"process {owner['pid']} on {owner['host']}"] if owner and not here else []
            raise DestinationError(f"another job is writing `{subject}`", elsewhere)
        if first is None:
            first, since = seen, time.monotonic()
        if ended or time.monotonic() - since > STALE_SECONDS:
            file.remove(seen)
            first = None
        else:
            time.sleep(BEAT_SECONDS / 4)


class LockFile:
    """What the lock asks of a file system: to create if absent, to read, to overwrite one's own,
    and to remove what has not changed since it was read. A bucket has all of it in conditional
    writes."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._descriptor = -1

    def create(self, data: bytes) -> bool:
        """Creates the file, which is then one's own; False where there is one."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        try:
            self._descriptor = os.open(self._path, flags, 0o644)
        except FileExistsError:
            return False
        try:
            self.write(data)
        except OSError:
            self.close()
            self._path.unlink(missing_ok=True)
            raise
        return True

    def write(self, data: bytes) -> None:
        """Overwrites the file that was created, whatever has its name now."""
        os.pwrite(self._descriptor, data, 0)
        os.close(os.dup(self._descriptor))  # NFS sends it to the server when a descriptor is closed

    def read(self) -> bytes | None:
        """Its content; None where there is none."""
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(self._path, flags)
        except FileNotFoundError:
            return None
        try:
            return os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)

    def remove(self, seen: bytes) -> None:
        """Removes the file if its content is what was read."""
        aside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        if LockFile(aside).read() != seen:  # a new owner's
            with contextlib.suppress(OSError):
                os.link(aside, self._path, follow_symlinks=False)
        aside.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives up the file that was created."""
        os.close(self._descriptor)


def _parsed(content: bytes) -> dict[str, Any] | None:
    """The owner that a lock names; None where it has not been written yet, or is no lock."""
    try:
        owner = json.loads(content)
        texts = [owner[key] for key in ("host", "machine", "started", "token")]
        pid = owner["pid"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    valid = all(isinstance(text, str) for text in texts) and type(pid) is int and 0 < pid < 1 << 31
    return owner if valid else None


def _token(content: bytes | None) -> str | None:
    owner = None if content is None else _parsed(content)
    return None if owner is None else owner["token"]


def _machine() -> str:
    """What two processes have in common that know each other's process ids; empty if unknown.

    Not the name of the host: containers on different machines may have the same.
    """
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(pid: int, started: str) -> bool:
    """Whether a process of this machine is gone, or another one has its id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    now = _started(pid)
    return bool(now and started) and now != started


def _started(pid: int) -> str:
    """When a process was started, in ticks since boot; empty if unknown."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]
