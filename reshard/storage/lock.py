"""A lock that holds between hosts: a file that its owner keeps changing.

`flock` says nothing to other hosts on NFS. The file, which in a bucket is an object, is created
exclusively, and names its owner; a counter in it is the owner's heartbeat. One whose owner is on
this host is free as soon as that process has ended. Of any other, it can only be seen whether it
changes: it is free once it has not done so for a while on the observer's own clock. Clocks of two
hosts are never compared.

An owner that was stopped for longer than that may have lost its lock without knowing. So it must
look at it again before it commits, and must never write where the next owner writes.
"""

import contextlib
import json
import os
import platform
import secrets
import threading
import time
from typing import Any

from reshard.errors import DestinationError
from reshard.storage import bucket, posix
from reshard.storage.location import Location, parse_location
from reshard.storage.posix import kernel_text

LockFile = posix.LockFile | bucket.LockFile

# How often an owner changes its lock; and how long it must not have changed to be free.
BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
# Tokens of locks that this process has released, one of which may be there still.
_released_tokens: set[str] = set()


class Lock:
    """A lock that this process holds until `release`: a file, with a token that no other lock has.
    The heartbeat ends with the process. Raises DestinationError, about the subject, if another job
    holds it, and FileNotFoundError if its directory is gone."""

    def __init__(self, path: Location, subject: Location):
        self.token = secrets.token_hex(8)
        self._subject = subject
        store = posix if parse_location(path).is_local else bucket
        self._file = store.LockFile(path)
        self._owner = {
            "host": platform.node(),
            "machine": _machine(),
            "pid": os.getpid(),
            "started": _started(os.getpid()),
            "token": self.token,
        }
        self._beats = 0
        self._renewing = threading.Lock()
        _wait_until_free(self._file, self._content(), subject)
        self._renewed = time.monotonic()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="reshard-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises DestinationError unless the lock is this one's, and will be for a while."""
        if self._is_old():
            with contextlib.suppress(OSError):
                self._renew()
        if _token(self._file.read()) != self.token or self._is_old():
            raise DestinationError(
                f"the lock on `{self._subject}` is no longer this job's",
                [f"a job that gives no sign for {STALE_SECONDS:g} s is taken to be dead"],
                ["run it again when no other job writes there"],
            )

    def release(self) -> None:
        """Frees the lock, if it is still this one's."""
        self._released.set()
        self._thread.join()
        _released_tokens.add(self.token)
        with contextlib.suppress(OSError):  # what cannot be removed is stale in a while
            seen = self._file.read()
            if seen is not None and _token(seen) == self.token:
                self._file.remove(seen)
        self._file.close()

    def _beat(self) -> None:
        while not self._released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # `check` tells what has become of it
                self._renew()

    def _renew(self) -> None:
        with self._renewing:
            begin = time.monotonic()
            self._beats += 1
            content = self._content()
            if not self._file.write(content):
                # Another one's; or an earlier heartbeat is there, whose answer was lost.
                seen = self._file.read()
                if seen is None or _token(seen) != self.token:
                    return
                if not self._file.take(seen, content):
                    return
            self._renewed = begin

    def _is_old(self) -> bool:
        """Whether another job may soon take the lock, as far as its owner knows."""
        return time.monotonic() - self._renewed > STALE_SECONDS / 2

    def _content(self) -> bytes:
        """As many bytes each time."""
        return json.dumps({**self._owner, "beat": f"{self._beats:012}"}).encode()


def _wait_until_free(file: LockFile, content: bytes, subject: Location) -> None:
    """Creates the file, or raises DestinationError as soon as it is seen that its owner lives."""
    first, since = None, 0.0
    while not file.create(content):
        seen = file.read()
        if seen is None:  # released since
            continue
        owner = _parsed(seen)
        here = owner is not None and owner["machine"] == _machine() != ""
        ended = owner is not None and (
            owner["token"] in _released_tokens
            or (here and _has_ended(owner["pid"], owner["started"]))
        )
        if (here and not ended) or (first is not None and seen != first):
            elsewhere = not here or isinstance(file, bucket.LockFile)
            who = [f"process {owner['pid']} on {owner['host']}"] if owner and elsewhere else []
            raise DestinationError(f"another job is writing `{subject}`", who)
        if first is None:
            first, since = seen, time.monotonic()
        if ended or time.monotonic() - since > STALE_SECONDS:
            if file.take(seen, content):
                return
            first = None
        else:
            time.sleep(BEAT_SECONDS / 4)


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
    boot, ids = kernel_text("sys/kernel/random/boot_id"), kernel_text("self/ns/pid")
    return f"{boot.strip()} {ids}" if boot and ids else ""


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
    fields = kernel_text(f"{pid}/stat").rpartition(")")[2].split()
    return "" if not fields else "ended" if fields[0] in "ZX" else fields[19]
