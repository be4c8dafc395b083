"""The oldest releases that are declared are those that the tests are run with, and the README's."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FLOORS = dict(line.split(">=") for line in PROJECT["dependencies"])


def test_the_floors_that_are_declared_are_tested():
    optax = [line for line in PROJECT["optional-dependencies"]["test"] if line.startswith("optax")]
    lines = (ROOT / "tests" / "floors.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tested.pop("jaxlib") == tested["jax"]
    assert tested == FLOORS | dict(line.split(">=") for line in optax)


def test_the_readme_says_which_they_are():
    names = {
        "JAX": "jax",
        "Flax": "flax",
        "Orbax": "orbax-checkpoint",
        "TensorStore": "tensorstore",
    }
    python = PROJECT["requires-python"].removeprefix(">=")
    releases = ", ".join(f"{word} {FLOORS[name]}" for word, name in names.items())
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"On Linux or macOS with Python {python}, {releases} or newer" in text
