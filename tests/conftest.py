"""Sixteen simulated devices, the checkpoints that tests share, and the cases of the default run."""

import os
import pathlib
import signal
import tempfile

# A shell makes its background jobs ignore interrupts, but some tests interrupt processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before any test module imports jax. Compiled code runs once or twice, so it is not optimized.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["JAX_PLATFORMS"] = "cpu"

# Other modules, processes and runs compile the same again: JAX caches it beside pytest's cache.
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(pathlib.Path(__file__).parents[1] / ".pytest_cache" / "compiled"),
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

import contextlib
import ctypes
import functools
import gc
import shutil
import sys

import hypothesis
import pytest
import sampling
from releases import older

hypothesis.settings.register_profile("few", max_examples=10)
hypothesis.settings.register_profile("many", max_examples=22)
# The most cases of one test, in the exhaustive run, that combine two values of its parameters.
MOST_PAIRS = 24
# Files that take long, longest first: they run first, so that no process waits for another.
LONG = "broadcast written_to_buckets convert convert_models save resume restorer buckets protocol"
LONG += " targets convert_align convert_layers docs format frozen cli verification derived"
LONG += " cli_convert records outputs stacking shares_written examples convert_hints commit diff"
LONG += " workers hostile page loader device_reads execution imports msgpack"


def pytest_configure(config: pytest.Config) -> None:
    """Few examples of property tests in the default run, whose files are in memory if there is room
    and `TMPDIR` is not set. Those of the exhaustive run are on a disk."""
    is_default = "not exhaustive" in config.option.markexpr
    hypothesis.settings.load_profile("few" if is_default else "many")
    if is_default:
        memory = "/dev/shm"
        if os.path.isdir(memory) and shutil.disk_usage(memory).free >= 4 << 30:
            tempfile.tempdir = os.environ.setdefault("TMPDIR", memory)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Selects cases. The default run takes few combinations of a test's parameters, but each value.
    The exhaustive run takes more pairs of values, at most `MOST_PAIRS`, and tests with examples
    again. Tests marked `every_combination` run with all."""
    tests: dict[str, dict[pytest.Item, sampling.Choices]] = {}
    for item in items:
        sampled = hypothesis.is_hypothesis_test(item.obj) or item.get_closest_marker("sampled")
        if sampled and config.option.markexpr == "exhaustive":
            item.add_marker("exhaustive")
        if hasattr(item, "callspec"):
            name, _, _ = item.nodeid.partition("[")
            tests.setdefault(name, {})[item] = sampling.choices(item)
    if hasattr(config, "workerinput"):  # one of several processes
        order = {f"test_{name}": number for number, name in enumerate(LONG.split())}
        items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    left_out: set[pytest.Item] = set()
    for cases in tests.values():
        if next(iter(cases)).get_closest_marker("every_combination"):
            continue
        default = sampling.covering(
            {item: one for item, one in cases.items() if not item.get_closest_marker("exhaustive")}
        )
        left_out |= cases.keys() - default - sampling.covering(cases, 2, MOST_PAIRS)
        for item in cases.keys() - default:
            item.add_marker("exhaustive")
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish() -> None:
    """Garbage collections skip imported modules, and are few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """One checkpoint of every layout, made when it is first asked for: layout -> `Saved`."""
    import layouts

    made: dict[str, layouts.Saved] = {}

    def get(layout: str) -> layouts.Saved:
        if layout not in made:
            part = layouts.PARTS.get(layout)
            made[layout] = (
                part(get("manager"))
                if part is not None
                else layouts.save(layout, tmp_path_factory.mktemp(layout))
            )
        return made[layout]

    return get


@pytest.fixture(scope="session")
def read_by_orbax(saved):
    """Layout, name of one of `layouts.READERS` -> what Orbax reads without a target, not to be
    changed."""
    import layouts

    return functools.cache(
        lambda layout, reader: layouts.READERS[reader](saved(layout), saved(layout).path)
    )


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory):
    """Kind of `jobs.make` -> a source, checked to be unchanged at the end, and what one process
    writes of it."""
    from jobs import changed, make
    from layouts import hashes

    import reshard

    before = {}

    @functools.cache
    def get(kind: str) -> tuple[pathlib.Path, pathlib.Path]:
        folder = tmp_path_factory.mktemp("job")
        source = make(folder / "source", kind, 2)
        before[source] = hashes(source)
        # The test that asks first may have made shares smaller.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reshard.writer.plan.SHARE_BYTES", 1 << 30)
            reshard.save(changed(source), folder / "whole", max_memory="3MiB")
        return source, folder / "whole"

    yield get
    assert {source: hashes(source) for source in before} == before


@pytest.fixture(scope="session")
def _stores():
    if older("tensorstore", "0.1.86"):
        pytest.skip("an older tensorstore refuses some names in s3")
    import servers

    with contextlib.closing(servers.Stores()) as found, pytest.MonkeyPatch.context() as patch:
        for name, value in found.environment.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def stores(_stores):
    """Object stores on loopback, for `s3://` and `gs://`; see `servers.Stores`. Each bucket is new,
    and no request has been counted yet."""
    _stores.reset()
    yield _stores
    errors = _stores.errors
    _stores.reset()  # also for fixtures of a module, which run before the next test
    assert errors == []


@pytest.fixture
def short_tries(monkeypatch):
    """Failed requests are repeated twice, soon."""
    from reshard.storage import bucket

    monkeypatch.setitem(bucket.RETRIES, "max_retries", 2)
    monkeypatch.setitem(bucket.RETRIES, "initial_delay", "10ms")
    bucket._opened.cache_clear()
    bucket._obstore_opened.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def _forgets():
    """Frees compiled code and memory: otherwise the process grows to gigabytes."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def quickly_compiled():
    """Compiles models in half the time, with XLA emitters that do not keep all bits of NaNs."""
    from jax._src import compiler

    def options(*args, _get=compiler.get_compile_options, **kwargs):
        found = _get(*args, **kwargs)
        if older("jaxlib", "0.11"):  # later ones may lack the option
            found.env_option_overrides += [("xla_cpu_use_fusion_emitters", False)]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", options)
        yield


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """New processes of Python are forked from one that has imported the modules."""
    import forked

    monkeypatch.setattr("subprocess.Popen", forked.Popen)


@pytest.fixture
def data() -> pathlib.Path:
    """The directory of genuine old checkpoints."""
    return pathlib.Path(__file__).parent / "data"
