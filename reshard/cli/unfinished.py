"""Unfinished jobs of a path, and the commands that finish them."""

import contextlib
import re
import shlex
from collections.abc import Iterator

from reshard.checkpoint import Source
from reshard.errors import (
    CheckpointFormatError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UncommittedCheckpointError,
)
from reshard.loader.inventory import list_root
from reshard.loader.locate import steps_at, uncommitted_hints
from reshard.storage.disk import kernel_text
from reshard.storage.location import parse_location
from reshard.storage.machine import has_ended
from reshard.writer import commit, job

_RUNNING = " (still running)"


@contextlib.contextmanager
def explained(path: str, step: int | None, command: str | None = None) -> Iterator[None]:
    """For errors of the checkpoint at a path: names the unfinished jobs that write it. If the
    latest step of a root is damaged, and no other `step` was asked for, names the step before, or
    the `command` that reads it."""
    try:
        yield
    except (CheckpointNotFoundError, CheckpointFormatError) as error:
        place = parse_location(path)
        if isinstance(error, CheckpointNotFoundError) and place.exists():  # it lacks a step or item
            raise
        problems, hints = unfinished(path)
        if not problems:
            raise
        own = any(found.documents for found in commit.jobs(place).values())
        kind = UncommittedCheckpointError if own else type(error)  # or a job writes something in it
        raise kind(error.summary, [*error.problems, *problems], hints) from error
    except CorruptCheckpointError as error:
        if step is None:
            earlier = [*steps_at(path, committed=True)][-2:-1]
            error.hints += tuple(
                f"{command} --step {n}" if command else f"--step {n} is the step before it"
                for n in earlier
            )
        raise


def ways_on(source: Source) -> tuple[list[str], list[str]]:
    """The unfinished jobs of the root of a checkpoint, and what to do about them or, in a bucket,
    about a later step that is not committed."""
    if source.root.is_local:
        return unfinished(str(source.root))
    return [], uncommitted_hints(list_root(source.root)) if source.uncommitted else []


def unfinished(path: str) -> tuple[list[str], list[str]]:
    """The unfinished jobs that write to a path, or on a disk to a path in it; and the commands that
    finish them."""
    problems, hints, place = [], [], parse_location(path)
    names = place.names() if place.is_local and place.is_dir() else ()
    inside = dict.fromkeys(match[1] for match in map(commit.JOB_NAME.fullmatch, names) if match)
    paths = [path, *(f"{path.rstrip('/')}/{name}" for name in inside)]
    jobs = [(each, *item) for each in paths for item in commit.jobs(parse_location(each)).items()]
    for each, directory, found in jobs:
        if found.documents:
            done = sum(part != job.UNSHARED for part in found.parts)
            text = f"{done} of {found.count} shares of an unfinished job are complete"
            begun = {
                state: job.writers([d for d in found.begun if has_ended(d["owner"]) is ended])
                for ended, state in ((False, _RUNNING), (True, " (ended)"), (None, ""))
            }
            lines = [f"{line}{state}" for state, writers in begun.items() for line in writers]
            problems += [f"{text}, in `{directory}`", *(lines or job.writers(found.documents))]
            hints += [] if begun[_RUNNING] else _ways_to_finish(shlex.quote(each), found)
    return problems, hints


def _is_plain(text: str) -> bool:
    """Whether text is printable, and means the same to a shell with its quotes: a document may be
    untrusted."""
    with contextlib.suppress(ValueError):
        return text.isprintable() and shlex.join(shlex.split(text)) == text
    return False


def _ways_to_finish(path: str, found: job.Found) -> list[str]:
    """The commands that finish a job."""
    # Documents of earlier versions have no folder.
    commands = sorted({(d["command"], d.get("folder", "")) for d in found.documents})
    here, count = ("", kernel_text("self/cwd")), found.count or 0
    if len(found.parts) > count:  # all shares, and the unshared part
        return [f"reshard commit {path}"]
    ways = []
    for command, folder in commands:
        if not (_is_plain(command) and folder.isprintable()):
            continue
        start = "" if folder in here else f"cd {shlex.quote(folder)} && "
        if "--shard" in command:
            missing = [n for n in range(count) if str(n) not in found.parts] or [0]
            shards = (re.sub(r"--shard[ =]\S+", f"--shard {n}/{count}", command) for n in missing)
            return [start + each for each in shards]
        of_shell = command.startswith("reshard ")
        again = commit.continued(command) if of_shell else f"{command}, with resume=True"
        ways.append(start + again)
    return ways
