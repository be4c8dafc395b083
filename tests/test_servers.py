"""The object stores that the tests are run with: what each of them keeps."""

import pytest
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
