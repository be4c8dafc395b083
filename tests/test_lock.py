"""The lock of a job: who holds it, who may take it, and what its owner knows of that."""

import json
import os
import subprocess
import sys
import time

import jobs
import pytest

import reshard
from reshard.storage import lock
from reshard.storage.lock import Lock
from reshard.storage.posix import LockFile


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What takes a minute takes a part of a second."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.02)
    monkeypatch.setattr(lock, "STALE_SECONDS", 0.3)


@pytest.fixture
def patient(monkeypatch):
    """Nothing that has not changed for a while is free for that."""
    monkeypatch.setattr(lock, "STALE_SECONDS", 1e9)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "lock"


def owned(file, **changes):
    """A lock as another process has left it."""
    owner = {"host": "there", "machine": "another", "pid": 1, "started": "1"}
    file.write_text(json.dumps(owner | {"token": "theirs", "beat": "0"} | changes))


def held_by(file):
    return json.loads(file.read_bytes())["token"]


def refused(file, *problems):
    text = "\n  ".join([f"another job is writing `{file.parent}`", *problems])
    jobs.refused(reshard.DestinationError, text, Lock, file, file.parent)


def taken(file):
    mine = Lock(file, file.parent)
    assert held_by(file) == mine.token
    mine.check()
    mine.release()
    assert os.listdir(file.parent) == []


@pytest.mark.usefixtures("patient")
def test_a_lock_is_held_until_it_is_released(file):
    mine = Lock(file, file.parent)
    refused(file)
    mine.release()
    taken(file)


def test_where_there_is_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError):
        Lock(tmp_path / "none" / "lock", tmp_path)


def test_the_heartbeat_changes_it_and_nothing_else_of_it(file):
    mine = Lock(file, file.parent)
    first = file.read_bytes()
    while file.read_bytes() == first:
        time.sleep(0.01)
    then, now = json.loads(first), json.loads(file.read_bytes())
    assert int(now.pop("beat")) > int(then.pop("beat"))
    assert now == then
    mine.release()


@pytest.mark.usefixtures("patient")
def test_one_of_another_host_that_changes(file):
    """It is refused as soon as its heartbeat is seen, whatever that is."""
    owned(file)
    started = time.time()
    os.utime(file, (started - 1e6, started - 1e6))  # clocks say nothing
    beat = subprocess.Popen(["sh", "-c", f'sleep 0.1; sed -i \'s/"0"/"1"/\' {file}'])
    refused(file, "process 1 on there")
    beat.wait()
    assert held_by(file) == "theirs"


@pytest.mark.parametrize("content", [1, b"", b"garbage", b"[]", b'{"pid": 1}', 0, 1 << 31])
def test_one_that_does_not_change_is_taken(file, content):
    """Also one that was never written to the end, or names no process."""
    if isinstance(content, int):
        owned(file, machine="another" if content == 1 else lock._machine(), pid=content)
    else:
        file.write_bytes(content)
    os.utime(file, (time.time() + 1e6,) * 2)
    started = time.monotonic()
    taken(file)
    assert time.monotonic() - started > 0.3


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("waited", [True, False])
def test_the_owner_on_this_machine_is_dead(file, waited):
    """It is known at once: also of a process whose parent has not asked how it ended."""
    code = f"""
import os, pathlib, signal
from reshard.storage.lock import Lock
Lock(pathlib.Path({str(file)!r}), pathlib.Path("x"))
print("held", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b"held\n"
        os.waitid(os.P_PID, process.pid, os.WEXITED | (0 if waited else os.WNOWAIT))
        taken(file)


@pytest.mark.usefixtures("patient")
def test_another_process_has_the_owners_id(file):
    owned(file, machine=lock._machine(), pid=os.getpid(), started="1")
    taken(file)
    owned(file, machine=lock._machine(), pid=os.getpid(), started=lock._started(os.getpid()))
    refused(file)


def test_an_unknown_machine_is_not_this_one(file, monkeypatch):
    """Process ids say nothing then."""
    monkeypatch.setattr(lock, "_machine", lambda: "")
    started = time.monotonic()
    owned(file, machine="", pid=2**31 - 1)
    taken(file)
    assert time.monotonic() - started > 0.3


def test_an_owner_that_has_lost_it(file, monkeypatch):
    """As if it had been stopped for long: it notices, and leaves the next owner's alone."""
    monkeypatch.setattr(Lock, "_beat", lambda self: None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(lock, "_machine", lambda: "another")
        late = Lock(file, file.parent)
    mine = Lock(file, file.parent)
    late._file.write(late._content())
    text = (
        f"the lock on `{file.parent}` is no longer this job's\n"
        "  a job that gives no sign for 0.3 s is taken to be dead\n\n"
        "hint: run it again when no other job writes there"
    )
    jobs.refused(reshard.DestinationError, text, late.check)
    late.release()
    mine.check()
    mine.release()
    jobs.refused(reshard.DestinationError, text, late.check)
    assert os.listdir(file.parent) == []


def test_what_has_changed_since_is_not_removed(file):
    """Two observers find one stale; the first takes it, the second must not take that one."""
    owned(file)
    seen = LockFile(file).read()
    owned(file, token="the first one's")
    LockFile(file).remove(seen)
    assert held_by(file) == "the first one's"
    assert os.listdir(file.parent) == ["lock"]
    LockFile(file).remove(LockFile(file).read())
    LockFile(file).remove(b"")
    assert os.listdir(file.parent) == []


def test_the_heartbeat_keeps_no_process_alive(file):
    code = f"""
import pathlib
from reshard.storage.lock import Lock
Lock(pathlib.Path({str(file)!r}), pathlib.Path("x"))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    taken(file)


# Many processes, one lock: a counter that only its holder may change.
COUNTS = """
import pathlib, sys, time
from reshard.errors import DestinationError
from reshard.storage import lock
lock.BEAT_SECONDS = 0.01
path, counter = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
done = 0
while done < 10:
    try:
        mine = lock.Lock(path, path)
    except DestinationError:
        continue
    number = int(counter.read_text())
    time.sleep(0.001)
    counter.write_text(str(number + 1))
    mine.check()
    mine.release()
    done += 1
"""


def test_no_two_hold_it(file, tmp_path):
    (tmp_path / "counter").write_text("0")
    command = [sys.executable, "-c", COUNTS, file, tmp_path / "counter"]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert (tmp_path / "counter").read_text() == "20"
    assert not file.exists()


def test_a_file_that_is_another_ones_is_let_go_of(tmp_path):
    """And what was let go of once is not closed again: its number may be another file's by then."""
    first, second = (LockFile(tmp_path / "lock") for _ in range(2))
    assert first.create(b"one")
    assert not second.create(b"two")
    second.close()
    first.close()
    with (tmp_path / "other").open("wb") as other:
        first.close()
        other.write(b"text")
    assert second.read() == b"one"
    assert (tmp_path / "other").read_bytes() == b"text"
