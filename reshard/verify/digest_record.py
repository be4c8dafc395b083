"""Recorded digests: a file in an item's directory, which Orbax does not look at.

    {"version": 1,
     "arrays": {"params.Dense_0.kernel": {"dtype": "float32", "shape": [8, 4], "digest": "..."}},
     "strings": {"name": "..."},
     "files": {"_METADATA": "..."},
     "beside": {"metrics/metrics": "..."}}

Arrays have their names in the store, which no transform changes. A digest that was not computed is
null. `strings` has the SHA-256 of strings in the tree, and `files` that of the tree's documents.
`copied`, if there, has that of the files that a job has copied to its destination, below which are
their paths: a later job may delete such a file.
Earlier versions also recorded other files: under `files` those in the item's directory, and under
`beside` those of the step.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from reshard.arrays.boxes import Shape
from reshard.arrays.dtypes import name_of
from reshard.arrays.handle import ArrayHandle, StoredArray, array_text, stored_name
from reshard.checkpoint import Checkpoint, Leaf, Source
from reshard.errors import CorruptCheckpointError, DestinationError, StoreError
from reshard.loader.detection import (
    ARRAYS_FOLDER,
    RECORD_FILE,
    RECORD_TEMPORARY,
    SHARDING_FILE,
    STRINGS_FILE,
    TREE_FILE,
)
from reshard.loader.json_documents import unique_keys
from reshard.storage.location import Location
from reshard.tree import Path, shell_quoted

FILE = RECORD_FILE
_VERSION = 1
_KEYS = {"version", "arrays", "strings", "files", "beside", "copied"}
_DIGEST, _SHA256 = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class ArrayRecord:
    """The record of one array; `digest` is None if it was not computed."""

    dtype: str
    shape: Shape
    digest: str | None

    def __str__(self) -> str:
        return array_text(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class Record:
    """The record of one item.

    Attributes:
      arrays: name in the store -> record of the array.
      strings: name that the leaf would have in the store -> SHA-256 of the text.
      files, beside: path below the item's, and the step's, directory -> SHA-256.
      copied: path below the destination of a job -> SHA-256 of a file that it has copied.
    """

    arrays: Mapping[str, ArrayRecord]
    strings: Mapping[str, str]
    files: Mapping[str, str]
    beside: Mapping[str, str]
    copied: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The record as JSON."""
        arrays = {name: vars(entry) for name, entry in self.arrays.items()}
        hashes = {name: dict(getattr(self, name)) for name in ("strings", "files", "beside")}
        hashes |= {"copied": dict(self.copied)} if self.copied else {}
        return {"version": _VERSION, "arrays": arrays, **hashes}

    def write(self, file: Location) -> None:
        """Replaces the record of a checkpoint. Raises DestinationError if that fails."""
        try:
            file.replace(json.dumps(self.document()).encode(), RECORD_TEMPORARY)
        except OSError as error:
            raise DestinationError(f"`{file}` cannot be written: {error.strerror}") from error

    def digest(self, handle: ArrayHandle) -> str | None:
        """The digest of an array that is read as it is stored, if its kind is the recorded one."""
        entry = self.array(handle) if handle.stored is not None else None
        return None if entry is None or self.other_kind(handle) else entry.digest

    def array(self, handle: ArrayHandle) -> ArrayRecord | None:
        """The record of a stored array, cast or not; None for derived arrays."""
        return self.arrays.get(handle.data.name) if isinstance(handle.data, StoredArray) else None

    def other_kind(self, handle: ArrayHandle) -> str | None:
        """`it is float32[4], and float32[5]`, for a stored array of another kind than recorded."""
        entry = self.array(handle)
        if entry is None or entry == (stored := stored_record(handle, entry.digest)):
            return None
        return f"it is {stored}, and {entry}"

    def lacks(self, path: Path, leaf: Leaf) -> str | None:
        """What the record lacks for a leaf of another checkpoint; None if it has all."""
        if isinstance(leaf, str):
            recorded = self.strings.get(stored_name(path))
            if recorded != _text_hash(leaf):
                return "does not have it" if recorded is None else "has another text"
        elif isinstance(leaf, ArrayHandle):
            entry = self.array(leaf)
            if entry is None:
                return "does not have it"
            if entry.digest is None or leaf.stored is None:
                return "has no digest of it"
        return None

    def missing_arrays(self, source: Source, where: str) -> list[str]:
        """The recorded arrays that are not stored, a line each."""
        missing = [name for name in self.arrays if name not in source.store.values]
        return [f"the array `{name}`: {where}, but missing" for name in missing]

    def changed_files(
        self, source: Source, hash_of: Callable[[Location], str | None] = Location.sha256
    ) -> list[str]:
        """Recorded files that have changed, a line each. `hash_of` returns None for files that only
        have to exist."""
        step = source.root / source.step
        files = {source.store.directory / path: sha256 for path, sha256 in self.files.items()}
        if source.item:  # a step was opened, not the item alone
            for path, sha256 in self.beside.items():
                # A sibling item that has a record of its own may have been written since.
                if not (step / path.partition("/")[0] / FILE).exists():
                    files[step / path] = sha256
        changed = []
        for file, sha256 in files.items():
            try:
                if not file.is_file():
                    changed.append(f"the file `{file}`: recorded, but missing")
                elif hash_of(file) not in (None, sha256):
                    changed.append(f"the file `{file}`: it differs from the recorded one")
            except StoreError:
                raise
            except OSError as error:
                changed.append(f"the file `{file}`: it cannot be read: {error.strerror}")
        return changed


def stored_record(handle: ArrayHandle, digest: str | None = None) -> ArrayRecord:
    return ArrayRecord(name_of(handle.stored_dtype), handle.shape, digest)


def forget_hint(path: Location) -> str:
    """A hint for a record that should no longer count."""
    return f"rm {shell_quoted(str(path))} deletes the record"


def read_record(path: Location, hint: str = "") -> Record | None:
    """The record in a file, or None if the file does not exist. Raises CorruptCheckpointError, with
    this hint, if the file is no record."""
    data = path.read()
    if data is None:
        return None
    try:
        document = json.loads(data, object_pairs_hook=unique_keys)
        if not isinstance(document, dict) or "version" not in document:
            raise ValueError("it is a different kind of document")
        if document["version"] != _VERSION:
            raise ValueError(
                f"its format version is {document['version']!r}; only {_VERSION} is supported"
            )
        if unknown := sorted(document.keys() - _KEYS):
            raise ValueError(f"unknown keys: {unknown}")
        arrays = {name: _array(entry) for name, entry in document["arrays"].items()}
        strings = {name: _hash(text) for name, text in document.get("strings", {}).items()}
        files, beside = (_hashes(document[key]) for key in ("files", "beside"))
        copied = _hashes(document.get("copied", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"`{path}` is not a record of digests",
            [f"{type(error).__name__}: {error}"],
            [hint or forget_hint(path)],
        ) from error
    return Record(arrays, strings, files, beside, copied)


def _array(entry: Any) -> ArrayRecord:
    dtype, shape, digest = entry["dtype"], entry["shape"], entry["digest"]
    if not isinstance(dtype, str) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"an array of {dtype!r} {shape!r}")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ValueError(f"not a digest: {digest!r}")
    return ArrayRecord(dtype, tuple(shape), digest)


def _hashes(entries: Any) -> dict[str, str]:
    """Paths and hashes. Raises ValueError for a path that leaves the directory."""
    for path, digest in entries.items():
        parts = path.split("/")
        if path.startswith("/") or "\0" in path or not {"", ".", ".."}.isdisjoint(parts):
            raise ValueError(f"a path outside of the checkpoint: {path!r}")
        _hash(digest)
    return dict(entries)


def _hash(text: Any) -> str:
    if not _SHA256.fullmatch(text):
        raise ValueError(f"not a hash: {text!r}")
    return text


def record_of(
    ckpt: Checkpoint, arrays: Mapping[str, ArrayRecord], files: Mapping[str, str]
) -> Record:
    """The record of an item: its arrays, and the hashes of its strings and of the documents of its
    tree, by their names."""
    texts = {stored_name(path): leaf for path, leaf in ckpt.items() if isinstance(leaf, str)}
    strings = {name: _text_hash(text) for name, text in texts.items()}
    return Record(arrays, strings, files, {})


def document_hashes(directory: Location) -> dict[str, str]:
    """The hashes of the documents that describe the tree in an item's directory."""
    folder = directory / ARRAYS_FOLDER
    names = [TREE_FILE, SHARDING_FILE, STRINGS_FILE]
    names += [f"{ARRAYS_FOLDER}/{name}" for name in (folder.names() if folder.is_dir() else ())]
    return {name: (directory / name).sha256() for name in names if (directory / name).is_file()}


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
