"""JSON documents of a checkpoint, which may be untrusted: parsed here, and sound from then on.

What Python's parser lets pass and others trip over is refused: keys given twice, of which each
reader takes another one; half a surrogate pair, which no file or terminal can hold; and nesting so
deep that whoever walks it runs out of stack.
"""

import json
import re
from typing import Any

from reshard.errors import CorruptCheckpointError
from reshard.storage.location import Location

# Levels of JSON inside one another. Orbax's own documents have less than ten; what users attach to
# a checkpoint may have more.
_MAX_LEVELS = 100
_CONTAINERS = (dict, list)
# Digits of a number. The largest that there are, of nanoseconds, have 19.
_MAX_DIGITS = 40
# An escape that may be half of a surrogate pair.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Location) -> dict[str, Any] | None:
    """A JSON object, None where there is no file; raises CorruptCheckpointError for anything
    else."""
    data = path.read()
    if data is None:
        return None
    try:
        document = parse_json(data)
    except ValueError as error:
        raise CorruptCheckpointError(f"`{path}` is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CorruptCheckpointError(f"`{path}` is not a JSON object")
    return document


def parse_json(data: bytes | str) -> Any:
    """A JSON document; raises ValueError where it is none, a key is there twice, text in it is not
    Unicode, or it is nested too deeply."""
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
        raise ValueError("it is nested too deeply") from error
    _check_levels(document)
    return document


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; raises ValueError if a key is there twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {json.dumps(twice)[:80]} is there twice")
    return result


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _check_levels(document: Any) -> None:
    level = [document] if type(document) in _CONTAINERS else []
    for _ in range(_MAX_LEVELS):
        level = [
            child
            for node in level
            for child in (node.values() if type(node) is dict else node)
            if type(child) in _CONTAINERS
        ]
        if not level:
            return
    raise ValueError(f"it is nested more than {_MAX_LEVELS} levels deep")
