"""`to_mesh`: a checkpoint sharded by its saved specs, by rules, or like a target."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from reshard import transforms
from reshard.arrays.handle import ArrayHandle
from reshard.checkpoint import Checkpoint, check_checkpoints
from reshard.errors import ShardingError
from reshard.restore.matching import Mismatch, TargetLeaf, match, mismatch_error
from reshard.restore.pytrees import check_state, flatten_state, is_variable
from reshard.sharding.mesh import Mesh, Spec, normalize_spec, parse_mesh
from reshard.tree import Path, as_python, format_path, natural


def to_mesh(
    ckpt: Checkpoint,
    mesh: Any,
    specs: Sequence[tuple[str, Any]] | Mapping[str, Any] | None = None,
    *,
    axes: Mapping[str, str] | None = None,
    target: Any = None,
) -> Checkpoint:
    """Shard every device array over `mesh`.

    Each saved partition spec is projected by axis name. Arrays saved from a single device become
    replicated, and a note lists them. Host values stay on the host. This includes Python scalars,
    and NumPy arrays unless `specs` matches them. NumPy arrays of 64 bits stay unless a spec
    matches one alone.

    Args:
      mesh: any form that `reshard.sharding.mesh.parse_mesh` takes; no devices are needed.
      specs: ordered (path regex, partition spec) pairs that replace saved specs; the first match
        wins.
      axes: saved axis name -> axis of `mesh`, or `""` to replicate.
      target: an abstract state on `mesh`, as `reshard.target` returns it. Its specs replace the
        saved ones, and its leaves must be those of the checkpoint.

    Raises:
      ShardingError: every leaf whose spec does not fit, each with a hint.
      TreeMismatchError: every leaf in which the checkpoint and `target` differ.
      ArgumentError: the target is a class, a function or text.

    Example:
      >>> ckpt = reshard.to_mesh(reshard.open("run/1000"), "data=1,model=8", {"bias$": ""})
      >>> ckpt["params/layer_0/bias"]
      <params/layer_0/bias: float32[32] P()>
      >>> [str(mesh) for mesh in ckpt.meshes]
      ['data=1,model=8']
    """
    check_checkpoints(ckpt)
    new_mesh = parse_mesh(mesh, ckpt.meshes)
    known = None if target is None else target_specs(ckpt, new_mesh, target)
    return transforms.to_mesh(ckpt, new_mesh, specs, axes=axes, known=known)


def target_specs(ckpt: Checkpoint, mesh: Mesh, target: Any) -> dict[Path, Spec]:
    """Saved path -> the spec that the target has for it; Python scalars have none. Raises
    TreeMismatchError if their leaves differ, ShardingError if the target is on another mesh."""
    check_state(target)
    leaves = flatten_state(target).leaves
    targets = [leaf.target for leaf in leaves]
    saved_paths, problems = match(targets, ckpt)
    if problems:
        of_nnx = any(is_variable(leaf.wrapper) for leaf in leaves)
        raise mismatch_error(problems, targets, ckpt, of_nnx, _hints(problems, targets, ckpt))
    parsed = functools.cache(parse_mesh)
    specs: dict[Path, Spec] = {}
    for leaf, path in zip(leaves, saved_paths, strict=True):
        sharding: Any = getattr(leaf.value, "sharding", None)
        handle = None if path is None else ckpt[path]
        if not isinstance(handle, ArrayHandle) or not hasattr(sharding, "spec"):
            continue
        if parsed(sharding.mesh).split_axes != mesh.split_axes:
            raise ShardingError(
                f"the target is on the mesh `{parsed(sharding.mesh)}`, not on the new mesh "
                f"`{mesh}`",
                hints=["build it with `reshard.target(model, mesh=...)` for the same mesh"],
            )
        if handle.value_type != "scalar":
            specs[handle.path] = normalize_spec(sharding.spec)
    return specs


def _hints(
    problems: Sequence[Mismatch], targets: Sequence[TargetLeaf], ckpt: Checkpoint
) -> list[str]:
    """Calls that give a checkpoint the leaves of a target."""
    unexpected = [problem.path for problem in problems if problem.what == "unexpected"]
    used = {tuple(map(str, leaf.path[:end])) for leaf in targets for end in range(len(leaf.path))}
    drop: dict[str, None] = {}
    for path in sorted(unexpected, key=natural):
        above = (path[:end] for end in range(1, len(path)))
        level = next((keys for keys in above if tuple(map(str, keys)) not in used), None)
        drop[format_path(path) if level is None else f"{format_path(level)}/**"] = None
    if any(problem.what == "missing" for problem in problems):
        drop.pop("params/**", None)  # the model itself, under other names
    hints = [f"reshard.select(ckpt, drop={as_python([pattern])})" for pattern in drop]
    if any(problem.what == "dtype" for problem in problems) and not any(
        problem.what == "dtype" for problem in match(targets, ckpt, cast="lossy")[1]
    ):
        hints.append("reshard.cast(ckpt, ..., ...) casts")
    return hints
