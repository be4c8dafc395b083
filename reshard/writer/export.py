"""`export`: a checkpoint as a directory of safetensors files, as Hugging Face has them.

On a disk, the files are written in a directory beside the destination, which becomes it by one
rename. In a bucket, each file is made on this machine's disk and uploaded. There, an object that is
created if absent says that somebody writes; the index, or the configuration of a single file, is
created last.
"""

import contextlib
import dataclasses
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

from reshard import errors, loader, tree, units
from reshard.arrays import derived, dtypes
from reshard.arrays.handle import ArrayHandle, array_text, check_names, stored_name
from reshard.checkpoint import Checkpoint, name_clashes
from reshard.engine.budget import check_fits
from reshard.loader.json_documents import read_json
from reshard.loader.safetensors import INDEX, UNFINISHED
from reshard.storage import disk, location
from reshard.verify import digest_record, values
from reshard.writer import commit, job, planning, safetensors, siblings

# What is copied beside the weights: names that end, or begin, so.
_ENDS = (".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt")
_BEGINS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_NOT_COPIED = (".index.json", loader.detection.RECORD_FILE)
_CONFIG = "config.json"
# Leaves that are named one by one in a hint.
_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Export:
    """What `export` writes. `print()` shows it.

    Attributes:
      destination: where it will be.
      files: the safetensors files.
      like: where other files are copied from, if that is said.
      copied: their names.
    """

    destination: location.Location
    files: tuple[safetensors.File, ...]
    like: location.Location | None
    copied: tuple[str, ...]
    source_state: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all files with tensors."""
        return sum(file.nbytes for file in self.files)

    @property
    def rounded(self) -> derived.Rounded:
        """The arrays that a map computes and rounds."""
        return derived.rounded(handle for file in self.files for handle, _ in file.tensors)

    def document(self) -> dict[str, Any]:
        """What `reshard export --json` prints."""
        return {
            "destination": str(self.destination),
            "bytes": self.nbytes,
            "files": [
                {
                    "name": file.name,
                    "bytes": file.nbytes,
                    "tensors": [stored_name(handle.path) for handle, _ in file.tensors],
                }
                for file in self.files
            ],
            "copied": list(self.copied),
            **({"rounded": self.rounded._asdict()} if self.rounded.arrays else {}),
        }

    def __repr__(self) -> str:
        arrays = units.count_of(sum(len(file.tensors) for file in self.files), "array")
        files = units.count_of(len(self.files), "file")
        lines = [f"{arrays}, {units.format_bytes(self.nbytes)} in {files}"]
        lines += [f"copy     {', '.join(self.copied)}"] * bool(self.copied)
        lines += [f"rounded  {self.rounded}"] * bool(self.rounded.arrays)
        return "\n".join(lines)


def export(
    ckpt: Checkpoint,
    destination: str | os.PathLike,
    *,
    file_size: int | str = "5GB",
    like: str | os.PathLike | None = None,
    max_memory: int | str = "1GiB",
    workers: int | None = None,
    executor: Executor | None = None,
    progress: values.Progress | None = None,
) -> Export:
    """Write a checkpoint as safetensors files, as Hugging Face has them.

    The name of a tensor is its path, joined with dots. Shardings are not written. The files are
    the same for any mesh, and for any number of workers.

    Args:
      ckpt: the checkpoint, from `open` or a transform.
      destination: the new directory, or the prefix in a bucket.
      file_size: bytes of tensors in a file at most, unless a single one has more.
      like: a Hugging Face directory. Its configuration, tokenizer, licence and model card are
        copied. The names and shapes of its tensors, if it has any, must be those of `ckpt`.
      max_memory: bytes in flight at most, in each worker.
      workers: how many processes of this machine read and write.
      executor: any `concurrent.futures.Executor` whose workers read and write instead. They need
        the disk of the destination.
      progress: called with (bytes done, bytes in all).

    Returns:
      What was written.

    Raises:
      TreeMismatchError: leaves that safetensors has no type for, names of two leaves, or leaves
        that are not those of `like`: all of them.
      CorruptCheckpointError: arrays that cannot be read: all of them.
      DestinationError: the destination exists or cannot be written.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.

    Example:
      >>> ckpt = reshard.select(reshard.open("run/1000"), "params/**")
      >>> [file.name for file in reshard.export(ckpt, "out/hf").files]
      ['model.safetensors']
      >>> reshard.diff("out/hf", ckpt).equal
      True
    """
    plan = plan_export(ckpt, destination, file_size=file_size, like=like, max_memory=max_memory)
    place = plan.destination
    if executor is not None and not place.is_local:
        raise errors.ArgumentError(
            "an executor exports to a disk", hints=["workers=... for a bucket"]
        )
    report = values.counted(sum(handle.nbytes for handle in ckpt.arrays), progress)

    def write(files: Sequence[safetensors.File], directory: location.Location) -> dict[str, Any]:
        return _write(files, directory, units.parse_bytes(max_memory), report, workers, executor)

    def check() -> None:
        if changed := siblings.changed_paths(plan.source_state, siblings.source_state([ckpt])):
            told = [f"`{path}`" for path in changed]
            raise errors.CorruptCheckpointError("the source changed while it was read", told)

    (_to_disk if place.is_local else _to_bucket)(plan, write, check)
    return plan


def plan_export(
    ckpt: Checkpoint,
    destination: str | os.PathLike,
    *,
    file_size: int | str,
    like: str | os.PathLike | None,
    max_memory: int | str,
) -> Export:
    """What `export` would write. Raises what it would raise before it writes."""
    place = location.parse_location(destination)
    model = None if like is None else location.parse_location(like)
    found: list[errors.ReshardError] = []
    for problems in (_unwritable(ckpt), _clashes(ckpt), _unlike(ckpt, model)):
        found += [problems] if problems is not None else []
    limit = units.parse_bytes(max_memory)
    checks: list[Callable[[], object]] = [
        lambda: check_names(ckpt.arrays),
        lambda: _check_stored(ckpt),
        lambda: check_fits([(h.path, values.least_memory((h,))) for h in ckpt.arrays], limit),
        lambda: _check_destination(place, ckpt),
    ]
    for each in checks:
        try:
            each()
        except errors.ReshardError as error:
            found.append(error)
    errors.raise_all(found)
    handles = sorted(ckpt.arrays, key=lambda handle: tree.natural(handle.path))
    files = tuple(safetensors.in_files(handles, units.parse_bytes(file_size)))
    if problems := safetensors.header_problems(files):
        raise errors.ArgumentError("too many tensors in a file", problems, ['file_size="1GB"'])
    copied = () if model is None else tuple(filter(_is_copied, model.names()))
    plan = Export(place, files, model, copied, siblings.source_state([ckpt], opened=True))
    errors.raise_all([*planning.room_errors(place, plan.nbytes)] if place.is_local else [])
    return plan


def _unwritable(ckpt: Checkpoint) -> errors.TreeMismatchError | None:
    """Leaves that have no type in the format."""
    reasons = {
        path: why for path, leaf in ckpt.items() if (why := safetensors.why_not_written(leaf))
    }
    if not ckpt.arrays:
        return errors.TreeMismatchError("there is no array to export")
    if not reasons:
        return None
    globs = [*map(tree.format_glob, reasons)]
    if len(globs) > _NAMED:
        globs = list(dict.fromkeys(f"{tree.format_glob(path[:1])}/**" for path in reasons))
    hints = [f"reshard.select(ckpt, drop={tree.as_python(globs)}) leaves them out"]
    arrays = [handle for handle in ckpt.arrays if handle.path in reasons]
    floats = [handle.path for handle in arrays if dtypes.is_floating(handle.dtype)]
    hints += [
        f'reshard.cast(ckpt, "bfloat16", {tree.as_python(tree.format_glob(p))})' for p in floats[:1]
    ]
    return errors.TreeMismatchError(
        f"{units.count_of(len(reasons), 'leaf', 'leaves')} cannot be written as safetensors",
        [f"{tree.format_path(path)}: {why}" for path, why in reasons.items()],
        hints,
    )


def _clashes(ckpt: Checkpoint) -> errors.TreeMismatchError | None:
    """Leaves that would have one name, or one that no file can hold."""
    problems = name_clashes(ckpt)
    for path in ckpt:
        name = stored_name(path)
        if name == "__metadata__" or not name.isprintable() or not name:
            problems.append(f"{tree.format_path(path)}: `{name!a}` is no name of a tensor")
    if not problems:
        return None
    return errors.TreeMismatchError(
        "names of tensors are not one each", problems, ["reshard.rename(ckpt, [(..., ...)])"]
    )


def _unlike(ckpt: Checkpoint, like: location.Location | None) -> errors.ReshardError | None:
    """In what the tensors are not those of a Hugging Face directory."""
    if like is None:
        return None
    if not like.is_dir():
        return errors.CheckpointNotFoundError(f"there is no directory `{like}`")
    shapes: dict[str, tuple[int, ...] | None] = {}
    if any(name.endswith(loader.detection.SAFETENSORS) for name in like.names()):
        found = loader.open(like)
        shapes = {stored_name(handle.path): handle.shape for handle in found.arrays}
    elif (document := read_json(like / INDEX)) is not None:
        shapes = dict.fromkeys(document.get("weight_map", ()))
    own = {stored_name(handle.path): handle for handle in ckpt.arrays}
    problems = [f"missing: {name}: `{like}` has it" for name in shapes if name not in own]
    for name, handle in own.items() if shapes else ():
        text = array_text(handle.dtype.name, handle.shape)
        if name not in shapes:
            problems.append(f"unexpected: {name} {text}: `{like}` does not have it")
        elif (shape := shapes[name]) is not None and shape != handle.shape:
            problems.append(f"mismatch: {name} is {text}, and {list(shape)} in `{like}`")
    if not problems:
        return None
    hints = ["reshard.rename(ckpt, [(..., ...)])", "reshard.select(ckpt, drop=[...])"]
    return errors.TreeMismatchError(f"the tensors are not those of `{like}`", problems, hints)


def _is_copied(name: str) -> bool:
    return (name.endswith(_ENDS) or name.startswith(_BEGINS)) and not name.endswith(_NOT_COPIED)


def _check_stored(ckpt: Checkpoint) -> None:
    """Raises CorruptCheckpointError with all arrays of which something is not stored."""
    found = []
    for handle in ckpt.arrays:
        try:
            handle.stored_sizes()
        except errors.ReshardError as error:
            found.append(error)
    errors.raise_all(found)


def _check_destination(destination: location.Location, ckpt: Checkpoint) -> None:
    """Raises DestinationError for a place that is taken, or is no place for an export."""
    planning.check_apart(destination, ckpt.source.root)
    if destination == destination.parent:
        raise errors.DestinationError(f"`{destination}` is a whole bucket or disk")
    if destination.is_local and (destination.exists() or destination.is_symlink()):
        hint = "choose another destination, or move the existing one away"
        raise errors.DestinationExistsError(f"`{destination}` exists", hints=[hint])
    if not destination.is_local and (destination.is_file() or destination.names()):
        raise _taken(destination, destination.names())


def _taken(destination: location.Location, names: Sequence[str]) -> errors.DestinationExistsError:
    if UNFINISHED in names:
        text = f"another export writes `{destination}`, or was stopped"
        return errors.DestinationExistsError(text, hints=["wait, or delete it while no job runs"])
    lines = [f"`{destination / name}`" for name in names]
    hint = "write to another prefix"
    return errors.DestinationExistsError(f"`{destination}` holds objects", lines, [hint])


def _write(
    files: Sequence[safetensors.File],
    directory: location.Location,
    max_memory: int,
    report: values.Report,
    workers: int | None,
    executor: Executor | None,
) -> dict[str, digest_record.ArrayRecord]:
    """Writes files into a directory on a disk, durable; what is on record of their tensors."""
    groups: list[tuple[ArrayHandle]] = []
    writers = []
    for file in files:
        disk.make_file(directory / file.name, file.header, file.nbytes)
        for handle, begin in file.tensors:
            groups.append((handle,))
            writers.append(safetensors.Writer(handle, directory / file.name, begin))
    failed = values.read_values(groups, writers, max_memory, report, workers, executor)
    errors.raise_all([error for number in sorted(failed) for error in failed[number].values()])
    found = {}
    for (handle,), writer in zip(groups, writers, strict=True):
        name, dtype = stored_name(handle.path), dtypes.name_of(handle.dtype)
        found[name] = digest_record.ArrayRecord(dtype, handle.shape, writer.digest.text())
    return found


def _to_disk(
    plan: Export, write: Callable[..., dict[str, Any]], check: Callable[[], object]
) -> None:
    destination, token = plan.destination, secrets.token_hex(8)
    begun = commit.begin(destination, token, {})
    assert begun is not None
    attempt = job.Attempt(job.Job(destination, begun[0], ("",), token, 1))
    directory = attempt.job.directory
    with commit.attempted(attempt, whole=True):
        documents = _documents(plan, write(plan.files, directory))
        for name in plan.copied:
            assert plan.like is not None
            (plan.like / name).resolved().copy(directory / name)
        kept = [*plan.copied, *(file.name for file in plan.files)]
        commit.publish(attempt, commit.Result(documents, (), kept, (), ()), False, check)


def _documents(plan: Export, written: Mapping[str, Any]) -> dict[str, bytes]:
    """What is made beside the weights, the index last."""
    documents = {loader.detection.RECORD_FILE: digest_record.Record(written, {}, {}, {}).dump()}
    if len(plan.files) > 1:
        documents[INDEX] = safetensors.index(plan.files)
    return documents


def _to_bucket(
    plan: Export, write: Callable[..., dict[str, Any]], check: Callable[[], object]
) -> None:
    destination = plan.destination
    assert isinstance(destination, location.BucketLocation)
    with _claimed(destination) as made:
        written: dict[str, Any] = {}
        for file in plan.files:
            with disk.temporary_directory() as directory:
                written |= write([file], directory)
                made.append(file.name)
                (destination / file.name).upload(directory / file.name)
        documents = _documents(plan, written)
        for name in plan.copied:
            assert plan.like is not None
            documents[name] = (plan.like / name).resolved().read_whole() or b""
        check()
        last = INDEX if INDEX in documents else _CONFIG
        for name in sorted(documents, key=lambda name: name == last):
            place, data = destination / name, documents[name]
            if place.create(data):
                made.append(name)
            elif place.read_whole() != data:
                raise errors.DestinationError(f"`{place}` is not what this export writes there")


@contextlib.contextmanager
def _claimed(destination: location.Location) -> Iterator[list[str]]:
    """While an export writes to a prefix. If it fails, its files, which the caller lists, are
    deleted, and no others: another program may have begun to write there."""
    claim, data = destination / UNFINISHED, job.dumped({"token": secrets.token_hex(8)})
    if not claim.create_or_match(data):
        raise _taken(destination, [UNFINISHED])
    claim.check_conditions(data, destination)
    others = [entry.path for entry in destination.walk() if entry.path != UNFINISHED]
    if others:
        claim.remove()
        raise _taken(destination, others)
    made: list[str] = []
    try:
        yield made
    except BaseException:
        destination.remove_files(made)
        claim.remove()
        raise
    claim.remove()
