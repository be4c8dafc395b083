"""Tasks for workers: what one does, of what, and how often it is killed."""

import dataclasses
import os
import pathlib
import signal
import time

from reshard.errors import CorruptCheckpointError
from reshard.storage.machine import cores


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
