"""The oldest releases that are declared are those that the tests are run with."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parents[1]


def test_the_floors_that_are_declared_are_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optax = [line for line in project["optional-dependencies"]["test"] if line.startswith("optax")]
    declared = dict(line.split(">=") for line in [*project["dependencies"], *optax])
    lines = (ROOT / "tests" / "floors.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert tested.pop("jaxlib") == tested["jax"]
    assert tested == declared
