"""Which partition spec a leaf gets: ordered (path regex, spec) pairs, first match wins."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from reshard.errors import ShardingError
from reshard.mesh import Spec, normalize_spec
from reshard.tree import Path, format_path, nearest


def match_specs(paths: Iterable[Path], rules: Sequence[tuple[str, Any]]) -> dict[Path, Spec]:
    """The spec that the first matching rule gives to each path that any rule matches.

    Args:
      paths: the leaves that may be sharded.
      rules: pairs of a regex, searched for in the printed path, and a partition spec.

    Raises:
      ShardingError: a regex does not compile, or matches no leaf; all are named.
    """
    paths = list(paths)
    compiled, problems, hints = [], [], []
    for pattern, spec in rules:
        try:
            compiled.append((re.compile(pattern), normalize_spec(spec)))
        except re.error as error:
            problems.append(f"`{pattern}` is not a regex: {error}")
    if problems:
        raise ShardingError("the spec rules cannot be read", problems)
    chosen: dict[Path, Spec] = {}
    matched = set()
    for path in paths:
        text = format_path(path)
        hits = [i for i, (regex, _) in enumerate(compiled) if regex.search(text)]
        matched.update(hits)
        if hits:
            chosen[path] = compiled[hits[0]][1]
    for i, (pattern, _) in enumerate(rules):
        if i not in matched:
            problems.append(f"`{pattern}`")
            hints += [
                f"the nearest leaf is `{name}`" for name in nearest(_plain(pattern), paths)[:1]
            ]
    if problems:
        raise ShardingError("no array matches the regex of a spec", problems, hints)
    return chosen


def _plain(pattern: str) -> str:
    """A regex less its operators, to look for what it resembles."""
    return re.sub(r"[\\^$.*+?()|\[\]{}]", "", pattern)
