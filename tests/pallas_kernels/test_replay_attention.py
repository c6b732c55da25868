"""`replay_attention` against plain loops in float64, and its gradients against those of a naive form."""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as kernels
from pallas_kernels.dispatch import best
from pallas_kernels.models import MODELS, Workload
from pallas_kernels.replay_attention import cpu, gpu, pallas, reference, shapes, tpu
from tests.pallas_kernels import tpu_interpreter

ON_DEVICES = {"tpu": tpu.replay_attention, "gpu": gpu.replay_attention}


def on_a_cpu(*args, interpret=None, sorts=False):
    """In tiles small enough that short texts have several."""
    return cpu.replay_attention(*args, rows=8, columns=4, sorts=sorts)


ON_DEVICES["cpu"] = on_a_cpu
ON_DEVICES["cpu sorted"] = functools.partial(on_a_cpu, sorts=True)
ON_DEVICES["sorted"] = functools.partial(gpu.replay_attention, sorts=True)


def implementation_of(name, interpret=True):
    if name == "reference":
        return jax.jit(functools.partial(kernels.replay_attention, implementation="reference"))
    run = ON_DEVICES[name]
    return lambda *args, sink=None: run(*args, *[None] * (7 - len(args)), sink, interpret=interpret)


def cases_of(cases, on_devices, slow=()):
    """Every case for the reference, those of that name for the kernels too; `slow` ones take the code path of another one."""
    named = [("reference", name) for name in cases] + [(device, name) for device in ON_DEVICES for name in on_devices]
    return [
        pytest.param(run, *cases[name], id=f"{run}-{name}", marks=[pytest.mark.slow] * (name in slow)) for run, name in named
    ]


@pytest.fixture(params=["reference", *ON_DEVICES])
def replay_attention(request):
    return implementation_of(request.param)


@pytest.fixture(params=ON_DEVICES)
def device_kernel(request):
    return implementation_of(request.param)


TOLERANCE = {jnp.float32: 2e-5, jnp.bfloat16: 8e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["float32", "bfloat16"])
DOCS = Path(__file__).parents[2] / "docs/replay.md"
OPEN_END = 2**31 - 1  # the end of a column that is never dropped


def random_inputs(batch, num_tokens, num_keys, heads, group, head_size, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, num_tokens, heads * group, head_size))
    key, value = rng.standard_normal((2, batch, num_keys, heads, head_size))
    return [jnp.asarray(x, dtype) for x in (query, key, value)]


def causal_columns(batch, num_tokens, heads):
    """Positions, begins and ends under which column t is token t, seen from t on."""
    token = jnp.arange(num_tokens, dtype=jnp.int32)
    begin = jnp.broadcast_to(token, (batch, heads, num_tokens))
    return jnp.broadcast_to(token, (batch, num_tokens)), begin, jnp.full(begin.shape, OPEN_END, jnp.int32)


def random_columns(batch, num_tokens, heads, num_columns, seed=1):
    """Columns in no order, each seen for a while; a fifth is never seen."""
    rng = np.random.default_rng(seed)
    source = rng.integers(0, num_tokens, (batch, heads, num_columns))
    begin = rng.integers(0, num_tokens, source.shape)
    end = begin + rng.integers(1, num_tokens // 2 + 2, source.shape)
    end[rng.random(source.shape) < 0.3] = OPEN_END
    is_unseen = rng.random(source.shape) < 0.2
    begin[is_unseen], end[is_unseen] = -1, -1
    position = np.stack([rng.permutation(num_tokens) for _ in range(batch)])
    return [jnp.asarray(x, jnp.int32) for x in (position, begin, end, source)]


def by_hand(query, key, value, position, begin, end, source=None, sink=None):
    """One query and head at a time, over the columns that it may read, and over its sink."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    position, begin, end = (np.asarray(x) for x in (position, begin, end))
    source = np.broadcast_to(np.arange(begin.shape[2]), begin.shape) if source is None else np.asarray(source)
    group, out = query.shape[2] // key.shape[2], np.zeros(query.shape)
    for b, t, n in np.ndindex(query.shape[:3]):
        k = n // group
        is_visible = (begin[b, k] <= position[b, t]) & (position[b, t] < end[b, k])
        index = source[b, k, is_visible]
        if len(index):
            weight = np.exp(key[b, index, k] @ query[b, t, n] / math.sqrt(query.shape[-1]))
            of_sink = 0.0 if sink is None else math.exp(sink[n])
            out[b, t, n] = weight @ value[b, index, k] / (weight.sum() + of_sink)
    return out


def naive(query, key, value, position, begin, end, source=None, sink=None):
    """All at once, with a T x C mask; the keys that no query reads must be finite."""
    key, value = (jnp.moveaxis(x, 1, 2) for x in (key, value))
    if source is not None:
        key, value = (jnp.stack([x[b, k, source[b, k]] for b, k in np.ndindex(source.shape[:2])]) for x in (key, value))
        key, value = (x.reshape(*source.shape, -1) for x in (key, value))
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[1], axis=1) for x in (key, value))
    begin, end = (jnp.repeat(x, query.shape[2] // x.shape[1], axis=1) for x in (begin, end))
    when = position[:, None, :, None]
    is_visible = (begin[:, :, None] <= when) & (when < end[:, :, None])
    logits = jnp.einsum("btnh,bnch->bntc", query, key) / math.sqrt(query.shape[-1])
    weight = jnp.where(is_visible, jnp.exp(logits), 0.0)
    of_sink = 0.0 if sink is None else jnp.exp(sink)[:, None, None]
    weight = weight / jnp.maximum(weight.sum(axis=-1, keepdims=True) + of_sink, 1e-30)
    return jnp.einsum("bntc,bnch->btnh", weight, value)


def assert_agrees(out, expected, dtype=jnp.float32):
    assert out.dtype == dtype
    rounding = 2**-8 if dtype == jnp.bfloat16 else 0  # of the output itself, which may be larger than 2
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=TOLERANCE[dtype], rtol=rounding)


CAUSAL = {
    "T1": (1, 2, 2),
    "T2_K1_G1": (2, 1, 1),
    "T7_G3": (7, 2, 3),
    "T128": (128, 1, 2),
    "T129_G1": (129, 1, 1),
    "T200": (200, 2, 2),
}


@DTYPES
@pytest.mark.parametrize(
    ("replay_attention", "num_tokens", "heads", "group"),
    cases_of(CAUSAL, ["T7_G3", "T200"], slow=["T2_K1_G1", "T128", "T200"]),
    indirect=["replay_attention"],
)
def test_causal_columns_give_causal_attention(replay_attention, num_tokens, heads, group, dtype):
    query, key, value = random_inputs(2, num_tokens, num_tokens, heads, group, 16, dtype)
    columns = causal_columns(2, num_tokens, heads)
    out = replay_attention(query, key, value, *columns)
    assert_agrees(out, by_hand(query, key, value, *columns), dtype)


SPANS = {"T9_C14": (9, 14), "T200_C150": (200, 150)}


@DTYPES
@pytest.mark.parametrize(
    ("replay_attention", "num_tokens", "num_columns"), cases_of(SPANS, ["T9_C14"]), indirect=["replay_attention"]
)
def test_a_query_reads_the_columns_whose_span_holds_its_position(replay_attention, num_tokens, num_columns, dtype):
    query, key, value = random_inputs(2, num_tokens, num_tokens, 2, 2, 16, dtype)
    position, begin, end, source = random_columns(2, num_tokens, 2, num_columns)
    out = replay_attention(query, key, value, position, begin, end, source)
    assert_agrees(out, by_hand(query, key, value, position, begin, end, source), dtype)


def test_a_column_is_read_from_begin_on_and_no_longer_at_end(replay_attention):
    query, key, value = random_inputs(1, 5, 1, 1, 1, 4)
    columns = jnp.arange(5, dtype=jnp.int32)[None], jnp.full((1, 1, 1), 1, jnp.int32), jnp.full((1, 1, 1), 3, jnp.int32)
    out = replay_attention(query, key, value, *columns)[0, :, 0]
    np.testing.assert_array_equal(out, jnp.where(jnp.asarray([0, 1, 1, 0, 0])[:, None] == 1, value[0, 0, 0], 0.0))


@pytest.mark.parametrize(
    ("replay_attention", "num_tokens"),
    cases_of({"T9": (9,), "T200": (200,)}, ["T9"], slow=["T200"]),
    indirect=["replay_attention"],
)
def test_keys_that_only_empty_spans_name_may_be_nan(replay_attention, num_tokens):
    query, key, value = random_inputs(2, num_tokens, num_tokens, 2, 2, 8)
    position, begin, end, source = random_columns(2, num_tokens, 2, num_tokens)
    for columns in [(position, begin, end), (position, begin, end, source)]:
        unread = np.ones(key.shape[:3], bool)
        for b, k, c in np.ndindex(begin.shape):
            if begin[b, k, c] < end[b, k, c]:
                unread[b, source[b, k, c] if len(columns) == 4 else c, k] = False
        assert unread.any()
        poisoned = [jnp.where(unread[..., None], jnp.nan, x) for x in (key, value)]
        assert_agrees(replay_attention(query, *poisoned, *columns), by_hand(query, key, value, *columns))
        weigh = jax.jit(jax.grad(lambda *x, columns=columns: jnp.sum(replay_attention(*x, *columns) ** 2), argnums=(0, 1, 2)))
        for x, y in zip(weigh(query, *poisoned), weigh(query, key, value), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)  # a GPU adds to one key in any order


@pytest.mark.parametrize(
    ("replay_attention", "num_tokens", "num_columns"), cases_of(SPANS, ["T9_C14"]), indirect=["replay_attention"]
)
@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "spans"])
def test_gradients_are_those_of_the_naive_form(replay_attention, num_tokens, num_columns, is_causal):
    inputs = random_inputs(2, num_tokens, num_tokens, 2, 2, 8)
    columns = causal_columns(2, num_tokens, 2) if is_causal else random_columns(2, num_tokens, 2, num_columns)
    if not is_causal:
        columns[1] = jnp.maximum(columns[1], jnp.where(columns[1] < 0, columns[1], 3))  # positions 0 to 2 read nothing
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(inputs[0].shape), jnp.float32)
    grads = [
        jax.jit(jax.grad(lambda *x, attend=attend: jnp.sum(weight * attend(*x, *columns)), argnums=(0, 1, 2)))(*inputs)
        for attend in (replay_attention, naive)
    ]
    for x, y in zip(*grads, strict=True):
        assert np.abs(y).max() > 0.1
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=2e-5)


def test_a_query_that_reads_nothing_gives_zeros_and_finite_gradients(replay_attention):
    query, key, value = random_inputs(1, 4, 3, 1, 2, 8)
    position = jnp.asarray([[0, 1, 5, 9]], jnp.int32)
    begin, end = jnp.asarray([[[1, 1, -1]]], jnp.int32), jnp.asarray([[[6, 3, -1]]], jnp.int32)
    out, gradient = jax.value_and_grad(lambda x: jnp.sum(replay_attention(x, key, value, position, begin, end)))(query)
    assert np.isfinite(out)
    assert (replay_attention(query, key, value, position, begin, end)[0, jnp.asarray([0, 3])] == 0).all()
    assert np.isfinite(gradient).all()
    assert (gradient[0, jnp.asarray([0, 3])] == 0).all()


def test_a_chunk_of_a_prompt_reads_what_came_before_and_itself(replay_attention):
    query, key, value = random_inputs(2, 12, 12, 2, 2, 8)
    position, begin, end = causal_columns(2, 12, 2)
    whole = replay_attention(query, key, value, position, begin, end)
    chunk = replay_attention(query[:, 7:], key, value, position[:, 7:], begin, end)
    np.testing.assert_allclose(chunk, whole[:, 7:], atol=1e-6)


SINK = jnp.asarray([-1.5, 0.5, 2.0, 6.0])  # of four query heads


@DTYPES
@pytest.mark.parametrize(
    ("replay_attention", "num_tokens", "num_columns"), cases_of(SPANS, ["T9_C14"]), indirect=["replay_attention"]
)
def test_a_sink_is_one_more_term_of_the_denominator_of_its_head(replay_attention, num_tokens, num_columns, dtype):
    query, key, value = random_inputs(2, num_tokens, num_tokens, 2, 2, 16, dtype)
    columns = random_columns(2, num_tokens, 2, num_columns)
    out = replay_attention(query, key, value, *columns, sink=SINK)
    assert_agrees(out, by_hand(query, key, value, *columns, SINK), dtype)


def test_a_sink_far_above_or_below_all_logits_takes_all_or_nothing(replay_attention):
    query, key, value = random_inputs(1, 5, 5, 1, 2, 16)
    columns = causal_columns(1, 5, 1)
    out = replay_attention(query, key, value, *columns, sink=jnp.asarray([-1e4, 1e4]))
    np.testing.assert_allclose(out[:, :, 0], replay_attention(query, key, value, *columns)[:, :, 0], atol=1e-6)
    np.testing.assert_array_equal(out[:, :, 1], 0.0)


@pytest.mark.parametrize(
    ("replay_attention", "num_tokens", "num_columns"), cases_of(SPANS, ["T9_C14"]), indirect=["replay_attention"]
)
def test_gradients_reach_the_sink_and_count_it(replay_attention, num_tokens, num_columns):
    inputs = random_inputs(2, num_tokens, num_tokens, 2, 2, 8)
    columns = random_columns(2, num_tokens, 2, num_columns)
    columns[1] = jnp.maximum(columns[1], jnp.where(columns[1] < 0, columns[1], 3))  # positions 0 to 2 read nothing
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(inputs[0].shape), jnp.float32)

    def loss(attend, query, key, value, sink):
        return jnp.sum(weight * attend(query, key, value, *columns, sink=sink))

    grads = [
        jax.jit(jax.grad(functools.partial(loss, attend), argnums=(0, 1, 2, 3)))(*inputs, SINK)
        for attend in (replay_attention, naive)
    ]
    for x, y in zip(*grads, strict=True):
        assert np.abs(y).max() > 0.01
        np.testing.assert_allclose(x, y, atol=4e-5, rtol=2e-5)


@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_no_array_is_as_large_as_queries_times_columns(is_backward):
    replay_attention = implementation_of("reference")
    size = 1024
    inputs, columns = random_inputs(1, size, size, 1, 1, 8), causal_columns(1, size, 1)
    source = columns[1]

    def total(*x):
        return jnp.sum(replay_attention(*x, *columns, source) ** 2)

    traced = jax.jit(jax.grad(total, argnums=(0, 1, 2)) if is_backward else total).trace(*inputs)
    for text in (str(traced.jaxpr), traced.lower().compile().as_text()):
        largest = max(math.prod(map(int, dims.split(","))) for dims in re.findall(r"\b[fbsipu]\w+\[([\d,]+)\]", text))
        assert size * 8 <= largest <= size * size // 4


#         T, group, head size, C
SHAPES = {
    "G1_many_blocks": (600, 1, 64, 530),
    "G2_one_token": (1, 2, 64, 33),
    "G4_H128": (20, 4, 128, 40),
    "G5_many_blocks_of_rows": (130, 5, 64, 20),
    "G6_one_column": (9, 6, 64, 1),
    "G7": (19, 7, 64, 130),
    "G8_H128": (16, 8, 128, 17),
}


EVERYDAY = ("G2_one_token", "G4_H128", "G6_one_column", "G7")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(SHAPES[name], dtype, id=f"{name}-{dtype.__name__}", marks=[] if name in EVERYDAY else [pytest.mark.slow])
        for name, dtype in [
            *((name, jnp.float32) for name in SHAPES),
            ("G1_many_blocks", jnp.bfloat16),
            ("G4_H128", jnp.bfloat16),
        ]
    ],
)
def test_kernels_take_all_groups_and_head_sizes_in_tiles_that_nothing_divides(device_kernel, shape, dtype):
    num_tokens, group, head_size, num_columns = shape
    query, key, value = random_inputs(2, num_tokens, num_tokens, 2, group, head_size, dtype)
    columns = random_columns(2, num_tokens, 2, num_columns)
    assert_agrees(device_kernel(query, key, value, *columns), by_hand(query, key, value, *columns), dtype)


@pytest.mark.parametrize(
    "shape",
    [pytest.param(SHAPES["G1_many_blocks"], id="G1_many_blocks"), pytest.param(SHAPES["G7"], id="G7", marks=pytest.mark.slow)],
)
def test_gradients_of_kernels_over_many_tiles_are_those_of_the_naive_form(device_kernel, shape):
    num_tokens, group, head_size, num_columns = shape
    inputs = random_inputs(1, num_tokens, num_tokens, 2, group, head_size)
    columns = random_columns(1, num_tokens, 2, num_columns)
    source = columns[3]
    assert all(len(np.unique(source[0, k])) < source.shape[2] for k in range(2))  # keys that several columns hold
    weight = jnp.asarray(np.random.default_rng(2).standard_normal(inputs[0].shape), jnp.float32)
    grads = [
        jax.jit(jax.grad(lambda *x, attend=attend: jnp.sum(weight * attend(*x, *columns)), argnums=(0, 1, 2)))(*inputs)
        for attend in (device_kernel, naive)
    ]
    for x, y in zip(*grads, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * np.abs(y).max())


def test_gradients_of_kernels_in_bfloat16_are_near_those_in_float32(device_kernel):
    inputs = random_inputs(1, 40, 40, 2, 2, 64, jnp.bfloat16)
    columns = random_columns(1, 40, 2, 50)

    def weigh(attend, *x):
        return jnp.sum(attend(*x, *columns).astype(jnp.float32) ** 2)

    grads = jax.grad(functools.partial(weigh, device_kernel), argnums=(0, 1, 2))(*inputs)
    exact = jax.jit(jax.grad(functools.partial(weigh, naive), argnums=(0, 1, 2)))(*(x.astype(jnp.float32) for x in inputs))
    for x, y in zip(grads, exact, strict=True):
        assert x.dtype == jnp.bfloat16
        error = np.asarray(x, np.float32) - y
        assert np.sqrt(np.mean(error**2)) < 1e-2 * np.sqrt(np.mean(y**2))  # of products of three rounded factors


def test_kernels_spare_the_tiles_that_no_query_of_theirs_can_read(device_kernel):
    """Those columns are to be finite; that NaN in them does no harm shows that they are not looked at."""
    query, key, value = random_inputs(1, 600, 1100, 1, 1, 64)
    position = jnp.arange(600, dtype=jnp.int32)[None]
    begin = jnp.where(jnp.arange(1100) < 550, 0, 600)[None, None].astype(jnp.int32)
    end = jnp.full(begin.shape, OPEN_END, jnp.int32)
    expected = by_hand(query, key, value, position, begin, end)
    key, value = (x.at[:, 768:].set(jnp.nan) for x in (key, value))
    assert_agrees(device_kernel(query, key, value, position, begin, end), expected)
    total = jax.grad(lambda *x: jnp.sum(device_kernel(*x, position, begin, end) ** 2), argnums=(0, 1, 2))
    for x in total(query, key, value):
        assert np.isfinite(x).all()


def test_large_logits_do_not_overflow(replay_attention):
    query, key, value = random_inputs(2, 9, 9, 2, 2, 8)
    columns = random_columns(2, 9, 2, 14)
    out, grad = jax.value_and_grad(lambda x: jnp.sum(replay_attention(x, key, value, *columns)))(query * 120)
    np.testing.assert_allclose(out, by_hand(query * 120, key, value, *columns).sum(), rtol=1e-4)
    assert np.isfinite(grad).all()


def test_a_row_s_bits_depend_on_no_other_row(device_kernel):
    query, key, value = random_inputs(2, 9, 9, 2, 2, 8)
    position, begin, end, source = random_columns(2, 9, 2, 14)
    others = random_columns(2, 9, 2, 14, seed=5)
    mixed = [x.at[1].set(y[1]) for x, y in zip((position, begin, end, source), others, strict=True)]
    changed = [x.at[1].multiply(3) for x in (query, key, value)]
    out, other = device_kernel(query, key, value, position, begin, end, source), device_kernel(*changed, *mixed)
    np.testing.assert_array_equal(out[0], other[0])
    assert not np.array_equal(out[1], other[1])


def test_the_default_differentiates_under_checkpoint_and_scan():
    """Kernels for absent devices stand in its program, and it is the reference that runs."""
    inputs, columns = random_inputs(1, 12, 12, 2, 2, 64), random_columns(1, 12, 2, 14)
    assert tpu.why_not(*inputs, *columns) is None
    assert gpu.why_not(*inputs, *columns) is None

    def total(attend, query, key, value):
        @jax.checkpoint
        def layer(hidden, _):
            return hidden + attend(hidden, key, value, *columns), None

        return jnp.sum(jax.lax.scan(layer, query, None, length=3)[0] ** 2)

    found, expected = (
        jax.jit(jax.grad(functools.partial(total, attend), argnums=(0, 1, 2)))(*inputs)
        for attend in (kernels.replay_attention, naive)
    )
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())


@pytest.mark.parametrize("name", ["tpu", "gpu"])
def test_kernels_say_what_they_cannot_take(name):
    def why_not(head_size, dtype=jnp.bfloat16, tokens=16, batch=1, **other):
        model = MODELS["r1-llama-8b"]._replace(head_size=head_size)
        args = shapes.arguments(model, Workload(batch=batch, dtype=dtype), tokens=tokens, replayed=True)
        query, key, *rest = args
        return {"tpu": tpu, "gpu": gpu}[name].why_not(query, jax.ShapeDtypeStruct(key.shape, other.get("key", dtype)), *rest)

    assert why_not(64) is why_not(128) is why_not(256) is why_not(128, jnp.float32) is None
    assert "bfloat16; got float16" in why_not(128, jnp.float16)
    assert "got bfloat16, float32" in why_not(128, key=jnp.float32)
    assert "got 96" in why_not(96)
    assert "got 1024" in why_not(1024)
    if name == "tpu":
        assert "at most 65536 blocks of queries or of columns; got 262144" in why_not(128, tokens=1 << 25)
        assert "at most 8192 KV heads in all rows; got 8200" in why_not(128, batch=1025)


def test_a_cpu_visits_tiles_of_more_than_one_block_of_queries():
    inputs, columns = random_inputs(2, 150, 150, 2, 2, 16), random_columns(2, 150, 2, 170)
    assert "more than 128 queries; got 128" in cpu.why_not(inputs[0][:, :128], *inputs[1:], *columns)
    assert "got float16" in cpu.why_not(*(x.astype(jnp.float16) for x in inputs), *columns)
    assert best(kernels.KERNELS["replay_attention"].implementations, "cpu", *inputs, *columns, sorts=True) == "cpu"
    found = kernels.replay_attention(*inputs, *columns, SINK, sorts=True)
    assert_agrees(found, by_hand(*inputs, *columns, SINK))


def test_gradients_on_a_cpu_need_no_more_memory_than_plain_xla():
    """What a program holds beside its arguments grows with queries and columns, not with pairs."""

    def size(run, num_tokens):
        inputs, columns = random_inputs(1, num_tokens, num_tokens, 2, 2, 16), causal_columns(1, num_tokens, 2)
        grad = jax.grad(lambda *x: jnp.sum(run(*x, *columns, None) ** 2), argnums=(0, 1, 2))
        return jax.jit(grad).lower(*inputs).compile().memory_analysis().temp_size_in_bytes

    assert size(cpu.replay_attention, 1024) <= size(reference.replay_attention, 1024)
    assert size(cpu.replay_attention, 2048) <= 2.1 * size(cpu.replay_attention, 1024)


@pytest.fixture
def watched():
    with tpu_interpreter.watched() as interpret:
        yield interpret


def test_on_a_tpu_nothing_is_read_before_it_is_written_nor_out_of_bounds(watched):
    inputs, columns = random_inputs(2, 9, 9, 2, 2, 8), random_columns(2, 9, 2, 14)
    assert_agrees(implementation_of("tpu", watched)(*inputs, *columns), by_hand(*inputs, *columns))


@pytest.mark.parametrize("sorts", [False, True])
@pytest.mark.parametrize("num_cores", [1, 2])
def test_on_a_tpu_nor_in_the_backward_pass_over_several_tiles(monkeypatch, sorts, num_cores):
    """Halves of the list are of different lengths: of three blocks of rows, the even ones have more, and a fourth is none's."""
    monkeypatch.setattr(tpu, "BLOCK", 128)
    monkeypatch.setattr(tpu, "SORTED_BLOCKS", (128, 128))
    inputs, columns = random_inputs(1, 150, 150, 1, 2, 64), causal_columns(1, 150, 1)
    assert tpu.blocks_of(inputs[0], inputs[1], columns[1], sorts) == (128, 128)
    with tpu_interpreter.watched(num_cores) as interpret:
        run = functools.partial(tpu.replay_attention, source=None, sorts=sorts, interpret=interpret)
        attends = [lambda *x, run=run: run(*x, *columns) for run in (run, naive)]
        (out, pull), (expected, expected_pull) = (jax.vjp(attend, *inputs) for attend in attends)
        assert_agrees(out, expected)
        for x, y in zip(pull(expected), expected_pull(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * np.abs(y).max())


def evicted_columns(num_tokens, budget, interval, score):
    """Spans of each token's own column, [1, 1, T], where a compaction after each interval leaves the best of a score."""
    end, live = np.full(num_tokens, OPEN_END), np.arange(budget)
    for now in range(budget + interval, num_tokens, interval):
        live = np.concatenate([live, np.arange(now - interval, now)])
        kept = live[np.argsort(-score(now, live), kind="stable")[:budget]]
        end[np.setdiff1d(live, kept)], live = now, np.sort(kept)
    return jnp.arange(num_tokens)[None, None], jnp.asarray(end, jnp.int32)[None, None]


def scores_of(name):
    """What a compaction at `now` keeps the best of; `live` are tokens."""
    rng = np.random.default_rng(0)
    once = rng.random(LONG)
    return {
        "recent": lambda now, live: np.exp((live - now) / 1024) * rng.random(len(live)),
        "random": lambda now, live: rng.random(len(live)),
        "constant": lambda now, live: once[live],
    }[name]


LONG = 32768
# Of tiles, by tokens and columns, in the order of `SCORES`: visited pairs for each visible one. docs/replay.md has them.
SCORES = ("recent", "random", "constant")
COUNTED = {
    ("GPU", 32, 64, True): (1.65, 1.86, 1.79),
    ("GPU", 32, 64, False): (2.40, 6.67, 15.34),
    ("TPU", 256, 128, True): (2.18, 2.53, 2.48),
    ("TPU", 128, 512, False): (2.81, 6.36, 15.54),
}


@pytest.mark.parametrize("name", SCORES)
def test_visited_tiles_hold_as_many_pairs_as_the_docs_say(name):
    begin, end = evicted_columns(LONG, 1024, 128, scores_of(name))
    position = jnp.arange(LONG, dtype=jnp.int32)[None]
    visible = int((jnp.minimum(end, LONG) - begin).sum())
    order = pallas.order_of(position, begin, end)
    assert sorted(order[0, 0].tolist()) == list(range(LONG))
    by_order = [(begin, end), [jnp.take_along_axis(x, order, axis=2) for x in (begin, end)]]
    for (device, tokens, columns, is_sorted), expected in COUNTED.items():
        may_read = np.asarray(pallas.may_read(position, *by_order[is_sorted], tokens, columns))[0, 0]
        visited = may_read.sum()
        if device == "GPU" and not is_sorted:  # from the first block to the last that is read
            visited = sum(np.ptp(np.flatnonzero(row)) + 1 for row in may_read)
        assert visited * tokens * columns / visible == pytest.approx(expected[SCORES.index(name)], abs=0.006)
    rows = [line for line in DOCS.read_text().splitlines() if line.startswith(("| GPU, ", "| TPU, "))]
    written = [tuple(map(float, line.split("|")[3:6])) for line in rows]
    assert written == list(COUNTED.values())


@pytest.mark.parametrize(("most", "calls", "size"), [(1 << 17, 1, 12), (24, 3, 4), (12, 6, 2), (60, 2, 6), (48, 2, 6)], ids=str)
def test_the_list_of_a_tpu_has_the_tiles_to_visit_by_output_block(monkeypatch, most, calls, size):
    check_list(monkeypatch, np.random.default_rng(0).random((2, 2, 3, 6)) < 0.4, most, calls, size)


def test_a_list_of_a_tpu_may_have_more_output_blocks_than_there_are(monkeypatch):
    may_read = np.random.default_rng(1).random((1, 3, 3, 6)) < 0.4
    check_list(monkeypatch, may_read, 24, 3, 4)
    check_list(monkeypatch, may_read, 1 << 17, 1, 10)


def check_list(monkeypatch, may_read, most, calls, size):
    monkeypatch.setattr(tpu, "MOST_TILES", most)
    may_read[0, 1, 2] = may_read[-1, -1, 0] = False  # output blocks with nothing to read
    heads, num_own, num_other = may_read.shape[0] * may_read.shape[1], *may_read.shape[2:]
    expected = []
    for own in range(calls * size):
        head, reads = min(own // num_own, heads - 1), np.zeros(num_other, bool)
        if own < heads * num_own:
            reads = may_read.reshape(-1, num_other)[own]
        expected += [(own, head * num_other + i, bool(reads[i])) for i in (np.flatnonzero(reads) if reads.any() else [0])]
    code, length, first = (np.asarray(x) for x in tpu.tiles_to_visit(jnp.asarray(may_read)))
    assert code.shape == (calls, tpu.HALVES, size // tpu.HALVES * num_other)
    assert first[:, 0].tolist() == [call * size for call in range(calls)]
    found = []
    for call, half in np.ndindex(code.shape[:2]):
        listed = code[call, half, : length[call, half]]
        place, other, is_read = tpu.decoded(listed, half, tpu.bits_of(heads * num_other))
        assert np.all(np.diff(place) >= 0)  # an output block stays until it is complete
        found += zip((first[call, 0] + place).tolist(), other.tolist(), (is_read == 1).tolist(), strict=True)
    assert sorted(found) == expected


def test_on_a_tpu_several_calls_give_what_one_gives(monkeypatch):
    """Nine output blocks of 128 in three calls of four: the last three are none's."""
    monkeypatch.setattr(tpu, "BLOCK", 128)
    inputs, columns = random_inputs(1, 300, 300, 3, 1, 64), causal_columns(1, 300, 3)
    run, to_visit, found, calls = implementation_of("tpu"), tpu.tiles_to_visit, [], []
    monkeypatch.setattr(tpu, "tiles_to_visit", lambda may_read: calls.append(to_visit(may_read)) or calls[-1])
    for most in (1 << 17, 12):
        monkeypatch.setattr(tpu, "MOST_TILES", most)
        calls.clear()
        jax.clear_caches()
        out, pull = jax.vjp(lambda *x: run(*x, *columns), *inputs)
        found.append((out, *pull(out)))
        assert {len(tiles.code) for tiles in calls} == {1 if most > 12 else 3}
    jax.clear_caches()
    for x, y in zip(*found, strict=True):
        assert jnp.array_equal(x, y)


@pytest.mark.parametrize("name", ["sorted", "sorted on a tpu"])
def test_a_longer_replay_of_sorted_columns_agrees(monkeypatch, name):
    """Several blocks of rows and columns, with a list of blocks for each."""
    monkeypatch.setitem(ON_DEVICES, "sorted on a tpu", functools.partial(tpu.replay_attention, sorts=True))
    monkeypatch.setattr(tpu, "SORTED_BLOCKS", (256, 128))
    num_tokens = 700
    inputs = random_inputs(1, num_tokens, num_tokens, 2, 2, 16)
    position, begin, end, source = random_columns(1, num_tokens, 2, num_tokens)
    end = jnp.minimum(end, begin + 60)
    for columns in ((position, begin, end), (position, begin, end, source)):
        outs = [
            jax.value_and_grad(lambda *x, run=run, columns=columns: jnp.sum(run(*x, *columns) ** 2), argnums=(0, 1, 2))(*inputs)
            for run in (implementation_of(name), naive)
        ]
        for x, y in zip(jax.tree.leaves(outs[0]), jax.tree.leaves(outs[1]), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-4, rtol=2e-4)
