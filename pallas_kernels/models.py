"""The real models for whose shapes the kernels are compiled, checked and timed, one TOML file each in `real_models/`.

A file holds the fields of a `jkv.ModelConfig`: `jkv.plan` and the benchmarks read the same files. Kernels read the heads alone.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.quantised import FORMATS, Numbers, quantise, vector_bytes, zeros


class ModelShape(NamedTuple):
    """The sizes of a model on which its cache depends."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads

    @classmethod
    def read(cls, file: Path) -> "ModelShape":
        """The sizes in a TOML file of a model's shape."""
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
        return cls(*(fields[name] for name in cls._fields))


FILES = {file.stem: file for file in sorted((Path(__file__).parent / "real_models").glob("*.toml"))}
LANES = 128  # every kernel takes heads of one row of lanes; models with other heads have plain XLA for some
WHOLE = {name: shape for name, file in FILES.items() if (shape := ModelShape.read(file)).head_size == LANES}
MODELS = WHOLE | {"tiny-reasoner": ModelShape(4, 4, 2, 64)}


class Workload(NamedTuple):
    """How a model is run; with the model, it determines the arguments of a kernel. The default is R-KV's budget and buffer."""

    batch: int = 64  # rows
    slots: int = 1152  # per row's table
    page_size: int = 128
    dtype: Any = jnp.bfloat16
    layers: int | None = None  # layers whose pages the pool holds; None: all of the model's
    kv_format: str | None = None  # of quantised pages, a key of `FORMATS`; None: the pool holds numbers of `dtype`

    def num_rows(self, model: ModelShape) -> int:
        """Rows of one KV head each."""
        return self.batch * model.num_kv_heads

    def max_pages(self) -> int:
        """Pages per row's table."""
        return -(-self.slots // self.page_size)

    def pool(self, model: ModelShape) -> Any:
        """Shapes of the keys and values of a pool that holds all slots of every row, and the null page."""
        num_pages = 1 + (self.layers or model.num_layers) * self.num_rows(model) * self.max_pages()
        shape = num_pages, 2, self.page_size, model.head_size
        return jax.eval_shape(lambda: zeros(shape, self.dtype, None if self.kv_format is None else FORMATS[self.kv_format]))

    def random_pool(self, model: ModelShape, key: jax.Array) -> Numbers:
        """Normal keys and values."""
        pool = self.pool(model)

        def draw() -> Numbers:
            numbers = jax.random.normal(key, pool.shape, pool.dtype)
            return numbers if self.kv_format is None else quantise(numbers, FORMATS[self.kv_format])

        return jax.jit(draw)()

    def vector_bytes(self, model: ModelShape) -> int:
        """Bytes of a key or value in the pool, its scale included."""
        return vector_bytes(model.head_size, self.dtype, None if self.kv_format is None else FORMATS[self.kv_format])


class Case(NamedTuple):
    """One of a kernel's real calls, which the tests run and compile and the benchmark times."""

    name: str
    workload: dict[str, Any] = {}  # fields of the `Workload` to replace  # noqa: RUF012
    options: dict[str, Any] = {}  # of `shapes.arguments` and `shapes.values`  # noqa: RUF012
    is_gradient: bool = False  # differentiates the sum of the results by the first three arguments
    is_updated: bool = False  # the first argument is donated, and is the first result


def of(dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
    """An array's shape and dtype."""
    return jax.ShapeDtypeStruct(sizes, dtype)
