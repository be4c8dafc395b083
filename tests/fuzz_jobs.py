"""What damaged checkpoints are put through, and the model that some of them are of."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import Mesh

import reshard
from reshard.writer import plan

LIMIT_SECONDS = 20
# A file beside a damaged directory, which links in it point to.
SECRET = "secret"
MAP = """
[[rule]]
from = '^params/step$'
to = 'params/count'

[[rule]]
from = '^params/large$'
split = { axis = 1, sizes = [8, 24], into = ['large/left', 'large/right'] }

[[rule]]
from = '^params/'
to = ''
"""
# What a case may leave of its jobs.
LEFT = ("moved", "reshaped", "recorded", "converted", "resumed", ".reshard-resumed.*")


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(8)(x))
        return nn.Dense(4)(x)


class NnxMlp(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.second = nnx.Linear(8, 4, rngs=rngs)


def linen_training() -> TrainState:
    params = LinenMlp().init(jax.random.key(0), jnp.ones((1, 6)))["params"]
    state = TrainState.create(apply_fn=LinenMlp().apply, params=params, tx=optax.adam(1e-2))
    return state.replace(step=jnp.int32(7))


def nnx_training() -> dict[str, Any]:
    model = NnxMlp(rngs=nnx.Rngs(0))
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)}


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))


class _TooSlow(BaseException):
    """Not an Exception: nothing may take it for an error of the checkpoint."""


def _stop(number: int, frame: Any) -> None:
    raise _TooSlow


@dataclasses.dataclass(frozen=True)
class Case:
    """A copy of the checkpoint `base`, which `damage` has damaged; all files are in `folder`."""

    base: pathlib.Path
    folder: pathlib.Path
    damage: Callable[[pathlib.Path], None]

    @property
    def source(self) -> pathlib.Path:
        return self.folder / "source"

    @property
    def out(self) -> pathlib.Path:
        return self.folder / "out"

    def jobs(self, draw: random.Random) -> list[Callable[["Case"], None]]:
        """What it is put through: three jobs that every case is, a conversion, and one more."""
        conversions = CONVERSIONS.get(self.base.name, [_by_map])
        return [*JOBS, draw.choice(conversions), draw.choice(OTHERS)]


@contextlib.contextmanager
def limited(what: str, seconds: int = LIMIT_SECONDS) -> Iterator[None]:
    """Raises AssertionError if what is done takes longer."""
    previous = signal.signal(signal.SIGALRM, _stop)
    signal.alarm(seconds)
    try:
        yield
    except _TooSlow as error:
        raise AssertionError(f"{what}: more than {seconds} s") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def outcome(what: str, job: Callable[[], None]) -> str:
    """What a job says: "done", or the error. Raises AssertionError if it takes too long."""
    try:
        with limited(what):
            job()
    except reshard.ReshardError as error:
        str(error).encode()
        return f"{type(error).__name__}: {error}"
    return "done"


def saved(ckpt: reshard.Checkpoint, destination: pathlib.Path, **options: Any) -> None:
    """Saves, and opens what was saved: that must be possible, whatever it was made of."""
    reshard.save(ckpt, destination, **options)
    try:
        reshard.open(destination)
    except reshard.ReshardError as error:
        raise AssertionError("what was saved cannot be opened") from error


def _look(case: Case) -> None:
    repr(reshard.open(case.source)).encode(errors="surrogateescape")


def _carry_over(case: Case) -> None:
    ckpt = reshard.open(case.source)
    reshard.plan(ckpt, case.out / "moved")
    saved(ckpt, case.out / "moved")


def _reshape(case: Case) -> None:
    ckpt = reshard.to_mesh(reshard.open(case.source), "data=1,model=4")
    repr(reshard.plan(ckpt, case.out / "reshaped"))
    saved(ckpt, case.out / "reshaped", max_memory="64MiB")


def _restore(case: Case) -> None:
    reshard.restore(case.source, target(case.base))


def _restore_some(case: Case) -> None:
    """What is there, whatever it is, and where that is not what it was."""
    wanted = target(case.base)
    kept = next(iter(wanted))
    reshard.restore(case.source, {kept: wanted[kept]}, cast="lossy", unexpected="ignore")


def _restore_raw(case: Case) -> None:
    reshard.restore(case.source, mesh())


def _verify(case: Case) -> None:
    found = reshard.verify(case.source)
    assert found.ok == (not found.problems)
    repr(found).encode(errors="surrogateescape")


def _verify_against(case: Case) -> None:
    repr(reshard.verify(case.source, against=case.base)).encode(errors="surrogateescape")
    repr(reshard.verify(case.base, against=case.source)).encode(errors="surrogateescape")


def _digest(case: Case) -> None:
    copy = case.out / "recorded"
    with contextlib.suppress(OSError):  # shutil says so of pipes, having copied all else
        shutil.copytree(case.source, copy, symlinks=True)
    reshard.digest(copy, write=True)
    assert reshard.verify(copy).ok


def _diff(case: Case) -> None:
    for a, b in ((case.base, case.source), (case.source, case.base)):
        found = reshard.diff(a, b, values=True, layout=True)
        json.dumps(found.document())
        repr(found).encode(errors="surrogateescape")


def _diff_records(case: Case) -> None:
    repr(reshard.diff(case.source, case.base)).encode(errors="surrogateescape")


def _resume(case: Case) -> None:
    """The damage is that of what a stopped job of the genuine checkpoint has left."""
    destination = case.out / "resumed"
    left = stopped(case.base, destination)
    case.damage(left)
    secret = left.parent / SECRET  # what some of the damage is a link to
    before = secret.read_bytes() if secret.exists() else None
    try:
        go_on(case.base, destination, verify=True)
    finally:
        after = secret.read_bytes() if secret.exists() else None
        secret.unlink(missing_ok=True)
        assert after == before, "a link was written through"
    assert reshard.diff(case.base, destination, values=True).equal, "other values are there"


def _to_nnx(case: Case) -> None:
    saved(reshard.to_nnx(case.source, nnx_training), case.out / "converted")


def _back(case: Case) -> None:
    saved(reshard.to_linen(case.source), case.out / "converted")


def _to_linen(case: Case) -> None:
    converted = reshard.to_linen(case.source, linen_training, source=nnx_training)
    saved(converted, case.out / "converted")


def _by_map(case: Case) -> None:
    ckpt = reshard.open(case.source)
    names = {path[0] for path in reshard.open(case.base)}
    dropped = [name for name in ("name", "none", "empty", "key") if name in names] + ["layers/**"]
    made = reshard.to_nnx(
        ckpt, map_file=case.folder / "map.toml", layout="linen-params", drop=dropped
    )
    saved(made, case.out / "converted")


JOBS = [_look, _carry_over, _reshape]
OTHERS = [
    _restore,
    _restore_some,
    _restore_raw,
    _verify,
    _verify_against,
    _digest,
    _diff,
    _diff_records,
    _resume,
]
CONVERSIONS = {"linen": [_to_nnx], "nnx": [_back, _to_linen]}


@functools.cache
def target(base: pathlib.Path) -> Any:
    """The abstract tree of a genuine checkpoint."""

    def abstract(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

    return jax.tree.map(abstract, reshard.restore(base, mesh()))


def stopped(base: pathlib.Path, destination: pathlib.Path) -> pathlib.Path:
    """What a job of small shares leaves that is killed before its last step."""
    with mock.patch.object(plan, "SHARE_BYTES", 1 << 10), layouts.killed_at_the_end():
        go_on(base, destination)
    (left,) = destination.parent.glob(f".reshard-{destination.name}.*")
    return left


def go_on(base: pathlib.Path, destination: pathlib.Path, **options: Any) -> None:
    """Goes on with a job, or begins it; no file of it is the source's, which is damaged apart."""
    ckpt = reshard.to_mesh(reshard.open(base), "data=1,model=4")
    how = {"link": False, "digest": True, "resume": True}
    reshard.save(ckpt, destination, max_memory="24KiB", **how, **options)
