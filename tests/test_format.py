"""The format of the destination as an argument: as Orbax reads it, and what is decoded for it."""

import collections
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from click.testing import CliRunner
from jax.sharding import NamedSharding, PartitionSpec
from layouts import READERS
from sampling import few, some

import reshard
from reshard.cli import command
from reshard.cli.output import as_flags
from reshard.writer import planning

STORES = {
    "standalone": {"format": "zarr2", "ocdbt": True},
    "zarr2-files": {"format": "zarr2", "ocdbt": False},
    "zarr3-ocdbt": {"format": "zarr3", "ocdbt": True},
    "zarr3-files": {"format": "zarr3", "ocdbt": False},
}
WORDS = {
    layout: f"{'OCDBT' if store['ocdbt'] else 'plain files'}, {store['format']}"
    for layout, store in STORES.items()
}
# By default each layout is a source and a target, and those of zarr2 are both to one another.
PAIRS = few(
    [(one, other) for one in STORES for other in STORES if one != other],
    *zip(STORES, [*STORES][1:] + [*STORES][:1], strict=True),
    ("zarr2-files", "standalone"),
)


def chunks_of(path):
    """Path and place in the grid -> stored bytes of each chunk."""
    return {
        (h.path, h.data.encoding.chunk_index(key, len(h.shape))): store.read(key).result().value
        for h in reshard.open(path).arrays
        for store in [h.data.store.kvstore(h.data.name)]
        for key in h.data.chunks
    }


def restored(path):
    return jax.tree.map(np.asarray, layouts.load_pytree(path))


def run(*arguments):
    result = CliRunner().invoke(command, list(map(str, arguments)))
    error = result.exception
    return result.output if error is None else error.render(None, as_flags)


@pytest.fixture
def assert_read(saved, read_by_orbax):
    """Orbax's readers read what the source has, with and without a target: in the default run one
    of them, another one for each format."""

    def check(layout, out, target, on=None):
        source = saved(layout)
        first = [*STORES].index(target) % len(source.readers)
        for reader in some([*source.readers[first:], *source.readers[:first]]):
            expected = read_by_orbax(layout, reader)
            layouts.assert_same_tree(READERS[reader](source, out), expected)
            if reader in source.target_readers:
                abstract = layouts.abstract(source.tree, on or source.mesh)
                got = READERS[reader](source, out, abstract)
                layouts.assert_same_tree(got, layouts.plain_scalars(source.tree))

    return check


@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "target"), PAIRS)
def test_another_store_is_read_by_orbax(saved, assert_read, tmp_path, layout, target):
    """Chunks of the same bytes are not decoded: zarr v2 and v3 differ in names and metadata. Orbax
    has chunks of zarr v3 be shards, and they stay so; those of zarr v2 become no shards."""
    source, out = saved(layout), tmp_path / "out"
    before = layouts.hashes(source.path)
    ckpt = reshard.open(source.path)
    plan = reshard.save(ckpt, out, digest=True, **STORES[target])
    assert layouts.hashes(source.path) == before
    note = f"the arrays are stored as {WORDS[target]}, not {WORDS[layout]}"
    assert note in plan.notes
    written = reshard.open(out)
    assert written.source.format == WORDS[target]
    document = json.loads((out / "_METADATA").read_text())
    flags = "OCDBT" in WORDS[target], "zarr3" in target
    assert (document["use_ocdbt"], document["use_zarr3"]) == flags
    assert reshard.diff(source.path, out, values=True).equal
    assert reshard.verify(out).ok
    assert_read(layout, out, target)
    for array in written.arrays:
        assert array.chunk_shape == ckpt[array.path].chunk_shape
    same = "zarr3" not in layout or "zarr3" in target
    assert [array.verbatim for array in plan.arrays] == [same] * len(plan.arrays)
    one, other = chunks_of(source.path), chunks_of(out)
    assert one.keys() == other.keys()
    assert (one == other) == same
    if same:
        sizes = collections.Counter()
        for (path, _), data in one.items():
            sizes[path] += len(data)
        linked = "ocdbt" in target and layout == "standalone"
        assert linked == (plan.shared_bytes > 0)
        assert linked or {a.path: a.bytes_written for a in plan.arrays} == sizes


OTHERS = sorted(layouts.LAYOUTS.keys() - STORES.keys())
IN_ANOTHER = [*zip(OTHERS, itertools.cycle(STORES), strict=False)]
FEW = [pair for pair in IN_ANOTHER if pair[0] in ("items", "manager", "rich", "v1")]


@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "target"), few(IN_ANOTHER, *FEW))
def test_other_layouts_in_another_store(saved, assert_read, tmp_path, layout, target):
    source, out = saved(layout), tmp_path / "out"
    ckpt = reshard.open(source.path, **source.open)
    reshard.save(reshard.to_mesh(ckpt, "1x8"), out, **STORES[target])
    made = {path.name for path in (out / source.inner).iterdir()}
    assert ("manifest.ocdbt" in made) == STORES[target]["ocdbt"]
    assert reshard.open(out, **source.open).source.format == WORDS[target]
    assert_read(layout, out, target, layouts.mesh((1, 8)))


def old_tree(path):
    """What Orbax reads, on the host: the shardings are of devices that are not here."""
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        kinds = jax.tree_util.tree_map_with_path(
            lambda keys, _: str if "name" in jax.tree_util.keystr(keys) else np.ndarray, tree
        )
        arguments = jax.tree.map(lambda kind: ocp.RestoreArgs(restore_type=kind), kinds)
        return checkpointer.restore(path, restore_args=arguments)


OLD = ["orbax-0.4.4/default", "orbax-0.4.4/ocdbt_True", "orbax-0.4.4-b/ocdbt_False"]


@pytest.mark.parametrize("target", STORES)
@pytest.mark.parametrize("old", [*OLD, "orbax-0.4.4/ocdbt_False"])
def test_what_an_older_orbax_wrote(data, tmp_path, old, target):
    """The last has a database that was never merged, which Orbax cannot read."""
    path, out = data / old, tmp_path / "out"
    plan = reshard.save(reshard.open(path), out, **STORES[target])
    assert all(array.verbatim for array in plan.arrays)
    assert reshard.diff(path, out, values=True).equal
    if old in OLD:
        layouts.assert_same_tree(old_tree(out), old_tree(path))


@pytest.mark.parametrize("link", [True, False])
def test_another_database_around_the_same_chunks(tmp_path, link):
    """Of data files of another size: values of up to 1 KiB are in none. Nodes are in others."""
    on = layouts.mesh((2, 4))
    specs = {f"w{i}": PartitionSpec("data", "model") for i in range(4)}
    path, out = tmp_path / "saved", tmp_path / "out"
    layouts.save_pytree(path, layouts.small_tree(on, specs, (64, 256)))
    plan = reshard.save(reshard.open(path), out, file_size="32KiB", link=link)
    assert all(array.verbatim for array in plan.arrays) and not plan.shared_bytes
    assert plan.bytes_written >= 4 * 64 * 256 * 4
    assert chunks_of(out) == chunks_of(path)
    sizes = [file.stat().st_size for file in out.glob("ocdbt.process_*/d/*")]
    assert len(sizes) > 4 and max(sizes) < 64 << 10
    assert not layouts.data_inodes(out).keys() & layouts.data_inodes(path).keys()
    layouts.assert_same_tree(restored(out), restored(path))


def test_every_argument_at_once(saved, tmp_path):
    source, out = saved("items"), tmp_path / "out"
    ckpt = reshard.open(source.path, **source.open)
    ckpt = reshard.cast(reshard.to_mesh(ckpt, "1x8"), "bfloat16", where="params/**")
    ckpt = reshard.rename(ckpt, [("^params/", "weights/")])
    arguments = {"format": "zarr3", "ocdbt": True, "codec": "blosc", "file_size": "64KiB"}
    plan = reshard.save(ckpt, out, max_memory="1MiB", verify=True, **arguments)
    assert plan.arrays == reshard.plan(ckpt, max_memory="1MiB", **arguments).arrays
    assert reshard.diff(ckpt, reshard.open(out, **source.open), values=True).equal
    assert layouts.hashes(out / str(layouts.STEPS[0]) / "array") == layouts.hashes(
        source.path / str(layouts.STEPS[0]) / "array"
    )


@pytest.mark.parametrize("target", STORES)
def test_stacked_layers_in_another_store(tmp_path, target):
    path, out = tmp_path / "saved", tmp_path / "out"
    specs = {f"layer_{i}": PartitionSpec("data") for i in range(3)}
    tree = layouts.small_tree(layouts.mesh((2, 4)), specs, (8, 6))
    layouts.save_pytree(path, tree)
    ckpt = reshard.stack(reshard.open(path), "layer_{}", into="layers", axis=1)
    plan = reshard.save(ckpt, out, chunks="keep", **STORES[target])
    assert all(array.verbatim for array in plan.arrays)
    expected = np.stack([np.asarray(tree[name]) for name in specs], axis=1)
    layouts.assert_same_tree(restored(out), {"layers": expected})


# Codecs.

CODECS = {
    "none": [],
    "zstd": [("zstd", {"level": 1})],
    "zstd:9": [("zstd", {"level": 9})],
    "zstd:-5": [("zstd", {"level": -5})],
    "blosc": [("blosc", {"cname": "lz4", "clevel": 5})],
    "blosc:zstd": [("blosc", {"cname": "zstd", "clevel": 5})],
    "blosc:3": [("blosc", {"cname": "lz4", "clevel": 3})],
    "blosc:lz4hc:9": [("blosc", {"cname": "lz4hc", "clevel": 9})],
}


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("target", STORES)
@pytest.mark.parametrize("layout", ["standalone", "zarr3-ocdbt"])
def test_codecs(saved, read_by_orbax, tmp_path, layout, target, codec):
    source, out = saved(layout), tmp_path / "out"
    ckpt = reshard.open(source.path)
    reshard.save(ckpt, out, codec=codec, digest=True, **STORES[target])
    expected = CODECS[codec]
    if codec == "zstd" and layout == "zarr3-ocdbt":
        expected = [("zstd", {"level": 3})]  # the source's
    texts = {text for array in reshard.open(out).arrays for text in array.data.encoding.compressors}
    found = [
        (c["name"], {key: c["configuration"][key] for key in expected[0][1]})
        for c in map(json.loads, texts)
    ]
    assert all(one == expected[0] for one in found) and bool(found) == bool(expected)
    assert reshard.digest(out) == reshard.digest(source.path)
    assert reshard.verify(out).ok
    layouts.assert_same_tree(layouts.read_pytree(source, out), read_by_orbax(layout, "pytree"))


def random_and_zero(path, codec="zstd"):
    on = layouts.mesh((2, 4))
    sharding = NamedSharding(on, PartitionSpec("data", "model"))
    rng = np.random.default_rng(0)
    tree = {
        "zero": np.zeros((256, 512), np.float32),
        "some": rng.integers(0, 9, (256, 512)).astype(np.float32),
        "any": layouts.random_array(rng, (256, 512)),
        "halves": rng.standard_normal((512, 512)).astype(jnp.bfloat16),
    }
    layouts.save_pytree(path, jax.device_put(tree, sharding))
    return {name: values.nbytes for name, values in tree.items()}


@pytest.mark.parametrize("codec", ["none", "zstd:12", "blosc:zstd:9"])
def test_the_plan_estimates_at_most_what_a_codec_gives(tmp_path, codec):
    path, out = tmp_path / "saved", tmp_path / "out"
    whole = random_and_zero(path)
    plan = reshard.save(reshard.open(path), out, codec=codec)
    note = f"rewritten chunks are compressed with {codec}; their sizes are estimates"
    assert plan.notes == (note,)
    found = {array.path[-1]: sum(array.stored_sizes()) for array in reshard.open(out).arrays}
    for array in plan.arrays:
        name = array.path[-1]
        assert found[name] <= 1.2 * array.bytes_written + 1000 <= 1.3 * whole[name]
    assert found == whole if codec == "none" else found["some"] < whole["some"] / 4


def test_a_chunk_larger_than_blosc_can_take(saved, monkeypatch):
    monkeypatch.setattr(planning, "_MAX_BLOSC", 3000)
    ckpt = reshard.open(saved("standalone").path)
    plan = reshard.plan(ckpt, codec="blosc")
    assert plan.problems == (
        "params/embed: blosc takes chunks of at most 3000 bytes, but one of [32, 24] has 3072",
    )
    assert plan.hints == ('chunks="1GiB"',)
    assert not reshard.plan(ckpt, codec="blosc", chunks=3000).problems


def test_chunks_of_blosc_that_say_they_are_larger(tmp_path):
    """TensorStore would take memory for what they say."""
    path = tmp_path / "saved"
    random_and_zero(tmp_path / "zstd")
    reshard.save(reshard.open(tmp_path / "zstd"), path, codec="blosc", ocdbt=False)
    chunk = path / "some" / "0.1"
    data = bytearray(chunk.read_bytes())
    whole = int.from_bytes(data[4:8], "little")
    data[4:8] = (1 << 31).to_bytes(4, "little")
    chunk.write_bytes(data)
    text = f"the chunk `0.1` of `some` declares {1 << 31} decoded bytes, but a chunk has {whole}"
    with pytest.raises(reshard.CorruptCheckpointError, match=text):
        reshard.save(reshard.open(path), tmp_path / "out", codec="zstd")
    assert not (tmp_path / "out").exists()
    found = reshard.verify(path)
    assert [text in line for line in found.problems] == [True]


def stored_so(path, name, document, values, absent=()):
    """Has an array of plain files be stored with another document, without some of its chunks."""
    shutil.rmtree(path / name)
    spec = {"driver": "zarr" if document["zarr_format"] == 2 else "zarr3"}
    spec |= {"kvstore": f"file://{path / name}/", "metadata": document}
    spec["store_data_equal_to_fill_value"] = True
    ts.open(spec, create=True).result().write(values).result()
    for key in absent:
        (path / name / key).unlink()


def zarr2(dtype, **entries):
    compressor = {"id": "zstd", "level": 1}
    chunks = {"shape": [8, 6], "chunks": [4, 6], "dtype": dtype, "compressor": compressor}
    return {"zarr_format": 2, **chunks, "fill_value": None, "order": "C", **entries}


def zarr3(dtype, *codecs, **entries):
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 6]}}
    chunks = {"shape": [8, 6], "chunk_grid": grid, "chunk_key_encoding": {"name": "default"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "data_type": dtype,
        "fill_value": 0,
        **chunks,
        "codecs": [*codecs, {"name": "zstd", "configuration": {"level": 1}}],
        **entries,
    }


LITTLE, BIG = (
    {"name": "bytes", "configuration": {"endian": endian}} for endian in ("little", "big")
)
TURNED = {"name": "transpose", "configuration": {"order": [1, 0]}}
GZIP = {"name": "gzip", "configuration": {"level": 1}}
DOTS = {"name": "v2", "configuration": {"separator": "."}}
# Name -> zarr document, chunks that are absent, whether its chunks are the same in the other zarr.
OTHERS = {
    "zarr2-files": {
        "turned": (zarr2("<f4", order="F"), (), True),
        "filled": (zarr2("<f4", fill_value=7.5), ("1.0",), True),
        "nan": (zarr2("<f4", fill_value="NaN"), ("0.0",), True),
        "empty": (zarr2("bfloat16"), ("0.0", "1.0"), True),
        "big": (zarr2(">f4"), (), False),
        "slashes": (zarr2("<i2", dimension_separator="/"), (), True),
        "gzip": (zarr2("|b1", compressor={"id": "gzip", "level": 3}), (), True),
        "blosc": (zarr2("<c8", compressor={"id": "blosc", "cname": "zstd"}), (), True),
        "plain": (zarr2("int4", compressor=None), (), True),
    },
    "zarr3-files": {
        "turned": (zarr3("float32", TURNED, LITTLE), (), True),
        "filled": (zarr3("float32", LITTLE, fill_value=7.5), ("c/1/0",), True),
        "nan": (zarr3("float32", LITTLE, fill_value="NaN"), ("c/0/0",), True),
        "empty": (zarr3("bfloat16", LITTLE), ("c/0/0", "c/1/0"), True),
        "big": (zarr3("bfloat16", BIG), (), False),
        "dots": (zarr3("int16", LITTLE, chunk_key_encoding=DOTS), (), True),
        "summed": (zarr3("float32", LITTLE, {"name": "crc32c"}), (), False),
        "named": (zarr3("float32", LITTLE, dimension_names=["a", "b"]), (), True),
    },
}


@pytest.mark.parametrize("layout", OTHERS)
@pytest.mark.parametrize("ocdbt", [True, False])
def test_what_other_writers_store(tmp_path, layout, ocdbt):
    path, out = tmp_path / "saved", tmp_path / "out"
    others, new = OTHERS[layout], {"zarr2-files": "zarr3", "zarr3-files": "zarr2"}[layout]
    dtypes = {
        name: jnp.dtype(document.get("data_type", document.get("dtype", "").strip("<>|")) or "f4")
        for name, (document, _, _) in others.items()
    }
    rng = np.random.default_rng(0)
    tree = {name: layouts.random_array(rng, (8, 6), dtype) for name, dtype in dtypes.items()}
    layouts.save_pytree(
        path, jax.tree.map(jnp.asarray, tree), use_ocdbt=False, use_zarr3=new == "zarr2"
    )
    layouts.edit_document(path / "_METADATA", store_array_data_equal_to_fill_value=False)
    for name, (document, absent, _) in others.items():
        stored_so(path, name, document, tree[name], absent)
    expected = restored(path)
    assert (expected["filled"][4:] == 7.5).all() and np.isnan(expected["nan"][:4]).all()
    plan = reshard.save(reshard.open(path), out, format=new, ocdbt=ocdbt, digest=True)
    assert {a.path[0]: a.verbatim for a in plan.arrays} == {
        name: same for name, (*_, same) in others.items()
    }
    absent = sum(len(keys) for _, keys, _ in others.values())
    assert len(chunks_of(out)) == 2 * len(others) - absent
    layouts.assert_same_tree(restored(out), expected)
    back = tmp_path / "back"
    reshard.save(reshard.open(out), back, format="zarr2" if new == "zarr3" else "zarr3")
    layouts.assert_same_tree(restored(back), expected)
    assert reshard.digest(back) == reshard.digest(out) == reshard.digest(path)


@pytest.mark.parametrize("ocdbt", [True, False])
def test_arrays_in_fortran_order_of_any_rank(tmp_path, ocdbt):
    """With less than two axes, TensorStore takes this order where it is stored, and only there."""
    shapes = {"s": (), "v": (7,), "m": (6, 8), "c": (4, 6, 5)}
    tree = {name: layouts.random(shape) for name, shape in shapes.items()}
    path = layouts.save_pytree(tmp_path / "saved", tree, use_ocdbt=ocdbt)
    store = layouts.database(path) if ocdbt else ts.KvStore.open(f"file://{path}/").result()
    for name, shape in shapes.items():
        below = store / f"{name}/"
        document = json.loads(below[".zarray"]) | {"chunks": [min(size, 4) for size in shape]}
        below.delete_range(ts.KvStore.KeyRange("", "~")).result()
        turned = document | {"order": "F"}
        made = turned if len(shape) > 1 else document
        ts.open({"driver": "zarr", "metadata": made}, kvstore=below, create=True).result()[...] = (
            tree[name]
        )
        below.write(".zarray", json.dumps(turned).encode()).result()
    expected = layouts.load_pytree(path)
    layouts.assert_same_tree(expected, tree)
    ckpt = reshard.open(path)
    specs = [(name, ("data",)) if name in "mc" else (name, ()) for name in shapes]
    for number, (made, options) in enumerate(
        [(ckpt, {}), (ckpt, {"format": "zarr3"}), (reshard.to_mesh(ckpt, "data=2", specs), {})]
    ):
        out = tmp_path / f"out{number}"
        reshard.save(made, out, **options)
        found = jax.tree.map(np.asarray, layouts.load_pytree(out))
        assert {n: x.tobytes() for n, x in found.items()} == {
            n: x.tobytes() for n, x in tree.items()
        }


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (
            zarr3("float32", LITTLE, fill_value="0x7fc00001"),
            'cannot express its fill value "0x7fc00001"',
        ),
        (
            zarr2("<f4", compressor={"id": "bz2", "level": 1}),
            "does not support its compression: bz2",
        ),
        (zarr3("float32", LITTLE, GZIP), "does not support its compression: gzip, zstd"),
    ],
)
def test_what_the_other_zarr_has_not(tmp_path, document, text):
    path, out = tmp_path / "saved", tmp_path / "out"
    values = layouts.random_array(np.random.default_rng(0), (8, 6))
    is_new = document["zarr_format"] == 3
    layouts.save_pytree(path, {"w": jnp.asarray(values)}, use_ocdbt=False, use_zarr3=is_new)
    stored_so(path, "w", document, values)
    new = "zarr2" if is_new else "zarr3"
    told = f"^some arrays cannot be stored as plain files, {new}\n  w: {new} {text}"
    with pytest.raises(reshard.ArgumentError, match=told):
        reshard.save(reshard.open(path), out, format=new)
    assert not out.exists()
    if "fill" not in text:
        reshard.save(reshard.open(path), out, format=new, codec="zstd")
        layouts.assert_same_tree(restored(out), {"w": values})


def test_names_that_are_none_of_files(tmp_path):
    path, out = tmp_path / "saved", tmp_path / "out"
    tree = {"a": np.ones(3), "x" * 300: np.ones(3), "_METADATA": {"b": np.ones(2)}}
    layouts.save_pytree(path, {**tree, "notes": np.ones(4)})
    (path / "notes").write_text("rain")
    with pytest.raises(reshard.ArgumentError) as caught:
        reshard.save(reshard.open(path), out, ocdbt=False)
    assert caught.value.summary == "some arrays cannot be stored as plain files"
    assert sorted(caught.value.problems) == [
        "notes: `notes` is another file of the checkpoint",
        f"{'x' * 80}: its name is longer than a file name, which has at most 255 bytes",
    ]
    assert not out.exists()


WRONG = [
    ("format", "zarr4", "not a format", "zarr2"),
    *(("codec", f"zstd:{level}", "not a codec", "zstd:9") for level in ("", "99")),
    *(("codec", f"blosc:{rest}", "not a codec", "blosc:lz4:5") for rest in ("foo", "lz4:10")),
    *(("codec", name, "not a codec", "none") for name in ("gzip", "")),
    *(("file_size", size, "not a file size", "256MiB") for size in ("0", "many", "-1")),
]


@pytest.mark.parametrize(("argument", "value", "what", "hint"), WRONG)
def test_wrong_values(saved, tmp_path, argument, value, what, hint):
    path, out = saved("standalone").path, tmp_path / "out"
    for job in (reshard.plan, reshard.save):
        with pytest.raises(reshard.ArgumentError, match=f"^`{value}` is {what}\n"):
            job(reshard.open(path), out, **{argument: value})
    flag = f"--{argument.replace('_', '-')}"
    said = run("ckpt", path, out, f"{flag}={value}")
    assert said.startswith(f"`{value}` is {what}\n") and f"\nhint: {flag} {hint}" in said
    assert not out.exists()


def test_plain_files_have_no_size(saved, tmp_path):
    path, out = saved("zarr2-files").path, tmp_path / "out"
    text = "file_size does not apply to plain files: each file holds one chunk\n\n"
    text += "hint: --file-size requires --ocdbt"
    assert run("ckpt", path, out, "--file-size", "1GiB") == text
    for wrong in ("yes", 1):
        with pytest.raises(reshard.ArgumentError, match=f"ocdbt must be .*{wrong}"):
            reshard.plan(reshard.open(path), ocdbt=wrong)


def test_on_the_command_line(saved, assert_read, tmp_path):
    source, out, back = saved("manager"), tmp_path / "out", tmp_path / "back"
    flags = ["--format", "zarr3", "--no-ocdbt", "--codec", "blosc:zstd:3"]
    shown = run("ckpt", source.path, out, *flags, "--dry-run")
    assert "the arrays are stored as plain files, zarr3, not OCDBT, zarr2" in shown
    assert not out.exists()
    run("ckpt", source.path, out, *flags, "--verify")
    assert reshard.open(out).source.format == "plain files, zarr3"
    flags = ["--ocdbt", "--format=zarr2", "--codec=zstd", "--file-size=1MiB"]
    run("ckpt", out, back, *flags)
    assert reshard.open(back).source.format == "OCDBT, zarr2"
    assert_read("manager", back, target="standalone")
