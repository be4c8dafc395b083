"""Sixteen simulated devices for every test, and the checkpoints that the tests share."""

import os
import signal

# A shell that runs the tests in the background has them, and the processes they start, ignore
# interrupts; some of those are to be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Both must be set before jax is imported, which no test module has done yet.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=16"
os.environ["JAX_PLATFORMS"] = "cpu"

import pathlib

import pytest


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """One checkpoint of every layout, made when it is first asked for: layout -> `Saved`."""
    import layouts

    made: dict[str, layouts.Saved] = {}

    def get(layout: str) -> layouts.Saved:
        if layout not in made:
            made[layout] = layouts.save(layout, tmp_path_factory.mktemp(layout))
        return made[layout]

    return get


@pytest.fixture
def data() -> pathlib.Path:
    """The directory of genuine old checkpoints."""
    return pathlib.Path(__file__).parent / "data"
