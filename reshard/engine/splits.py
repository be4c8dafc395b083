"""Into how many equal parts the dimensions of a shard can be split."""

import functools
import math
from collections.abc import Sequence

# Of arrays with so many ways to split them, the last dimensions stay whole.
_MOST = 1 << 16


def few_enough(options: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Numbers of parts of each dimension, ascending, of which there are not too many combinations:
    of arrays with many axes there could be billions."""
    found, combinations = [], 1
    for parts in options:
        if combinations * len(parts) > _MOST:
            parts = parts[:1]
        combinations *= len(parts)
        found.append(parts)
    return found


@functools.lru_cache(maxsize=4096)
def shrinking_splits(size: int, source: int, shard: int) -> tuple[int, ...]:
    """Numbers of parts of one dimension of a shard that give a smaller box than fewer parts do."""
    splits, smallest = [], math.inf
    for k in divisors(shard):
        box = min(math.lcm(source, shard // k), size)
        if box < smallest:
            splits.append(k)
            smallest = box
    return tuple(splits)


@functools.lru_cache(maxsize=4096)
def splits_up_to(shard: int, parts: int) -> tuple[int, ...]:
    """Numbers of parts of one dimension of a shard, up to the first that is `parts` or more."""
    all_splits = divisors(shard)
    enough = next((k for k in all_splits if k >= parts), all_splits[-1])
    return tuple(k for k in all_splits if k <= enough)


@functools.lru_cache(maxsize=4096)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive number, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(dict.fromkeys(low + [number // d for d in reversed(low)]))
