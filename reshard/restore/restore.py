"""The restorer: a checkpoint and a target -> live arrays in the target's own containers."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from reshard import tree
from reshard.arrays.dtypes import is_floating
from reshard.arrays.handle import ArrayHandle, check_names
from reshard.checkpoint import Checkpoint, check_known
from reshard.errors import (
    ArgumentError,
    CorruptCheckpointError,
    ShardingError,
    TreeMismatchError,
    check_choice,
)
from reshard.loader import open as open_checkpoint
from reshard.restore import pytrees
from reshard.restore.device_reads import Request
from reshard.restore.device_shards import named_sharding
from reshard.restore.lazy_jax import jax
from reshard.restore.matching import Mismatch, cast_hints, match, mismatch_error
from reshard.restore.replicas import agreement, read_together
from reshard.restore.target_mesh import to_mesh
from reshard.sharding.mesh import Mesh, NamedSharding, normalize_spec, parse_mesh, spec_problems
from reshard.tree import Path, as_python, format_glob, format_path, nested
from reshard.units import parse_bytes

Progress = Callable[[int], None]


def restore(
    checkpoint: Checkpoint | str | os.PathLike,
    target: Any,
    *,
    cast: bool | str = False,
    keep: str | Sequence[str] = (),
    unexpected: str = "error",
    max_memory: int | str | None = None,
    replicas: str = "read",
    progress: Progress | None = None,
) -> Any:
    """Read a checkpoint into live arrays, in the containers and with the shardings of a target.

    Every mismatch is found before an array is read. Each process reads the bytes of its own
    devices, and each stored chunk once. CPU arrays use the buffers of the reads, without a copy,
    unless processes exchange them.

    Args:
      checkpoint: a checkpoint, or the path of one.
      target: an abstract state, as `reshard.target` returns it; a real state, whose shardings are
        used; or a `jax.sharding.Mesh` alone, for nested dicts and lists of arrays on the saved
        specs. A real pytree is returned as a new one. A real NNX module is updated in place, after
        every read has succeeded.
      cast: False requires equal dtypes. True allows casts that keep every value (wider floats,
        integers that fit). `"lossy"` also allows floats to be rounded once, to nearest even; a
        value that the dtype cannot hold is an error.
      keep: globs of leaves of a real target that keep their own values.
      unexpected: `"error"`, or `"ignore"` to leave out leaves that the target lacks.
      max_memory: the most bytes of arrays in memory, not counting the result: a number, or text
        such as `"256MiB"`. By default, enough to keep all cores busy.
      replicas: how the processes of a `jax.distributed` job read an array or chunk that several of
        them need. `"read"`: each reads it. `"broadcast"`: each stored byte is fetched once per
        job. Every process reads a part, and their devices exchange the parts in bounded memory.
        This is faster if the network between devices is faster than the store, for example for
        replicated weights in a bucket on many hosts. Three kinds of arrays are not exchanged:
        those that do not fit in `max_memory`, those without a `NamedSharding` over all processes,
        and those of complex numbers or of elements smaller than one byte. All processes make the
        same call. If it fails in one, it fails in all. For a single process both are the same.
      progress: called with the bytes that were decoded, or received, since its last call.

    Returns:
      The target's structure with `jax.Array`s on the target's shardings. NumPy arrays, Python
      scalars and strings of the target stay what they are.

    Raises:
      ArgumentError: an argument that is not one of its choices or not for a bare mesh; a target
        that is a class, a function or text; or processes whose targets differ.
      TreeMismatchError: leaves that are missing, unexpected, or of another shape, dtype or kind,
        and leaves of the target without a usable sharding: all of them.
      ShardingError: saved specs that do not fit a bare mesh.
      MemoryLimitError: one stored chunk does not fit into `max_memory`.
      ChangedCheckpointError: the checkpoint has changed since it was opened.
      CorruptCheckpointError: stored bytes are missing or do not decode.
      CheckpointNotFoundError, CheckpointFormatError: as `reshard.open`.

    Example:
      >>> import jax
      >>> auto = (jax.sharding.AxisType.Auto,) * 2  # without it, JAX makes Explicit axes
      >>> mesh = jax.make_mesh((1, 8), ("data", "model"), axis_types=auto)
      >>> state = reshard.restore("run/1000", mesh)
      >>> tuple(state["params"]["layer_0"]["kernel"].sharding.spec)
      (None, 'model')
      >>> initialised = jax.tree.map(jax.numpy.zeros_like, state)
      >>> state = reshard.restore("run/1000", initialised, keep="params/layer_1/**")
    """
    check_choice("cast", cast, (False, True, "lossy"))
    check_choice("unexpected", unexpected, ("error", "ignore"))
    check_choice("replicas", replicas, ("read", "broadcast"))
    report: Progress = progress or (lambda count: None)
    alone = replicas == "read" or jax.process_count() == 1
    with contextlib.nullcontext() if alone else agreement() as agree:
        ckpt = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
        budget = None if max_memory is None else parse_bytes(max_memory)
        how = {"max_memory": budget, "progress": report, "agree": agree}
        read = functools.partial(read_together, identity=ckpt.source.identity, **how)
        if isinstance(target, jax.sharding.Mesh | jax.sharding.AbstractMesh):
            if cast or keep or unexpected != "error":
                raise ArgumentError(
                    "cast, keep and unexpected require a state as the target, not a mesh",
                    hints=['reshard.cast(ckpt, "bfloat16")', 'reshard.select(ckpt, "params/**")'],
                )
            return _restore_raw(ckpt, target, read)

        pytrees.check_state(target)
        state = pytrees.flatten_state(target)
        leaves = state.leaves
        names = {name: leaf.path for leaf in leaves for name in (leaf.path, *leaf.aliases)}
        kept = {names[name] for name in tree.match_globs(names, tree.parse_globs("keep", keep), ())}
        targets = [leaf.target for leaf in leaves]
        saved_paths, problems = match(targets, ckpt, cast=cast, ignore=unexpected == "ignore")
        problems = [problem for problem in problems if problem.path not in kept]
        parsed = functools.cache(parse_mesh)
        for leaf in leaves:
            for what, text in _unusable(leaf, leaf.path in kept, parsed):
                problems.append(Mismatch(what, f"{format_path(leaf.path)}: {text}", leaf.path))
        if problems:
            given = "ckpt" if checkpoint is ckpt else "reshard.open(path)"
            others = {array.shape for array in ckpt.arrays if array.path not in saved_paths}
            chosen = [leaf.target for leaf in leaves if leaf.path not in kept]
            hints = [*cast_hints(chosen, ckpt, cast), *_hints(problems, leaves, others, given)]
            of_nnx = any(pytrees.is_variable(leaf.wrapper) for leaf in leaves)
            raise mismatch_error(problems, targets, ckpt, of_nnx, hints, given=given)

        values: list[Any] = [
            leaf.value if path is None or leaf.path in kept else ckpt[path]
            for leaf, path in zip(leaves, saved_paths, strict=True)
        ]
        arrays = {i: handle for i, handle in enumerate(values) if isinstance(handle, ArrayHandle)}
        check_names(arrays.values())
        requests = [_request(leaves[i], handle) for i, handle in arrays.items()]
        found = _read(read, requests, arrays.values())
        for i, value in zip(arrays, found, strict=True):
            values[i] = _as_target(value, leaves[i])
        return state.unflatten(values, in_place=True)


def _read(
    read: Callable[[Sequence[Request]], list[Any]],
    requests: Sequence[Request],
    saved: Iterable[ArrayHandle],
) -> list[Any]:
    """The arrays. Without casts by the caller, an error about a cast is about the target."""
    try:
        return read(requests)
    except TreeMismatchError as error:
        if error.hints and all(each.dtype == each.stored_dtype for each in saved):
            error.hints = ("give this leaf its saved dtype in the target",)
        raise


def _unusable(
    leaf: pytrees.StateLeaf, kept: bool, parsed: Callable[[Any], Mesh]
) -> Iterator[tuple[str, str]]:
    """Why a target leaf cannot be restored, by kind; `parsed` is a cached `parse_mesh`."""
    value, dtype = leaf.value, leaf.target.dtype
    if kept:
        if leaf.abstract or (isinstance(value, jax.Array) and value.is_deleted()):
            yield "kept", "keep names it, but in the target it has no value"
    elif not leaf.abstract and not isinstance(value, jax.Array):
        return
    elif dtype is not None and _narrowed(dtype):
        yield "x64", f"JAX makes no {dtype.name} arrays by default"
    elif getattr(value, "sharding", None) is None:
        yield "sharding", "in the target, it has no sharding"
    else:
        try:
            sharding = _on_devices(value.sharding)
            if isinstance(sharding, jax.sharding.NamedSharding):
                shape, spec = tuple(value.shape), normalize_spec(sharding.spec)
                for text in spec_problems(shape, parsed(sharding.mesh), spec):
                    yield "sharding", text
        except ShardingError as error:
            yield "sharding", error.summary


def _narrowed(dtype: np.dtype) -> bool:
    """Whether JAX would silently make arrays of a narrower dtype."""
    return jax.dtypes.canonicalize_dtype(dtype) != dtype


def _on_devices(sharding: Any) -> Any:
    """A sharding on devices. Raises ShardingError for an `AbstractMesh` that is not in context."""
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return sharding
    concrete = jax.sharding.get_mesh()
    if not concrete.empty and concrete.abstract_mesh == mesh:
        kind = sharding.memory_kind
        return jax.sharding.NamedSharding(concrete, sharding.spec, memory_kind=kind)
    raise ShardingError("in the target, its sharding is on an AbstractMesh, which has no devices")


def _hints(
    problems: Sequence[Mismatch], leaves: Sequence[pytrees.StateLeaf], others: set[Any], given: str
) -> list[str]:
    """What to type; `others` are the shapes of saved arrays that the target lacks, and `given` is
    what the caller typed for the checkpoint."""
    kinds = {problem.what for problem in problems}
    hints = []
    if "unexpected" in kinds and "missing" not in kinds:
        hints.append('unexpected="ignore" restores the rest')
    absent = {problem.path for problem in problems if problem.what == "missing"}
    # A missing leaf may have another name in the checkpoint.
    found = any(leaf.target.shape in others for leaf in leaves if leaf.path in absent)
    if absent and not found and not any(leaf.abstract for leaf in leaves):
        path = next(problem.path for problem in problems if problem.what == "missing")
        hints.append(f'keep=("{format_glob(path)}",) keeps its value; globs work')
    if tied := [format_path(problem.copy) for problem in problems if problem.copy]:
        hints.append(f"ckpt = reshard.select({given}, drop={as_python(tied)})")
    texts = {
        "kept": "pass a target whose kept leaves are arrays, not abstract leaves",
        "x64": 'jax.config.update("jax_enable_x64", True)',
        "sharding": "reshard.target(state, mesh=mesh, ...) gives every leaf a sharding",
    }
    return hints + [text for kind, text in texts.items() if kind in kinds]


def _request(leaf: pytrees.StateLeaf, handle: ArrayHandle) -> Request:
    """The read of a leaf."""
    sharding = None
    if isinstance(leaf.value, jax.Array | jax.ShapeDtypeStruct) and not _uncommitted(leaf.value):
        sharding = _on_devices(leaf.value.sharding)
    dtype = handle.dtype if leaf.target.dtype is None else leaf.target.dtype
    if is_floating(dtype):
        handle = dataclasses.replace(handle, dtype=dtype)
    return Request(handle, dtype, sharding)


def _uncommitted(value: Any) -> bool:
    """Whether an array is bound to no device, so that computations may move it."""
    return not getattr(value, "committed", True)


def _as_target(value: Any, leaf: pytrees.StateLeaf) -> Any:
    """A restored value as the target's kind of leaf."""
    kind = leaf.target.kind
    if kind == "key":
        return _as_keys(value, leaf.target.key_impl, _on_devices(leaf.value.sharding))
    if kind in ("int", "float", "bool"):
        return value.item()
    if isinstance(leaf.value, jax.Array) and _uncommitted(leaf.value):
        with jax.default_device(next(iter(leaf.value.devices()))):
            return jax.device_put(value, may_alias=True)
    return value[()] if isinstance(leaf.value, np.generic) else value


def _as_keys(data: Any, impl: str | None, sharding: Any) -> Any:
    """Typed PRNG keys with that sharding."""
    try:
        keys = jax.random.wrap_key_data(data, impl=impl)
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(
            f"the checkpoint records PRNG keys of the kind `{impl}`, which JAX cannot make from an "
            f"array of shape {list(data.shape)}",
            [str(error)],
        ) from error
    equivalent = keys.sharding.is_equivalent_to(sharding, keys.ndim)
    return keys if equivalent else jax.device_put(keys, sharding)


def _restore_raw(
    ckpt: Checkpoint, mesh: Any, read: Callable[[Sequence[Request]], list[Any]]
) -> Any:
    """Nested dicts and lists of all leaves, with device arrays on a mesh."""
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise ShardingError(
            "an AbstractMesh has no devices to restore to", hints=[pytrees.MESH_HINT]
        )
    check_known(ckpt)
    ckpt = to_mesh(ckpt, mesh)
    check_names(ckpt.arrays)
    requests, wide = [], []
    for handle in ckpt.arrays:
        sharding = None
        if isinstance(handle.sharding, NamedSharding):
            sharding = named_sharding(mesh, handle.sharding.spec)
            if _narrowed(handle.dtype):
                wide.append(f"{format_path(handle.path)}  {handle.dtype.name}{list(handle.shape)}")
        requests.append(Request(handle, handle.dtype, sharding))
    if wide:
        raise TreeMismatchError(
            "JAX cannot make arrays of these dtypes without jax_enable_x64",
            wide,
            ['jax.config.update("jax_enable_x64", True)'],
        )
    leaves: dict[Path, Any] = dict(ckpt)
    for handle, value in zip(ckpt.arrays, read(requests), strict=True):
        if handle.key_impl is not None and isinstance(value, jax.Array):
            assert isinstance(handle.sharding, NamedSharding)
            sharding = named_sharding(mesh, handle.sharding.spec[: value.ndim - 1])
            value = _as_keys(value, handle.key_impl, sharding)
        leaves[handle.path] = value.item() if handle.value_type == "scalar" else value

    def build(node: Any) -> Any:
        """A list for positions, a dict for other keys."""
        if not isinstance(node, dict) or not node:  # a leaf may be an empty dict
            return node
        if all(isinstance(key, int) for key in node):
            return [build(node[key]) for key in sorted(node)]
        return {key: build(below) for key, below in node.items()}

    return build(nested(leaves.items()))
