"""Shares that are written to a bucket, in place, and their commit, whose marker is last."""

import importlib
import json
import random

import pytest
import tensorstore as ts
from jobs import MARKER, save
from sampling import few
from test_shares_written import killed, killed_in

import reshard
from reshard.storage.location import Location
from reshard.storage.ocdbt import new_context, ocdbt_spec
from reshard.writer.share_job import Job

pytestmark = pytest.mark.usefixtures("short_tries")
SHARES = 5
# A function has its name.
share_commit = importlib.import_module("reshard.writer.share_commit")


def stored(stores, url):
    """Key of an object, or of a database, below a URL -> bytes."""
    scheme, _, rest = url.partition("://")
    name, _, prefix = rest.partition("/")
    found = {}
    for key in stores.keys(f"{scheme}://{name}"):
        if not key.startswith(f"{prefix}/"):
            assert not key.startswith(f"{prefix.rpartition('/')[0]}/.reshard-"), key
            continue
        below = key.removeprefix(f"{prefix}/")
        if below.endswith("manifest.ocdbt"):
            item = Location(f"{url}/{below}").parent
            assert "process_" not in below
            spec = ocdbt_spec(item)
            store = ts.KvStore.open(spec, context=new_context()).result()
            place = below.rpartition("/")[0]
            keys = store.list().result()
            found |= {f"{place}/{k.decode()}": store.read(k).result().value for k in keys}
        elif "ocdbt.process_" not in below and below.split("/")[-2:][0] != "d":
            found[below] = b"" if below.endswith(MARKER) else Location(f"{url}/{below}").read()
    return found


KINDS = ["ckpt manager", "convert zarr3-files", "ckpt zarr2"]


@pytest.mark.parametrize("kind", few(KINDS, "ckpt manager", "convert zarr3-files"))
@pytest.mark.parametrize("where", few(["s3", "gs", "conditional"], "gs"))
def test_shares_in_a_bucket_are_what_one_process_writes(stores, jobs, monkeypatch, where, kind):
    """In any order; one is killed before it has told what it wrote, one is written twice."""
    (path, _), top = jobs(kind), f"{stores.bucket(where)}/runs"
    save(path, f"{top}/whole")
    url = f"{top}/out"
    options = {"share": (2, SHARES)}
    killed_in(monkeypatch, Job, "write_document", killed(0), save, path, url, **options)
    numbers = random.Random(kind).sample([0, 1, 2, 3, 3, 4], 6)
    for number in numbers[:-1]:
        save(path, url, share=(number, SHARES))
    with pytest.raises(reshard.UncommittedCheckpointError):
        reshard.open(f"{url}/1" if kind == "ckpt manager" else url)
    save(path, url, share=(numbers[-1], SHARES))
    stores.reset()
    killed_in(monkeypatch, share_commit, "write_markers", killed(0), reshard.commit, url)
    assert not stores.answered("list", r"/\d\.json$")  # but all of them together
    assert len(stores.answered("read", r"/\d\.json$")) == SHARES
    assert reshard.commit(url) is True
    assert stored(stores, url) == stored(stores, f"{top}/whole") != {}
    assert reshard.commit(url) is False
    for step in reshard.open(url).source.steps or (None,):
        assert reshard.verify(reshard.open(url, step=step)).ok


def test_refusals_in_a_bucket(stores, jobs):
    (path, _), url = jobs("ckpt zarr2"), f"{stores.bucket('gs')}/runs/out"
    with pytest.raises(reshard.CheckpointNotFoundError, match=f"no shares of `{url}`"):
        reshard.commit(url)
    save(path, url, share=(1, 2))
    with pytest.raises(reshard.DestinationError, match="shares: 2 then, 3 now"):
        save(path, url, share=(1, 3))
    with pytest.raises(reshard.DestinationError, match=r"missing: 0\n"):
        reshard.commit(url)
    with pytest.raises(reshard.DestinationError, match="shares of a job for"):
        save(path, url)
    other = f"{stores.bucket('gs')}/runs/other"
    Location(f"{other}/notes.txt").write(json.dumps({}).encode())
    with pytest.raises(reshard.DestinationExistsError, match="is no unfinished job's"):
        save(path, other, share=(1, 2))
