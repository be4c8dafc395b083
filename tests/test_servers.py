"""The object stores that the tests are run with: what each of them keeps, and what the proxy does
to requests."""

import http.client
import urllib.error
import urllib.request

import pytest
import servers
import tensorstore as ts

KINDS = ("s3", "gs", "conditional")


def opened(stores, url):
    bucket = url.partition("://")[2]
    spec = {"driver": "gcs", "bucket": bucket, "path": "below/"}
    if url.startswith("s3"):
        spec |= {"driver": "s3", "endpoint": stores.url, "aws_region": "us-east-1"}
        spec["aws_credentials"] = {"type": "environment"}
    return ts.KvStore.open(spec).result()


@pytest.mark.every_combination
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_listed_and_deleted(kind, stores):
    url = stores.bucket(kind)
    store = opened(stores, url)
    for name in ("a", "b/0", "b/1 ü&<", "b/2", "c"):
        store.write(name, name.encode() * 3).result()
    assert store.read("b/1 ü&<").result().value == "b/1 ü&<".encode() * 3
    assert store.read("c").result().value == b"ccc"
    assert store.read("b/0", byte_range=slice(-4, None)).result().value == b"/0b/0"[-4:]
    assert store.read("b/0", byte_range=slice(2, 5)).result().value == b"0b/"
    assert store.read("b").result().state == "missing"
    listed = store.list(ts.KvStore.KeyRange("b/1", "c")).result()
    assert sorted(listed) == ["b/1 ü&<".encode(), b"b/2"]
    store.delete_range(ts.KvStore.KeyRange("b/", "b/1")).result()
    assert stores.keys(f"{url}/below/") == ["below/a", "below/b/1 ü&<", "below/b/2", "below/c"]
    asked = {(r.operation, r.key.partition("/")[2], r.status) for r in stores.requests}
    assert {("write", "below/a", 200), ("read", "below/b", 404)} <= asked
    assert ("delete", "below/b/0", 200 if kind == "gs" else 204) in asked


@pytest.mark.every_combination
@pytest.mark.parametrize("kind", ["s3", "conditional"])
def test_writes_and_deletions_keep_their_conditions(kind, stores):
    store = opened(stores, stores.bucket(kind))
    missing = store.read("lock").result().stamp.generation
    first = store.write("lock", b"1", if_equal=missing).result().generation
    assert first
    assert store.write("lock", b"2", if_equal=missing).result().generation == b""
    second = store.write("lock", b"2", if_equal=first).result().generation
    assert store.write("lock", b"3", if_equal=first).result().generation == b""
    read = store.read("lock").result()
    assert (read.value, read.stamp.generation) == (b"2", second)
    assert store.read("lock", if_not_equal=second).result().state == "unspecified"


def test_lists_come_in_pages(stores):
    url = stores.bucket("conditional")
    store = opened(stores, url)
    names = [f"{number:04}" for number in range(1001)]
    for write in [store.write(name, b"") for name in names]:
        write.result()
    assert sorted(key.decode() for key in store.list().result()) == names
    assert len(stores.answered("list")) == 2
    assert stores.keys(url) == [f"below/{name}" for name in names]


def test_the_proxy_refuses_cuts_and_truncates(stores):
    url = stores.bucket("conditional")
    opened(stores, url).write("a", b"0123456789").result()
    target = f"{stores.url}/storage/v1/b/{url[5:]}/o/below%2Fa?alt=media"
    stores.faults += [servers.Fault("read .*below/a", kind) for kind in (503, "cut", "truncated")]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(target)
    with pytest.raises(http.client.RemoteDisconnected):
        urllib.request.urlopen(target)
    with pytest.raises(http.client.IncompleteRead, match=r"5 bytes read, 5 more expected"):
        urllib.request.urlopen(target).read()
    assert urllib.request.urlopen(target).read() == b"0123456789"
    answered = stores.answered("read", "below/a$")
    assert [(r.status, r.received) for r in answered] == [(503, 0), (0, 0), (200, 10), (200, 10)]
