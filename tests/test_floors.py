"""The oldest releases that are declared are those that the tests are run with, and the README's."""

import pathlib
import tomllib

from layouts import refused

import reshard

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
    assert f"at least Python {python}, {', '.join(releases)} and {last}." in text


def test_a_dtype_that_no_tensorstore_has(data):
    ckpt = reshard.open(data / "orbax-0.4.4" / "default")
    assert refused(reshard.ArgumentError, reshard.cast, ckpt, "float8_e4m3") == (
        "cast to float8_e4m3: TensorStore cannot store this dtype\n\n"
        "hint: `bfloat16`, `float16`, `float32`, `float8_e4m3fn`"
    )
