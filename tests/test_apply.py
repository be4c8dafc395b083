"""`apply` in a map: a function of the user's makes the values of leaves."""

import concurrent.futures
import os
import pickle
import shutil
import subprocess
import sys

import in_process
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from converted import refused
from flax import nnx
from flax.training import train_state
from layouts import save_standard

import reshard
from reshard.convert.conversion import conversion
from reshard.engine.cost import decoded_together
from reshard.writer.job import job_token

SHAPE = (12, 5)
FUNCTIONS = """
import numpy as np

CALLS = []


def normalised(x):
    CALLS.append(x.dtype.name)
    return x / np.linalg.norm(x.astype("f4"), axis=-1, keepdims=True).astype(x.dtype)


def halves(x):
    return x[:, :4].astype("f2")


def big_endian(x):
    return (2 * x).astype(">f4")


def fails(x):
    raise KeyError("no such thing")


NUMBER = 3
"""
NORMALISED = "apply = 'functions:normalised'"


class Codebook(nnx.Module):
    def __init__(self, rngs, shape=SHAPE, dtype=jnp.float32):
        self.codes = nnx.Param(jnp.ones(shape, dtype))
        self.out = nnx.Linear(3, 4, rngs=rngs)


def in_bfloat16():
    return Codebook(nnx.Rngs(0), dtype=jnp.bfloat16)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A directory with functions, and a checkpoint of Linen's, with an optimizer and an average."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "functions.py").write_text(FUNCTIONS)
    rng = np.random.default_rng(0)

    def values(*shape):
        return rng.normal(size=shape).astype("f4")

    params = {"codes": values(*SHAPE), "out": {"kernel": values(3, 4), "bias": values(4)}}
    state = train_state.TrainState.create(
        apply_fn=None, params=jax.tree.map(jnp.asarray, params), tx=optax.adam(1e-3)
    )
    save_standard(directory / "linen", {"params": params})
    save_standard(directory / "trained", jax.tree.map(np.asarray, state))
    return directory, params


@pytest.fixture(autouse=True)
def inside(project):
    with in_process.inside(project[0]) as patch:
        patch.syspath_prepend(str(project[0]))
        yield


def map_of(tmp_path, rule, head=""):
    file = tmp_path / "map.toml"
    file.write_text(f"{head}\n[[rule]]\nfrom = '^params/codes$'\nto = 'codes'\n{rule}\n")
    return file


def converted(tmp_path, rule=NORMALISED, model=Codebook, source="linen", **options):
    """A checkpoint of Linen's as a model of NNX's, by a map with a rule."""
    return reshard.to_nnx(source, model, map_file=map_of(tmp_path, rule), **options)


EXECUTE = """
import pickle, sys
from reshard.writer.save import execute
with open(sys.argv[1], "rb") as file:
    execute(pickle.load(file))
"""


def normalised(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def read(ckpt, path):
    return ckpt[path].view().read().result()


def test_the_function_is_called_once_a_leaf_whatever_the_mesh(project, tmp_path):
    _, params = project
    ckpt = converted(tmp_path)
    assert "functions" in sys.modules and sys.modules["functions"].CALLS == []
    told = "`functions:normalised` makes the values of codes/value, a whole leaf at a time"
    assert ckpt.notes[0] == told
    split = reshard.to_mesh(ckpt, "a=4", specs=[("codes", [None, None]), ("", [])])
    planned = reshard.save(split, tmp_path / "out", max_memory="1MiB", chunks=64)
    assert sys.modules["functions"].CALLS == ["float32"]
    assert planned.peak_memory >= 4 * 4 * 60
    out = reshard.open(tmp_path / "out")
    assert out["codes/value"].chunk_shape != SHAPE
    np.testing.assert_array_equal(read(out, "codes/value"), normalised(params["codes"]))
    np.testing.assert_array_equal(read(out, "out/kernel/value"), params["out"]["kernel"])
    assert reshard.verify(tmp_path / "out").ok
    assert reshard.digest(tmp_path / "out") == reshard.digest(ckpt)
    assert reshard.diff(ckpt, tmp_path / "out", values=True).equal
    restored = reshard.restore(ckpt, Codebook(nnx.Rngs(0)))
    np.testing.assert_array_equal(restored.codes[...], normalised(params["codes"]))
    plan = reshard.plan(split, tmp_path / "again", max_memory="1MiB", chunks=64)
    assert job_token(pickle.loads(pickle.dumps(plan)), True) == job_token(plan, True)


@pytest.mark.usefixtures("forked")
def test_a_function_of_a_file_is_loaded_again_in_a_fresh_process(project, tmp_path):
    """And in one where the file is gone, that is said."""
    (tmp_path / "lib").mkdir()
    file = tmp_path / "lib" / "elsewhere.py"
    file.write_text("def twice(values):\n    return 2 * values\n")
    rule = f"apply = '{os.path.relpath(file)}:twice'"
    ckpt = converted(tmp_path, rule)
    (tmp_path / "plan").write_bytes(pickle.dumps(reshard.plan(ckpt, tmp_path / "out")))
    command = [sys.executable, "-c", EXECUTE, str(tmp_path / "plan")]
    subprocess.run(command, check=True, cwd=tmp_path)
    made = read(reshard.open(tmp_path / "out"), "codes/value")
    np.testing.assert_array_equal(made, 2 * project[1]["codes"])
    shutil.rmtree(file.parent)
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    told = f"reshard.errors.ReshardError: apply {file}:twice: there is no such file"
    assert ran.stderr.splitlines()[-1] == told


LAZY = """
import sys
import threading

ENTERED, GO, paths = threading.Event(), threading.Event(), [[*sys.path]]


def slow(values):
    ENTERED.set()
    assert GO.wait(60)
    from beside import FACTOR

    paths.append([*sys.path])
    return FACTOR * values


def quick(values):
    paths.append([*sys.path])
    return -values
"""


@pytest.fixture
def lazy(project, tmp_path):
    """What converts by a function of a file, which imports a module beside it when it is called."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "lazy.py").write_text(LAZY)
    (folder / "beside.py").write_text("FACTOR = 3\n")

    path = os.path.relpath(folder / "lazy.py")
    yield lambda function: converted(tmp_path, f"apply = '{path}:{function}'")
    for name in ("lazy", "beside"):
        sys.modules.pop(name, None)


def test_the_path_of_modules_is_as_it_was_after_every_call(lazy, project, tmp_path):
    before, folder = [*sys.path], str(tmp_path / "lib")
    ckpts = [lazy("slow"), lazy("slow"), lazy("quick")]
    assert sys.path == before
    sys.modules["lazy"].GO.set()
    reshard.save(ckpts[0], tmp_path / "out")
    for ckpt in ckpts[1:]:
        read(ckpt, "codes/value")
    assert sys.path == before
    made = read(reshard.open(tmp_path / "out"), "codes/value")
    np.testing.assert_array_equal(made, 3 * project[1]["codes"])
    assert sys.modules["lazy"].paths == [[folder, *before]] * 4


def test_a_folder_that_is_first_on_the_path_stays_there(lazy, tmp_path):
    sys.path.insert(0, str(tmp_path / "lib"))
    before = [*sys.path]
    read(lazy("quick"), "codes/value")
    assert sys.path == before
    assert sys.modules["lazy"].paths == [[before[0], *before]] * 2


def test_a_function_finds_its_modules_after_another_was_loaded_from_its_folder(lazy, project):
    before, ckpt = [*sys.path], lazy("slow")
    module = sys.modules["lazy"]
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(read, ckpt, "codes/value")
        try:
            assert module.ENTERED.wait(60)
            lazy("quick")
        finally:
            module.GO.set()
        np.testing.assert_array_equal(made.result(), 3 * project[1]["codes"])
    assert sys.path == before


def test_what_it_makes_may_have_another_shape_and_dtype(project, tmp_path):
    """And another order of bytes, which is no other dtype."""
    _, params = project
    rule = "apply = { function = 'functions:halves', shape = [12, 4], dtype = 'float16' }\n"
    rule += "transpose = [1, 0]"
    out = converted(tmp_path, rule, lambda: Codebook(nnx.Rngs(0), (4, 12), jnp.float16))
    expected = params["codes"][:, :4].astype("f2").T
    np.testing.assert_array_equal(read(out, "codes/value"), expected)
    assert read(out, "codes/value")[1:3].tobytes() == expected[1:3].tobytes()
    swapped = read(converted(tmp_path, "apply = 'functions:big_endian'"), "codes/value")
    np.testing.assert_array_equal(swapped, 2 * params["codes"], strict=True)


def test_what_it_makes_must_be_what_the_model_has(tmp_path):
    error = refused(converted, tmp_path, model=in_bfloat16)
    assert error.problems == ("params/codes -> codes: dtype float32, the model has bfloat16",)
    assert error.hints == ()
    said = "apply = { function = 'functions:normalised', dtype = 'bfloat16' }"
    ckpt = converted(tmp_path, said, in_bfloat16)
    told = str(refused(reshard.save, ckpt, tmp_path / "out", of=reshard.ReshardError))
    made = "returned float32[12, 5] for float32[12, 5], expected bfloat16[12, 5]"
    assert f"`functions:normalised` {made}" in told
    assert not (tmp_path / "out").exists()


def test_it_is_given_what_was_cast(project, tmp_path):
    _, params = project
    cast = reshard.cast(reshard.open("linen"), "bfloat16", "params/codes")
    ckpt = converted(tmp_path, model=in_bfloat16, source=cast)
    found = read(ckpt, "codes/value")
    assert sys.modules["functions"].CALLS[-1] == "bfloat16"
    given = params["codes"].astype(ml_dtypes.bfloat16)
    norm = np.linalg.norm(given.astype("f4"), axis=-1, keepdims=True)
    assert found.tobytes() == (given / norm.astype(ml_dtypes.bfloat16)).tobytes()


def test_optimizer_state_does_not_follow_through_a_function(project, tmp_path):
    adam = optax.adam(1e-3)

    def training():
        model = Codebook(nnx.Rngs(0))
        return {"model": model, "optimizer": nnx.Optimizer(model, adam, wrt=nnx.Param)}

    error = refused(converted, tmp_path, model=training, source="trained")
    assert [problem for problem in error.problems if "functions" in problem] == [
        f"opt_state/0/{name}/codes: `functions:normalised` changes its parameter, and does not "
        "apply to optimizer state"
        for name in ("mu", "nu")
    ]
    moments = "opt_state/0/*/codes"
    trained = {"model": training, "source": "trained"}
    ckpt = converted(tmp_path, **trained, drop=moments, init=f"optimizer/{moments}")
    assert not read(ckpt, "optimizer/opt_state/0/mu/codes/value").any()
    np.testing.assert_array_equal(read(ckpt, "model/codes/value"), normalised(project[1]["codes"]))


def test_a_checkpoint_tells_of_the_function_and_never_has_it_run(project, tmp_path):
    file = map_of(tmp_path, NORMALISED)
    ckpt = reshard.to_nnx("linen", Codebook, map_file=file)
    reshard.save(ckpt, tmp_path / "out")
    metadata = reshard.open(tmp_path / "out").source.metadata["custom_metadata"]
    assert {"function": "functions:normalised"} in [
        step.get("Apply") for step in metadata["reshard.linen"]["route"]["steps"]
    ]
    del sys.modules["functions"]
    told = str(refused(reshard.to_linen, tmp_path / "out"))
    assert "was made by a function, 'func" in told
    status, _, err = in_process.command(["verify", str(tmp_path / "out"), "--against", "linen"])
    assert status == 2 and "codes/value was made by a function, 'func" in err
    assert "functions" not in sys.modules
    with file.open("a") as more:
        more.write("[[rule]]\nfrom = '^params/out/'\nto = 'out/'\n")
    words = ["verify", str(tmp_path / "out"), "--against", "linen", "--map", str(file)]
    assert in_process.command(words)[0] == 0
    assert "functions" in sys.modules
    sys.modules["functions"].normalised.__globals__["np"] = None  # it is called
    assert in_process.command(words)[0] != 0


def test_a_job_goes_on_with_the_function_that_it_began_with_alone(project, tmp_path):
    """Whatever a function rests on may have changed: its source tells only a part of that."""
    file = map_of(tmp_path, NORMALISED)
    once, again = (reshard.to_nnx("linen", Codebook, map_file=file) for _ in range(2))
    one, same, other = (
        job_token(reshard.plan(ckpt, tmp_path / "out"), True) for ckpt in (once, once, again)
    )
    assert one == same != other


def test_shares_by_two_versions_of_a_function_are_of_two_jobs(project, tmp_path):
    file = tmp_path / "doubling.py"
    rule = map_of(tmp_path, f"apply = '{file}:twice'")

    def token(factor):
        file.write_text(f"def twice(values):\n    return {factor} * values\n")
        ckpt = reshard.to_nnx("linen", Codebook, map_file=rule)
        return job_token(reshard.plan(ckpt, tmp_path / "out"), False)

    assert token(2) == token(2) != token(3)


def test_the_whole_leaf_is_counted_before_and_after(tmp_path):
    plain = reshard.to_nnx("linen", Codebook)
    ckpt = converted(tmp_path)
    costs = [decoded_together([c["codes/value"]]) for c in (plain, ckpt)]
    assert costs[1].nbytes - costs[0].nbytes == 2 * (240 + 240)
    assert costs[1].elements == costs[0].elements


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("functions:gone", "apply functions:gone: it cannot be imported; module 'functions' has"),
        ("nowhere:f", "apply nowhere:f: it cannot be imported; No module named 'nowhere'"),
        ("functions", "apply functions: this name does not have the form `package.module:"),
        ("functions:NUMBER", "`apply`: functions:NUMBER is not a function"),
    ],
)
def test_functions_that_there_are_not(tmp_path, function, problem):
    error = refused(converted, tmp_path, f"apply = '{function}'", of=reshard.ArgumentError)
    (found,) = error.problems
    assert found.startswith(f"rule 1, `^params/codes$`: {problem}")


def test_a_function_that_fails_leaves_nothing(tmp_path):
    ckpt = converted(tmp_path, "apply = 'functions:fails'")
    told = str(refused(reshard.save, ckpt, tmp_path / "out", of=reshard.ReshardError))
    assert "the function `functions:fails` failed on float32[12, 5]" in told
    assert list(tmp_path.glob("out*")) == []


def linen():
    dense = {"kernel": jnp.ones((3, 4)), "bias": jnp.ones(4)}
    return {"params": {"codes": jnp.ones(SHAPE), "out": dense}}


def test_a_map_to_linen_has_functions_too_and_none_is_run_backwards(project, tmp_path):
    reshard.save(reshard.to_nnx("linen", Codebook), tmp_path / "nnx")
    file = tmp_path / "map.toml"
    rule = f"from = '^codes$'\nto = 'params/codes'\n{NORMALISED}\n"
    file.write_text(f"to = 'linen'\n[[rule]]\n{rule}")
    ckpt = reshard.to_linen(tmp_path / "nnx", linen, map_file=file)
    np.testing.assert_array_equal(read(ckpt, "params/codes"), normalised(project[1]["codes"]))
    error = refused(reshard.to_nnx, "linen", Codebook, map_file=file)
    assert "the function `functions:normalised` has no inverse" in str(error)
    file = map_of(tmp_path, NORMALISED, 'to = "nnx"')
    for model in ((), (linen,)):
        error = refused(reshard.to_linen, tmp_path / "nnx", *model, map_file=file)
        assert "the function `functions:normalised` has no inverse" in str(error)


def test_the_whole_map_names_the_function(tmp_path):
    made = conversion("linen", "nnx", Codebook, map_file=map_of(tmp_path, NORMALISED))
    (row,) = (row for row in made.map.rows() if row.operation)
    assert str(row) == "params/codes -> codes  apply functions:normalised"
    again = tmp_path / "again.toml"
    again.write_text(made.map_text())
    assert NORMALISED in made.map_text()
    assert conversion("linen", "nnx", Codebook, map_file=again).map.values == made.map.values
