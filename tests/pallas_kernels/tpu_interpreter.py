"""What tests of TPU kernels with DMAs of their own share: the interpreter that finds races, and a kernel that has one."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu


def strict(dma_execution_mode: str = "on_wait", num_cores: int = 1) -> pltpu.InterpretParams:
    """Finds races; memory is NaN before it is written, and reads out of bounds are errors."""
    return pltpu.InterpretParams(
        detect_races=True,
        out_of_bounds_reads="raise",
        uninitialized_memory="nan",
        dma_execution_mode=dma_execution_mode,
        num_cores_or_threads=num_cores,
    )


def has_race(run: Callable[[], Any]) -> bool:
    """Whether a kernel that `run` interprets has a race, which the interpreter reports either way."""
    try:
        jax.block_until_ready(run())
    except jax.errors.JaxRuntimeError as error:
        if "RACE DETECTED" not in str(error):
            raise
        return True
    return interpret_pallas_call.races.races_found


@contextlib.contextmanager
def watched(num_cores: int = 1) -> Iterator[pltpu.InterpretParams]:
    """What to interpret a kernel with; a race fails at the end."""
    pltpu.reset_tpu_interpret_mode_state()
    yield strict(num_cores=num_cores)
    assert interpret_pallas_call.races is not None
    assert not interpret_pallas_call.races.races_found


class NeverWaits:
    """`pltpu.make_async_copy` whose `wait` returns at once."""

    def __init__(self, *args: Any) -> None:
        self.copy = make_async_copy(*args)

    def start(self) -> None:
        self.copy.start()

    def wait(self) -> None:
        pass


make_async_copy = pltpu.make_async_copy
