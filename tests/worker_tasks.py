"""Tasks for workers: what one does, of what, and how often it is killed."""

import dataclasses
import importlib
import os
import pathlib
import signal
import stat
import time

import numpy as np

from reshard.errors import CorruptCheckpointError
from reshard.storage.array_store import ArrayStore
from reshard.storage.machine import cores


def is_pipe(descriptor):
    try:
        return stat.S_ISFIFO(os.fstat(int(descriptor)).st_mode)
    except OSError:  # that of the directory that was listed
        return False


@dataclasses.dataclass(frozen=True)
class Tiny:
    """Adds a line to a file; does what it is told; answers with its number, process and cores."""

    number: int
    log: pathlib.Path
    does: str = ""
    nbytes: int = 100

    def __str__(self):
        return f"task {self.number}"

    def run(self, report):
        with self.log.open("a") as file:
            print(self.number, file=file)
        attempts = self.log.read_text().splitlines().count(str(self.number))
        report(self.nbytes // 2)
        if self.does == "killed once" and attempts == 1:
            time.sleep(0.2)
            report(10)
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.does == "hangs":
            time.sleep(60)
        if self.does == "garbage" and attempts == 1:
            pipes = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and is_pipe(fd)]
            os.write(min(pipes), b"no pickle")
            time.sleep(60)
        if self.does == "slow":
            time.sleep(0.5)
        if self.does == "corrupt":
            error = CorruptCheckpointError("two are wrong", ["a: one", "b: two"], ["type this"])
            error.add_note("a note")
            raise error
        if self.does == "full":
            raise OSError(28, "No space left on device", "out")
        if self.does == "bug":
            raise AssertionError("a bug")
        print("no answer")
        return self.number, os.getpid(), cores()


@dataclasses.dataclass(frozen=True)
class Finds:
    """Answers with what is in a module, and in its environment."""

    module: str
    variable: str
    nbytes: int = 1

    def run(self, report):
        return importlib.import_module(self.module).value, os.environ.get(self.variable)


@dataclasses.dataclass(frozen=True)
class Opens:
    """Answers with which store it was given, among other things."""

    number: int
    store: ArrayStore
    nbytes: int = 1

    def run(self, report):
        values = np.float32(self.number)
        text = f"number {self.number}"
        found = {"number": self.number, "store": id(self.store), "names": len(self.store.values)}
        return found | {"text": text, "again": [text, values], "values": values}
