"""Names of files, what a file is by its first bytes, and checkpoints of other programs."""

import re

from reshard.checkpoint import Item
from reshard.errors import CheckpointFormatError, CheckpointNotFoundError
from reshard.storage.location import Location
from reshard.storage.ocdbt import MANIFEST, PROCESS

TREE_FILE = "_METADATA"
SHARDING_FILE = "_sharding"
STRINGS_FILE = "_strings.json"
ARRAYS_FOLDER = "array_metadatas"
CHECKPOINT_FILE = "_CHECKPOINT_METADATA"
V1_MARKER = "orbax.checkpoint"
TEMPORARY = ".orbax-checkpoint-tmp"
SAFETENSORS = ".safetensors"
MSGPACK_FILE = ".msgpack"
MARKER = "commit_success.txt"
# The commit record of a job in a bucket, written before any file that Orbax reads: see
# `reshard.writer.commit`.
RECORD = "reshard_commit.json"
# The v1 API's record of an item that is being deleted.
DELETION_FILE = "_CHECKPOINT_DELETION"
# Documents of an item or a step that are read.
DOCUMENTS = (CHECKPOINT_FILE, DELETION_FILE, TREE_FILE, SHARDING_FILE, STRINGS_FILE, MANIFEST)
# Names in an item or a step of Orbax that no other program writes, and names of zarr metadata.
_ORBAX = {*DOCUMENTS, V1_MARKER, ARRAYS_FOLDER, MARKER, RECORD, "checkpoint"} - {MANIFEST}
ZARR = (".zarray", "zarr.json")
# The digest record of an item, written at any time: see `reshard.verify.digest_record`.
RECORD_FILE = "reshard_digests.json"
RECORD_TEMPORARY = f"{RECORD_FILE}.tmp"
RECORD_FILES = (RECORD_FILE, RECORD_TEMPORARY)
# Ends and beginnings of names that are copied with the weights of a Hugging Face directory.
_ENDS = (".jinja", ".json", ".md", ".model", ".py", ".tiktoken", ".txt")
_BEGINS = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_NOT_COPIED = (RECORD_FILE, RECORD)
# The name of an index: `model.safetensors.index.json`, or of a variant of the weights,
# `model.safetensors.index.fp16.json`.
_INDEX = re.compile(r"(.*)\.index(\.[^.]+)?\.json")
# Names of the files of `flax.training.checkpoints`, which takes any number as a step.
_FLAX_NAME = re.compile(r"checkpoint(?:_(-?[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?))?")
MSGPACK = "a Flax msgpack checkpoint"
_PICKLE = "a pickle, which is never opened: reading it can run any code"
# The first bytes of files of other programs.
_UNSUPPORTED = {
    b"GGUF": "a GGUF file, which is not supported",
    b"\x89HDF": "an HDF5 file, which is not supported",
    b"PK\3\4": "a zip file, as PyTorch and NumPy write them, which is not supported",
    b"\x93NUMPY": "a NumPy file, which is not supported",
}
_EASYLM = "a streaming file of EasyLM, which is not supported"
_UNKNOWN = "a file, not a checkpoint directory"
# Names of files that may hold weights in an unsupported format, and how many of them are examined.
_WEIGHTS = (".gguf", ".h5", ".bin", ".pt", ".pth", ".npz", ".pkl", ".pickle")
_EXAMINED = 20
_WEIGHTS_NAME = re.compile(r"(?:checkpoint|streaming_params|streaming_train_state)(?:_.+)?")
# Subdirectories that are examined for arrays.
SOME = 8


def flax_steps(root: Location) -> dict[float, str]:
    """Step -> name of its file, ascending, for the files of `flax.training.checkpoints`. Raises
    CheckpointFormatError if a step has two files."""
    matches = [match for match in map(_FLAX_NAME.fullmatch, root.names()) if match and match[1]]
    steps: dict[float, str] = {}
    for name, digits in ((match[0], match[1]) for match in matches):
        if (root / name).is_file():
            other = steps.setdefault(int(digits) if digits.isdecimal() else float(digits), name)
            if other != name:
                raise CheckpointFormatError(
                    f"`{root}` has two files for one step: `{other}` and `{name}`",
                    hints=[f"open one of them: {root / name}"],
                )
    if not any(describe_file(root / name) == MSGPACK for name in steps.values()):
        return {}
    return dict(sorted(steps.items()))


def foreign_files(directory: Location) -> list[str]:
    """Files that may hold weights in a format that is not supported, with the format in words."""
    names = [n for n in directory.names() if _WEIGHTS_NAME.fullmatch(n) or n.endswith(_WEIGHTS)]
    described = {name: describe_file(directory / name) for name in names[:_EXAMINED]}
    return [f"`{name}` is {what}" for name, what in described.items() if what != _UNKNOWN]


def of_another_program(root: Location) -> Item | None:
    """A directory of safetensors or msgpack files, or of zarr arrays that Orbax did not write."""
    names = root.names()
    files = [name for name in names if name.endswith(SAFETENSORS)]
    if files:
        return Item(root, "safetensors")
    files = [name for name in names if name.endswith(MSGPACK_FILE)]
    if any(name.endswith(f"{MSGPACK_FILE}.index.json") for name in names if files):
        return Item(root, "msgpack")
    if len(files) > 1:
        hints = [f"open one of them: {root / files[0]}"]
        raise CheckpointNotFoundError(f"`{root}` has several checkpoints", files, hints)
    if files:
        return Item(root / files[0], "msgpack")
    return Item(root, "zarr") if _is_zarr_tree(root, names) else None


def _is_zarr_tree(root: Location, names: list[str]) -> bool:
    """Whether TensorStore wrote the arrays of a directory for another program than Orbax.

    Then no name that Orbax writes is in it, below it or next to it. One array is two or more levels
    deep, and not all arrays are in one directory: an item of Orbax has each array in a directory of
    its own, directly below it.
    """
    siblings = (root.parent / name for name in (CHECKPOINT_FILE, DELETION_FILE, V1_MARKER))
    if any(map(_is_orbax, names)) or any(sibling.exists() for sibling in siblings):
        return False
    if MANIFEST in names:
        return True
    pending, examined = [root], 0
    while pending and examined < _EXAMINED:
        directory, examined = pending.pop(), examined + 1
        if directory.parent != root and any((directory / key).is_file() for key in ZARR):
            paths = [entry.path.rpartition("/") for entry in root.walk()]
            arrays = [array for array, _, name in paths if array and name in ZARR]
            directories = {array.rpartition("/")[0] for array in arrays}
            return len(directories) > 1 and not any(_is_orbax(name) for _, _, name in paths)
        pending += [directory / name for name in directory.directories()[:SOME][::-1]]
    return False


def _is_orbax(name: str) -> bool:
    return name in _ORBAX or name.startswith(PROCESS) or TEMPORARY in name


def is_copied(name: str) -> bool:
    """Whether a file of a Hugging Face directory is copied with its weights, by its name."""
    ours = name.endswith(_NOT_COPIED) or _INDEX.fullmatch(name)
    return not ours and (name.endswith(_ENDS) or name.startswith(_BEGINS))


def is_index(name: str) -> bool:
    """Whether a file is an index of safetensors files, by its name."""
    match = _INDEX.fullmatch(name)
    return match is not None and match[1].endswith(SAFETENSORS)


def is_record_file(path: Location) -> bool:
    """Whether a path is a file that may be a digest record, and not a checkpoint."""
    if not path.is_file() or path.name.endswith(SAFETENSORS):
        return False
    return describe_file(path) != MSGPACK


def describe_file(path: Location) -> str:
    """The format of a file, in words, from its name and its first bytes."""
    entry = path.entry(follow=True)
    # Only of a file: a pipe may never end.
    start = path.part(0, min(8, entry.nbytes)) if entry and entry.is_file and entry.nbytes else b""
    for magic, description in _UNSUPPORTED.items():
        if start.startswith(magic):
            return description
    # A pickle has a version after this byte. An empty msgpack map ends with it.
    if path.name.endswith((".pkl", ".pickle")) or (start[:1] == b"\x80" and start[1:]):
        return _PICKLE
    # A msgpack list of two: the list of a leaf's keys, and its bytes.
    if re.match(rb"\x92[\x91-\x9f\xdc]", start):
        return _EASYLM
    # A msgpack map: fixmap, map16 or map32.
    if start and (0x80 <= start[0] <= 0x8F or start[0] in (0xDE, 0xDF)):
        return MSGPACK
    return _UNKNOWN
