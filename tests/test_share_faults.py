"""Jobs in shares whose processes are killed, by SIGKILL or from the keyboard; and what comes
together at once. What comes out is what one process writes, or nothing is."""

import contextlib
import os
import signal
import subprocess
import time

import layouts
import numpy as np
import psutil
import pytest
from jobs import RESHARD, unfinished
from test_shares_written import assert_same

pytestmark = pytest.mark.usefixtures("forked")


FUNCTIONS = '''
import os
import pathlib
import time

FOLDER = pathlib.Path(__file__).parent


def waits(x):
    """Until there is no gate, or the process is one of those that hang."""
    (FOLDER / f"called-{os.getpid()}").touch()
    while (FOLDER / "gate").exists():
        time.sleep(0.01)
    return x + x
'''
MAP = """
to = "nnx"

[[rule]]
from = '^params/waits$'
to = 'waits'
apply = 'gated:waits'

[[rule]]
from = '^params/'
to = ''
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory with a function, its gate closed, a map that applies it, and a checkpoint; and
    what one process converts it to."""
    (tmp_path / "gated.py").write_text(FUNCTIONS)
    (tmp_path / "map.toml").write_text(MAP)
    rng = np.random.default_rng(5)
    params = {f"w{i}": layouts.random_array(rng, (300 + i, 257)) for i in range(4)}
    params["waits"] = rng.normal(size=(123, 77)).astype("f4")
    layouts.save_pytree(tmp_path / "run", {"params": params})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    assert reshard_ended(begun("whole")) == (0, "")
    for file in tmp_path.glob("called-*"):
        file.unlink()
    (tmp_path / "gate").touch()
    return tmp_path


def begun(out, *more):
    words = ["convert", "run", out, "--to", "nnx", "--map", "map.toml", "--quiet", *more]
    return subprocess.Popen(
        [RESHARD, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def reshard_ended(process):
    err = process.communicate()[1]
    return process.returncode, "\n".join(
        line for line in err.splitlines() if line and "Warning" not in line
    )


def awaited(look):
    """Calls a function until it returns something, and returns that."""
    until = time.monotonic() + 60
    while not (found := look()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def ended(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_job_of_workers_that_is_killed(project, number):
    """Its workers end by themselves, and its shares stay. After an interrupt from the keyboard
    nothing is left."""
    process, out = begun("out", "--workers", "2"), project / "out"
    [pid] = awaited(lambda: [int(path.name[7:]) for path in project.glob("called-*")])
    workers = psutil.Process(process.pid).children(recursive=True)
    assert pid in [each.pid for each in workers]
    process.send_signal(number)
    if number == signal.SIGKILL:
        process.wait()
        process.stderr.close()
        (project / "gate").unlink()
    else:
        assert reshard_ended(process) == (130, "Interrupted.")
    awaited(lambda: all(map(ended, workers)))
    (project / "gate").unlink(missing_ok=True)
    assert not out.exists()
    assert len(unfinished(out)) == (number == signal.SIGKILL)
    if unfinished(out):
        status, text = reshard_ended(begun("out", "--workers", "2"))
        assert status == 2
        assert text.startswith("Error: a stopped job left ")
        assert f"finished shares of `{out}`\n" in text
    assert reshard_ended(begun("out", "--workers", "3", "--resume")) == (0, "")
    assert_same(out, project / "whole")
