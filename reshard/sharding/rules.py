"""Partition specs of leaves, by their paths or by the names of their axes.

By path: ordered (regex, spec) pairs, the first match wins. By logical axis names: rules from names
to mesh axes. Flax's two APIs read such a list differently if a name or an axis occurs twice:

| names, rules                               | `"linen"`           | `"nnx"`                  |
|--------------------------------------------|---------------------|--------------------------|
| `(embed, mlp)`, both -> `model`            | the first rule wins | `P('model', 'model')`    |
| `embed` -> `data`, later `embed` -> `None` | the first free rule | the last rule            |
| a name that no rule has                    | replicated          | passed on as a mesh axis |

The Linen column is `flax.linen.logical_to_mesh_axes`, the NNX column `flax.nnx.get_partition_spec`.
"""

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import ShardingError
from reshard.sharding.mesh import Spec, normalize_spec
from reshard.tree import Path, format_path, nearest_to_regex, regex_of_glob

SEMANTICS = ("linen", "nnx")
Rule = tuple[str, tuple[str, ...]]
# One name or several for each dimension, or none.
Names = tuple[str | tuple[str, ...] | None, ...]


def spec_pairs(specs: Any) -> list[tuple[str, Any]]:
    """Pairs of a path regex and a spec, from a sequence or a mapping of them. Raises ShardingError
    for anything else."""
    entries = list(specs.items()) if isinstance(specs, Mapping) else () if specs is None else specs
    if not isinstance(entries, list | tuple) or not all(
        isinstance(entry, list | tuple) and len(entry) == 2 and isinstance(entry[0], str)
        for entry in entries
    ):
        raise ShardingError(
            f"`specs` are pairs of a path regex and a partition spec, not {specs!r}",
            hints=['specs=[("kernel$", P("data", "model"))]'],
        )
    return [(regex, spec) for regex, spec in entries]


def match_specs(
    paths: Iterable[Path],
    rules: Sequence[tuple[str, Any]],
    variables: Collection[Path] = (),
    otherwise: Sequence[str] = (),
) -> dict[Path, Spec]:
    """The spec of each path that a rule matches. Raises ShardingError with each regex that does not
    compile, or matches no leaf.

    Args:
      rules: pairs of a regex, searched for in the printed path, and a partition spec. A regex that
        is in no path is searched for in paths without a variable's level `value`, then without
        `model` before them.
      variables: the paths that lack the level `value`; they are searched with it last.
      otherwise: the hints if no path resembles a regex.
    """
    paths = list(paths)
    compiled, problems, hints = [], [], []
    for pattern, spec in rules:
        try:
            compiled.append((re.compile(pattern), normalize_spec(spec)))
        except (re.error, OverflowError, RecursionError) as error:
            problems.append(f"`{pattern}` is not a regex: {error}")
            if "*" in pattern:
                hints.append(f"as a regex, the glob `{pattern}` is `{regex_of_glob(pattern)}`")
    if problems:
        raise ShardingError("the specs cannot be read", problems, hints)

    @functools.cache
    def texts(form: int) -> list[str]:
        return [format_path(_forms(path, path in variables)[form]) for path in paths]

    specs: dict[Path, Spec] = {}
    for regex, spec in compiled:
        matches = (
            [path for path, text in zip(paths, texts(form), strict=True) if regex.search(text)]
            for form in range(4)
        )
        matched = next(filter(None, matches), ())
        for path in matched:
            specs.setdefault(path, spec)
        if not matched:
            problems.append(f"`{regex.pattern}`")
            near = nearest_to_regex(regex.pattern, paths)
            hints += [f"the nearest leaf is `{name}`" for name in near]
    if problems:
        raise ShardingError("no array matches the regex of a spec", problems, hints or otherwise)
    return specs


def _forms(path: Path, variable: bool) -> tuple[Path, ...]:
    """A path in the forms that regexes are written for, the first choice first."""
    without_value = path[:-1] if path[1:] and path[-1] == "value" else path
    below_model = without_value[1:] if path[1:] and path[0] == "model" else without_value
    return path, without_value, below_model, (*path, "value") if variable else path


def parse_rules(rules: Any, names: Iterable[str]) -> tuple[Rule, ...]:
    """Rules as ordered pairs of a logical name and mesh axes; a rule without axes replicates.
    Raises ShardingError with all entries that are no rules.

    Args:
      rules: pairs, a mapping, or a callable that takes a name and returns a mesh axis, several or
        None (the `MeshRules` dataclass of the Flax examples).
      names: the logical names in use, for a callable. A name for which it raises AttributeError,
        KeyError or ValueError has no rule.
    """
    pairs: list[Any] = [rules]
    if isinstance(rules, Mapping):
        pairs = list(rules.items())
    elif callable(rules):
        pairs = _called(rules, names)
    elif isinstance(rules, Iterable) and not isinstance(rules, str):
        pairs = list(rules)
    parsed = [(pair, _axes_of(pair)) for pair in pairs]
    problems = [repr(pair) for pair, axes in parsed if axes is None]
    if problems:
        raise ShardingError(
            "a rule must be a pair: a logical name, and a mesh axis, a tuple of mesh axes, or None",
            problems,
            ['rules=[("embed", "data"), ("vocab", ("data", "model")), ("kv", None)]'],
        )
    return tuple((pair[0], axes) for pair, axes in parsed if axes is not None)


def _called(rules: Callable[..., Any], names: Iterable[str]) -> list[tuple[str, Any]]:
    pairs = []
    for name in dict.fromkeys(names):
        try:
            answer = rules(name)
        except (AttributeError, KeyError, ValueError):
            continue
        one = isinstance(answer, tuple | list) and len(answer) == 1
        pairs.append((name, answer[0] if one else answer))
    return pairs


def _axes_of(pair: Any) -> tuple[str, ...] | None:
    """The mesh axes of a rule; None if it is not a rule."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
        return None
    axes = () if pair[1] is None else (pair[1],) if isinstance(pair[1], str) else pair[1]
    are_names = isinstance(axes, tuple | list) and all(isinstance(axis, str) for axis in axes)
    return tuple(axes) if are_names else None


class Resolved(NamedTuple):
    """A spec, the positions of the rules that decided it, and the names without a rule."""

    spec: Spec
    used: tuple[int, ...]
    unmatched: tuple[str, ...]


def resolve_names(names: Names, rules: Sequence[Rule], semantics: str, passes: bool) -> Resolved:
    """The partition spec of an array from the names of its axes. Each is a logical name, a tuple of
    mesh axes, or None. A name without a rule is a mesh axis if `passes`, else it splits nothing."""
    last = {name: position for position, (name, _) in enumerate(rules)}
    unmatched = [name for name in names if isinstance(name, str) and name not in last]
    fixed = [
        ((name,) if passes and name in unmatched else ()) if isinstance(name, str) else name or ()
        for name in names
    ]
    used: dict[int, int] = {}
    if semantics == "nnx":
        used = {dim: last[name] for dim, name in enumerate(names) if name in last}
    else:
        taken = {axis for axes in fixed for axis in axes}
        for position, (name, axes) in enumerate(rules):
            open_dims = (dim for dim, own in enumerate(names) if own == name and dim not in used)
            dim = next(open_dims, None)
            if dim is not None and taken.isdisjoint(axes):
                used[dim] = position
                taken.update(axes)
    return Resolved(
        tuple(rules[used[dim]][1] if dim in used else axes for dim, axes in enumerate(fixed)),
        tuple(used[dim] for dim in sorted(used)),
        tuple(dict.fromkeys(unmatched)),
    )
