"""The commit protocol under random schedules: see `protocol`."""

import protocol
import pytest

KINDS = ("bucket", "disk", "disk without exchange")
# Each takes one condition of the protocol away: where a schedule shows it, the text, and another.
MUTANTS = {
    "the record replaces another one": (
        "bucket",
        "(job.destination / detection.RECORD).create(dumped(record))",
        '(job.destination / detection.RECORD).replace(dumped(record), "")',
    ),
    "whoever's the record is": (
        "bucket",
        'if forward(job.destination, record if created else None)[0]["job"] != job.token:',
        "if forward(job.destination) is None:",
    ),
    "markers are not the last": (
        "bucket",
        "    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:\n        items",
        '    for path, content in record["markers"]:\n'
        "        _fix(destination, path, content, sizes)\n"
        "    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:\n        items",
    ),
    "what the record names is deleted": (
        "bucket",
        "[path for path in attempts if path not in kept]",
        "attempts",
    ),
    "who fails removes what is published": ("bucket", "self.published.add(part)", "_ = 0"),
    "who fails removes the nodes of a root": ("bucket", "    attempt.published.add(ROOT)\n", ""),
    "parts of other jobs count": (
        "bucket",
        'counts = document["job"] == job.token and token',
        "counts = token",
    ),
    "what another checkpoint needs is deleted": (
        "disk",
        "_prune(destination, unneeded)",
        "_prune(destination, [path for e in destination.walk() "
        "if is_of_an_attempt(path := e.path) and path not in kept])",
    ),
    "a rename that was done counts as failed": (
        "disk",
        "if not attempt.is_in(destination):",
        "if True:",
    ),
    "a job has the same name for all who commit it": (
        "disk",
        "            disk.rename(directory, own)\n",
        "            own = directory\n",
    ),
    "an attempt does not see what it has renamed": (
        "disk",
        'if not (own / (attempt.begun.below(directory) or "")).exists():',
        "if False:",
    ),
    "what an exchange has replaced counts as a job": (
        "disk",
        "        _token(directory) in path for path in found.sizes\n",
        "        True for _ in (1,)\n",
    ),
    "all that was replaced is deleted": (
        "disk",
        'kept += [f"`{place / path}`" for path in replaced.remove_seen(place, seen or ())]',
        "place.remove_tree()",
    ),
    "all that is aside is deleted by the next job": (
        "disk",
        "            replaced.remove_seen(place, seen)",
        "            place.remove_tree()",
    ),
    "the nodes of another manifest are deleted": (
        "disk",
        "kept |= {prefix",
        "_ = {prefix",
    ),
    "a failure between two renames": (
        "disk without exchange",
        "((aside, destination), (own, directory))",
        "((own, directory),)",
    ),
}


@pytest.mark.parametrize(
    "seeds", [range(6700), pytest.param(range(6700, 20000), marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_no_schedule_loses_or_mixes_anything(kind, seeds):
    assert protocol.run(kind, seeds) is None


@pytest.mark.parametrize("name", MUTANTS)
def test_a_protocol_without_a_condition_is_found_out(name):
    kind, old, new = MUTANTS[name]
    assert protocol.run(kind, range(10000), old, new) is not None
