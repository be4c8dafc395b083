"""What the processes of a job tell one another while they restore together: bytes, and errors.

All of them take the same steps in the same order:

    begin  ->  gather, gather, ...  ->  end

`begin` and `end` go through the coordination service of `jax.distributed`, so that nobody is in a
collective before all are there; bytes are spread by an all-gather of devices, which changes none
(a sum makes 0.0 of -0.0). A process that fails says so in its next step, in the place of what it
would have said there, and all raise.
"""

import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from reshard import errors
from reshard.compat import coordinator
from reshard.errors import ArgumentError, ReshardError
from reshard.restore.broadcast import HEADER, SMALLEST_ROW
from reshard.restore.lazy_jax import jax

# Seconds that the first processes wait for the last one to begin; and after which each looks
# whether it has been interrupted.
_PATIENCE, _LOOK = 600, 1
# Characters of a summary, and problems, that others are told.
_MAX_SUMMARY, _MAX_PROBLEMS = 700, 10

_calls = itertools.count()


class Told(NamedTuple):
    """An error, as processes tell it one another."""

    name: str
    summary: str
    problems: tuple[str, ...]
    hints: tuple[str, ...]


class Exchange:
    """The steps of one process in one restore, in which every process of the job takes part. As a
    context, it tells the others what fails in it.

    Attributes:
      processes: how many there are.
      here: the number of this one.
      row: the bytes that it sends in the next round, from `begin` on.
    """

    def __init__(self) -> None:
        self.processes, self.here = jax.process_count(), jax.process_index()
        self._client = coordinator()
        self._key = f"reshard/restore/{next(_calls)}"
        self._said = 0
        self._patience: int | None = _PATIENCE
        self._rounds = 0  # to come
        self._over = False
        if self._client is None:
            raise ArgumentError(
                "processes that restore together need the coordination service of JAX",
                hints=["jax.distributed.initialize()"],
            )

    def begin(self, rounds: int, row: int, what: Sequence[str]) -> None:
        """Waits for all processes, which will gather rows of `row` bytes in so many rounds. Raises
        ArgumentError unless all say the same of `what` they restore."""
        self._rounds = rounds
        self._framed = np.zeros(HEADER + row, np.uint8)
        self.row = self._framed[HEADER:]
        said = [document["what"] for document in self._say({"what": what})]
        self._patience = None  # to read may take as long as it takes
        if any(each != said[0] for each in said):
            self._over = True
            raise ArgumentError(
                "processes that restore together restore the same, and these do not",
                [f"process {number}: {', '.join(each)}" for number, each in enumerate(said)],
            )

    def gather(self) -> np.ndarray:
        """The rows of all processes in the next round."""
        rows, told = self._gather()
        self._check(told)
        return rows

    def end(self) -> None:
        """Waits until all processes have read what they need."""
        self._say({})
        self._over = True

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or self._over:
            return
        mine = _told(error)
        if self._rounds:
            text = np.frombuffer(_encoded(mine), np.uint8)
            self._framed[:8].view(np.int64)[0] = len(text)
            self.row[: len(text)] = text
            _, told = self._gather()
        else:
            told = _errors(self._answers({"error": mine}))
        self._over = True
        # An error that all have, such as another target's, is no error of some processes.
        if isinstance(error, ReshardError) and any(each != mine for each in told):
            raise _failure(told) from error

    def _check(self, told: Sequence[Told | None]) -> None:
        """Raises what others have told."""
        if any(told):
            self._over = True
            raise _failure(told)

    def _gather(self) -> tuple[np.ndarray, list[Told | None]]:
        """The rows of all processes in a round, and what they tell: before each is the length of an
        error that is in its place, or 0."""
        self._rounds -= 1
        try:
            rows = _all_gather(self.processes, self.here)(self._framed)
        except Exception:  # of a collective that others have left, there is no next one
            self._over = True
            raise
        lengths = rows[:, :8].copy().view(np.int64)[:, 0].tolist()
        told = [
            _of_json(json.loads(line[HEADER : HEADER + length].tobytes())) if length else None
            for line, length in zip(rows, lengths, strict=True)
        ]
        return rows[:, HEADER:], told

    def _say(self, document: dict[str, Any]) -> list[Any]:
        """What all processes say in this step, once all have said something."""
        answers = self._answers(document)
        self._check(_errors(answers))
        return answers

    def _answers(self, document: dict[str, Any]) -> list[Any]:
        """What each process says in this step, or that it has not come. The first one collects it:
        so that others ask for one thing alone, and not for as many as there are processes."""
        step = f"{self._key}/{self._said}"
        self._said += 1
        self._over = True  # who is interrupted here has said already what it has to say
        self._client.key_value_set(f"{step}/{self.here}", json.dumps(document))
        until = None if self._patience is None else time.monotonic() + self._patience
        if self.here == 0:
            answers = [
                {"error": _absent()} if text is None else json.loads(text)
                for text in (self._heard(f"{step}/{n}", until) for n in range(self.processes))
            ]
            self._client.key_value_set(f"{step}/all", json.dumps(answers))
        else:
            text = self._heard(f"{step}/all", until and until + _PATIENCE)
            answers = [{"error": _absent()}] if text is None else json.loads(text)
        self._over = False
        return answers

    def _heard(self, key: str, until: float | None) -> str | None:
        """What is said under a key; None if nothing is until some time."""
        while True:
            try:
                return self._client.blocking_key_value_get(key, _LOOK * 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                if until is not None and time.monotonic() > until:
                    return None


@functools.lru_cache(maxsize=1)
def _all_gather(processes: int, here: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function that gives all processes the rows of all, by a device of each."""
    first: dict[int, Any] = {}
    for device in sorted(jax.devices(), key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    devices = [first[number] for number in range(processes)]
    mesh = jax.sharding.Mesh(np.array(devices), ("process",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("process"))
    all_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    identity = jax.jit(lambda array: array, out_shardings=all_rows)

    def gather(row: np.ndarray) -> np.ndarray:
        with jax.set_mesh(mesh):
            local = jax.device_put(row[None], first[here])
            shape = (processes, len(row))
            array = jax.make_array_from_single_device_arrays(shape, rows, [local])
            return np.asarray(identity(array).addressable_data(0))

    return gather


def _told(error: BaseException) -> Told:
    """An error, as much of it as others are told."""
    if not isinstance(error, ReshardError):
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return Told("ReshardError", text[:_MAX_SUMMARY], (), ())
    problems = error.problems[:_MAX_PROBLEMS]
    if rest := len(error.problems) - len(problems):
        problems += (f"... and {rest} more",)
    told = Told(type(error).__name__, error.summary[:_MAX_SUMMARY], problems, error.hints)
    while len(_encoded(told)) > SMALLEST_ROW:
        told = told._replace(problems=told.problems[:-1], hints=())
    return told


def _errors(answers: Sequence[dict[str, Any]]) -> list[Told | None]:
    return [_of_json(found["error"]) if "error" in found else None for found in answers]


def _of_json(told: Sequence[Any]) -> Told:
    name, summary, problems, hints = told
    return Told(name, summary, tuple(problems), tuple(hints))


def _encoded(told: Told) -> bytes:
    return json.dumps(told, ensure_ascii=False).encode(errors="replace")


def _absent() -> Told:
    return Told("ReshardError", f"it has not begun to restore within {_PATIENCE} seconds", (), ())


def _failure(told: Sequence[Told | None]) -> ReshardError:
    """What all processes raise where some have failed."""
    failed = {number: error for number, error in enumerate(told) if error is not None}
    name, summary, problems, hints = next(iter(failed.values()))
    if len(failed) == 1:
        summary = f"process {next(iter(failed))}: {summary}"
    else:
        summary = f"{len(failed)} of {len(told)} processes could not restore"
        problems = [
            f"process {number}: {line}"
            for number, error in failed.items()
            for line in (error.summary, *error.problems)
        ]
    return getattr(errors, name)(summary, problems, hints)
