"""Which releases the tests run with."""

import importlib.metadata

import pytest


def older(package: str, release: str) -> bool:
    """Whether an older one is installed."""
    installed = importlib.metadata.version(package)
    return _numbers(installed) < _numbers(release)


def since(package: str, release: str) -> pytest.MarkDecorator:
    """Marks a test of what a package has from that release on."""
    return pytest.mark.skipif(older(package, release), reason=f"needs {package} {release}")


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]


# The metadata of NNX variables that names the axes of an array, which newer releases of flax call
# otherwise.
OUT_SHARDING = "sharding_names" if older("flax", "0.12.4") else "out_sharding"
