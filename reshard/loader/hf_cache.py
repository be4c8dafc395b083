"""The cache of Hugging Face: a directory for each model, with its snapshots.

    models--ORG--NAME/refs/main            the name of the snapshot that is current
    models--ORG--NAME/snapshots/NAME/      links to the files of a model
    models--ORG--NAME/blobs/               these files
"""

from reshard.errors import CheckpointNotFoundError
from reshard.storage.location import Location


def snapshot(directory: Location) -> Location:
    """The current snapshot of a model's directory in a cache; of anything else, the location
    itself. Raises CheckpointNotFoundError if it has no such snapshot."""
    try:
        names = directory.names()
    except (FileNotFoundError, NotADirectoryError):
        return directory
    if "snapshots" not in names or {"refs", "blobs"}.isdisjoint(names):
        return directory
    snapshots, data = directory / "snapshots", (directory / "refs" / "main").read()
    name, present = (data or b"").decode(errors="replace").strip(), snapshots.directories()
    if name in present:
        return snapshots / name
    lacks = f"snapshot `{name:.80}`, which its `refs/main` names"
    lacks = "`refs/main`, which names the snapshot to open" if data is None else lacks
    hints = [str(snapshots / each) for each in present]
    raise CheckpointNotFoundError(f"`{directory}` has no {lacks}", hints=hints)
