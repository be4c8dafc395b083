"""The object stores that the tests are run with: what each of them keeps, and what the proxy does
to requests."""

import http.client
import urllib.error
import urllib.request

import pytest
import servers
import tensorstore as ts


def opened(stores, url):
    bucket = url.partition("://")[2]
    spec = {"driver": "gcs", "bucket": bucket, "path": "below/"}
    if url.startswith("s3"):
        spec |= {"driver": "s3", "endpoint": stores.url, "aws_region": "us-east-1"}
        spec["aws_credentials"] = {"type": "environment"}
    return ts.KvStore.open(spec).result()


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
