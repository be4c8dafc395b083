"""JSON documents of a checkpoint, which may be untrusted.

Python's parser accepts some documents that other code fails on. They are refused: duplicate keys,
which readers resolve differently; half of a surrogate pair, which no file or terminal can hold; and
nesting so deep that recursion runs out of stack.
"""

import json
import re
from typing import Any

from reshard.errors import CorruptCheckpointError
from reshard.loader.hf_files import check_no_pointer
from reshard.storage.location import Location

# The deepest nesting. Orbax's documents have less than ten levels; users attach deeper ones.
_MAX_LEVELS = 100
_CONTAINERS = (dict, list)
# The most digits of a number. Times in nanoseconds have 19.
_MAX_DIGITS = 40
# An escape that may be half of a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Location, follow: bool = False) -> dict[str, Any] | None:
    """The JSON object in a file, or None without a file. Raises CorruptCheckpointError for anything
    else. `follow`: also through a symbolic link, as in the cache of Hugging Face."""
    data = path.read(follow)
    if data is None:
        return None
    try:
        document = parse_json(data)
    except ValueError as error:
        check_no_pointer(path)
        raise CorruptCheckpointError(f"`{path}` is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"`{path}` is JSON, but not an object")
    return document


def parse_json(data: bytes | str) -> Any:
    """Parses JSON. Raises ValueError if it is invalid, has a duplicate key or text that is not
    Unicode, or is nested too deeply."""
    if isinstance(data, str):
        data = data.encode()
    try:
        document = json.loads(data, object_pairs_hook=unique_keys, parse_int=_integer)
        if _SURROGATE.search(data):
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ValueError("it holds text that is not Unicode") from error
    except json.JSONDecodeError as error:
        reason = error.msg.lower().removesuffix(" at")
        raise ValueError(f"{reason} at character {error.pos}") from error
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    _check_levels(document)
    return document


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a duplicate key."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {json.dumps(twice)[:80]} occurs twice")
    return result


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _check_levels(document: Any) -> None:
    level = [document] if type(document) in _CONTAINERS else []
    for _ in range(_MAX_LEVELS):
        nodes = (node.values() if type(node) is dict else node for node in level)
        level = [child for node in nodes for child in node if type(child) in _CONTAINERS]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MAX_LEVELS} levels deep")
