"""What is written is read by older releases of Orbax, each in an environment that is made once and
kept in the user's cache directory."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import layouts
import pytest
from fuzz_jobs import linen_training, nnx_training
from older_reader import read

import reshard

pytestmark = pytest.mark.exhaustive

HERE = pathlib.Path(__file__).parent
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
# Orbax -> what was installed with it. Tests with the oldest releases that are declared read what is
# written with 0.11.28.
OLDER = {
    "0.11.5": ("jax==0.6.1", "flax==0.10.6", "tensorstore==0.1.75"),
    "0.11.20": ("jax==0.6.2", "flax==0.10.7", "tensorstore==0.1.75"),
}
# Which the oldest TensorStore does not store.
NEWER_DTYPES = ("float8_e8m0fnu", "float4_e2m1fn", "int2")


@pytest.fixture(scope="module", params=OLDER)
def older(request):
    """The interpreter of an environment with that Orbax."""
    home = CACHE / "reshard-tests" / f"orbax-{request.param}-python{sys.version_info.minor}"
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        make = [sys.executable, "-m", "venv", "--clear", "--without-pip", home]
        subprocess.run(make, check=True)
        wanted = (f"orbax-checkpoint=={request.param}", *OLDER[request.param], "numpy<2.4")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
        subprocess.run([*pip, "--no-compile", *wanted], check=True)
        (home / "complete").touch()
    return python


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Paths of items that were written: rewritten in every layout, and converted both ways."""
    folder = tmp_path_factory.mktemp("written")
    found = []
    for layout in layouts.LAYOUTS:
        source = layouts.save(layout, folder / layout)
        dropped = [f"dtypes/{name}" for name in NEWER_DTYPES if name in layouts.DTYPES]
        ckpt = reshard.select(reshard.open(source.path, **source.open), drop=dropped)
        reshard.save(reshard.to_mesh(ckpt, "1x8"), folder / f"out-{layout}")
        found.append(folder / f"out-{layout}" / source.inner)
    state = layouts.randomized(jax.eval_shape(linen_training))
    layouts.save_standard(folder / "linen", state)
    reshard.save(reshard.to_nnx(folder / "linen", nnx_training), folder / "nnx")
    back = reshard.to_linen(folder / "nnx", linen_training, source=nnx_training)
    reshard.save(back, folder / "back")
    assert reshard.diff(folder / "linen", folder / "back", values=True).equal
    return [str(path) for path in (*found, folder / "nnx", folder / "back")]


def test_an_older_orbax_reads_what_is_written(older, written):
    ran = subprocess.run(
        [older, HERE / "older_reader.py", *written],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    for path in written:
        expected = read(path)
        assert len(expected) > 10
        assert found[path] == expected, path
