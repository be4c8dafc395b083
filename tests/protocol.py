"""A simulator of the commit protocol: the code of `writer.job` and `writer.commit` on a store in
memory. Each request of an attempt is a step, and between any two of them a seeded scheduler lets
others go on, kills one, or has its requests arrive late, twice, or without an answer.

It knows nothing of how the protocol works: only what a reader would see, and what must be true.
"""

import errno
import functools
import json
import random
import types
import zlib
from typing import Any

import greenlet

from reshard.errors import DestinationError, KeptFilesError, ReshardError, StoreError
from reshard.loader import detection
from reshard.loader.inventory import REPLACED_SUFFIX
from reshard.storage.disk import UNKNOWN, Entry, Location
from reshard.writer import commit, job, replaced

FOREIGN = "foreign"  # begins names of somebody else's files
TOP, ITEM, SHARES = "root/1000", "default", 2
MARKER, META, MANIFEST = "commit_success.txt", "_METADATA", "manifest.ocdbt"
REPLACED = TOP + REPLACED_SUFFIX
FIXED = {f"{TOP}/{n}" for n in (detection.RECORD, MARKER, f"{ITEM}/{META}", f"{ITEM}/{MANIFEST}")}


class FoulError(Exception):
    """What must never be."""


class Place:
    """A path in a simulated store, with what `Location` offers to the protocol. Each access is a
    request, which the scheduler carries out."""

    def __init__(self, world: "World", path: str):
        self.world, self.path = world, path
        self.is_local = world.is_local

    def __truediv__(self, below: str) -> "Place":
        return Place(self.world, f"{self.path}/{below}".rstrip("/"))

    def __str__(self) -> str:
        return self.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and other.path == self.path

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> "Place":
        return Place(self.world, self.path.rpartition("/")[0])

    def below(self, outer: "Place") -> str:
        return self.path[len(outer.path) + 1 :]

    def ask(self, operation: str, *arguments: Any) -> Any:
        request = (operation, self.path, *arguments)
        if self.world.calm:  # nobody else is there, and nothing goes wrong
            return self.world.apply(request, self.world.running)
        return self.world.scheduler.switch(request)

    def read(self) -> Any:
        return self.ask("read")

    read_whole = read

    def exists(self) -> bool:
        return self.ask("exists")

    is_dir = exists

    def walk(self) -> list[Entry]:
        found = [(path, self.world.files[f"{self.path}/{path}"]) for path in self.ask("list")]
        return [
            _entry(path, data) if isinstance(data, bytes) else _entry(path) for path, data in found
        ]

    def names(self) -> list[str]:
        return sorted({path.partition("/")[0] for path in self.ask("list")})

    directories = names

    def create(self, data: Any) -> bool:
        return self.ask("create", data)

    create_or_match: Any = Location.create_or_match
    check_conditions: Any = Location.check_conditions

    def replace(self, data: Any, temporary: str) -> None:
        self.ask("put", data)

    def remove(self) -> None:
        self.ask("delete")

    def remove_files(self, names: list[str]) -> None:
        for name in names:
            (self / name).remove()

    def remove_tree(self) -> None:
        self.remove_files(self.ask("list"))

    def make_directory(self) -> None:
        """There are no directories."""

    remove_empty = make_directory


@functools.lru_cache(1 << 12)
def _entry(path: str, content: bytes = b"") -> Entry:
    return Entry(path, True, False, 1, zlib.crc32(content))


def rename(one: Place, other: Place) -> None:
    if code := one.ask("rename", other.path):
        kind = {errno.EEXIST: FileExistsError, errno.ENOENT: FileNotFoundError}[code]
        raise kind(code, "refused")


def exchange(one: Place, other: Place) -> bool:
    if one.world.kind == "disk" and (code := one.ask("exchange", other.path)):
        raise FileNotFoundError(code, "refused")
    return one.world.kind == "disk"


def link(one: Place, other: Place) -> bool:
    if (data := one.read()) is not None:
        other.create(data)
    return True


class Pool:
    """A pool of threads, whose work is done in order."""

    def __init__(self, count: int):
        self.map = map

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def modules(old: str = "", new: str = "") -> list[Any]:
    """Copies of the two modules, in one of which a text is another; with stores, processes and
    random numbers that are simulated."""
    disk = types.SimpleNamespace(
        UNKNOWN=UNKNOWN,
        rename=rename,
        exchange=exchange,
        link_or_copy=lambda source, place, _: link(source, place),
        sync=lambda path: None,
        remove_tree=Place.remove_tree,
        remove_empty=Place.remove_empty,
    )
    threads = types.SimpleNamespace(futures=types.SimpleNamespace(ThreadPoolExecutor=Pool))
    made: list[Any] = []
    found = 0
    for module in (job, commit):
        with open(str(module.__file__)) as file:
            text = file.read()
        found += text.count(old) if old else 1
        fresh = types.ModuleType(module.__name__)
        exec(compile(text.replace(old, new) if old else text, module.__name__, "exec"), vars(fresh))
        for other in made:  # what the one has of the other
            shared = vars(fresh).keys() & vars(other).keys()
            own = {n for n in shared if getattr(vars(other)[n], "__module__", "") == other.__name__}
            vars(fresh).update({name: vars(other)[name] for name in own})
        vars(fresh).update(disk=disk, concurrent=threads, dumped=dumped, parsed=parsed)
        made.append(fresh)
    assert found == (1 if old else 2), f"{found} places have: {old}"
    clock = types.SimpleNamespace(strftime=lambda *_: "", gmtime=lambda: None)
    vars(made[0]).update(_command=lambda: "", time=clock)
    vars(made[1])["value_files"] = value_files
    return made


def dumped(document: Any) -> Any:
    """A document is stored as it is: nobody changes one."""
    return document


def parsed(place: Place) -> Any:
    return place.read()


def value_files(place: Place, nodes: bool) -> list[str]:
    if (manifest := (place / MANIFEST).read()) is None:
        raise DestinationError("there is no manifest")
    return _refs(manifest)


@functools.lru_cache(1 << 12)
def _refs(manifest: bytes) -> list[str]:
    return json.loads(manifest)


class Actor:
    """An attempt: its kind, its job, where it runs, and the request that it waits for."""

    def __init__(self, world: "World", number: int, kind: str, token: str):
        self.number, self.kind, self.token = number, kind, token
        # A commit overwrites if the job's documents say so.
        self.overwrites = kind == "overwrite" or (kind != "plain" and world.overwrites)
        self.host = world.random.choice((1, 1, 2))
        self.speed = world.random.choice((0.03, 0.3, 1.0))
        self.alive, self.killed, self.published, self.result = True, False, False, ""
        self.let = greenlet.greenlet(lambda: world.attempt(self))
        self.request: Any = None


class World:
    """A store, those who use it, and what they were told.

    Attributes:
      kind: `bucket`, `disk`, or `disk without exchange`.
    """

    def __init__(self, made: list[Any], kind: str, seed: int):
        self.job, self.commit = made
        self.kind, self.is_local = kind, kind != "bucket"
        self.random = random.Random(seed)
        self.files: dict[str, Any] = {}
        self.late: list[tuple[Any, ...]] = []
        self.actors: list[Actor] = []
        self.record: Any = None
        self.kept: set[str] = set()  # what the record names
        self.watched = FIXED  # the files by which a reader's answer may change
        self.complete, self.current = "", b""  # the job, and the manifest of its commit
        self.replaced: set[bytes] = set()  # manifests of checkpoints that others have replaced
        self.overwrites = self.random.random() < 0.5
        self.ever: set[str] = set()
        self.calm = False  # nothing goes wrong any more
        self.running: Actor | None = None
        self.scheduler = greenlet.getcurrent()
        tokens = types.SimpleNamespace(token_hex=lambda n: f"{self.random.getrandbits(64):016x}")
        vars(self.job).update(secrets=tokens, this_process=self._process)
        vars(self.commit).update(secrets=tokens, has_ended=self._has_ended)
        if self.is_local and self.random.random() < 0.6:
            ref = f"{ITEM}/ocdbt.process_0/d/x"
            self.files = {f"{TOP}/{name}": data for name, data in _whole("old", [ref]).items()}
            self.files[f"{TOP}/{ref}"] = b"data old"
            self.complete, self.current = "old", self.files[f"{TOP}/{ITEM}/{MANIFEST}"]

    def _process(self) -> dict[str, Any]:
        assert self.running is not None
        return {"pid": self.running.number, "host": str(self.running.host)}

    def _has_ended(self, owner: dict[str, Any]) -> bool | None:
        assert self.running is not None
        actor = self.actors[owner["pid"]]
        return None if actor.host != self.running.host else not actor.alive

    # What an attempt does.

    def attempt(self, actor: Actor) -> str:
        place, kind = Place(self, TOP), actor.kind
        seen = None
        try:
            if self.is_local and actor.overwrites:
                seen = [*map(replaced.seen_entry, self.commit.standing(place).walk())]
                if any(each[0].startswith(FOREIGN) for each in seen):
                    return "refused"
            if kind == "commit":
                return self._commit(place)
            shared = kind.startswith("share")
            start = self.commit.begin(
                place,
                actor.token,
                resume=kind == "resume",
                overwrite=actor.overwrites,
                shared=shared,
            )
            if start is None:
                return "ok"
            if self.is_local and not actor.overwrites and place.exists():
                return "exists"
            directory, found, ignored = start
            own = self.job.Job(place, directory, (ITEM,), actor.token, SHARES, ignored)
            attempt = self.job.Attempt(own)
            parts = [
                str(number) for number in range(SHARES) if not shared or kind[-1] == str(number)
            ]
            parts += [self.job.UNSHARED] if "0" in parts else []
            with self.commit.attempted(attempt, whole=not shared):
                for part in parts:
                    if found is None or part not in found.parts:
                        self._write(attempt, part, seen)
                if not shared:
                    self._finish(attempt, seen)
            return "written" if shared else "ok"
        except KeptFilesError:
            return "ok"
        except (ReshardError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    def _write(self, attempt: Any, part: str, seen: Any) -> None:
        directory = attempt.job.item_directory(0)
        names = {f"{attempt.name(part, '0')}/d/x": b"data " + attempt.job.token.encode()}
        staged = {}
        if part == self.job.UNSHARED:
            path = f"{ITEM}/{attempt.name(part, 'files')}/0"
            staged = {f"{ITEM}/{META}": (path, 1)}
            (attempt.job.directory / path).replace(b"meta " + attempt.job.token.encode(), "")
        for name, data in names.items():
            (directory / name).replace(data, "")
        if not self.calm and self.random.random() < 0.05:
            raise DestinationError("a share has failed")
        item = {"files": dict.fromkeys(names, 1), "nodes": {}}
        attempt.publish(part, {"items": {"0": item}, "files": staged, "replaced": seen})

    def _finish(self, attempt: Any, seen: Any) -> None:
        own = attempt.job
        assert self.running is not None
        self.running.overwrites = seen is not None
        parts = self.commit.chosen(own, self.job.look(own.directory))
        node = f"{attempt.name(self.job.ROOT, '')}/d/n"
        (own.item_directory(0) / node).replace(b"data " + own.token.encode(), "")
        refs = [node, *(name for part in parts.values() for name in part["items"]["0"]["files"])]
        [(staged, _)] = parts[self.job.UNSHARED]["files"].values()
        files = {f"{ITEM}/{META}": staged, f"{ITEM}/{MANIFEST}": json.dumps(refs).encode()}
        markers = [(MARKER, b"marker " + own.token.encode())]
        kept = [f"{ITEM}/{ref}" for ref in refs]
        result = self.commit.Result(files, markers, kept, [], [])
        self.commit.publish(attempt, result, seen, lambda: None)

    def _commit(self, place: Place) -> str:
        if not self.is_local and (place / detection.RECORD).exists():
            self.commit.forward(place)
            return "ok"
        found = [(path, each) for path, each in self.commit.jobs(place).items() if each.parts]
        if len(found) != 1 or len({d["job"] for d in found[0][1].documents}) != 1:
            return "not one job"
        [(directory, each)] = found
        directory = self.commit.taken(place, directory, each)
        about = each.documents[0]
        own = self.job.Job(place, directory, (ITEM,), about["job"], SHARES)
        attempt = self.job.Attempt(own)
        unshared = self.commit.chosen(own, each)[self.job.UNSHARED]
        with self.commit.attempted(attempt, whole=True):
            self._finish(attempt, unshared["replaced"])
        return "ok"

    # What happens.

    def run(self) -> None:
        """A schedule: two or three attempts of one or two jobs, and then one that is alone."""
        kinds = ("plain", "plain", "resume", "overwrite", "overwrite", "commit", "share0", "share1")
        one, two = "1" * 16, "2" * 16
        todo = [self.random.choice(kinds) for _ in range(self.random.choice((2, 3)))]
        if "share0" in todo or "share1" in todo:
            todo = ["share0", "share1", self.random.choice(kinds), "commit"]
        elif self.random.random() < 0.3:
            self._start("share0", one)
            self._start("share1", one)
            todo = ["commit", "commit", self.random.choice((*kinds, *["commit"] * len(kinds)))]
        foreign = self.random.choice((0, 0.03))
        soon, hesitates = self.random.choice((0.1, 0.01)), self.random.choice((1, 0.02))
        while (living := [actor for actor in self.actors if actor.alive]) or todo:
            written = todo[:1] != ["commit"] or not any(a.kind[:5] == "share" for a in living)
            if todo and (not living or (written and self.random.random() < soon)):
                self._start(todo.pop(0), self.random.choice((one, one, one, two)))
            elif self.is_local and self.random.random() < foreign:
                self._save_foreign()
            elif self.late and self.random.random() < 0.05:
                self.apply(self.late.pop(self.random.randrange(len(self.late))), None)
            else:
                # Who is about to decide may wait for long, until others are about to.
                decide = [a for a in living if a.request[0] in ("rename", "exchange")]
                waits = decide[0] if len(decide) == 1 else None
                speeds = [a.speed * (hesitates if a is waits else 1) for a in living]
                [actor] = self.random.choices(living, speeds)
                self._step(actor)
        while self.late:
            self.apply(self.late.pop(self.random.randrange(len(self.late))), None)
        self.calm = True
        names = [name for name in self.files if name.startswith(f"{TOP}/")]
        if self.complete and not names and not any(actor.killed for actor in self.actors):
            raise FoulError("nobody was killed, and the old checkpoint is not put back")
        for name in names:
            if FOREIGN in name:
                del self.files[name]
        for kind in ("resume", "overwrite"):
            self._start(kind, self.random.choice((one, two)))
        if not self.complete:
            raise FoulError(f"a lone job does not get there: {self.actors[-1].result}")

    def _save_foreign(self) -> None:
        """Another program saves a step."""
        if f"{TOP}/{MARKER}" in self.files:
            self.files[f"{TOP}/{FOREIGN}{len(self.files)}"] = b"foreign"

    def _start(self, kind: str, token: str) -> None:
        actor = Actor(self, len(self.actors), kind, token)
        self.actors.append(actor)
        self._switch(actor, None)

    def _switch(self, actor: Actor, answer: Any) -> None:
        self.running = actor
        if isinstance(answer, Exception):
            request = actor.let.throw(answer)
        else:
            request = actor.let.switch(answer) if actor.request else actor.let.switch()
        actor.request = request
        if actor.let.dead:
            actor.alive, actor.result = False, request
            if request == "ok":
                self.check()
                if not self.ever if actor.kind == "commit" else actor.token not in self.ever:
                    raise FoulError("told to be complete, and is not")
            elif actor.published:
                raise FoulError(f"complete, and told that it is not: {request}")

    def _step(self, actor: Actor) -> None:
        request, chance = actor.request, self.random.random()
        changes = request[0] in ("create", "put", "delete")
        if chance < 0.02:  # killed; what it has sent may arrive
            actor.alive, actor.killed = False, True
            if changes and not self.is_local and self.random.random() < 0.7:
                self.late.append(request)
            actor.let.throw()
            return
        answer = self.apply(request, actor)
        if changes and not self.is_local and chance < 0.10:
            if chance < 0.05:
                self.late.append(request)  # it arrives again
            else:
                answer = False if request[0] == "create" else StoreError("no answer")
        elif request[0] == "rename" and chance < 0.10:
            answer = self.apply(request, actor)  # a file server has it twice
        self._switch(actor, answer)

    def apply(self, request: tuple[Any, ...], actor: Actor | None) -> Any:
        operation, path, *arguments = request
        files = self.files
        before = files.get(path)
        if operation == "read":
            return before
        below = f"{path}/"
        if operation == "list":
            return sorted([name[len(below) :] for name in files if name.startswith(below)])
        if operation == "exists":
            return path in files or any(name.startswith(below) for name in files)
        if operation == "create":
            if path in files:
                return False
            files[path] = arguments[0]
        elif operation == "put":
            files[path] = arguments[0]
        elif operation == "delete":
            if FOREIGN in path:
                raise FoulError("somebody else's file is deleted")
            files.pop(path, None)
        else:
            assert actor is not None
            one, other = ({n for n in files if n.startswith(f"{p}/")} for p in (path, arguments[0]))
            if not one or (operation == "exchange" and not other):
                return errno.ENOENT
            if operation == "rename" and other:
                return errno.EEXIST
            if other and not actor.overwrites:
                raise FoulError("what was not to be replaced is replaced")
            moved = {arguments[0] + n[len(path) :]: files.pop(n) for n in one}
            back = {path + n[len(arguments[0]) :]: files.pop(n) for n in other}
            files.update(moved | back)
            if TOP in (path, arguments[0]):  # what was published there is replaced
                for each in self.actors:
                    each.published = False
            actor.published = arguments[0] == TOP and not path.startswith(REPLACED)
            self.check()
            return 0
        watched = path in self.watched or path.startswith(REPLACED)
        if watched and files.get(path) != before:
            self.check()
        return True

    def check(self) -> None:
        """Raises FoulError for what must never be; notes what is complete."""
        files = self.files
        record = files.get(f"{TOP}/{detection.RECORD}")
        if self.record not in (None, record):
            raise FoulError("the commit record is gone, or another one")
        if record is not None and self.record is None:
            self.record, self.kept = record, {f"{TOP}/{path}" for path in record["kept"]}
        if not self.kept <= files.keys():
            raise FoulError("what the commit record names is gone")
        marker = files.get(f"{TOP}/{MARKER}")
        if self.is_local:
            there = any(name.startswith(f"{TOP}/") for name in files)
        else:
            there = marker is not None
        if not there:
            gone = not self.is_local or not any(name.startswith(REPLACED) for name in files)
            if self.complete and gone:
                raise FoulError("what was complete is gone")
            self.watched = FIXED | self.kept
            return
        owner = marker.split()[-1].decode() if marker else ""
        refs = {
            f"{TOP}/{ITEM}/{ref}" for ref in _refs(files.get(f"{TOP}/{ITEM}/{MANIFEST}", b"[]"))
        }
        data = {files.get(ref) for ref in refs}
        meta = files.get(f"{TOP}/{ITEM}/{META}")
        if not owner or data != {f"data {owner}".encode()} or meta != f"meta {owner}".encode():
            raise FoulError("what can be read is mixed, or not all there")
        if not self.is_local and self.complete not in ("", owner):
            raise FoulError("what was complete is another one")
        manifest = files[f"{TOP}/{ITEM}/{MANIFEST}"]
        if manifest in self.replaced:
            raise FoulError("an older checkpoint is back")
        if manifest != self.current:
            self.replaced.add(self.current)
            self.current = manifest
        self.watched = FIXED | self.kept | refs
        self.complete = owner
        self.ever.add(owner)


def _whole(owner: str, refs: list[str]) -> dict[str, bytes]:
    """The fixed names of a complete checkpoint."""
    names = [ref.removeprefix(f"{ITEM}/") for ref in refs]
    return {
        f"{ITEM}/{META}": f"meta {owner}".encode(),
        f"{ITEM}/{MANIFEST}": json.dumps(names).encode(),
        MARKER: f"marker {owner}".encode(),
    }


def run(kind: str, seeds: range, old: str = "", new: str = "") -> tuple[int, str] | None:
    """The first schedule of these in which something goes wrong, and what; None if nothing does."""
    made = modules(old, new)
    for seed in seeds:
        try:
            World(made, kind, seed).run()
        except FoulError as error:
            return seed, str(error)
    return None
