"""Shares that are written to a bucket, in place, and their commit, whose marker is last."""

import random
from unittest import mock

import pytest
import tensorstore as ts
from jobs import MARKER, Killed, refused, save
from sampling import few
from servers import Fault

import reshard
from reshard.loader.detection import RECORD
from reshard.storage.location import parse_location
from reshard.storage.ocdbt import new_context, ocdbt_spec
from reshard.writer.job import Attempt, is_of_an_attempt

pytestmark = pytest.mark.usefixtures("short_tries")
SHARES = 5


def stored(stores, url):
    """Key of an object, or of a database, below a URL -> bytes."""
    found = {}
    prefix = "/".join(url.split("/")[3:])
    for key in stores.keys(f"{url}/"):
        below = key.removeprefix(f"{prefix}/")
        if below.endswith("manifest.ocdbt"):
            spec = ocdbt_spec(parse_location(f"{url}/{below}").parent)
            store = ts.KvStore.open(spec, context=new_context()).result()
            place = below.rpartition("/")[0]
            keys = store.list().result()
            found |= {f"{place}/{k.decode()}": store.read(k).result().value for k in keys}
        elif not is_of_an_attempt(below) and below != RECORD:
            place = parse_location(f"{url}/{below}")
            found[below] = b"" if below.endswith(MARKER) else place.read()
    return found


KINDS = ["ckpt manager", "convert zarr3-files", "ckpt zarr2"]


@pytest.mark.parametrize("kind", few(KINDS, "ckpt manager", "convert zarr3-files"))
@pytest.mark.parametrize("where", ["s3", "conditional"])
def test_shares_in_a_bucket_are_what_one_process_writes(stores, jobs, monkeypatch, where, kind):
    """In any order; one is killed before it has told what it wrote, one is written twice."""
    (path, _), top = jobs(kind), f"{stores.bucket(where)}/runs"
    save(path, f"{top}/whole")
    url = f"{top}/out"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        for name in ("publish", "abandon"):
            patch.setattr(Attempt, name, mock.Mock(side_effect=Killed))
        save(path, url, share=(2, SHARES))
    numbers = random.Random(kind).sample([0, 1, 2, 3, 3, 4], 6)
    for number in numbers[:-1]:
        save(path, url, share=(number, SHARES))
    with pytest.raises(reshard.UncommittedCheckpointError):
        reshard.open(f"{url}/1" if kind == "ckpt manager" else url)
    save(path, url, share=(numbers[-1], SHARES))
    stores.faults = [Fault(f"write .*{MARKER}", 403)]
    with pytest.raises(reshard.StoreError):
        reshard.commit(url)
    assert reshard.commit(url) is True
    assert stored(stores, url) == stored(stores, f"{top}/whole") != {}
    assert reshard.commit(url) is False
    for step in reshard.open(url).source.steps or (None,):
        assert reshard.verify(reshard.open(url, step=step)).ok


def test_refusals_in_a_bucket(stores, jobs):
    (path, _), url = jobs("ckpt zarr2"), f"{stores.bucket('conditional')}/runs/out"
    with pytest.raises(reshard.CheckpointNotFoundError, match=f"no shares exist for `{url}`"):
        reshard.commit(url)
    save(path, url, share=(1, 2))
    with pytest.raises(reshard.DestinationError, match=f"the job of `{url}` has 2 shares, not 3"):
        save(path, url, share=(1, 3))
    with pytest.raises(reshard.DestinationError, match="missing share numbers: 0\n"):
        reshard.commit(url)
    place = parse_location(url)
    (document,) = (place / e.path for e in place.walk() if e.path.endswith("/1.json"))
    document.write(b"{")
    text = (
        f"`{document}` is damaged\n\nhint: delete `{document}`; resume=True writes its part again"
    )
    refused(reshard.DestinationError, text, reshard.commit, url)
    document.remove()
    with pytest.raises(reshard.CheckpointNotFoundError, match=f"no shares exist for `{url}`"):
        reshard.commit(url)
