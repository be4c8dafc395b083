"""Which releases the tests run with."""

import importlib.metadata


def older(package: str, release: str) -> bool:
    """Whether an older one is installed."""
    installed = importlib.metadata.version(package)
    return _numbers(installed) < _numbers(release)


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".") if part.isdigit()]


# The metadata of NNX variables that names the axes of an array, which newer releases of flax call
# otherwise.
OUT_SHARDING = "sharding_names" if older("flax", "0.12.4") else "out_sharding"
