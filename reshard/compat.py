"""What older releases of JAX, Flax and TensorStore lack, each with the release that makes it
unnecessary."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


@functools.cache
def older(package: str, release: str) -> str:
    """The installed release of a package if it is older than `release`, else ""."""
    from importlib.metadata import version  # most jobs do not ask

    installed = version(package)
    return installed if _numbers(installed) < _numbers(release) else ""


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]


# Dtypes that tensorstore has since a release.
_DTYPES = {"float4_e2m1fn": "0.1.80", "float8_e8m0fnu": "0.1.85"}


def missing_dtype(name: Any) -> str:
    """Which release of tensorstore has a dtype, if an older one is installed; else ""."""
    release = _DTYPES.get(name, "") if isinstance(name, str) else ""
    installed = release and older("tensorstore", release)
    if not installed:
        return ""
    return f"`{name}` needs tensorstore {release} or newer; {installed} is installed"


def why_no_buckets() -> str:
    """Why objects in buckets are not read and written; empty where they are: tensorstore before
    0.1.81 reads no part of one, and none with every name."""
    installed = older("tensorstore", "0.1.81")
    return installed and f"it needs tensorstore 0.1.81 or newer; {installed} is installed"


def ranged_reads(store: Any, keys: Sequence[str], part: slice) -> Iterator[tuple[Any, slice]]:
    """Reads of the same bytes of several values, and where they are in what is read: tensorstore
    before 0.1.81 reads whole values, here one after another."""
    if older("tensorstore", "0.1.81"):
        return ((store.read(key), part) for key in keys)
    return iter([(store.read(key, byte_range=part), slice(None)) for key in keys])


def node_read(
    store: Any, file: str, part: slice, location: str, dump: Callable[..., Any]
) -> Callable[[], bytes | None]:
    """Begins to read a node of a B-tree, and returns what waits for its bytes: None where its file
    is missing. tensorstore before 0.1.81 reads part of a file only as a value of a database."""
    if older("tensorstore", "0.1.81"):
        return dump(store, f"value:{location.partition(':')[2]}").result
    read = store.read(file, byte_range=part)
    return lambda: found.value if (found := read.result()).state == "value" else None


def axis_name_keys() -> tuple[str, ...]:
    """Metadata of an NNX variable that names the axes of its array: flax before 0.12.4 ignores
    `out_sharding`."""
    names = ("out_sharding", "sharding_names", "sharding")
    return names[1:] if older("flax", "0.12.4") else names


def jaxprs_in_params(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation: `jax.extend.core.jaxprs_in_params` of JAX 0.10
    and newer."""
    from jax.extend import core

    for value in params.values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, core.ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, core.Jaxpr):
                yield part
