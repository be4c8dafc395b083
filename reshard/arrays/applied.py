"""`Apply`: an operation that makes values anew, by a function of the user's."""

import dataclasses
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import tensorstore as ts

from reshard.arrays.boxes import Box, Shape, check_size, full_spec
from reshard.errors import ReshardError, TreeMismatchError
from reshard.sharding.mesh import Spec

# Functions of the user's run one at a time, whichever threads read what they make.
_APPLYING = threading.Lock()


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
    """What a function, called `package.module:function`, makes of a whole array, NumPy to NumPy;
    shape and dtype are those of what it is given where they are None. A job goes on with the same
    loading of the function alone: what it computes rests on more than can be compared."""

    function: Callable[[np.ndarray], np.ndarray] = dataclasses.field(repr=False)
    name: str
    shape: Shape | None = None
    dtype: np.dtype | None = None
    loaded: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    def __str__(self) -> str:
        return f"apply {self.name}"

    def shapes(self, inputs: Sequence[Shape]) -> list[Shape]:
        (shape,) = inputs
        made = shape if self.shape is None else self.shape
        check_size(made)
        return [made]

    def inverse(self, inputs: Sequence[Shape]) -> NoReturn:
        raise TreeMismatchError(f"what `{self.name}` makes cannot be run backwards")

    def specs(self, specs: list[Spec], inputs: Sequence[Shape]) -> list[Spec]:
        """Of an array of another shape, that of nothing partitioned."""
        (made,) = self.shapes(inputs)
        return [full_spec(specs[0], made) if made == inputs[0] else ((),) * len(made)]

    def chunks(self, chunks: Sequence[Shape], inputs: Sequence[Shape]) -> list[Shape]:
        return [tuple(max(size, 1) for size in self.shapes(inputs)[0])]

    def sources(self, part: int, box: Box, inputs: Sequence[Shape]) -> list[tuple[int, Box]]:
        return [(0, tuple(slice(0, size) for size in inputs[0]))]

    def views(self, views: list[ts.TensorStore]) -> list[ts.TensorStore]:
        return [self.view(views[0], views[0].dtype.numpy_dtype, lambda values: values)]

    def view(
        self, view: ts.TensorStore, dtype: np.dtype, rounded: Callable[[np.ndarray], np.ndarray]
    ) -> ts.TensorStore:
        """A view of what the function makes of a view: it is called when that is read, once for all
        that is read in one batch. `rounded` makes values of `dtype`, which it is given, of what is
        read."""
        (shape,) = self.shapes([tuple(view.shape)])
        new_dtype = dtype if self.dtype is None else self.dtype

        def read(_: object, into: np.ndarray, __: object) -> ts.Future:
            promise, future = ts.Promise.new()

            def done(values: ts.Future) -> None:
                try:
                    given = rounded(np.asarray(values.result()))
                    into[...] = self._made(given, shape, new_dtype)
                except BaseException as error:
                    promise.set_exception(error)
                else:
                    promise.set_result(None)

            view.read().add_done_callback(done)
            return future

        layout = ts.ChunkLayout(read_chunk_shape=[max(size, 1) for size in shape])
        return ts.virtual_chunked(read, dtype=ts.dtype(new_dtype), shape=shape, chunk_layout=layout)

    def _made(self, values: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
        given = f"{values.dtype.name}{list(values.shape)}"
        with _APPLYING:
            try:
                made = np.asarray(self.function(values))
            except Exception as error:
                told = f"{type(error).__name__}: {error}"
                raise ReshardError(f"`{self.name}` failed on {given}", [told]) from error
        made = made.astype(made.dtype.newbyteorder("="), copy=False)
        if made.shape != shape or made.dtype != dtype:
            raise TreeMismatchError(
                f"`{self.name}` made {made.dtype.name}{list(made.shape)} of {given}, and "
                f"{dtype.name}{list(shape)} was to be made",
                hints=[f"apply = {{ function = '{self.name}', shape = [...], dtype = '...' }}"],
            )
        return made
