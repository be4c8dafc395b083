"""The oldest releases that are declared are those that the tests are run with, and the README's;
errors name the release that has a missing feature."""

import importlib.metadata
import json
import pathlib
import tomllib

import pytest
from layouts import refused
from releases import older

import reshard
from reshard import compat
from reshard.loader.array_metadata import parse_zarr

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = dict(line.split(">=") for line in PROJECT["dependencies"])


def test_the_floors_that_are_declared_are_tested():
    optax = [line for line in PROJECT["optional-dependencies"]["test"] if line.startswith("optax")]
    lines = (ROOT / "tests" / "floors.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tested.pop("jaxlib") == tested["jax"]
    assert tested == FLOORS | dict(line.split(">=") for line in optax)


def test_the_readme_names_the_floors():
    names = {"JAX": "jax", "Flax": "flax", "Orbax": "orbax-checkpoint"}
    names |= {"TensorStore": "tensorstore"}
    python = PROJECT["requires-python"].removeprefix(">=")
    *releases, last = [f"{word} {FLOORS[name]}" for word, name in names.items()]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"work are Python {python}, {', '.join(releases)} and {last}." in text


@pytest.mark.parametrize(
    ("dtype", "release"), [("float4_e2m1fn", "0.1.80"), ("float8_e8m0fnu", "0.1.85")]
)
def test_a_dtype_that_needs_a_newer_tensorstore(dtype, release, data):
    document = {"zarr_format": 2, "shape": [4], "chunks": [4], "dtype": dtype, "fill_value": None}
    document = json.dumps(document | {"compressor": None, "order": "C", "filters": None}).encode()
    ckpt = reshard.open(data / "orbax-0.4.4" / "default")
    if not older("tensorstore", release):
        assert parse_zarr(document, "zarr").dtype.name == dtype
        assert reshard.cast(ckpt, dtype, where="bf")["bf"].dtype.name == dtype
        return
    installed = importlib.metadata.version("tensorstore")
    text = f"`{dtype}` needs tensorstore {release} or newer; {installed} is installed"
    assert refused(ValueError, parse_zarr, document, "zarr") == text
    told = refused(reshard.ArgumentError, reshard.cast, ckpt, dtype)
    assert told.split("\n")[0] == f"cast to {dtype}: {text}"


def test_a_dtype_that_no_tensorstore_has(data):
    assert compat.missing_dtype(["float32"]) == ""  # as zarr lists fields
    ckpt = reshard.open(data / "orbax-0.4.4" / "default")
    assert refused(reshard.ArgumentError, reshard.cast, ckpt, "float8_e4m3") == (
        "cast to float8_e4m3: TensorStore does not store it\n\n"
        "hint: `bfloat16`, `float16`, `float32`, `float8_e4m3fn`"
    )


def test_databases_are_read_with_an_older_tensorstore(monkeypatch, data):
    path = data / "orbax-0.4.4" / "default"
    found = reshard.digest(path)
    monkeypatch.setattr(compat, "older", lambda package, release: "0.1.77")
    assert reshard.digest(path) == found


def test_buckets_need_a_newer_tensorstore(monkeypatch):
    monkeypatch.setattr(compat, "older", lambda package, release: "0.1.77")
    told = refused(reshard.CheckpointFormatError, reshard.open, "gs://bucket/run")
    assert told == "`gs://bucket/run`: it needs tensorstore 0.1.81 or newer; 0.1.77 is installed"
