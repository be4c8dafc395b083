"""Pages have the numbers of the plan, names never become markup, and pages work in a browser."""

import base64
import hashlib
import html
import json
import math
import pathlib
import re
import shutil
import unittest.mock

import browser
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from in_process import refused, reshard_in, shown
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from layouts import save_pytree

import reshard
from reshard.convert.map_rules import apply_map
from reshard.convert.mapfile import read_map
from reshard.engine.plan import read_amplification
from reshard.report.facts import Fact, page_of
from reshard.report.outline import Row, outline
from reshard.report.page import MARK, page, to_html
from reshard.sharding.mesh import shard_shape
from reshard.tree import format_key, format_path, match_globs, natural
from reshard.units import format_bytes, format_load

HOSTILE = [
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "\"><svg onload='window.hacked=1'>",
    "a\u202eb\u2066c\u200f",
    "&lt;b&gt; ${1+1} `$title`",
    "]]><!--",
    "k" * 10_000,
    "ключ/鍵",
    "\n\t\x00",
]


DASH = "\u2013"
WITHOUT_MESH = {("rate",), ("table",)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run/1`: leaves of several ranks on a 2x4 mesh, two that every device holds in full."""
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4)[:, ::-1], ("data", "model"))
    rng = np.random.default_rng(7)

    def array(shape, *spec):
        return jax.device_put(rng.normal(size=shape).astype("f4"), NamedSharding(mesh, P(*spec)))

    def layers():
        layer = {"kernel": array((48, 40), None, "model"), "bias": array((40,))}
        return [layer | {"proj": array((8, 6, 16), ("data", "model"))} for _ in range(3)]

    tree = {
        "params": {"embed": array((96, 80)), "layers": layers()},
        "opt_state": [{"mu": {"embed": array((96, 80), "data", "model")}}],
        "rate": np.float64(rng.normal()),
        "table": rng.normal(size=(5, 3)),
    }
    folder = tmp_path_factory.mktemp("page")
    save_pytree(folder / "run" / "1", tree)
    return folder


@pytest.fixture(scope="module")
def ckpt(run):
    return reshard.open(run / "run" / "1")


@pytest.fixture(scope="module")
def planned(ckpt, run):
    return reshard.plan(reshard.to_mesh(ckpt, "data=1,model=8"), run / "out")


@pytest.fixture(scope="module")
def covered():
    mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    params = {"kernel": jax.ShapeDtypeStruct((32, 30), "float32"), "bias": jnp.zeros(7)}
    return reshard.coverage(params, mesh=mesh, specs={"kernel$": P("data", "model")})


def embedded(text):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    return json.loads(found)


def paths(data):
    folders = [""]
    for parent, key in data["folders"]:
        folders.append(folders[parent] + key + "/")
    return [folders[folder] + key for folder, key, *_ in data["leaves"]]


def fabricated(leaves, devices, layers=100):
    """The document of a plan with this number of leaves."""
    sizes = {"data": devices // 8, "model": 8}
    saved = {"mesh": sizes, "spec": [[], ["model"]], "chunk_shape": [64, 64]}
    amplification = {"before": 2.0, "after": 1.0}
    alike = {"dtype": "float32", "bytes": 1 << 14, "chunk_shape": [64, 8], "moved": False}
    alike |= {"mesh": sizes, "spec": [[], ["model"]], "read_amplification": amplification}
    alike |= {"saved": saved}
    counts = {"bytes_read": 1, "bytes_written": 1, "shared_bytes": 0, "peak_memory": 1}
    return counts | {
        "source": ["gs://bucket/a/long/path/run/1000"],
        "destination": "gs://bucket/out/1000",
        "meshes": [sizes],
        "device_ids": [list(range(devices))[::-1]],
        "read_amplification": amplification,
        "bytes_per_device": {"before": leaves << 11, "after": leaves << 11},
        "decoded_bytes": leaves << 14,
        "arrays": [
            alike
            | {
                "keys": ["params", f"layer_{i % layers}", f"module_{i // layers}", "kernel"],
                "shape": [64, 64 + i % 3],
                "bytes_read": 15_000 + i,
                "bytes_written": 16_000 + i,
            }
            for i in range(leaves)
        ],
    }


def test_facts_of_a_plan(planned, run):
    document = planned.document()
    found = page_of(document)
    arrays, moved = len(planned.arrays), sum(array.verbatim for array in planned.arrays)
    assert 0 < moved < arrays
    assert found.title == f"{run}/run/1 → {run}/out"
    counts = f"{arrays - moved} rewritten, {moved} copied verbatim."
    assert found.lead.startswith(f"Changes the mesh of {arrays} arrays (")
    assert found.lead.endswith(f": data=2,model=4 → data=1,model=8. {counts}")
    (before, after), (old, new) = planned.amplification, planned.bytes_per_device
    assert (before > after == 1.0) and old > new
    laid_out = [array for array in planned.arrays if array.path not in WITHOUT_MESH]
    saved = sum((a.amplification[0] - a.amplification[1]) * a.decoded_bytes for a in laid_out)
    replicated = 96 * 80 * 4 + 3 * 160
    read, written = (format_bytes(n) for n in (planned.bytes_read, planned.bytes_written))
    assert found.facts == (
        Fact(
            "How much memory does a device need?",
            f"{format_bytes(old)} → {format_bytes(new)}",
            ("Before and after the job, on the device with the most array bytes.",),
            "good",
        ),
        Fact(
            "Is it worth it? A restore reads",
            f"{before:.2f} times the bytes that it needs; after the job, exactly the bytes that it "
            "needs",
            (
                f"On data=1,model=8, a restore reads {saved / 1024:.2f} KiB less than before.",
                "The 2 arrays without a mesh: not known.",
            ),
            "good",
            "amplification",
        ),
        Fact(
            "How much of a device's memory is replicated?",
            f"{replicated / new:.0%} of the bytes",
            (
                "4 leaves, 30.47 KiB, in full on every device.",
                "2 arrays without a mesh: not known.",
            ),
            "bad",
        ),
        Fact(
            "What does the job cost?",
            f"reads {read}, writes {written}",
            (
                "Compressed bytes. At most "
                f"{format_bytes(planned.peak_memory)} of memory for arrays.",
            ),
        ),
    )
    linked = page_of(document | {"shared_bytes": 1024}).facts[3].details
    assert linked[1:] == ("1.00 KiB are hard-linked, not copied.",)


@pytest.mark.parametrize(("leaves", "tone"), [(1, ""), (2, "warn"), (10, "warn"), (11, "bad")])
def test_replication_is_a_share_of_the_bytes_per_device(leaves, tone):
    document = fabricated(leaves + 11 * 8, 8)
    for number, array in enumerate(document["arrays"]):  # the others have eight shards
        array |= {"shape": [64, 64]} | ({"spec": [[], []]} if number < leaves else {})
    found = page_of(document)
    answer = f"{leaves / (leaves + 11):.0%} of the bytes"
    assert (found.facts[2].answer, found.facts[2].tone) == (answer, tone)
    assert found.data["replicated"] == tone


def test_alike_levels_are_folded_as_in_the_terminal():
    document = fabricated(120, 8, layers=12)
    for array in document["arrays"]:
        array["shape"] = [64, 64]
    document["arrays"][5]["shape"] = [1, 2]  # in layer_5
    document["arrays"].reverse()
    data = page_of(document).data
    folded = {
        name: [data["folders"][number - 1][1] for number in numbers]
        for name, numbers in data["folds"]
    }
    layers = [f"layer_{i}" for i in range(12) if i != 5]
    assert folded.pop("layer_{0..4,6..11}") == layers
    assert {name.partition("{")[0] for name in folded} == {"module_"}
    above = [row.name.partition("/")[0] for row in outline(document["arrays"]) if row.depth == 1]
    assert above == ["layer_{0..4,6..11}", "layer_5"]
    # Layers are sorted by their numbers, not as in the document.
    keys = [path.split("/")[1] for path in paths(data)]
    assert [*dict.fromkeys(keys)] == [f"layer_{i}" for i in range(12)]


def test_the_embedded_data_is_that_of_the_plan(planned, ckpt, run):
    text = to_html(planned)
    assert text.startswith(MARK) and MARK.endswith('content="reshard">')
    data = embedded(text)
    assert paths(data) == [format_path(array.path) for array in planned.arrays]
    for (_, _, layout), array in zip(data["leaves"], planned.arrays, strict=True):
        shape, nbytes, _, load, moved, _, sides = data["layouts"][layout]
        assert (tuple(shape), nbytes) == (array.shape, array.decoded_bytes)
        known = None if array.path in WITHOUT_MESH else list(array.amplification)
        assert (load, moved) == (known, array.verbatim)
        chunks = [[*array.source_chunk], [*array.chunk]]
        assert [chunk for _, _, chunk, _ in sides] == chunks
    ((mesh, parts),), state = data["held"][1], 96 * 10 * 4
    held = planned.bytes_per_device[1]
    assert (mesh, parts) == ("data=1,model=8", [held - state, state, 0])
    # Before a cast, a device holds bytes of the saved dtype.
    cast = reshard.cast(reshard.to_mesh(ckpt, "data=1,model=8"), "bfloat16")
    planned = reshard.plan(cast, run / "out")
    held = page_of(planned.document()).data["held"]
    assert tuple(sum(parts) for ((_, parts),) in held) == planned.bytes_per_device


def test_the_size_of_a_page_does_not_grow_with_devices():
    sizes = {devices: len(page(fabricated(2_000, devices))) for devices in (64, 65_536)}
    assert max(sizes.values()) < 400_000
    assert abs(sizes[65_536] - sizes[64]) < 1_000
    assert len(embedded(page(fabricated(900, 64)))["layouts"]) == 3


def named_badly(names):
    """The document of a checkpoint with these names, even if they cannot be saved."""
    leaf = {"type": "jax.Array", "shape": [4], "dtype": "float32", "bytes": 16}
    laid_out = {"chunk_shape": [4], "mesh": {HOSTILE[0]: 2}, "spec": [[HOSTILE[0]]]}
    return {
        "path": HOSTILE[1],
        "format": HOSTILE[0],
        "meshes": [{HOSTILE[0]: 2}],
        "device_ids": [None],
        "problems": [f"{HOSTILE[1]}: {HOSTILE[2]}"],
        "destination": HOSTILE[3],
        "leaves": [{"keys": ["a/b", name], "path": name} | leaf | laid_out for name in names],
    }


def test_names_never_become_markup():
    text = page(named_badly(HOSTILE))
    tags, plain = (
        [tag for tag in re.findall(r"<(\w+)", each) if tag not in ("p", "wbr")]
        for each in (text, page(named_badly([])))
    )
    assert tags == plain
    named = [(format_key("a/b"), format_key(name)) for name in HOSTILE]
    assert paths(embedded(text)) == ["/".join(keys) for keys in sorted(named, key=natural)]
    (data,) = re.findall(r'id="data">(.*?)</script>', text)
    assert not set("<>&") & set(data)
    for character in "\u202e\u2066\u200f\0":
        assert character not in text


def test_a_page_loads_no_other_file():
    text = page(fabricated(5, 8))
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', text)
    hashes = {}
    for name in ("style", "script"):
        (own,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
        hashes[name] = f"'sha256-{digest}'"
    assert policy == (
        f"default-src 'none'; style-src {hashes['style']}; script-src {hashes['script']}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    assert set(re.findall(r"\b(?:src|href|srcset|action)=\"?([^\"> ]*)", text)) == {"data:,"}
    assert set(re.findall(r"\w+://[\w./]+", text)) == {
        "http://www.w3.org/2000/svg",
        "gs://bucket/a/long/path/run/1000",
        "gs://bucket/out/1000",
    }


def test_unknown_values(ckpt, run):
    without = reshard.select(ckpt, ["rate", "table"])
    found = page_of(without.document())
    assert [fact.answer for fact in found.facts] == ["not known"] * 3
    assert found.lead == "2 arrays, 128 B, saved on no mesh, OCDBT, zarr2."
    planned = page_of(reshard.plan(without, run / "out").document())
    none = ("No array has a mesh.",)
    assert planned.facts[:2] == (
        Fact("How much memory does a device need?", "not known", none),
        Fact("What does a restore read?", "not known", none, "", "amplification"),
    )
    assert {load for _, _, _, load, *_ in planned.data["layouts"]} == {None}
    empty = page_of(fabricated(0, 8))
    assert [fact.answer for fact in empty.facts[1:3]] == ["not known", "nothing"]
    compared = page_of(reshard.diff(ckpt, ckpt, values=False).document())
    answers = [fact.answer for fact in compared.facts]
    assert answers == ["not known", "nothing found", "0 arrays, by recorded digests"]
    assert compared.data["histograms"] is None
    # Device ids of two meshes of one shape are unknown.
    document = fabricated(1, 8)
    document |= {"meshes": document["meshes"] * 2, "device_ids": [[7, 6, 5, 4, 3, 2, 1, 0], None]}
    assert page_of(document).data["meshes"][0]["ids"] is False


def test_histograms_of_a_diff(ckpt, tmp_path):
    changed = reshard.cast(ckpt, "bfloat16", "params/**")
    found = reshard.diff(ckpt, changed, values=True)
    document = found.document()
    gaps, relative = [], []
    for each in found.of("values"):
        a, b = (np.asarray(c[each.path].view().read().result()) for c in (ckpt, changed))
        gap = np.abs(a.astype("f8") - b.astype("f8"))[a != b]
        gaps.append(np.floor(np.log2(gap)))
        relative.append(np.floor(np.log2(gap / np.abs(b.astype("f8")[a != b]))))
    data = page_of(document).data
    for bins, powers in zip(data["histograms"], (gaps, relative), strict=True):
        values, counts = np.unique(np.concatenate(powers).astype(int), return_counts=True)
        assert bins == np.stack([values, counts], 1).tolist()
    kinds = [each["what"] for each in document["differences"]]
    assert [each[0] for each in data["differences"]] == kinds


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    """A diff with NaN, inf, 0 and -0, and a moved array."""
    folder = tmp_path_factory.mktemp("apart")
    rng = np.random.default_rng(11)
    x, moved = rng.normal(size=(2, 6, 5)).astype("f4")
    y = x.copy()
    y[0, :2], y[1, 0], y[2, :3] = np.nan, -np.inf, x[2, :3] + 1
    zeros = np.zeros(7, "f4")
    a = save_pytree(folder / "a", {"w": x, "z": zeros, "all": zeros + 1, "old": moved})
    b = save_pytree(folder / "b", {"w": y, "z": -zeros, "all": zeros + np.nan, "new": moved})
    return reshard.diff(a, b, values=True)


def test_a_diff_counts_differences_without_a_size(apart, ckpt):
    found = page_of(apart.document())
    assert found.facts[1:] == (
        Fact("What differs?", "values differ in 3 arrays, 1 leaf moved"),
        Fact("What was compared?", "3 arrays, bit for bit"),
    )
    near = page_of(reshard.diff(ckpt, ckpt, values=True, rtol=1e-3).document())
    assert near.facts[2].answer.endswith(" arrays, |A - B| <= 0 + 0.001 * |B|, integers exactly")
    assert near.lead.endswith(" are equal within |A - B| <= 0 + 0.001 * |B|, integers exactly.")
    # If the largest difference is infinite, the number is unknown.
    (row,) = [each for each in apart.document()["differences"] if each["path"] == "z"]
    document = apart.document() | {"differences": [row | {"max_abs": "inf"}]}
    assert page_of(document).data["differences"][0][-1] is None


def test_a_coverage_has_a_page(covered):
    found = page_of(covered.document())
    assert found.title == "a model on data=2,model=4"
    assert [fact.answer for fact in found.facts] == ["508 B", "no, 1 problem", "5% of the bytes"]
    assert found.lists["Problems"] == [
        "kernel  [32, 30]: dimension 1 has size 30, not a multiple of 4 (model)"
    ]
    assert [layout[1] for layout in found.data["layouts"]] == [28, 3840]


def test_objects_show_themselves_in_a_frame(ckpt, planned, covered):
    for x in (ckpt, planned, ckpt.arrays[0], covered, reshard.diff(ckpt, ckpt)):
        framed = x._repr_html_()
        assert framed.startswith('<iframe sandbox="allow-scripts" width="100%" ')
        assert html.unescape(framed).endswith(f'srcdoc="{to_html(x)}"></iframe>')
    with pytest.raises(reshard.ArgumentError, match="an object of type `str` has no page"):
        reshard.to_html("run/1")


JOBS = {
    "inspect": ("inspect", "run/1"),
    "diff": ("diff", "run/1", "run/1", "--values"),
    "ckpt": ("ckpt", "run/1", "out", "--to", "1x8", "--dry-run"),
}


def test_commands_write_pages(run, ckpt, tmp_path):
    texts = []
    for name, words in JOBS.items():
        file = tmp_path / f"{name}.html"
        assert shown(run, *words, "--html", file).endswith(f"\nwrote {file}\n")
        out = shown(run, *words, "--html", file, "--json")
        assert out.count("\n") == 1 and file.read_text() == page(json.loads(out))
        texts.append(file.read_text())
    inspected, compared, _ = map(embedded, texts)
    assert paths(inspected) == [format_path(path) for path in ckpt]
    assert compared["kind"] == "diff"
    told = refused(run, *JOBS["ckpt"][:-1], "--html", tmp_path / "q.html")
    assert "--html requires --dry-run" in told and not (tmp_path / "q.html").exists()


def test_each_step_has_a_page_of_its_own(run, tmp_path):
    root, folder = tmp_path / "root", tmp_path / "pages"
    for step in (1, 2):
        shutil.copytree(run / "run" / "1", root / f"{step}" / "default")
        (root / f"{step}" / "_CHECKPOINT_METADATA").write_text("{}")
    folder.mkdir()
    job = ("ckpt", root, "out", "--to", "1x8", "--dry-run")
    for words in (("inspect", root), job, ("diff", root, root)):
        for steps, names in (("all", ["page-1", "page-2"]), ("2", ["page"]), ("latest", ["page"])):
            file = folder / "page.html"
            told = shown(tmp_path, *words, "--step", steps, "--html", file)
            pages = sorted(folder.iterdir())
            assert [written.stem for written in pages] == names
            assert [f"wrote {written}" in told for written in pages] == [True] * len(names)
            for written, step in zip(pages, (1, 2) if steps == "all" else (2,), strict=True):
                named, text = f"{root}/{step}", written.read_text()
                named = f"Step {step}" if words[0] == "inspect" else named
                assert named in text and f"{root}/{3 - step}" not in text
                written.unlink()
    # The page of a step that is refused has its number.
    words = ("--from", "1x7", "--step", "all", "--html", folder / "p.html")
    assert reshard_in(tmp_path, *job, *words)[0] == 2
    assert [written.name for written in folder.iterdir()] == ["p-1.html"]
    several = reshard.plan([reshard.open(root, step=step) for step in (1, 2)], tmp_path / "out")
    assert several._repr_html_() is None
    with pytest.raises(reshard.ArgumentError, match="a page shows one step, and the plan has 2"):
        to_html(several)


def test_the_page_of_a_plan_that_failed(run, tmp_path):
    file = tmp_path / "page.html"
    words = "ckpt", "run/1", "out", "--to", "1x7", "--spec", "kernel$=,model", "--dry-run"
    status, _, err = reshard_in(run, *words, "--html", file)
    assert status == 2
    assert html.escape(err.splitlines()[1].strip()) in file.read_text()
    # The summary is the first sentence of the page, not one of the problems.
    title, *problems = json.loads(reshard_in(run, *words, "--json")[1])["problems"]
    text = file.read_text()
    assert f"<strong>nothing: {len(problems)} problems</strong>" in text
    assert f"<summary>Problems ({len(problems)})</summary>" in text
    assert html.escape(f"The plan could not be made: {title}") in text


def test_html_replaces_only_a_page(run, tmp_path):
    file = tmp_path / "page.html"
    words = "inspect", "run/1", "--filter", "rate", "--html", file
    for earlier in (f"{MARK} an older one", ""):
        file.write_text(earlier)
        assert reshard_in(run, *words)[0] == 0
        assert paths(embedded(file.read_text())) == ["rate"]
    assert [*tmp_path.iterdir()] == [file]
    file.write_text("<!doctype html>\nsomething else")
    told = refused(run, *words)
    assert told.startswith(f"Error: --html {file}: the file exists and is not a page of reshard\n")
    assert file.read_text() == "<!doctype html>\nsomething else"


@pytest.mark.parametrize("command", JOBS)
def test_a_wrong_file_is_an_error_before_the_work(run, tmp_path, monkeypatch, command):
    def told(file):
        err = refused(run, *JOBS[command], "--html", file)
        return err.removeprefix(f"Error: --html {file}: ").splitlines()[0]

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("reshard.cli.options.open_checkpoint", None)
    for file in ("", "-", "gs://bucket/page.html", tmp_path / "folder", "/dev/null"):
        assert told(file) == "a page must be a file on this machine"
    for folder in (tmp_path / "none", pathlib.Path("/proc")):
        said = "it cannot be written: No such file or directory"
        assert told(folder / "page.html") == said
    # A page inside a checkpoint would damage the checkpoint.
    (tmp_path / "link").symlink_to(run / "run")
    for file in (run / "run" / "1" / "page.html", tmp_path / "link" / "1" / "x.html"):
        assert told(file) == f"the page would be inside the checkpoint {run / 'run' / '1'}"
        assert not file.exists()
    if command == "ckpt":
        out = run / "out"
        out.mkdir()
        assert told(out / "x.html") == f"the page would be inside the checkpoint {out}"
        out.rmdir()


def test_a_page_that_cannot_be_written_is_an_error(run, tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    file.write_text(f"{MARK} an older one")

    full = unittest.mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("os.replace", full)
    for words in JOBS.values():
        status, _, err = reshard_in(run, *words, "--html", file)
        assert status == 2
        assert f"Error: --html {file}: No space left on device" in err
    # A job that is refused is refused for its own reason.
    status, _, err = reshard_in(run, *JOBS["ckpt"], "--from", "1x7", "--html", file)
    assert status == 2
    warning, error, *_ = err.splitlines()
    assert warning == f"Warning: --html {file}: No space left on device"
    assert error == "Error: --from 1x7: SRC was not saved on this mesh"
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == f"{MARK} an older one"


def test_an_outline_folds_alike_levels():
    def leaf(*keys, shape=(4,)):
        return {"keys": list(keys), "shape": list(shape), "bytes": 4 * math.prod(shape)}

    leaves = [leaf("layers", i, "w") for i in (0, 1, 2, 5)]
    leaves += [leaf("layers", i, "b", shape=(2,)) for i in (0, 1, 2, 5)]
    leaves += [leaf("layers", 7, "w"), leaf("a", "b", "c"), leaf("x1"), leaf("x01"), leaf("x2")]
    by_name = {"/".join(map(str, each["keys"])): each for each in leaves}
    assert outline(leaves) == [
        Row(0, "layers", 9, 4 * 16 + 4 * 8 + 16, None),
        Row(1, "{0..2,5}", 8, 4 * 16 + 4 * 8, None),
        Row(2, "w", 4, 64, by_name["layers/0/w"]),
        Row(2, "b", 4, 32, by_name["layers/0/b"]),
        Row(1, "7/w", 1, 16, by_name["layers/7/w"]),
        Row(0, "a/b/c", 1, 16, by_name["a/b/c"]),
        Row(0, "x{1..2}", 2, 32, by_name["x1"]),
        Row(0, "x01", 1, 16, by_name["x01"]),
    ]
    assert outline([]) == []


def test_inspect_shows_the_tree(run):
    out = shown(run, "inspect", "run/1", "--tree")
    split, both = "P(None, 'model')", "P(('data', 'model'))"
    assert [re.sub("  +", "  ", line) for line in out.splitlines()[2:]] == [
        "opt_state/0/mu/embed  30.00 KiB  #######  float32[96,80]  P('data', 'model')",
        "params  61.97 KiB  #############  10 leaves",
        "  embed  30.00 KiB  #######  float32[96,80]  P()",
        "  layers/{0..2}  31.97 KiB  #######  9 leaves",
        "  bias  480 B  3 leaves  float32[40]  P()",
        f"  kernel  22.50 KiB  #####  3 leaves  float32[48,40]  {split}",
        f"  proj  9.00 KiB  ##  3 leaves  float32[8,6,16]  {both}",
        "rate  8 B  float64[]  Python scalar",
        "table  120 B  float64[5,3]  numpy",
        "13 leaves, 13 arrays, 92.09 KiB",
    ]
    starts = [line.index("float") for line in out.splitlines() if "float" in line]
    assert len(set(starts)) == 1


# --- in a browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with browser.started(tmp_path_factory.mktemp("chromium")) as started:
        yield started


def test_tests_of_pages_are_skipped_without_a_browser_except_in_ci(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    message = "no Chromium is installed: apt-get install chromium"
    with pytest.raises(pytest.skip.Exception, match=message), browser.started(tmp_path):
        pass
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=message), browser.started(tmp_path):
        pass


def test_a_page_works_in_a_browser(chromium, planned, ckpt, run):
    tab = chromium.open(to_html(planned))
    load = format_load(*planned.amplification)
    assert tab.text("#fact-amplification strong") == load
    assert f"\nload     a restore reads {load}" in repr(planned)
    rows = tab.rows()
    assert [row[0] for row in rows] == [format_path(a.path) for a in planned.arrays]
    for (*_, load, moved), array in zip((row[:8] for row in rows), planned.arrays, strict=True):
        known = " → ".join(f"{x:.2f}" for x in array.amplification)
        assert load == ("not known" if array.path in WITHOUT_MESH else known)
        assert moved == ("verbatim" if array.verbatim else "rewritten")
    # A click on a leaf shows it on both meshes, with the ids of the devices that hold it.
    embed = '[aria-label^="opt_state/0/mu/embed:"]'
    tab.click(embed)
    assert tab.text("#chosen") == "opt_state/0/mu/embed"
    ids = "[...document.querySelectorAll('#meshes figure')].slice(0, 2).map((figure) => "
    ids += "[...figure.querySelectorAll('.ids')].map((node) => node.textContent))"
    assert tab.value(ids) == [[*"32107654"], [*"01234567"]]
    assert " of data=1,model=8, id 0, keeps its shard" in tab.text("#reads")
    # The leaf is next to the treemap, in the same view.
    box = "document.querySelector({}).getBoundingClientRect()"
    left, top = (tab.value(f"{box.format(repr('#chosen'))}.{way}") for way in ("left", "top"))
    right, bottom = (tab.value(f"{box.format(repr('#map'))}.{way}") for way in ("right", "bottom"))
    assert left >= right and top < bottom
    assert tab.value("document.querySelectorAll('#map .chosen').length") == 1
    assert "2 arrays without a mesh, 128 B, are left out." in tab.text("#devices")
    # Groups are opened and closed, by mouse and keys.
    crumbs = ".crumbs button"
    tab.click('[aria-label^="params/layers/{0..2}, group of 9 leaves"]', corner=True)
    assert tab.texts(crumbs) == ["all", "params", "layers", "0"]
    # One of the alike layers is shown, and a list chooses another.
    assert tab.texts(".crumbs option") == ["0", "1", "2"]
    tab.value(f"{PICK}('.crumbs select', 1)")
    assert tab.texts(crumbs) == ["all", "params", "layers", "1"]
    tab.press("ArrowRight")
    tab.press("Enter")
    assert tab.text("#chosen") == "params/layers/1/proj"
    for _ in range(3):
        tab.press("Escape")
    assert tab.texts(crumbs) == ["all"]
    tab.write("#search", "params/*/?/kernel")
    assert [row[0] for row in tab.rows()] == [f"params/layers/{i}/kernel" for i in range(3)]
    dimmed = "[...document.querySelectorAll('g.group.dim')].map((g) => g.ariaLabel)"
    assert [name.partition(",")[0] for name in tab.value(dimmed)] == ["opt_state/0/mu"]
    tab.write("#search", "EMBED")
    assert len(tab.rows()) == 2
    assert tab.value(f"{FIND}('[')") == []
    tab.value(f"{FIND}('')")
    head = "#leaves thead th:nth-child(4)"
    for way in ("descending", "ascending"):
        tab.click(f"{head} button")
        assert tab.value(f"document.querySelector('{head}').ariaSort") == way
        nbytes = [ckpt[row[0]].nbytes for row in tab.rows()]
        assert nbytes == sorted(nbytes, reverse=way == "descending")
    assert tab.complaints() == []
    # The script computes the planner's read amplification.
    tab = chromium.open(to_html(ckpt))
    expected = []
    for path, leaf in ckpt.items():
        known = "not known"
        if hasattr(leaf.sharding, "mesh"):
            shard = shard_shape(leaf.shape, leaf.sharding)
            known = f"{read_amplification(leaf.shape, leaf.chunk_shape, shard):.2f}"
        expected.append([format_path(path), known])
    assert [[row[0], row[6]] for row in tab.rows()] == expected
    assert " of data=2,model=4, id 3, keeps its shard" in tab.text("#reads")
    assert tab.complaints() == []


PICK = """((selector, number) => {
  const select = document.querySelector(selector);
  select.value = number;
  select.dispatchEvent(new Event("change"));
})"""
GLOBBED = [
    ("model", "embed", "value"),
    ("model", "layers", 0, "kernel"),
    ("model", "layers", 12, "kernel"),
    ("model", "model", "kernel"),
    ("opt_state", 0, "mu", "embed", "value"),
    ("opt_state", 0, "mu", "layers", 0, "kernel"),
    *(("params", x, "kernel") for x in ("a/b", "a b", 'q"*"', "e😀", "ea", "n\nl", "n\u2028l")),
    *(("params", x) for x in ("*", "**", "a*", "a?", "ab", "\\*", "a\\", "\0", "\u202eb", ".")),
    ("params", "constructor", "__proto__"),
    ("params", "k" * 5000 + "x"),
    ("KERNEL",),
]
GLOBS = r"""
* ** **/* */** **/** **/kernel **/**/kernel */*/kernel params/*/** params/* params/? params/??
params/a? params/a* params/a** params/**a embed/* layers/*/kernel layers/?/kernel **/layers/**
layers/? model/* */layers mo?el/layers opt_state/*/mu **/mu/**/kernel **/mu kerne? *ERNEL
params/\* params/a\* params/a\? params/\\* params/*\* params/\? . params/"a/?"/kernel
params/a?b/kernel params/"a\\*" params/"*" params/"q\"*"/kernel params/"\u002a"
params/"e\ud83d\ude00"/* params/e?/kernel params/e??/kernel params/n?l/* params/n*l/* params/<*
params/(* params/[a]* params/*/ /* *//* "* a"*" params/.* params/?b params/*proto*/* *x* params/*kx
params/k*k*x **/*o*/** **/__proto__* */*/*/*/*/* **/?/**/?/**
"""
# Globs that nothing matches, for which going back takes longer than anybody waits.
SLOW = ["*" * 30 + "x?", "**/" * 30 + "x*"]
SLOW += ["params/" + text * 40 + "y" for text in ("*k", "k*")]
FIND = """
((glob) => {
  const search = document.getElementById("search");
  search.value = glob;
  search.dispatchEvent(new Event("input"));
  return [...document.querySelectorAll("#leaves tbody tr")].map((row) => row.cells[0].textContent);
})"""


def test_globs_of_a_page_are_those_of_the_commands(chromium):
    leaf = {"type": "jax.Array", "shape": [4], "dtype": "float32", "bytes": 16, "chunk_shape": [4]}
    document = {"path": "run", "format": "x", "meshes": [], "device_ids": []}
    document["leaves"] = [{"keys": [*p], "path": format_path(p)} | leaf for p in GLOBBED]
    tab = chromium.open(page(document))
    wrong = {}
    for glob in [*GLOBS.split(), 'params/"a b"/*']:
        try:
            expected = match_globs(GLOBBED, [glob]) if re.search("[*?]", glob) else None
        except reshard.ReshardError:
            expected = set()
        found = tab.value(f"{FIND}({json.dumps(glob)})")
        if expected is not None and sorted(found) != sorted(map(format_path, expected)):
            wrong[glob] = found
    assert wrong == {}
    assert [tab.value(f"{FIND}({json.dumps(glob)})") for glob in SLOW] == [[]] * len(SLOW)
    assert tab.complaints() == []


def test_a_diff_in_a_browser(chromium, apart, ckpt):
    tab = chromium.open(to_html(apart))
    rows = {row[1]: row[4:] for row in tab.rows("differences")}
    assert rows == {
        "all": ["7 of 7", DASH, DASH, "7", DASH],
        "w": ["6 of 30", "1.000", rows["w"][2], "3", DASH],
        "z": ["7 of 7", "0.000", "0.000", DASH, "7"],
        "old": [DASH] * 5,
    }
    text = (
        "20 elements differ: 10 are NaN or infinite in A or B, 7 are 0 in one and -0 in the other"
    )
    assert text in tab.text("#histograms")
    ticks = tab.texts("#histograms figure:first-of-type .tick")
    assert ticks[3] == "0" and all(re.fullmatch(r"[1-9]e[+-]\d+", tick) for tick in ticks[:2])
    for found in (reshard.diff(ckpt, ckpt, values=True), reshard.diff(ckpt, ckpt)):
        tab = chromium.open(to_html(found))
        assert tab.texts("#sections h2") == ["Where the bytes are", "What differs", "All leaves"]
    assert tab.complaints() == []


CONTRAST = """
(() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
  };
  const found = [];
  const check = (node, front, back) => {
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5)
      found.push([node.getAttribute("class"), node.textContent.slice(0, 40), front, back]);
  };
  for (const node of document.querySelectorAll("main *, header *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || node.closest("svg, noscript, script") || !node.getClientRects().length) continue;
    check(node, parse(getComputedStyle(node).color), behind(node));
  }
  for (const cell of document.querySelectorAll("g.cell")) {
    const back = parse(getComputedStyle(cell.querySelector("rect")).fill);
    for (const text of cell.querySelectorAll("text"))
      check(text, parse(getComputedStyle(text).fill), back);
  }
  for (const text of document.querySelectorAll("text.ids"))
    check(text, parse(getComputedStyle(text).fill), parse(getComputedStyle(text).stroke));
  return found;
})()
"""


def row_of(before, after, origin, operation=None, problem=None):
    """A row of `convert --json`."""
    told = {"operation": operation, "origin": origin, "problem": problem}
    return {"from": before.split(), "to": after.split()} | told


ROWS_OF_A_MAP = [
    row_of("params/a", "a/kernel/value", "path"),
    row_of("params/b/w", "b/w/value", "map", "slice 0 of 2"),
    row_of("params/b/w", "c/w/value", "map", "slice 1 of 2"),
    row_of("params/x params/y", "c/xy/value", "structure", "Stack(axis=0)"),
    row_of('params/"a/b"', "c/slash/value", "structure"),
    row_of("params/old", "", "dropped"),
    row_of("", "rngs/count/value", "initial"),
]
REFUSED: dict = {"problems": ["no"], "destination": "out"}
REFUSED["rows"] = [
    row_of("params/layers/0/bias", "layer/bias/value", "path"),
    row_of("params/layers/0/kernel", "", "ambiguous", None, "it is one or the other"),
    row_of("", "one/kernel/value", "ambiguous", None, "it is one or the other"),
    row_of("", "other/kernel/value", "missing"),
]
TREES = """[...document.querySelectorAll("#conversion .pane")].map((pane) =>
    [...pane.querySelectorAll("li:not(:has(details))")].map((item) =>
        ["button", ".origin"].map((name) => item.querySelector(name).textContent)))"""


def test_a_conversion_is_two_trees(chromium, planned, ckpt):
    document = planned.document() | {"to": "nnx", "model": "lm:training", "rows": ROWS_OF_A_MAP}
    assert page_of(document).lead.startswith("Linen → NNX, lm:training. Changes the mesh of 13 ")
    assert page_of(document | {"to": "linen", "model": None}).lead.startswith("NNX → Linen. ")
    tab = chromium.open(page(document | {"warnings": []}))
    before = [["b/w", "map"], ["a", "path"], ["x", "structure"], ["y", "structure"]]
    before += [['"a/b"', "structure"], ["old", "dropped"]]
    after = [["a/kernel/value", "path"], ["b/w/value", "map"], ["w/value", "map"]]
    after += [["xy/value", "structure"], ["slash/value", "structure"]]
    after += [["rngs/count/value", "initial"]]
    assert tab.value(TREES) == [before, after]
    assert tab.texts("#conversion .chip") == ["path1", "map2", "structure2", "dropped1", "initial1"]
    # A click shows the leaf in the other tree, and the operation.
    tab.click("#conversion .pane button")
    assert tab.texts("#conversion .chosen-leaf") == ["b/w", "b/w/value", "w/value"]
    assert tab.text("#conversion .about") == (
        "params/b/w → b/w/value · slice 0 of 2 · by map; "
        "params/b/w → c/w/value · slice 1 of 2 · by map"
    )
    tab.click("#conversion .chip:nth-child(3)")
    assert tab.value(TREES) == [before[2:5], after[3:5]]
    rows = [row[:2] for row in tab.rows("conversion")]
    assert rows == [["params/x + params/y", "c/xy/value"], ['params/"a/b"', "c/slash/value"]]
    assert tab.complaints() == []
    # Undecided leaves are in both trees, and first in the table.
    tab = chromium.open(page(ckpt.document() | REFUSED))
    assert tab.text("#conversion h2") == "3 leaves are undecided"
    origins = [row[3] for row in tab.rows("conversion")]
    assert origins == ["▲ ambiguous", "▲ ambiguous", "▲ missing", "path"]
    meaning = "document.querySelector('#conversion .mark').title"
    assert tab.value(meaning) == "Several leaves may be its counterpart."
    assert tab.value(TREES) == [
        [["bias", "path"], ["kernel", "▲ ambiguous"]],
        [
            ["layer/bias/value", "path"],
            ["one/kernel/value", "▲ ambiguous"],
            ["other/kernel/value", "▲ missing"],
        ],
    ]
    tab.click("#conversion li li button")
    tab.click("#conversion .pane li:nth-child(2) > button")
    assert "it is one or the other" in tab.text("#conversion .about")
    assert tab.text("#conversion .rule") == "Now click its counterpart in the model."
    tab.value(f"{OPEN_LEAF}(1, 'one/kernel/value')")
    assert tab.text("#conversion pre") == (
        "[[rule]]\nfrom = '^params/layers/0/kernel$'\nto = 'one/kernel'\n"
    )
    assert tab.complaints() == []


OPEN_LEAF = """((pane, name) => [...document.querySelectorAll("#conversion .pane")[pane]
    .querySelectorAll("button.path")].find((button) => button.textContent === name).click())"""


def test_the_rule_for_two_undecided_leaves_works_in_a_map(chromium, ckpt, tmp_path):
    names = ['od.d(1)"', "it's", "b\\s{0}", "0"]
    sources, targets = (
        {(n, name): (*above(n), name) for n in range(11) for name in names}
        for above in (
            lambda n: ("params", f"layer_{n}", "mlp_0"),
            lambda n: ("model", "layers", str(n), "0"),
        )
    )
    rows = [row_of("params/step", "model/step/value", "path")]
    rows.append(row_of("opt_state/0/mu/x", "", "ambiguous"))
    for leaf in sources:
        rows.append(row_of("", "", "missing") | {"from": [format_path(sources[leaf])]})
        rows.append(row_of("", "", "missing") | {"to": [format_path((*targets[leaf], "value"))]})
    tab = chromium.open(page(ckpt.document() | REFUSED | {"rows": rows}))
    # One of the alike layers is shown, and the rule is for all of them.
    for one, other in ((0, 0), (7, 7), (7, 8)):
        tab.value(f"{PICK}('.pane [aria-label=\"layer_{{0..10}}\"]', {one})")
        tab.value(f"{PICK}('.pane [aria-label=\"{{0..10}}\"]', {other})")
        for name in names:
            tab.value(f"{OPEN_LEAF}(0, {json.dumps(format_key(name))})")
            tab.value(f"{OPEN_LEAF}(1, {json.dumps(format_key(name) + '/value')})")
            (tmp_path / "map.toml").write_text(tab.text("#conversion pre"))
            rules = read_map(tmp_path / "map.toml")
            moved = apply_map(rules, dict.fromkeys(sources.values(), (4,))).map.values
            expected = {targets[n, name][1:]: sources[n, name] for n in range(11)}
            if one != other:
                expected = {targets[other, name][1:]: sources[one, name]}
            found = {path: made.path for path, made in moved.items() if made.path != path}
            assert found == expected
    tab.value(f"{OPEN_LEAF}(0, 'opt_state/0/mu/x')")
    assert tab.text("#conversion .rule").startswith("Optimizer state follows its parameters")
    assert tab.complaints() == []


def test_a_diff_has_a_treemap(chromium, ckpt):
    renamed = reshard.rename(ckpt, [("layers/2", "last")])
    other = reshard.cast(reshard.select(renamed, drop="opt_state/**"), "float16", "**/bias")
    found = reshard.diff(ckpt, other, values=True)
    what = {each.path: each.what for each in found.differences}
    expected = [
        [format_path(path), {"dtype": "other shape or type", "values": "up to 0.001"}.get(w, w)]
        for path, nbytes in found.nbytes.items()
        for w in [what.get(path, "equal")]
    ]
    tab = chromium.open(to_html(found))
    assert sorted([row[0], row[2]] for row in tab.rows()) == sorted(expected)
    sizes = dict.fromkeys([kind for _, kind in expected], 0)
    for (_, kind), nbytes in zip(expected, found.nbytes.values(), strict=True):
        sizes[kind] += nbytes
    assert sizes.keys() == {"equal", "added", "removed", "moved", "up to 0.001"}
    chips = sorted(f"{kind}{format_bytes(nbytes)}" for kind, nbytes in sizes.items())
    assert sorted(tab.texts("#map .chip")) == chips
    tab.click("#map .chip")
    assert len(tab.rows()) < len(expected)
    assert tab.complaints() == []


@pytest.fixture(scope="module")
def pages(run, ckpt, planned, covered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    converted = planned.document() | {"to": "nnx", "model": None, "rows": ROWS_OF_A_MAP}
    converted |= {"why": ["`params` has a name that Linen generates"]}
    converted |= {"warnings": ["one leaf went by its order"]}
    words = "ckpt", "run/1", "out", "--to", "1x7", "--spec", "kernel$=,model", "--dry-run"
    reshard_in(run, *words, "--html", folder / "refused.html")
    leaves = {name: np.arange(6, dtype="f4") + i for i, name in enumerate(HOSTILE[:-3])}
    leaves |= {HOSTILE[-2]: {HOSTILE[0]: np.ones(4, "f4")}}
    hostile = save_pytree(folder / "<b>run", {"params": leaves, "text": HOSTILE[0]})
    return {
        "checkpoint": to_html(ckpt),
        "array": to_html(ckpt["params/layers/0/proj"]),
        "plan": to_html(planned),
        "conversion": page(converted),
        "refused conversion": page(ckpt.document() | REFUSED),
        "refused": (folder / "refused.html").read_text(),
        "coverage": to_html(covered),
        "diff": to_html(reshard.diff(ckpt, reshard.cast(ckpt, "bfloat16"), values=True)),
        "digests": to_html(reshard.diff(ckpt, reshard.select(ckpt, drop="rate"))),
        "hostile names": page(named_badly(HOSTILE)),
        "hostile checkpoint": to_html(reshard.open(hostile)),
        "large": page(fabricated(10_000, 8192)),
        "nothing": page(fabricated(0, 8)),
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("dark", [False, True])
def test_every_page_can_be_read(chromium, pages, dark):
    blank = len(chromium.open("<!doctype html><title>x</title>", dark=dark).screenshot())
    for name, text in pages.items():
        tab = chromium.open(text, dark=dark)
        assert tab.complaints() == [], name
        assert tab.value("window.hacked") is None, name
        assert tab.value(CONTRAST) == [], name
        assert len(tab.screenshot()) > 4 * blank, name
        assert tab.texts("#sections h2") or name == "nothing"
        for width in () if dark else (360, 700):
            tab.resize(width)
            wide = tab.value("document.documentElement.scrollWidth")
            assert wide <= width, (name, width)
        assert tab.complaints() == [], name
        tab.call("Page.close")


@pytest.mark.exhaustive
def test_names_are_shown_as_they_are_printed(chromium, pages):
    tab = chromium.open(pages["hostile names"])
    expected = [format_path(("a/b", name)) for name in HOSTILE]
    assert sorted(row[0] for row in tab.rows()) == sorted(expected)
    tab.write("#search", "onload")
    assert [row[0] for row in tab.rows()] == [expected[2]]
    assert tab.complaints() == []


@pytest.mark.exhaustive
def test_ten_thousand_leaves_are_searched_sorted_and_shown(chromium, pages):
    tab = chromium.open(pages["large"])
    assert len(tab.rows()) == 100
    assert tab.text("#leaves .count") == "10000 of 10000 rows, the first 100 shown"
    tab.click("#leaves .more")
    assert len(tab.rows()) == 10_000
    tab.write("#search", "params/layer_7/**")
    assert len(tab.rows()) == 100
    count, more = tab.text("#leaves .count"), tab.text("#leaves .more")
    assert (count, more) == ("100 of 10000 rows", "Show all 100 rows")
    assert 20 < len(tab.texts("g.cell")) < 100  # alike layers are one
    assert tab.complaints() == []


@pytest.mark.exhaustive
def test_all_of_a_page_is_reached_with_the_keyboard(chromium, pages):
    tab = chromium.open(pages["plan"])
    focused = "(() => { const n = document.activeElement; return n.id || n.className; })()"
    seen = []
    while seen.count("search") < 2 and len(seen) < 200:
        tab.press("Tab")
        seen.append(tab.value(focused + ".baseVal ?? " + focused))
    assert seen.count("search") == 2
    assert {"chip", "device", "path", "scroll"} <= {*seen}
    cells = [each for each in seen if each.startswith("cell")]
    assert len(cells) == 1  # one stop, and arrow keys from there
    outline = tab.value(
        "(() => { document.getElementById('search').focus(); return "
        "getComputedStyle(document.activeElement).outlineStyle; })()"
    )
    assert outline == "solid"


@pytest.mark.exhaustive
def test_a_page_can_be_printed(chromium, pages):
    for name in ("plan", "diff", "conversion"):
        tab = chromium.open(pages[name], dark=True)
        dark = [{"name": "prefers-color-scheme", "value": "dark"}]
        tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
        # Printed pages are light, also in dark mode.
        assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert tab.value(CONTRAST) == [], name
        data = base64.b64decode(tab.call("Page.printToPDF", printBackground=True)["data"])
        assert data.startswith(b"%PDF"), name
        assert len(data) > 10_000, name
