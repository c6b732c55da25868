"""Scoring, replay and their gradients on a mesh: the axis "tensor" splits heads, MLP width and vocabulary, others the rows.

The whole forward pass runs inside one `jax.shard_map`, where each device sees its rows and its heads, so kernels see local
arrays and devices exchange no queries, keys or values: in a layer only the two partial sums of the residual stream, as a
decode step does on a mesh (`jkv.engine.mesh`).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jkv.errors import refused
from jkv.model.joined import separate_weights
from jkv.model.params import Params
from jkv.model.sharding import COPIES, HEADS, P, check_divides, fitted_all, num_parts, part_of, specs_of, with_copies

AnyMesh = Mesh | AbstractMesh
T = TypeVar("T")


def mesh_of(params: Params, mesh: AnyMesh | None = None) -> AnyMesh | None:
    """The mesh that is given; else that of the weights, or under `jit`, which hides it, that of `jax.set_mesh`; None if none.

    A mesh of one device is none.

    Raises:
      ValueError: a mesh that does not divide the model.
    """
    if mesh is None and not isinstance(jax.tree.leaves(params.embedding)[0], jax.core.Tracer):
        sharding = getattr(params.embedding, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    elif mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh is None or mesh.size <= 1:
        return None
    check_divides(params.config, num_parts(mesh))
    return with_copies(mesh, params.config) if HEADS in mesh.axis_names else mesh


def num_row_shards(mesh: AnyMesh | None) -> int:
    """Over how many devices the rows are split."""
    return 1 if mesh is None else mesh.size // num_parts(mesh)


def on_mesh(run: Callable[..., T], mesh: AnyMesh, params: Params, columns: Any, by_row: tuple[Any, ...]) -> T:
    """`run(params, columns, *by_row)` on a mesh; `columns` are a `Columns`, and all arrays of `by_row` begin with the rows.

    So do the arrays that `run` returns.

    Raises:
      ValueError: rows that do not divide.
    """
    rows, shards = columns.ended.shape[0], num_row_shards(mesh)
    if rows % shards:
        raise refused(
            f"The rows of a batch must be a multiple of the {shards} devices that split them; got {rows}. Make the batch with "
            f"rows={-(-rows // shards) * shards}, or pack=(rows, tokens).",
            batch="does_not_fit",
        )
    has_heads = HEADS in mesh.axis_names
    params = separate_weights(params) if has_heads else params
    row_axes = tuple(name for name in mesh.axis_names if name not in (HEADS, COPIES))
    of_rows = P(row_axes)
    of_columns = P(row_axes, None, HEADS) if has_heads else of_rows
    column_specs = jax.tree.map(lambda _: of_rows, columns)
    by_head = {name: getattr(columns, name) for name in ("ended", "tokens", "starts")}
    by_head = {name: of_columns for name, field in by_head.items() if field is not None and field.shape[2] > 1}
    column_specs = column_specs._replace(**by_head)
    weights = fitted_all(specs_of(Params, params, "params"), mesh) if has_heads else jax.tree.map(lambda _: P(), params)

    def on_shard(params: Params, columns: Any, by_row: tuple[Any, ...]) -> T:
        return run(part_of(params) if has_heads else params, columns, *by_row)

    specs = weights, column_specs, jax.tree.map(lambda _: of_rows, by_row)
    return jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=of_rows, check_vma=False)(params, columns, by_row)
