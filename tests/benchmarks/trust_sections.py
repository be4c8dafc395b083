"""What trust costs: digests in a save, and reading a checkpoint to verify it."""

from collections.abc import Callable, Iterator

from tests.benchmarks.bench import (
    DST,
    RESHARD,
    Bench,
    Program,
    compare_timed,
    module,
    timed_seconds,
)
from tests.benchmarks.sections import Row, rate


def digests(bench: Bench) -> Iterator[Row]:
    """W1 from 2x4 to 1x8, with digests and without."""
    source = bench.source("W1")
    command = module("trust", source, DST)
    ours, without = compare_timed(
        bench,
        "digests",
        Program("with digests", source, command),
        Program("without", source, [*command, "--without-digests"]),
    )
    more = timed_seconds(ours) / timed_seconds(without) - 1
    yield Row("W1: wall time that digests add", "15%", "5%", f"{more:.1%}")


def verify(bench: Bench) -> Iterator[Row]:
    """W1 and W2 verified, against decoding every chunk once in memory; start-up included."""
    for name in ("W1", "W2"):
        source = bench.source(name)
        (ours,) = bench.compare("verify", Program("verify", source, [RESHARD, "verify", source]))
        bound = Program("decode bound", source, module("bound", source, "--decode-only"))
        (decode,) = compare_timed(bench, "verify", bound)
        yield Row(
            f"{name} verified: rate, of decoding's",
            "0.7",
            "0.9",
            rate(timed_seconds(decode), ours.seconds),
        )


TRUST_SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    section.__name__: section for section in (digests, verify)
}
