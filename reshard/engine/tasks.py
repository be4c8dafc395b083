"""Parts of a job that run in other processes, and how they are pickled: with what they read of a
store, and nothing else that is stored."""

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from reshard.arrays.handle import StoredArray
from reshard.errors import ArgumentError
from reshard.storage.array_store import ArrayStore
from reshard.storage.ocdbt import StoredValue

# Tasks of each worker, bytes of one at least, and workers of an executor, unless that is said.
_TASKS = 4
_SMALLEST = 32 << 20
_WORKERS = 16

Report = Callable[[int], None]


class Task(Protocol):
    """A part of a job, which pickles, and so does its result; `str()` names it.

    Attributes:
      nbytes: bytes of work: what it reports of at most, and counts as in the end.
    """

    @property
    def nbytes(self) -> int: ...

    def run(self, report: Report) -> Any:
        """Does it; calls `report` with numbers of bytes that are done, now and then."""
        ...


def task_count(nbytes: int, workers: int | None) -> int:
    """In how many tasks a job of so many bytes is divided: a few for each worker, or of as many as
    are not known, since one that is lost is done again; not too small ones, and as many for each,
    so that none waits for the others at the end. Raises ArgumentError for no number of workers."""
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ArgumentError(f"`{workers}` is no number of workers")
    each = nbytes // _SMALLEST // (workers or 1)
    most = _TASKS if workers else _TASKS * _WORKERS
    return max(min(most, each) * (workers or 1), min(nbytes, workers or 1), 1)


class Pickler(pickle.Pickler):
    """A pickler that takes of a store the arrays that it meets, and not all values."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is StoredArray:
            values = [(key, *value) for key, value in obj.store.values[obj.name].items()]
            return _stored_array, (obj.store, obj.name, obj.metadata, values)
        if type(obj) is ArrayStore:
            return empty_store, told_of(obj)
        return NotImplemented


class _Checker(Pickler):
    """What a task is made of, less what is stored."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (StoredArray, ArrayStore):
            return object, ()
        if getattr(obj, "__module__", None) == "__main__":
            raise pickle.PicklingError(f"`{obj.__qualname__}` is defined in no module")
        return NotImplemented


def imported_by(tasks: Sequence[object]) -> list[bytes]:
    """Tasks without what they read, pickled: what they import. Raises ArgumentError for one that
    other processes cannot be given."""
    try:
        return [pickled(task, _Checker) for task in tasks]
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentError(
            "workers cannot be given what they are to do",
            [str(error)],
            ["define functions at the top level of a module, which workers import"],
        ) from error


def pickled(task: object, pickler: type[Pickler] = Pickler) -> bytes:
    data = _Buffer()
    pickler(data).dump(task)
    return bytes(data)


class _Buffer(bytearray):
    """Bytes that a pickler writes to."""

    def write(self, data: bytes) -> None:
        self.extend(data)


def told_of(store: ArrayStore) -> tuple[Any, ...]:
    """What `empty_store` makes a store of."""
    fields = (getattr(store, field.name) for field in dataclasses.fields(store))
    return *fields, store.has_many


def empty_store(*told: Any) -> ArrayStore:
    """A store without values."""
    *own, has_many = told
    store = ArrayStore(*own)
    vars(store).update(values={}, has_many=has_many)
    return store


def _stored_array(
    store: ArrayStore, name: str, metadata: bytes, values: Sequence[tuple]
) -> StoredArray:
    """An array of a store, which gets its values."""
    store.values[name] = {key: StoredValue(*value) for key, *value in values}
    return StoredArray(store, name, metadata)
