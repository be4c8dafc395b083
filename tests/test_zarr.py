"""zarr metadata documents, compared with TensorStore's and Orbax's."""

import itertools
import json

import jax.numpy as jnp
import layouts
import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import DTYPES, random
from sampling import examples

import reshard
from reshard.arrays import zarr
from reshard.loader.array_metadata import parse_zarr
from reshard.writer.format import _encoding

BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
ZSTD = {"name": "zstd", "configuration": {"checksum": False, "level": 1}}
CRC = {"name": "crc32c"}


def sharded(*inner, codecs=(BYTES, ZSTD)):
    """A codec of zarr v3 that cuts a chunk up."""
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": list(inner),
            "codecs": list(codecs),
            "index_codecs": [BYTES, CRC],
            "index_location": "end",
        },
    }


def zarr2(shape, chunks, **fields):
    """A document of zarr v2, as TensorStore writes it."""
    return {
        "chunks": list(chunks),
        "compressor": {"id": "zstd", "level": 1},
        "dimension_separator": ".",
        "dtype": "<f4",
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    } | fields


def zarr3(shape, chunks, *codecs, **fields):
    """A document of zarr v3, as TensorStore writes it."""
    return {
        "chunk_grid": {"configuration": {"chunk_shape": list(chunks)}, "name": "regular"},
        "chunk_key_encoding": {"name": "default"},
        "codecs": list(codecs) or [BYTES, ZSTD],
        "data_type": "float32",
        "fill_value": 0.0,
        "node_type": "array",
        "shape": list(shape),
        "zarr_format": 3,
    } | fields


class Memory:
    """Arrays in memory, by name."""

    def __init__(self):
        self.context = ts.Context()
        self.store = ts.KvStore.open("memory://", context=self.context).result()

    def open(self, document, name="x"):
        """The array of a document, as the writer opens it."""
        return ts.open(
            {
                "driver": "zarr" if document["zarr_format"] == 2 else "zarr3",
                "kvstore": f"memory://{name}/",
                "metadata": document,
                "assume_metadata": True,
                "store_data_equal_to_fill_value": True,
            },
            context=self.context,
        ).result()

    def chunks(self, name="x"):
        """Key below a name -> stored bytes."""
        keys = [key.decode() for key in self.store.list().result()]
        own = [key.removeprefix(f"{name}/") for key in keys if key.startswith(f"{name}/")]
        return {key: self.store.read(f"{name}/{key}").result().value for key in own}


def encoding(document):
    driver = "zarr" if document["zarr_format"] == 2 else "zarr3"
    return zarr.parse_encoding(parse_zarr(json.dumps(document), driver).metadata)


def remade(document, shape, chunk, dtype="float32"):
    """The document of an array that is encoded as that of another one is."""
    made = encoding(document).document(shape, chunk, jnp.dtype(dtype))
    assert b" " not in made
    return json.loads(made)


def assert_holds(document, values):
    """An array of that document takes these values and gives them back."""
    array = Memory().open(document)
    assert (array.shape, array.dtype.numpy_dtype) == (values.shape, values.dtype)
    v2 = document["zarr_format"] == 2
    grid = document["chunks"] if v2 else document["chunk_grid"]["configuration"]["chunk_shape"]
    assert list(array.chunk_layout.write_chunk.shape or ()) == list(grid)
    array.write(values).result()
    assert layouts.bits(np.asarray(array.read().result())) == layouts.bits(values)


# Other grids and shapes.


@pytest.mark.parametrize(
    ("document", "chunk", "expected"),
    [
        (zarr2((12, 8), (6, 8)), (4, 4), zarr2((12, 8), (4, 4))),
        (zarr3((12, 8), (6, 8)), (12, 4), zarr3((12, 8), (12, 4))),
        *(
            (zarr3((12, 8), outer, sharded(*inner)), chunk, zarr3((12, 8), chunk, sharded(*kept)))
            for outer, inner, chunk, kept in [
                ((6, 8), (3, 4), (6, 4), (3, 4)),  # they divide the new chunks
                ((6, 8), (3, 4), (4, 8), (4, 8)),  # they do not
                ((6, 8), (6, 8), (12, 8), (12, 8)),  # they were whole chunks
                ((6, 8), (3, 4), (3, 4), (3, 4)),
            ]
        ),
    ],
)
def test_other_chunks(document, chunk, expected):
    """And the chunks inside them, of zarr v3."""
    made = remade(document, (12, 8), chunk)
    assert made == expected
    assert_holds(made, random((12, 8)))


@pytest.mark.parametrize(
    ("shape", "chunk"), [((), ()), ((5,), (2,)), ((2, 3, 4), (1, 3, 4)), ((12, 8), (4, 4))]
)
@pytest.mark.parametrize(
    "document",
    [
        zarr2((12, 8), (6, 8)),
        zarr2((), ()),
        zarr3((12, 8), (6, 8), dimension_names=["a", "b"]),
        zarr3((12, 8), (6, 8), sharded(3, 4)),
        zarr3((12, 8), (6, 8), sharded(6, 8), dimension_names=[None, "b"]),
        zarr3((), (), sharded()),
    ],
)
def test_another_shape(document, shape, chunk):
    """Names of dimensions go, and inner chunks are whole ones."""
    other = _encoding(encoding(document), True, False, None, document["zarr_format"])
    new = json.loads(other.document(shape, chunk, np.dtype("float32")))
    expected = zarr2(shape, chunk)
    if document["zarr_format"] == 3:
        inner = "sharding_indexed" in str(document)
        expected = zarr3(shape, chunk, *([sharded(*chunk)] if inner else []))
    assert new == expected
    assert_holds(new, random(shape))


# Other dtypes.


@pytest.mark.parametrize("layout", ["standalone", "zarr3-ocdbt", "zarr3-files"])
def test_another_dtype_is_as_orbax_writes_it(saved, layout):
    """From the document of an array of any dtype to that of any other one."""
    ckpt = reshard.open(saved(layout).path)
    handles = {name: ckpt["dtypes", name] for name in DTYPES}
    for one, other in itertools.product(handles.values(), handles.values()):
        made = _encoding(one.data.encoding, False, True, None, one.data.encoding.zarr_format)
        expected = other.data.encoding.document(one.shape, one.chunk_shape, other.dtype)
        assert made.document(one.shape, one.chunk_shape, other.dtype) == expected
        same = other.data.encoding.document(other.shape, other.chunk_shape, other.dtype)
        assert same == other.data.metadata


# Whether chunks can be moved.

TRANSPOSED = {"name": "transpose", "configuration": {"order": [1, 0]}}
MOVABLE = [
    zarr2((6, 4), (3, 4)),
    zarr2((6, 4), (3, 4), compressor=None),
    zarr2((6, 4), (3, 4), dtype="bfloat16"),
    zarr2((6, 4), (3, 4), dimension_separator="/"),
    zarr2((6, 4), (3, 4), fill_value=0.0),
    zarr2((6, 4), (3, 4), compressor={"id": "zstd", "level": 2}),
    zarr3((6, 4), (3, 4)),
    zarr3((6, 4), (3, 4), BYTES),
    zarr3((6, 4), (3, 4), {"name": "bytes", "configuration": {"endian": "big"}}),
    zarr3((6, 4), (3, 4), sharded(3, 4)),
    zarr3((6, 4), (3, 4), sharded(3, 4, codecs=[BYTES])),
    zarr3((6, 4), (3, 4), data_type="uint32", fill_value=0),
    zarr3((6, 4), (3, 4), fill_value=1.0),
    zarr3(
        (6, 4), (3, 4), chunk_key_encoding={"name": "default", "configuration": {"separator": "."}}
    ),
    zarr3((6, 4), (3, 4), chunk_key_encoding={"name": "v2"}),
]
UNMOVABLE = [
    zarr2((6, 4), (3, 4), order="F"),
    zarr3((6, 4), (3, 4), sharded(3, 2)),
    zarr3((6, 4), (3, 4), TRANSPOSED, BYTES),
    zarr3((6, 4), (3, 4), sharded(3, 4, codecs=[TRANSPOSED, BYTES])),
]


def test_when_chunks_can_be_copied_verbatim():
    """Equal codecs. Keys, versions of zarr and spellings of a zero fill value may differ."""
    assert all(encoding(document).ignores_unit_axes for document in MOVABLE)
    assert not any(encoding(document).ignores_unit_axes for document in UNMOVABLE)
    same: dict = {}
    for number, document in enumerate(MOVABLE):
        same.setdefault(encoding(document).codecs, []).append(number)
    plain = [1, 7]  # without a codec, of zarr v2 and v3
    level_1 = [0, 2, 3, 4, 6, 11, 13, 14]
    assert sorted(same.values()) == [level_1, plain, [5], [8], [9], [10], [12]]


@pytest.mark.parametrize("document", MOVABLE)
def test_shape_grid_and_order_may_differ(document):
    one = encoding(document)
    other = remade(document, (2, 9), (1, 5), document.get("data_type", "float32"))
    assert encoding(other) == one
    assert encoding(dict(reversed(document.items()))) == one


@pytest.mark.parametrize("document", MOVABLE + UNMOVABLE)
def test_a_document_is_reproduced(document):
    dtype = document.get("data_type") or document["dtype"].removeprefix("<")
    again = remade(document, (6, 4), (3, 4), dtype)
    if again.get("chunk_key_encoding") != document.get("chunk_key_encoding"):
        keys = document["chunk_key_encoding"]  # what is said by leaving it out
        assert keys["configuration"] == {"separator": "/"} and keys["name"] == "default"
        again["chunk_key_encoding"] = keys
    assert again == document


# Keys.


@settings(deadline=None, max_examples=examples(60))
@given(st.data(), st.sampled_from(["2.", "2/", "3", "3.", "3/", "3v2"]))
def test_keys_are_those_of_tensorstore(data, kind):
    shape = tuple(data.draw(st.lists(st.integers(1, 12), max_size=3)))
    chunk = tuple(data.draw(st.integers(max(1, size // 3), size)) for size in shape)
    if kind.startswith("2"):
        document = zarr2(shape, chunk, dimension_separator=kind[1])
    else:
        document = zarr3(shape, chunk)
        if kind == "3v2":
            document["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "."}}
        elif kind[1:]:
            document["chunk_key_encoding"]["configuration"] = {"separator": kind[1:]}
    memory = Memory()
    memory.open(document).write(random(shape)).result()
    grid = [range(-(-size // step)) for size, step in zip(shape, chunk, strict=True)]
    places = list(itertools.product(*grid))
    keys = [encoding(document).chunk_key(place) for place in places]
    assert set(keys) == set(memory.chunks())
    assert [encoding(document).chunk_index(key, len(shape)) for key in keys] == places
    pattern = encoding(document).chunk_keys(len(shape))
    assert [tuple(map(int, pattern.fullmatch(key).groups())) for key in keys] == places
    for key in ("", "x", "c/x", ".zarray", "-1", "0.0.__lock", "1e0", "٣"):
        assert pattern.fullmatch(key) is None


def test_what_other_writers_leave_out():
    document = zarr2((4, 4), (2, 2))
    del document["dimension_separator"]
    assert encoding(document) == encoding(zarr2((4, 4), (2, 2)))
    assert encoding(document).chunk_key((0, 1)) == "0.1"
    assert encoding(document).chunk_index("1.0", 2) == (1, 0)
    short = {"name": "zstd", "configuration": {"level": 1}}
    assert encoding(zarr3((4, 4), (2, 2), BYTES, short)) == encoding(zarr3((4, 4), (2, 2)))


@pytest.mark.parametrize("lost", ["codecs", "chunk_key_encoding", "order"])
def test_a_document_without_a_part_that_tensorstore_requires(lost):
    """In a specification, TensorStore would take a default for it, and read other values."""
    document = zarr2((4, 4), (2, 2)) if lost == "order" else zarr3((4, 4), (2, 2))
    del document[lost]
    with pytest.raises(ValueError, match=lost):
        encoding(document)


def test_a_fill_value_stays_as_it_is_stored():
    """TensorStore would write this one, which is NaN, as another NaN."""
    document = zarr2((4,), (2,), dtype="float8_e4m3fn", fill_value="-Infinity")
    assert json.loads(encoding(document).fill) == "-Infinity"
