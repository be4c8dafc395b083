"""Tuple paths: how the leaves of a saved pytree are named, printed, matched and renamed.

A path is a tuple of keys: `int` for a position in a list or tuple, `str` for a dict key (Orbax
stores int dict keys as strings). Keys may hold any character, `/` and `.` among them, so a path
is only ever a joined string when it is printed.
"""

import collections
import difflib
import functools
import itertools
import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from reshard.errors import ArgumentError, TreeMismatchError, printable

Key = str | int
Path = tuple[Key, ...]
T = TypeVar("T")

# Keys of a path: code that walks a deeper tree runs out of stack.
MAX_KEYS = 100

_PLAIN = re.compile(r'[^/"\s\x00-\x1f\x7f]+')
_WILD = re.compile(r"[*?]")
_TOKEN = re.compile(r"(\\?[*?])")
_COMPONENT = re.compile(r'("(?:[^"\\]|\\.)*"|[^/"]+)(?:/(?!\Z)|\Z)')


@functools.lru_cache(maxsize=1 << 16)
def format_key(key: Key) -> str:
    """A key as it is printed: bare, or as a JSON string if it holds `/`, quotes, spaces or
    unprintable characters."""
    text = str(key)
    if _PLAIN.fullmatch(text) and text.isprintable():
        return text
    return printable(json.dumps(text, ensure_ascii=False))


def format_path(path: Path) -> str:
    """`("params", "layer_0", 3)` as `params/layer_0/3`; the root is `.`."""
    return "/".join(map(format_key, path)) or "."


def nested(leaves: Iterable[tuple[Path, Any]]) -> Any:
    """Nested dicts with these values at their paths, or the value at the root."""
    root: dict[Key, Any] = {}
    for path, value in leaves:
        if not path:
            return value
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return root


def natural(path: Path) -> tuple[Any, ...]:
    """A sort key for paths that compares numbers in names by value."""
    return tuple(_natural(str(key)) for key in path)


@functools.lru_cache(maxsize=4096)
def _natural(key: str) -> tuple[Any, ...]:
    parts = re.split(r"(\d+)", key)
    return tuple(int(part) if i % 2 else part for i, part in enumerate(parts)), key


def split_path(text: str) -> tuple[str, ...]:
    """The keys of a printed path, all as `str`: the inverse of `format_path` up to ints. Raises
    ArgumentError if a key is empty, its quotes do not close, or there are too many keys."""
    keys, position = [], 0
    plain = text.split("/")
    if '"' not in text and all(plain):  # most paths; the regex takes six times as long
        keys, position = plain, len(text)
    while not keys or position < len(text):
        match = _COMPONENT.match(text, position)
        try:
            if match is None:
                raise ValueError("a key is empty or its quotes do not close")
            keys.append(json.loads(match[1]) if match[1].startswith('"') else match[1])
        except ValueError as error:
            raise ArgumentError(
                f"`{text}` is not a path: {error}",
                hints=['quote a key that holds a slash: `params/"mlp/linear"/w`'],
            ) from error
        position = match.end()
    if len(keys) > MAX_KEYS:
        raise ArgumentError(
            f"`{text[:80]}...` is {len(keys)} levels deep: a tree has at most {MAX_KEYS}"
        )
    return tuple(keys)


def compile_glob(pattern: str) -> re.Pattern[str]:
    """A glob over paths: `*` and `?` stay within one key, `**` spans any number of keys, `\\*` and
    `\\?` are these characters.

    Match it against `glob_text(path)`. That takes linear time: paths may be untrusted.
    """
    runs = [""]  # of keys between `**`
    for key in split_path(pattern):
        if key == "**":
            runs.append("")
        else:
            runs[-1] += _key_regex(key) + r"\x00"
    return re.compile(_spanned(runs, r"(?:[^\x00]*\x00)*"), re.DOTALL)


def _key_regex(key: str) -> str:
    """The regex of one key of a glob."""
    runs = [""]  # of text between `*`
    # Every second piece is a token. The tokens `\*` and `\?` are their own regexes.
    for place, piece in enumerate(_TOKEN.split(key)):
        if place % 2 and piece == "*":
            runs.append("")
        elif place % 2:
            runs[-1] += r"[^\x00]" if piece == "?" else piece
        else:
            runs[-1] += re.escape(piece)
    return _spanned(runs, r"[^\x00]*")


def _spanned(runs: Sequence[str], span: str) -> str:
    """The regex of runs with spans between them. Each run is matched where it first occurs, and
    never again (an atomic group); only the last is searched from the end."""
    first, *inner = runs
    if not inner:
        return first
    *inner, last = inner
    return "".join([first, *(f"(?>{span}?{run})" for run in inner), span, last])


def format_glob(path: Path) -> str:
    """The glob that names a path: `a*` as `a\\*`, all else as it is printed."""
    return format_path(tuple(map(glob_key, path)))


def glob_key(key: Key) -> str:
    """The key of a glob that matches this key alone."""
    return _WILD.sub(r"\\\g<0>", str(key))


def glob_text(path: Path) -> str:
    """The form of a path that `compile_glob` patterns match: its keys, each ended by NUL."""
    return "".join(str(key).replace("\0", "\ufffd") + "\0" for key in path)


def parse_globs(name: str, globs: str | Iterable[str]) -> list[str]:
    """A list of globs, from one glob or several. Raises ArgumentError for the argument `name` if a
    glob is not text."""
    if isinstance(globs, str):
        return [globs]
    found: list[Any] = list(globs) if isinstance(globs, Iterable) else [globs]
    wrong = [f"{name}: {glob!r:.80}" for glob in found if not isinstance(glob, str)]
    if wrong:
        raise ArgumentError("a glob must be text", wrong, ["`params/**`, `**/kernel`"])
    return found


# A hint that shows how to list the paths of a checkpoint.
LISTING = ("reshard.open(path) lists the leaves",)


def match_globs(
    paths: Iterable[Path], patterns: Sequence[str], otherwise: Sequence[str] = LISTING
) -> set[Path]:
    """The paths that at least one glob names. If a model is saved with its optimizer, a glob may
    leave out the key `model`. Raises TreeMismatchError with all globs that name no path;
    `otherwise` are its hints if no path is near."""
    pairs = [(path, path) for path in paths]
    below = [(path[1:], path) for path, _ in pairs if path[:1] == ("model",) and path[1:]]
    return named_in((pairs, below), patterns, otherwise=otherwise)


def named_in(
    namespaces: Sequence[Collection[tuple[Path, Path]]],
    patterns: Sequence[str],
    optional: Sequence[str] = (),
    otherwise: Sequence[str] = (),
) -> set[Path]:
    """The paths that globs name, each glob in the first namespace (pairs of a name and its path)
    where it names any. Raises TreeMismatchError with all globs that name no path, except those of
    `optional`."""
    if not patterns and not optional:
        return set()
    by_text: list[dict[str, list[Path]]] = [collections.defaultdict(list) for _ in namespaces]
    for texts, pairs in zip(by_text, namespaces, strict=True):
        for name, path in pairs:
            texts[glob_text(name)].append(path)
    found: set[Path] = set()
    problems, hints = [], []
    for number, pattern in enumerate((*patterns, *optional)):
        named = ({p for t in named_by(texts, pattern) for p in texts[t]} for texts in by_text)
        hits = next(filter(None, named), set())
        found |= hits
        if not hits and number < len(patterns):
            problems.append(f"`{pattern}`")
            near = nearest(pattern, (name for name, _ in namespaces[0]))
            hints += [f"the nearest leaf is `{name}`" for name in near[:1]]
    if problems:
        raise TreeMismatchError("no leaf matches", problems, hints or otherwise)
    return found


def named_by(texts: Collection[str], glob: str) -> list[str]:
    """The paths, as `glob_text` gives them, that a glob names: the leaves that it matches, else all
    leaves in the modules that it matches."""
    if glob == format_path(()) and "" in texts:
        return [""]
    if not _WILD.search(glob):
        text = glob_text(split_path(glob))
        return [text] if text in texts else [each for each in texts if each.startswith(text)]
    regex = compile_glob(glob)
    hits = [text for text in texts if regex.fullmatch(text)]
    return hits or [text for text in texts if regex.match(text)]


def passed_over(paths: Iterable[Path], patterns: Sequence[str]) -> list[str]:
    """A note for each glob that matches leaves and modules: it does not select from the modules."""
    texts = [(path, glob_text(path)) for path in paths] if patterns else []
    notes = []
    for pattern in (each for each in patterns if not each.endswith("**")):
        regex = compile_glob(pattern)
        hits = [(path, regex.fullmatch(text)) for path, text in texts if regex.match(text)]
        below = [path for path, whole in hits if not whole]
        if 0 < len(below) < len(hits):
            notes.append(
                f"`{pattern}` matches leaves, so it applies to these alone: "
                f"{format_path(below[0])} is in a module that it matches, too"
            )
    return notes


def nearest(name: str, paths: Iterable[Path]) -> list[str]:
    """Printed paths that resemble `name`, best first, at most three.

    Only the first ten thousand paths are compared, so that a hint takes little time.
    """
    texts = [format_path(path) for path in itertools.islice(paths, 10_000)]
    close = difflib.get_close_matches(name, texts, n=3, cutoff=0.5)
    if not close:  # perhaps one key is misspelt
        keys = {key: text for text in texts for key in text.split("/")}
        wrong = [key for key in name.split("/") if key not in keys]
        near = [other for key in wrong for other in difflib.get_close_matches(key, keys)]
        close = list(dict.fromkeys(keys[key] for key in near))[:3]
    return close


def regex_of_glob(glob: str) -> str:
    """The regex over printed paths that matches as a glob does: `^(.*/)?kernel$` for
    `**/kernel`."""
    regexes = {"**/": "(.*/)?", "/**": "/", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|/\*\*\Z|[*?])", glob)
    regex = "".join(regexes.get(part) or re.escape(part) for part in parts)
    return f"^{regex}" if glob.endswith("/**") else f"^{regex}$"


def nearest_to_regex(pattern: str, paths: Iterable[Path]) -> list[str]:
    """The printed path that resembles a regex without its operators, if there is one."""
    return nearest(re.sub(r"[\\^$.*+?()|\[\]{}]", "", pattern), paths)[:1]


def shell_quoted(text: str) -> str:
    """Text as it is typed into a shell, always in quotes."""
    return "'" + text.replace("'", "'\"'\"'") + "'"


def as_python(value: Any) -> str:
    """A value as it is typed in Python: text in double quotes if it has none itself."""
    match value:
        case list():
            return f"[{', '.join(map(as_python, value))}]"
        case tuple():
            return f"({', '.join(map(as_python, value))})"
        case str() if value.isprintable() and '"' not in value and not value.endswith("\\"):
            raw = "r" * ("\\" in value)
            return f'{raw}"{value}"'
    return repr(value)


def rename_paths(paths: Sequence[Path], rules: Sequence[tuple[str, str]]) -> dict[Path, Path]:
    """Old path -> new path, each rule applied in order as `re.sub` on the printed path.

    A key of digits stays a list position if the old path had that position in that place; any
    other becomes a dict key.

    Raises:
      ArgumentError: a rule is not a regex.
      TreeMismatchError: a rule changes nothing, two leaves would meet in one path, or a leaf would
        become a container of another.
    """
    several = isinstance(rules, Iterable) and not isinstance(rules, str)
    pairs: list[Any] = list(rules) if several else [rules]
    wrong = [f"{p!r:.80}" for p in pairs if not isinstance(p, tuple | list) or len(p) != 2]
    if wrong:
        example = r'(r"layer_(\d)", r"block_\1")'
        raise ArgumentError("a rename must be a pair: a regex and a replacement", wrong, [example])
    printed = {path: format_path(path) for path in paths}
    texts = dict(printed)
    problems, hints = [], []
    for pattern, replacement in pairs:
        try:
            regex = re.compile(pattern)
            changed = {path: regex.sub(replacement, text) for path, text in texts.items()}
        except (re.error, IndexError, OverflowError, RecursionError, TypeError) as error:
            raise ArgumentError(f"rename `{pattern}={replacement}` is invalid: {error}") from error
        if changed == texts:
            problems.append(f"`{pattern}` matches no leaf")
            near = nearest_to_regex(pattern, (p for p in paths if texts[p] == printed[p]))
            hints += [f"the nearest leaf is `{name}`" for name in near]
        texts = changed
    if problems:
        raise TreeMismatchError("a rename changes nothing", problems, hints)
    renamed = {
        path: path if text == printed[path] else with_positions(split_path(text), path)
        for path, text in texts.items()
    }
    _check_tree(renamed)
    return renamed


def with_positions(keys: tuple[str, ...], old: Path, moves: bool = False) -> Path:
    """Keys of a renamed path, with the list positions of the old one in their places: all places
    if the paths are equally long, else those before and after the renamed keys. If
    `moves`, a position that becomes another number is a position, too."""
    new: list[Key] = list(keys)
    shorter = min(len(keys), len(old))
    for places in (range(shorter), range(-1, -1 - shorter, -1)):
        for place in places:
            if keys[place] == str(old[place]):
                new[place] = old[place]
            elif (
                moves
                and isinstance(old[place], int)
                and re.fullmatch(r"0|[1-9]\d*", keys[place], re.A)
            ):
                new[place] = int(keys[place])
            elif len(keys) != len(old):
                break
    return tuple(new)


def overlaps(leaves: Iterable[tuple[T, Path]]) -> Iterator[tuple[T, T, bool]]:
    """Pairs of leaves that no tree can hold, with their paths as text: the first is at the path of
    the second, or above it. Whether it is above."""
    leaves = list(leaves)
    first: dict[tuple[str, ...], T] = {}
    for leaf, path in leaves:
        other = first.setdefault(tuple(map(str, path)), leaf)
        if other is not leaf:
            yield other, leaf, False
    for leaf, path in leaves:
        texts = tuple(map(str, path))
        for depth in range(len(texts)):
            if texts[:depth] in first:
                yield first[texts[:depth]], leaf, True


def _check_tree(renamed: dict[Path, Path]) -> None:
    """Raises TreeMismatchError for new paths that are equal, or where one is below another."""
    problems = []
    for one, other, above in overlaps(renamed.items()):
        new = f" -> {format_path(renamed[other])}"
        if above:
            leaf = f"{format_path(one)} -> {format_path(renamed[one])}"
            problems.append(f"{format_path(other)}{new}, below the leaf {leaf}")
        else:
            problems.append(f"{format_path(one)} and {format_path(other)}{new}")
    if problems:
        raise TreeMismatchError(
            "leaves would have the same path, or one below another, after renaming", problems
        )


def check_lists(paths: Iterable[Path], before: Iterable[Path] = ()) -> None:
    """Raises TreeMismatchError if a list does not keep its positions 0..n-1 (a gap would silently
    shift what follows), or has dict keys. Containers with the same keys as `before` pass."""
    children, old = _children(paths), _children(before)
    problems = []
    for container, keys in children.items():
        positions = {key for key in keys if isinstance(key, int)}
        if not positions or keys == old.get(container):
            continue
        if names := sorted(map(format_key, keys - positions)):
            text = f"list positions and dict keys: {', '.join(names[:3])}"
            problems.append(f"{format_path(container)} has {text}")
        elif gaps := sorted({*range(len(keys))} - keys):
            after = min(key for key in positions if key > gaps[0])
            text = f"position {after} but no position {gaps[0]}"
            problems.append(f"{format_path(container)} has {text}")
    if problems:
        summary = "a list would lose positions, so later elements would shift"
        raise TreeMismatchError(summary, problems, ["drop the whole list, or keep all of it"])


def _children(paths: Iterable[Path]) -> dict[Path, set[Key]]:
    """The keys of every container."""
    children: dict[Path, set[Key]] = collections.defaultdict(set)
    for path in paths:
        for depth, key in enumerate(path):
            children[path[:depth]].add(key)
    return children
