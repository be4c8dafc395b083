"""Trees of one leaf: an array or a number that Orbax saves without a name."""

import functools
import json

import jax
import jax.numpy as jnp
import layouts
import orbax.checkpoint as ocp
import pytest
import v1
from in_process import reshard_in, shown
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import bits, refused
from releases import older

import reshard
from reshard.storage.location import parse_location

pytestmark = pytest.mark.skipif(
    older("orbax-checkpoint", "0.12"), reason="an older Orbax saves no tree of one leaf"
)

LEAVES = {
    "sharded": lambda: layouts.put(layouts.random((6, 40)), "data", "model"),
    "replicated": lambda: layouts.put(layouts.random((16, 8), "bfloat16"), ("data", "model")),
    "host": lambda: layouts.random((3, 5)),
    "key": lambda: layouts.put(jax.random.split(jax.random.key(3), 8), "data"),
    "number": lambda: 7,
    "scalar": lambda: jnp.float32(2.5),
}
FORMS = {"zarr2": {}, "zarr3": {"use_zarr3": True}}


def load(path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


@pytest.mark.every_combination
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LEAVES)
def test_orbax_restores_the_copy(tmp_path, name, form):
    leaf = LEAVES[name]()
    path = layouts.save_pytree(tmp_path / "saved", leaf, **FORMS[form])
    ckpt = reshard.open(path)
    assert [*ckpt] == [()] and ckpt["."] is ckpt[()]
    other = {"zarr2": "zarr3", "zarr3": "zarr2"}[form]
    jobs = {"copy": {}, "other": {"format": other}, "codec": {"codec": "none", "workers": 2}}
    for job, options in jobs.items():
        out = tmp_path / job
        reshard.save(ckpt, out, verify=True, digest=True, **options)
        found = load(out)
        assert bits(found) == bits(leaf)
        assert getattr(found, "sharding", None) == getattr(leaf, "sharding", None)
        assert not reshard.verify(out).problems
        assert reshard.diff(ckpt, out, values=True).equal
        assert reshard.digest(out) == reshard.digest(ckpt)
        assert {*reshard.digest(out)} == {()}
    reshard.save(reshard.rename(ckpt, [(r"^\.$", "params/w")]), tmp_path / "named")
    named = load(tmp_path / "named")
    assert bits(named.pop("params").pop("w")) == bits(leaf) and not named


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["sharded", "key"])
def test_on_another_mesh_and_restored(tmp_path, name, form):
    leaf = LEAVES[name]()
    path = layouts.save_pytree(tmp_path / "saved", leaf, **FORMS[form])
    on = layouts.mesh((2, 2))
    moved = reshard.to_mesh(reshard.open(path), on, [(r"^\.$", P("model"))])
    reshard.save(moved, tmp_path / "out", chunks=64)
    sharding = NamedSharding(on, P("model"))
    for found in (
        load(tmp_path / "out"),
        reshard.restore(path, layouts.laid_out(leaf, sharding)),
        reshard.restore(tmp_path / "out", layouts.laid_out(leaf, sharding)),
        reshard.restore(moved, on),
    ):
        assert bits(found) == bits(leaf) and found.sharding == sharding
    if name == "sharded":
        cast = reshard.cast(moved, "bfloat16", where=".")
        reshard.save(cast, tmp_path / "cast")
        layouts.assert_equal_or_nan(load(tmp_path / "cast"), leaf.astype("bfloat16"))


def test_trees_of_the_v1_api(tmp_path):
    for name, leaf in {"array": LEAVES["sharded"](), "text": "größe", "number": 2.5}.items():
        v1.save(tmp_path / name, leaf)
        reshard.save(reshard.open(tmp_path / name), tmp_path / f"{name}2")
        assert bits(v1.load(tmp_path / f"{name}2")) == bits(leaf)
        assert reshard.diff(tmp_path / name, tmp_path / f"{name}2").equal


def test_globs_and_the_command_line(tmp_path):
    leaf = LEAVES["sharded"]()
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", leaf))
    for glob in (".", "**"):
        assert [*reshard.select(ckpt, glob)] == [()]
    assert refused(reshard.TreeMismatchError, reshard.select, ckpt, drop=".") == (
        "no leaf is left\n  `.` is dropped"
    )
    for glob in ("params", "*", "./w"):
        assert "no leaf matches" in refused(reshard.TreeMismatchError, reshard.select, ckpt, glob)
    assert "\n.     6x40   float32" in shown(tmp_path, "inspect", "saved")
    assert "complete" in shown(tmp_path, "doctor", "saved")
    run = reshard_in(tmp_path, "ckpt", "saved", "out", "--select", ".", "--dtype", ".=bfloat16")
    assert run[0] == 0
    layouts.assert_equal_or_nan(load(tmp_path / "out"), leaf.astype("bfloat16"))
    assert reshard_in(tmp_path, "diff", "saved", "out", "--values")[0] == 1


def test_what_needs_names_is_refused(tmp_path):
    ckpt = reshard.open(layouts.save_pytree(tmp_path / "saved", LEAVES["sharded"]()))
    (tmp_path / "map.toml").write_text("[[rule]]\nfrom = '^\\.$'\nto = 'params/w'\n")
    assert [*reshard.remap(ckpt, tmp_path / "map.toml")] == [("params", "w")]
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}
    config |= {"num_hidden_layers": 1, "intermediate_size": 12, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ready = functools.partial(reshard.remap, ckpt, "hf:auto-tunix", config=tmp_path)
    for call, text in (
        (ready, "no rule applies to ."),
        (lambda: reshard.export(ckpt, tmp_path / "out"), "`''` is not a valid name of a tensor"),
        (lambda: reshard.stack(ckpt, "layer_{}", "layer"), "no layer matches `layer_{}`"),
        (lambda: reshard.unstack(ckpt, ".", "layer_{}"), "no leaf is below `.`"),
        (lambda: reshard.to_nnx(ckpt), "the checkpoint is not a model: it holds no array, or one"),
    ):
        assert text in refused(reshard.TreeMismatchError, call)
    assert refused(reshard.ArgumentError, reshard.save, ckpt, tmp_path / "out", ocdbt=False) == (
        "some arrays cannot be stored as plain files\n"
        "  .: a tree of one array has no name for its directory\n\n"
        "hint: ocdbt=True stores them in a database"
    )


@pytest.mark.parametrize("use_zarr3", [False, True])
def test_plain_files_among_the_documents_are_refused(tmp_path, use_zarr3):
    leaf = LEAVES["sharded"]()
    path = layouts.save_pytree(tmp_path / "saved", leaf, use_ocdbt=False, use_zarr3=use_zarr3)
    assert refused(reshard.CheckpointFormatError, reshard.open, path) == (
        f"`{path}` is a single array without OCDBT: its files are among the documents, and "
        "`reshard` does not read them\n\n"
        "hint: restore it with Orbax, and save it with OCDBT or inside a dict"
    )


def test_in_a_bucket(stores, tmp_path):
    url = f"{stores.bucket('conditional')}/run"
    leaf = LEAVES["sharded"]()
    path = layouts.save_pytree(tmp_path / "saved", leaf)
    reshard.save(reshard.open(path), f"{url}/copy")
    assert reshard.diff(path, f"{url}/copy", values=True).equal
    reshard.save(reshard.open(f"{url}/copy"), tmp_path / "back", codec="none")
    assert bits(load(tmp_path / "back")) == bits(leaf)
    assert not [name for name in parse_location(f"{url}/copy").names() if name.startswith(".")]
