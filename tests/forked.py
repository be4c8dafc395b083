"""Python processes that start with all imports done, for tests that do not test imports. A server
that has imported everything forks them.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import sysconfig
import unittest.mock
from multiprocessing import spawn
from multiprocessing.connection import Connection

RESHARD = os.path.join(sysconfig.get_path("scripts"), "reshard")
PATH = subprocess.run(
    [sys.executable, "-EPc", "import sys; print(*sys.path, sep=chr(10))"],
    capture_output=True,
    text=True,
    check=True,
).stdout.split("\n")[:-1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("jax.numpy", "flax.linen", "flax.nnx", "flax.training.train_state", "optax"),
        *("orbax.checkpoint", "tensorstore", "rich.console", "rich.progress", "rich.table"),
        *(
            "reshard.cli.ckpt",
            "reshard.cli.convert",
            "reshard.cli.subprocess_model",
            "reshard.cli.output",
        ),
        *("reshard.convert.conversion", "reshard.restore.restore", "reshard.writer.save"),
    ]
)


def prepared(name: str, without=spawn.get_preparation_data) -> dict:
    told = without(name)
    return {key: told[key] for key in told if not key.startswith("init_main")}


def run(words: list[str], directory: str, environment: dict[str, str], streams: list) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path += PATH
    if words[0] == RESHARD:
        sys.argv[:] = words
        from reshard.cli import main

        main()
    elif words[1] == "-c":
        sys.argv[:] = ["-c", *words[3:]]
        sys.path.insert(0, "")
        exec(words[2], {"__name__": "__main__"})
    else:
        sys.argv[:] = words[3:]
        sys.modules.pop(words[3], None)
        runpy.run_module(words[3], run_name="__main__", alter_sys=True)


class Popen(subprocess.Popen):
    """Such a process for `reshard WORDS`, `python -c CODE` and `python -P -m MODULE`, unless it has
    an environment of its own. Other programs are started as usual."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        words = [args] if isinstance(args, str) else [*map(str, args)]
        python = words[0] == sys.executable and words[1] in ("-c", "-P")
        self.forked = None
        if env is not None or preexec_fn is not None or not (python or words[0] == RESHARD):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest
            )
            return
        _, _, _, stdin, _, _, stdout, _, stderr, *_ = rest
        given = enumerate((stdin, stdout, stderr))
        streams = [Connection(os.dup(number if fd == -1 else fd)) for number, fd in given]
        arguments = (words, str(cwd or os.getcwd()), dict(os.environ), streams)
        self.forked = CONTEXT.Process(target=run, args=arguments)
        with unittest.mock.patch.object(spawn, "get_preparation_data", prepared):
            self.forked.start()
        self.pid, self._child_created = self.forked.pid, True
        for stream in streams:
            stream.close()
        for fd in {stdin, stdout, stderr} - {-1}:
            os.close(fd)
        self._closed_child_pipe_fds = True

    def _internal_poll(self, *args, **kwargs):
        if self.forked is None:
            return super()._internal_poll(*args, **kwargs)
        self.returncode = self.forked.exitcode
        return self.returncode

    def _wait(self, timeout):
        if self.forked is None:
            return super()._wait(timeout)
        self.forked.join(timeout)
        if self._internal_poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode
