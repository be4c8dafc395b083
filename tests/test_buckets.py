"""Checkpoints in buckets: read as the same files on a disk are, in few requests, and with errors
that say what was asked of whom."""

import functools
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import types

import google.auth
import layouts
import numpy as np
import pytest
import tensorstore as ts
import test_loader
from in_process import reshard_in
from jax.sharding import PartitionSpec as P
from jobs import FORMATS, MARKER, refused
from sampling import few
from servers import Fault

import reshard
from reshard.storage import bucket, disk
from reshard.storage.location import Location, parse_location
from reshard.writer.save import execute

KINDS = ("s3", "gs")


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def write(place, files):
    store = place.open(ts.Context(bucket.resources()))
    for future in [store.write(name, data) for name, data in files.items()]:
        future.result()


def put(url, directory):
    files = [file for file in pathlib.Path(directory).rglob("*") if file.is_file()]
    write(parse_location(url), {str(f.relative_to(directory)): f.read_bytes() for f in files})
    return url


@pytest.fixture
def assert_read(saved, read_by_orbax, tmp_path):
    """Asserts that a bucket reads like the same layout on a disk, also after a save, by Orbax."""

    def check(url, layout, path=None):
        source = saved(layout)
        near, far = (reshard.open(place, **source.open) for place in (path or source.path, url))
        assert repr(far) == repr(near).replace(str(path or source.path), url)
        assert far.source.format == near.source.format and far.source.items == near.source.items
        again = pickle.loads(pickle.dumps(far))
        found = reshard.verify(again, against=near)
        assert found.problems == () and found.compared == len(near.arrays)
        reshard.save(reshard.to_mesh(again, "1x8"), tmp_path / "out")
        reader = source.readers[0]
        got = layouts.READERS[reader](source, tmp_path / "out")
        layouts.assert_same_tree(got, read_by_orbax(layout, reader))

    return check


@pytest.mark.parametrize("layout", few(layouts.LAYOUTS, "zarr3-files", "manager", "v1"))
@pytest.mark.parametrize("has_obstore", [True, False])
def test_every_layout_is_read(saved, stores, kind, layout, has_obstore, assert_read, monkeypatch):
    """Without obstore, TensorStore lists keys alone: all of them, and no sizes."""

    def refuse(*arguments):
        raise bucket.OnlyTensorStoreError

    if not has_obstore:
        monkeypatch.setattr(bucket, "_store", refuse)
    url = put(f"{stores.bucket(kind)}/run/x", saved(layout).path)
    before = stores.keys(url)
    assert_read(url, layout)
    assert stores.keys(url) == before
    assert not stores.answered("delete")


@pytest.mark.parametrize("writers", few([1, 3], 3))
def test_unmerged_databases(saved, stores, kind, writers, tmp_path, assert_read):
    path = test_loader.never_merged(saved("standalone").path, tmp_path / "unmerged", 3, writers)
    assert_read(put(f"{stores.bucket(kind)}/run", path), "standalone", path)


@pytest.mark.parametrize("kind", [*KINDS, "conditional"])
def test_listing_a_directory(stores, kind):
    place = parse_location(f"{stores.bucket(kind)}/run")
    names = ["a.b/c", "a/b", "d", "e/f/&"]
    names += ["a"] if kind != "gs" else []  # a name is a file or a directory on the Go server
    write(place, {name: name.encode() for name in names})
    assert place.names() == ["a", "a.b", "d", "e"]
    assert place.directories() == ["a", "a.b", "e"] or kind != "gs"
    assert [found.path for found in place.walk() if found.is_file][-3:] == ["a.b/c", "d", "e/f/&"]
    assert [found.path for found in place.walk() if found.is_dir][-2:] == ["e", "e/f"]
    assert (place / "d").is_file() and not (place / "d").is_dir()
    assert (place / "e/f").is_dir() and not (place / "e/f").is_file()
    assert not (place / "e/").is_file() and not (place / "n").exists()
    assert (place / "d").file_bytes() == 1 and (place / "n").file_bytes() is None
    assert (place / "d").read() == (place / "d").part(0, 1) == b"d"
    assert (place / "n").read() is None
    (place / "d").write(b"other")
    assert (place / "d").read() == b"other"
    (place / "d").remove()
    assert not (place / "d").exists()


def test_a_root_of_many_steps_is_opened_with_few_requests(saved, stores, kind):
    source = saved("manager")
    url = put(f"{stores.bucket(kind)}/run", source.path)
    place = parse_location(url)
    names = [f"{step}/default/a/{chunk}" for step in range(21, 80) for chunk in range(3)]
    write(place, dict.fromkeys(names, b""))
    stores.reset()
    ckpt = reshard.open(url)
    # Steps that are not marked, and after the last that is.
    assert ckpt.source.steps == layouts.STEPS and ckpt.source.step == "20"
    assert len(ckpt.source.uncommitted) == 59
    documents = [f"default/{name}" for name in ("_METADATA", "manifest.ocdbt", "_sharding")]
    files = {f"79/{name}": (source.path / "20" / name).read_bytes() for name in documents}
    names = [f"{step}/{MARKER}" for step in range(21, 80)] + ["100/default/a/0"]
    write(place, files | dict.fromkeys(names, b""))
    stores.reset()
    with pytest.raises(reshard.CorruptCheckpointError):  # its data files are others'
        reshard.open(url)
    assert len(stores.requests) < 30, [request[:2] for request in stores.requests]
    stores.reset()
    assert reshard.open(url, step=20).source.steps[:4] == (*layouts.STEPS, 21, 22)
    assert len(stores.requests) < 30, [request[:2] for request in stores.requests]
    assert not [r for r in stores.requests if re.search(r"run/(2[1-9]|[3-7]\d)", r.key)]


def test_a_root_of_many_chunks(saved, stores):
    item = saved("zarr2-files").path
    top = stores.bucket("conditional")
    files = {f"{f.relative_to(item)}": f.read_bytes() for f in item.rglob("*") if f.is_file()}
    for step in range(1000):
        chunks = {f"old/{n}": b"x" for n in range(10_000 if step == 999 else 10)}
        for key, data in {**(files if step == 999 else {}), **chunks}.items():
            stores.objects[top[5:], f"run/{step}/default/{key}"] = (1, data)
        for key in (MARKER, "_CHECKPOINT_METADATA"):
            stores.objects[top[5:], f"run/{step}/{key}"] = (1, b"{}")
    ckpt = reshard.open(f"{top}/run")
    assert ckpt.source.steps == tuple(range(1000)) and ckpt.source.step == "999"
    assert len(ckpt.arrays) == len(reshard.open(item).arrays)
    assert len(stores.answered("list")) <= 16
    assert {request.key.split("/")[2] for request in stores.requests} == {"", "999"}
    stores.objects.clear()


@pytest.mark.parametrize("layout", ["standalone", "manager", "bare"])
def test_without_a_marker_it_is_uncommitted(saved, stores, layout):
    source = saved(layout)
    url = put(f"{stores.bucket('gs')}/run/x", source.path)
    number = 20 if layout == "manager" else None
    place = parse_location(f"{url}/20" if number else url)
    assert reshard.open(url).source.item == ("default" if number else "")
    (place / MARKER).remove()
    if number:
        assert reshard.open(url).source.steps == (3,)
        assert reshard.open(url).notes == ("step 20 was never committed and is left out",)
    text = f"`{place}` was never committed: its `{MARKER}`, which is written last in a bucket, is "
    text += "missing\n\nhint: if it is a copy of a complete checkpoint, put a file "
    text += f"`{MARKER}` into it"
    refused(reshard.UncommittedCheckpointError, text, reshard.open, url, step=number)


def test_a_copy_of_a_root_without_markers(saved, stores):
    """The hint of a step also stands in the error of its root, in `doctor`, and beside a step."""
    source = saved("manager")
    url = put(f"{stores.bucket('gs')}/run", source.path)
    for step in layouts.STEPS:
        (parse_location(url) / f"{step}/{MARKER}").remove()
    hint = f"if `{url}/20` is a copy of a complete checkpoint, put a file `{MARKER}` into it"
    text = f"`{url}` holds only checkpoints that were never committed\n  20\n  3\n\nhint: {hint}"
    refused(reshard.UncommittedCheckpointError, text, reshard.open, url)
    status, out, _ = reshard_in(source.path, "doctor", url)
    assert status == 1 and f"next     {hint}\n" in out
    (parse_location(url) / f"3/{MARKER}").write(b"")
    assert reshard.open(url).source.steps == (3,)
    status, out, _ = reshard_in(source.path, "doctor", url)
    assert status == 0 and "never committed: 20" in out and f"next     {hint}\n" in out
    text = f"`{url}` has no step 19\n  its steps: 3\n  never committed: 20\n\nhint: step=3"
    refused(reshard.CheckpointNotFoundError, text, reshard.open, url, step=19)


def test_missing_paths(stores):
    """The hint lists the existing names: of directories, or all."""
    url = stores.bucket("s3")
    write(parse_location(f"{url}/run"), dict.fromkeys(["c", "a/x", "b", "d", "e", "f"], b""))
    text = f"nothing exists at `{url}/run/x`\n\nhint: `{url}/run` has: a"
    refused(reshard.CheckpointNotFoundError, text, reshard.open, f"{url}/run/x")
    text = f"`{url}/run` is not a checkpoint\n  {test_loader.NOTHING}\n\n"
    text += f"hint: `{url}/run` has: a, b, c, d, e, ..."
    refused(reshard.CheckpointFormatError, text, reshard.open, f"{url}/run")


def test_a_missing_bucket(stores, kind):
    stores.bucket(kind)
    stores.faults.append(Fault(" nobody", 404, 1000))
    url = f"{kind}://nobody-has-it/run"
    text = f"the list of `{url}` cannot be read\n  404: there is no such bucket or object"
    refused(reshard.StoreError, text, reshard.open, url)


def test_slow_requests_are_reported(stores, monkeypatch, caplog):
    monkeypatch.setattr(bucket, "_PATIENCE", 0.01)
    url = f"{stores.bucket('conditional')}/run"
    stores.delay = 0.05
    parse_location(url).names()
    text = f"waiting for `{url}`: failed requests are repeated for some seconds"
    assert caplog.messages == [text]


@pytest.mark.parametrize(("layout", "most"), [("manager", 13), ("standalone", 9), ("v1", 10)])
def test_opening_repeats_no_request(saved, stores, layout, most):
    url = put(f"{stores.bucket('conditional')}/run", saved(layout).path)
    stores.reset()
    reshard.open(url)
    asked = [request[:2] for request in stores.requests]
    # One directory is listed twice: alone, and with everything below it.
    assert len(asked) <= min(most, len(set(asked)) + 1), asked


def test_files_next_to_the_steps(saved, stores, tmp_path):
    """A directory that is called as one is copied; no object that has the name of a directory."""
    url = put(f"{stores.bucket('s3')}/run", saved("manager").path)
    place = parse_location(url) / "notes"
    (parse_location(url) / "logs_2024/events").write(b"events")
    reshard.save(reshard.open(url), tmp_path / "out")
    assert (tmp_path / "out/logs_2024/events").read_bytes() == b"events"
    (place / "x").write(b"x")
    (place / "x/y").write(b"y")
    text = f"`{place}/x` is an object, and also a directory of other objects\n\n"
    text += "hint: rename one of them: a disk cannot hold both"
    ckpt, out = reshard.open(url), tmp_path / "other"
    refused(reshard.CheckpointFormatError, text, reshard.save, ckpt, out)


STATUSES = {
    403: "403: no credentials allow it",
    429: "429: too many requests, also after retries",
    503: "503: the store was not available, also after retries",
}


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    tree = layouts.small_tree(layouts.mesh((2, 4)), {"embed": P("data", "model")}, (64, 96))

    def save(form):
        path = tmp_path_factory.mktemp(form) / "saved"
        return layouts.save_pytree(path, {"params": tree}, **FORMATS[form])

    return functools.cache(save)


@pytest.mark.usefixtures("short_tries")
@pytest.mark.parametrize("fault", [*STATUSES, "cut", "truncated"])
@pytest.mark.parametrize("what", ["list", "_METADATA", "data"])
def test_refused_requests(one, stores, kind, fault, what):
    url = put(f"{stores.bucket(kind)}/run", one("zarr2-files"))
    ckpt = reshard.select(reshard.open(url), "params/embed")
    pattern = {"list": "list ", "data": r"read .*/\d"}.get(what, f"read .*{what}")
    stores.faults.append(Fault(pattern, fault, 1000))
    with pytest.raises(reshard.StoreError) as caught:
        if what == "data":
            reshard.digest(ckpt)
        else:
            reshard.open(url)
    text = str(caught.value)
    assert STATUSES.get(fault, "the connection failed, also after retries: ") in text
    said = rf"{url}[^ ]*` cannot be read\n"
    if what == "data":
        said = rf"\n  ({url}|run)/params.embed/\d.\d: "
    assert re.search(said, text), text


@pytest.mark.parametrize(
    "answer", [b"", b"[]", b"<html>", b"<a><Contents><Key>b</Key></Contents></a>"]
)
def test_an_invalid_list(stores, monkeypatch, kind, answer):
    url = f"{stores.bucket(kind)}/run"
    monkeypatch.setattr(stores._proxy, "handle", lambda handler, _: handler.answer(200, {}, answer))
    text = f"the list of `{url}` cannot be read\n  the answer is not a list of objects"
    refused(reshard.StoreError, text, parse_location(url).names)


def test_an_object_removed_after_it_was_listed(stores, kind, tmp_path):
    place = parse_location(f"{stores.bucket(kind)}/run/a")
    place.write(b"data")
    stores.faults.append(Fault("read .*run/a", 404))
    text = f"`{place}` cannot be read\n  "
    refused(reshard.StoreError, text + "it was removed while it was read", place.read)
    assert place.read() == b"data"
    text += "it changed or was removed while it was read"
    refused(reshard.StoreError, text, place.copy, Location(str(tmp_path / "a")), nbytes=5)


def test_a_manifest_that_is_missing_for_a_moment(saved, stores):
    url = put(f"{stores.bucket('s3')}/run", saved("standalone").path)
    document = parse_location(f"{url}/_METADATA")
    tree = json.loads(document.read())
    document.write(json.dumps(tree | {"store_array_data_equal_to_fill_value": False}).encode())
    ckpt = reshard.open(url)
    stores.faults.append(Fault("read .*manifest", 404, 1000))
    with pytest.raises(reshard.ReshardError, match="its stored bytes"):
        reshard.digest(ckpt)


def test_wrong_environment_variables_of_s3(stores, monkeypatch):
    url = stores.bucket("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9")
    text = "AWS_ENDPOINT_URL is `127.0.0.1:9`, which is not a URL\n\n"
    text += "hint: export AWS_ENDPOINT_URL=http://127.0.0.1:9"
    refused(reshard.CheckpointFormatError, text, reshard.open, f"{url}/run")
    monkeypatch.setenv("AWS_ENDPOINT_URL", stores.url)
    monkeypatch.setenv("AWS_PROFILE", "nope")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(reshard.StoreError, match="The config profile"):
        reshard.open(f"{url}/run")


@pytest.mark.usefixtures("short_tries")
@pytest.mark.parametrize("fault", [429, 503, "cut", "truncated"])
@pytest.mark.parametrize("form", ["zarr2", "zarr2-files"])
def test_failed_requests_are_retried(one, stores, kind, fault, form):
    url = put(f"{stores.bucket(kind)}/run", one(form))
    for pattern in ("list ", "_METADATA", r"read .*/\d", "read .*/d/"):
        stores.faults.append(Fault(pattern, fault))
    assert reshard.diff(one(form), url, values=True).equal


@pytest.mark.usefixtures("short_tries")
@pytest.mark.parametrize("form", ["zarr2", "zarr2-files", "zarr3-files"])
def test_a_removed_object(one, stores, kind, form, tmp_path):
    url = put(f"{stores.bucket(kind)}/run", one(form))
    ckpt = reshard.open(url)
    values = ckpt.source.store.values["params.embed"].items()
    file = max(value.file for key, value in values if value.file and key[0] not in ".z")
    plan = reshard.plan(reshard.to_mesh(ckpt, "1x8"), tmp_path / "out")
    (parse_location(url) / file).remove()
    text = f"`{url}/{file}` was removed\n\nhint: open it again: reshard.open(path)"
    part = reshard.select(ckpt, "params/embed")
    calls = [(execute, plan), (reshard.restore, part, layouts.mesh((1, 8)))]
    for call in (*calls, (reshard.verify, part), (part["params/embed"].read,)):
        refused(reshard.ChangedCheckpointError, text, *call)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt", "ocdbt.process_0/d/", MARKER])
@pytest.mark.parametrize("planned", [False, True])
def test_an_object_that_changes_after_it_was_opened(saved, stores, kind, name, planned, tmp_path):
    top = stores.bucket(kind)
    url = put(f"{top}/run", saved("standalone").path)
    ckpt = reshard.to_mesh(reshard.open(url), "1x8")
    place = parse_location(url) / next(file for file in ckpt.source.identity.files if name in file)
    data = place.read() + b"\n"
    if not planned:
        place.write(data)
        ckpt = pickle.loads(pickle.dumps(ckpt))
    text = f"`{place}` has changed since it was opened\n  it had {len(data) - 1} bytes, version "
    calls = [reshard.plan, ckpt, tmp_path / "out"]
    if planned:
        calls = [execute, reshard.plan(*calls[1:])]
        place.write(data)
    assert layouts.refused(reshard.ChangedCheckpointError, *calls).startswith(text)
    assert not (tmp_path / "out").exists()


def test_a_restore_with_few_requests_at_once(saved, stores):
    source = saved("standalone")
    url = put(f"{stores.bucket('s3')}/run", source.path)
    for options, limit in (({}, 128), ({"concurrency": 3}, 3)):
        ckpt = reshard.open(url, **options)
        context = ckpt.source.store.context
        assert context["s3_request_concurrency"].to_json() == {"limit": limit}
    got = reshard.restore(ckpt, layouts.abstract(source.tree, layouts.mesh((1, 8))))
    layouts.assert_same_tree(got, layouts.plain_scalars(source.tree))
    with pytest.raises(reshard.ArgumentError, match="concurrency must be 1 or more, not 0"):
        reshard.open(url, concurrency=0)


def test_libraries_print_nothing(saved, stores, tmp_path):
    """Not even TensorStore, if it finds no credentials."""
    url = put(f"{stores.bucket('gs')}/run", saved("standalone").path)
    lonely = {**os.environ, "HOME": str(tmp_path)}
    del lonely["AWS_ACCESS_KEY_ID"]
    words = [sys.executable, "-m", "reshard", "inspect", "--json", url]
    done = subprocess.run(words, capture_output=True, text=True, env=lonely, check=True)
    assert done.stderr == "" and json.loads(done.stdout)["path"] == url
    stores.faults.append(Fault("list nobody", 403, 2))
    words[-2:] = ["s3://nobody-has-it/run"]
    done = subprocess.run(words, capture_output=True, text=True, env=lonely, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert re.match(r"Error: .* cannot be read\n", done.stderr), done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [("s3", "a//b"), ("s3", "a/\x01"), ("conditional", "a//b"), ("conditional", "a/./b")],
)
def test_names_that_only_tensorstore_lists(stores, kind, name):
    place = parse_location(f"{stores.bucket(kind)}/run")
    write(place, {"d": b"d", "a/c": b"c"})
    if kind == "s3":
        write(place, {name: b"x"})
    else:
        stores.objects[str(place.parent)[5:], f"run/{name}"] = (1, b"x")
    assert place.names() == ["a", "d"]
    files = {found.path: found.nbytes for found in place.walk() if found.is_file}
    assert files == dict.fromkeys(["d", "a/c", name], disk.UNKNOWN)


@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_placeholder_objects_of_directories(stores, kind):
    """Some tools put an empty object `a/` for a directory `a`: it is not a file."""
    place = parse_location(f"{stores.bucket(kind)}/run")
    write(place, {"a/": b"", "a/b/": b"", "a/b/c": b"c", "empty": b"", "x/": b""})
    found = [(entry.path, entry.nbytes) for entry in place.walk() if entry.is_file]
    assert found == [("a/b/c", 1), ("empty", 0)]
    assert place.names() == ["a", "empty", "x"] and place.directories() == ["a", "x"]
    assert (place / "x").names() == [] and (place / "a").names() == ["b"]
    assert not (place / "a/b").is_file() and (place / "a/b").is_dir()
    assert (place / "empty").is_file() and not (place / "x").exists()


@pytest.mark.parametrize("kind", ["s3", "conditional"])
@pytest.mark.parametrize("status", [400, 401, 403])
def test_credentials_that_obstore_does_not_have(stores, kind, status, monkeypatch):
    place = parse_location(f"{stores.bucket(kind)}/run")
    write(place, {"a/b": b"1", "d": b"2"})
    sizes = {found.path: found.nbytes for found in place.walk() if found.is_file}
    assert sizes == {"a/b": 1, "d": 1}
    if status != 400:  # a signature for another region
        access = {"s3": "_s3_access", "conditional": "_gs_access"}[kind]
        config = getattr(bucket, access)()[0] | {"skip_signature": True}
        monkeypatch.setattr(bucket, access, lambda: (config, None))
        bucket._obstore_opened.cache_clear()
    stores.faults.append(Fault("list ", status))
    assert place.names() == ["a", "d"]
    stores.faults.append(Fault("list ", status))
    unknown = {found.path: found.nbytes for found in place.walk() if found.is_file}
    assert unknown == dict.fromkeys(sizes, disk.UNKNOWN)
    stores.faults.append(Fault("HEAD .*/d", status))
    assert (place / "d").is_file() and [fault.times for fault in stores.faults] == [0, 0, 0]


def test_credentials_of_a_profile(monkeypatch, tmp_path):
    """Of the environment first; then those that boto3 finds."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    store = bucket._store("s3", "bucket")
    assert store.credential_provider is None and "skip_signature" not in store.config
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    file = tmp_path / "credentials"
    file.write_text("[mine]\naws_access_key_id = two\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    store = bucket._store("s3", "bucket")
    assert store.credential_provider()["access_key_id"] == "two"
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_REGION", "eu-west-2")
    store = bucket._store("s3", "bucket")
    assert store.config["skip_signature"]
    monkeypatch.delenv("AWS_REGION")  # the profile has none
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
    with pytest.raises(bucket.OnlyTensorStoreError):
        bucket._store("s3", "bucket")


def test_credentials_of_google(monkeypatch):
    """A token of the environment first; then those that google-auth finds."""
    asked = []

    def default(scopes):
        assert scopes == ["https://www.googleapis.com/auth/devstorage.read_write"]
        found = types.SimpleNamespace(token="found", expiry=None, refresh=asked.append)
        return found, "project"

    monkeypatch.setattr(google.auth, "default", default)
    monkeypatch.delenv("TENSORSTORE_GCS_HTTP_URL", raising=False)
    monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "given")
    store = bucket._store("gs", "with-a-token")
    assert store.credential_provider()["token"] == "given"
    monkeypatch.delenv("GOOGLE_AUTH_TOKEN_FOR_TESTING")
    store = bucket._store("gs", "without-one")
    assert store.credential_provider()["token"] == "found" and len(asked) == 1
    monkeypatch.setitem(sys.modules, "google.auth", None)
    store = bucket._store("gs", "without-google-auth")
    assert store.config["skip_signature"]


@pytest.mark.usefixtures("short_tries")
@pytest.mark.parametrize("kind", ["s3", "conditional"])
@pytest.mark.parametrize(("fault", "times"), [(None, 0), ("lost", 1), ("lost", 9), ("cut", 1)])
def test_an_object_is_created_if_it_is_absent(stores, kind, fault, times):
    """Never replaced. A refusal proves nothing if the answer to the first request was lost."""
    place = parse_location(f"{stores.bucket(kind)}/run/record")
    other = place.parent / "other"
    stores.faults.append(Fault("write ", fault, times))
    if times == 9:
        text = "503: the store was not available, also after retries"
        text = f"`{place}` cannot be written\n  {text}"
        refused(reshard.StoreError, text, place.create, b"mine")
    else:
        assert place.create(b"mine") == (fault != "lost")
    stores.faults.clear()
    assert not place.create(b"mine") and not place.create(b"another's")
    stores.faults.append(Fault("write ", 403, 9))
    text = f"`{other}` cannot be written\n  403: no credentials allow it"
    refused(reshard.StoreError, text, other.create, b"mine")
    assert place.read_whole() == b"mine" and other.read_whole() is None


def test_a_copy_on_the_server_may_take_long(stores, monkeypatch):
    """Its answer comes when gigabytes are copied; other requests are repeated after 30 s."""
    place, stored = parse_location(f"{stores.bucket('s3')}/run/one"), bucket._obstore().store
    place.write(b"one")
    make, timeouts = stored.S3Store, []

    def watched(bucket, **options):
        timeouts.append(options["client_options"]["timeout"])
        return make(bucket, **options)

    monkeypatch.setattr(stored, "S3Store", watched)
    bucket._obstore_opened.cache_clear()
    place.copy_on_server(place.parent / "two")
    assert timeouts == ["3600s"] and (place.parent / "two").read_whole() == b"one"
    assert place.exists() and timeouts == ["3600s", "30s"]


def test_absent_chunks(stores, kind, tmp_path):
    """A chunk that was removed is an error, also if absent chunks hold the fill value."""
    x = np.arange(1, 16 * 6 + 1, dtype=np.float32).reshape(16, 6)
    x[6:8, 3:] = x[14:, :3] = 0
    tree = {"a": layouts.put(x, "data", "model", sizes=(8, 2))}
    path = layouts.save_pytree(tmp_path / "in", tree, use_ocdbt=False)
    layouts.edit_document(path / "_METADATA", store_array_data_equal_to_fill_value=False)
    for key in ("3.1", "7.0"):
        (path / "a" / key).unlink()
    url = put(f"{stores.bucket(kind)}/run", tmp_path / "in")
    ckpt = reshard.open(url)
    assert np.array_equal(ckpt["a"].view().read().result(), x)
    reshard.save(reshard.cast(ckpt, "bfloat16"), tmp_path / "out")
    assert not stores.answered("read", r"/a/(3\.1|7\.0)$")
    there = reshard.cast(reshard.open(tmp_path / "in"), "bfloat16")
    assert reshard.diff(there, tmp_path / "out", values=True).equal
    (parse_location(url) / "a/5.1").remove()
    for call, *arguments in ((reshard.digest,), (reshard.save, tmp_path / "again")):
        told = layouts.refused(reshard.ChangedCheckpointError, call, ckpt, *arguments)
        assert told.startswith(f"`{url}/a/5.1` was removed\n")
    assert not (tmp_path / "again").exists()
