"""Engines and programs on meshes of eight simulated devices produce the results of one device.

`tests/engine/test_mesh.py` runs this file.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from jkv.engine import chunk_inputs, mesh, programs
from jkv.engine.clocks import COMPILING
from jkv.engine.parts.base import Carried
from jkv.engine.state import empty_state
from jkv.eviction import Needs
from jkv.model.eight_bits import quantise_weights
from jkv.model.sampling import rows_of
from jkv.model.weight_shapes import init_params
from jkv.reasoning.sentences import SentenceMap
from jkv.reasoning.steering import SteeringVector
from jkv.testing import TINY, adapted, random_gate, random_statistics, tiny_model, unfolded
from tests.cache.test_pool import assert_allocator_is_consistent
from tests.support import gemma, glm, learned_sinks, olmo3, recurrent
from tests.support.learned_sinks import with_random_vectors
from tests.support.mixes import LOOSE, BreakingTokenizer

CONFIG = dataclasses.replace(TINY, num_query_heads=16, num_kv_heads=8)
PAGE_SIZE, MAX_SLOTS, NUM_ROWS = 4, 52, 4
ROW = CONFIG.num_layers * CONFIG.num_kv_heads * MAX_SLOTS // PAGE_SIZE  # pages of a full row
PROMPT, LONG = [5, 1, 9], list(range(20))
GREEDY, SAMPLED = jkv.Sampling(temperature=0.0), jkv.Sampling(seed=7)
VECTOR = SteeringVector(np.random.default_rng(0).standard_normal((2, 32)).astype(np.float32))
STATISTICS, GATE = random_statistics(tiny_model(config=CONFIG)), random_gate(tiny_model(config=CONFIG), "mlp")
BELOW = jkv.learned_gate(GATE, threshold=0.0, window=4, interval=8)
# Name -> arguments of `submit`. The requests cover the outputs and the cross-head operations of all policies.
REQUESTS = {
    "full": {"prompt": PROMPT, "policy": jkv.full(), "sampling": GREEDY},
    "forked": {"prompt": LONG, "policy": jkv.full(), "sampling": SAMPLED, "n": 3},
    "r_kv": {"prompt": LONG, "policy": jkv.r_kv(16, 8, window=4), "sampling": GREEDY},
    "rpc": {"prompt": PROMPT, "policy": jkv.rpc(interval=8, window=4), "sampling": GREEDY},
    "tova": {"prompt": PROMPT, "policy": jkv.tova(14), "sampling": GREEDY},
    "all": {"prompt": LONG, "policy": jkv.r_kv(16, 8, window=4, scope="all"), "sampling": GREEDY},
    "h2o": {"prompt": PROMPT, "policy": jkv.h2o(14), "sampling": GREEDY},
    "quest": {"prompt": LONG, "policy": jkv.quest(12, dense_layers=1), "sampling": GREEDY},
    "skip_kv": {"prompt": LONG, "policy": jkv.skip_kv(14, 8, window=4, tau=0.2, ends=(1, 5, 9, 17)), "sampling": GREEDY},
    "random": {"prompt": PROMPT, "policy": jkv.random(14, 8), "sampling": SAMPLED},
    "moving-sinks": {"prompt": PROMPT, "policy": jkv.streaming_llm(12, interval=8, positions="cache"), "sampling": GREEDY},
    "critical_kv": {"prompt": LONG, "policy": jkv.critical_kv(16, 8, window=4), "sampling": GREEDY},
    "expected_attention": {"prompt": LONG, "policy": jkv.expected_attention(16, 8, num_queries=8), "sampling": GREEDY},
    "tri_attention": {"prompt": PROMPT, "policy": jkv.tri_attention(16, STATISTICS, 8), "sampling": GREEDY},
    "learned_gate": {"prompt": LONG, "policy": jkv.learned_gate(GATE, 16, interval=8), "sampling": GREEDY},
    "seal": {"prompt": PROMPT, "policy": jkv.seal(VECTOR, strength=-0.7), "sampling": SAMPLED},
    "reason_cache": {"prompt": LONG, "policy": jkv.reason_cache(include_prompt=True, **LOOSE), "sampling": GREEDY},
    "aligned": {"prompt": PROMPT, "policy": jkv.reason_cache(align_steps=True, **LOOSE), "sampling": SAMPLED},
}
# Their heads hold unequal numbers of slots, so shards are not full at the same time, and rows are admitted at other times.
UNEVEN = {
    "below_threshold": {"prompt": LONG, "policy": BELOW, "sampling": SAMPLED, "n": 4},
    "ada_kv": {"prompt": LONG, "policy": jkv.ada_kv(8, interval=4, window=4), "sampling": SAMPLED, "n": 4},
}
# Devices -> requests. On four devices a shard has two of the eight KV heads, on eight one, and on two four.
MESHES = {
    4: tuple(REQUESTS),
    8: tuple(REQUESTS),
    2: ("forked", "r_kv", "rpc", "tova", "all", "skip_kv", "random", "reason_cache"),
}


def marks_of(count):
    return () if count == 2 else pytest.mark.slow


meshes = pytest.mark.parametrize("count", [pytest.param(count, marks=marks_of(count)) for count in MESHES])


def devices_of(count: int) -> Mesh:
    return Mesh(jax.devices()[:count], ("tensor",))


@pytest.fixture(scope="module")
def model():
    return tiny_model(config=CONFIG, tokenizer=BreakingTokenizer())


def shards_of(pool, num_shards):
    """The pool of each shard, on the host."""
    pool = jax.device_get(pool)
    head_axis = {"page_table": 2, "length": 2, "vacant_slot": 2, "slot_data": 2}  # other fields are split by pages, axis 0

    def part(name, index):
        axis = head_axis.get(name, 0)
        value = jax.tree.map(lambda x: np.split(np.atleast_1d(x), num_shards, axis)[index], getattr(pool, name))
        return value.reshape(()) if name == "free_top" else value

    whole = ("logical_length", "poison")
    fields = [field.name for field in dataclasses.fields(pool) if field.name not in whole]
    return [pool.replace(**{name: part(name, index) for name in fields}) for index in range(num_shards)]


def cache_sizes(engine):
    return {name: getattr(engine.runner.programs, name).num_compiled() for name in mesh.PROGRAMS}


def play(model, on, names, requests=REQUESTS | UNEVEN, row=ROW):
    """Runs requests in one engine with too small a pool for all: results by name, the engine, the number of compilations."""
    engine = jkv.Engine(
        model,
        max_running=NUM_ROWS,
        max_slots=MAX_SLOTS,
        page_size=PAGE_SIZE,
        num_pages=(2 if "ada_kv" in names else 1) * row + row // 2 + 7,  # one of eight shards may win the slots of all
        policies=[requests[name]["policy"] for name in names],
        chunk=4,
        return_trace=True,
        poison=True,
        mesh=on,
    )
    num_shards, before = mesh.num_pools(engine.mesh), cache_sizes(engine)
    tickets = {name: engine.submit(**requests[name], max_new_tokens=22, stop_ids=()) for name in names}
    while not engine.is_idle:
        engine.step()
        block_tables = [
            jax.device_get(prefix.row.snapshot.block_table)
            for prefix in engine.scheduler.prefixes.values()
            if prefix.row.snapshot
        ]
        for index, pool in enumerate(shards_of(engine.runner.state.cache.pool, num_shards)):
            assert_allocator_is_consistent(pool, [part_of(block_table, num_shards, index) for block_table in block_tables])
    compiled = {name: size - before[name] for name, size in cache_sizes(engine).items()}
    return {name: engine.result(ticket) for name, ticket in tickets.items()}, engine, compiled


def part_of(block_table, num_shards, index):
    split = {name: np.split(getattr(block_table, name), num_shards, axis=1)[index] for name in ("page_table", "length")}
    return block_table._replace(**split)


@pytest.fixture(scope="module")
def on_one_device(model):
    """Number of devices -> the result of the same requests on one, where equal requests run once."""
    of_names = functools.cache(lambda names: play(model, None, names))
    return lambda count: of_names(MESHES[count])


@pytest.fixture(scope="module")
def on_devices(model):
    """Number of devices -> the result of `play` on them."""
    return functools.cache(lambda count: play(model, devices_of(count), MESHES[count]))


@pytest.mark.everyday
@pytest.mark.parametrize(
    ("count", "name"), [pytest.param(count, name, marks=marks_of(count)) for count, names in MESHES.items() for name in names]
)
def test_a_mesh_changes_no_token(on_one_device, on_devices, count, name):
    one, many = on_one_device(count)[0][name], on_devices(count)[0][name]
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.logprobs, one.logprobs, atol=1e-4)
    for field in ("source", "begin", "end"):  # which tokens each head read and evicted
        np.testing.assert_array_equal(getattr(many.trace, field), getattr(one.trace, field))
    assert len(set(map(tuple, one.tokens.tolist()))) == REQUESTS[name].get("n", 1)
    if name in ("r_kv", "rpc", "tova", "all", "h2o", "skip_kv", "random", "moving-sinks", "learned_gate"):
        assert many.samples[0].evicted == one.samples[0].evicted > 0


@meshes
@pytest.mark.parametrize("name", UNEVEN)
def test_shards_whose_heads_hold_unequal_numbers_of_slots_never_run_out_of_pages(model, count, name):
    (one, *_), (many, engine, _) = (play(model, on, [name]) for on in (None, devices_of(count)))
    one, many = one[name], many[name]
    np.testing.assert_array_equal(many.tokens, one.tokens)
    np.testing.assert_allclose(many.logprobs, one.logprobs, atol=1e-4)
    np.testing.assert_array_equal(many.trace.end, one.trace.end)
    held = (one.trace.end == 2**31 - 1).sum(axis=-1).reshape(4, CONFIG.num_layers, count, -1).sum(axis=(1, 3))
    assert (held.max(axis=-1) > held.min(axis=-1)).any()  # of the shards of each sample
    assert np.asarray(engine.runner.state.cache.pool.free_top).tolist() == [engine.num_pages // count] * count


@meshes
def test_the_pages_of_all_shards_are_freed(on_one_device, on_devices, count):
    (_, one, _), (_, many, _) = on_one_device(count), on_devices(count)
    assert one.num_pages % count > 0
    assert many.num_pages == one.num_pages // count * count
    assert np.asarray(many.runner.state.cache.pool.free_top).tolist() == [many.num_pages // count] * count
    assert many.stats.preemptions > 0


@meshes
def test_all_shards_count_as_one_pool(on_one_device, on_devices, count):
    (_, one, _), (_, many, _) = on_one_device(count), on_devices(count)
    for field in ("preemptions", "forks", "prefills", "steps", "peak_kv_bytes", "kv_bytes", "dense_kv_bytes"):
        assert getattr(many.stats, field) == getattr(one.stats, field) > 0, field
    assert many.stats.sharing.shared == one.stats.sharing.shared > 0


@meshes
def test_a_mesh_compiles_programs_no_more_often(on_one_device, on_devices, count):
    assert on_devices(count)[2] == on_one_device(count)[2]


@meshes
def test_weights_and_pages_are_split_evenly(on_devices, count):
    _, engine, _ = on_devices(count)
    num_shards, layer, pool = engine.mesh.size, engine.model.params.layers[0], engine.runner.state.cache.pool
    for whole, axis in ((layer.query, 1), (layer.out, 0), (layer.down, 0), (engine.model.params.embedding, 0), (pool.kv, 0)):
        assert whole.addressable_shards[0].data.shape[axis] * num_shards == whole.shape[axis]
    assert jkv.shard(engine.model.params, engine.mesh).embedding is engine.model.params.embedding


def test_new_weights_with_other_shardings_are_refused_and_equal_ones_compile_nothing(model):
    devices, policy = devices_of(2), jkv.r_kv(budget=16, interval=8, window=4)
    options = {"max_prompt_tokens": 8, "max_new_tokens": 16, "page_size": 4, "n": 2, "mesh": devices}
    rollout = jkv.Rollout(model.params, policy, **options)
    expected = rollout([[5, 1, 9]], seed=0, stop_ids=())
    for elsewhere in (jax.devices()[1], jax.sharding.NamedSharding(devices, jax.sharding.PartitionSpec())):
        with pytest.raises(ValueError, match="must have the shardings of the old ones; params"):
            rollout.update(jax.device_put(model.params, elsewhere))
    rollout.update(jkv.shard(model.params, devices))
    rollout.sleep()
    compiled = COMPILING.seconds
    np.testing.assert_array_equal(rollout([[5, 1, 9]], seed=0, stop_ids=()).tokens, expected.tokens)
    assert COMPILING.seconds == compiled  # neither new weights nor a new pool compile anything


@pytest.mark.everyday(where=lambda name, kv_dtype: (name, kv_dtype) != ("r_kv", "int8"))
@pytest.mark.parametrize(("name", "kv_dtype"), [("r_kv", "int8"), ("h2o", "int8"), ("r_kv", "int4")])
def test_quantised_pages_are_split_with_their_scales(model, name, kv_dtype):
    if kv_dtype == "int4":
        model = jkv.testing.tiny_model(config=dataclasses.replace(jkv.testing.TINY, head_size=32))
    policy = {"r_kv": jkv.r_kv(budget=24, interval=16, window=4), "h2o": jkv.h2o(budget=24)}[name]
    settings = {"policy": policy, "sampling": jkv.Sampling(seed=1), "max_new_tokens": 40, "page_size": 4, "stop_ids": ()}
    prompts = [[5, 1, 9], [3, 7] * 16 + [1]]
    one, split = (
        jkv.generate(model, prompts, kv_dtype=kv_dtype, mesh=on, progress=False, **settings) for on in (None, devices_of(2))
    )
    np.testing.assert_array_equal(one.tokens, split.tokens)
    apart = np.abs(one.logprobs - split.logprobs)
    # A number at the border of two codes may get the other one, and later tokens read it; a wrong scale is 1e-2 off at once.
    assert np.median(apart) <= 1e-3
    assert apart.max() <= 0.05
    assert one.stats.peak_kv_bytes == split.stats.peak_kv_bytes


@pytest.mark.parametrize("num_experts", [0, 4])
def test_codes_of_weights_are_split_with_their_scales(num_experts):
    config = dataclasses.replace(UNTIED, num_experts=num_experts, num_active_experts=min(num_experts, 2))
    params = quantise_weights(init_params(config, jax.random.key(2), scale=0.3), "int8")

    def tokens_on(on):
        engine = jkv.Engine(params, max_running=2, max_slots=MAX_SLOTS, page_size=PAGE_SIZE, mesh=on)
        ticket = engine.submit(LONG, max_new_tokens=24, stop_ids=())
        engine.run()
        return engine, engine.result(ticket).tokens.tolist()

    _, expected = tokens_on(None)
    engine, found = tokens_on(devices_of(4))
    assert found == expected
    layer = engine.model.params.layers[0]
    matrices = [layer.query, *([layer.experts.down] if num_experts else [layer.gate])]
    for leaf in jax.tree.leaves(matrices):
        assert leaf.addressable_shards[0].data.size * 4 == leaf.size


def test_weights_with_adapters_or_unfolded_shapes_are_split_too(model):
    params = adapted(unfolded(init_params(UNTIED, jax.random.key(2), scale=0.3)))

    def tokens_on(on):
        engine = jkv.Engine(params, max_running=2, max_slots=MAX_SLOTS, page_size=PAGE_SIZE, mesh=on)
        ticket = engine.submit(LONG, max_new_tokens=24, stop_ids=())
        engine.run()
        return engine, engine.result(ticket)

    _, expected = tokens_on(None)
    engine, out = tokens_on(devices_of(8))
    assert out.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)
    layer = engine.model.params.layers[0]
    for whole, axis in ((layer.query.base, 1), (layer.query.up, 1), (layer.out.base, 0), (layer.out.down, 0), (layer.up.up, 1)):
        assert whole.addressable_shards[0].data.shape[axis] * 8 == whole.shape[axis]
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(engine.model.params))
    assert mesh.local_bytes(params, 8) == held


def test_adapters_by_request_are_split_with_their_matrices():
    params = init_params(UNTIED, jax.random.key(2), scale=0.3)

    def results_on(on):
        sizes = {"max_running": 2, "max_slots": MAX_SLOTS, "page_size": PAGE_SIZE, "max_adapters": 1, "adapter_rank": 4}
        engine = jkv.Engine(params, **sizes, mesh=on)
        engine.add_adapter("a", adapted(params))
        tickets = [engine.submit(LONG, max_new_tokens=24, stop_ids=(), adapter=name) for name in ("a", None)]
        engine.run()
        return engine, [engine.result(ticket) for ticket in tickets]

    _, expected = results_on(None)
    engine, outs = results_on(devices_of(8))
    assert expected[0].tokens.tolist() != expected[1].tokens.tolist()
    for out, wanted in zip(outs, expected, strict=True):
        assert out.tokens.tolist() == wanted.tokens.tolist()
        np.testing.assert_allclose(out.logprobs, wanted.logprobs, atol=1e-4)
    layer = engine.runner.adapters.stacks.layers[0]
    for whole, axis in ((layer.query.up, 2), (layer.out.down, 1), (layer.up.up, 2), (layer.down.down, 1)):
        assert whole.addressable_shards[0].data.shape[axis] * 8 == whole.shape[axis]


def test_each_expert_is_split_by_its_width():
    config = dataclasses.replace(CONFIG, num_experts=4, num_active_experts=2, normalises_experts=True, whole_experts=False)
    params, settings = init_params(config, jax.random.key(4), scale=0.3), {"max_running": 2, "max_slots": MAX_SLOTS}

    def tokens_on(on):
        engine = jkv.Engine(params, page_size=PAGE_SIZE, mesh=on, **settings)
        ticket = engine.submit(LONG, max_new_tokens=24, stop_ids=())
        engine.run()
        return engine, engine.result(ticket)

    (_, expected), (engine, out) = tokens_on(None), tokens_on(devices_of(8))
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_allclose(out.logprobs, expected.logprobs, atol=1e-4)
    experts = engine.model.params.layers[0].experts
    for whole in (experts.gate, experts.up, experts.down):
        assert whole.addressable_shards[0].data.shape[1] * 8 == whole.shape[1] == config.mlp_width


UNTIED = dataclasses.replace(CONFIG, tie_embeddings=False, qk_norm=True)
PROMPTS = [[5, 1, 9], LONG[:13], [7, 7], [2, 30, 4, 8, 11, 3]]


@pytest.fixture(scope="module")
def params():
    return init_params(UNTIED, jax.random.key(1), scale=0.3)


def prefilled(params, on, rows):
    """The state after the prefill of some rows, on a mesh or (None) on one device."""
    pages_of_row, needs = 8, Needs(window=4, mass=True)
    sizes = {
        "num_rows": len(rows),
        "num_pages": len(rows) * UNTIED.num_layers * UNTIED.num_kv_heads * pages_of_row,
        "max_pages": pages_of_row,
        "page_size": PAGE_SIZE,
        "poison": True,
    }
    if on is None:
        state, prefill = empty_state(UNTIED, needs, **sizes), programs
    else:
        state, prefill = mesh.empty_state(on, UNTIED, needs, **sizes), mesh.programs_on(on)
        params = jkv.shard(params, on)
    for i, row in enumerate(rows):
        token = jnp.asarray([PROMPTS[row] + [0] * (16 - len(PROMPTS[row]))], jnp.int32)
        count = jnp.asarray([len(PROMPTS[row])], jnp.int32)
        state, *_ = prefill.prefill_chunk(params, state, jnp.asarray([i], jnp.int32), token, count)
    return state


def test_outputs_over_all_heads_cover_all_shards(params):
    """Distances of pages, dropped positions, and positions that any head keeps."""
    on = Mesh(jax.devices()[:4], ("tensor",))
    pair = [np.asarray([x], np.int32) for x in (1, 0, 2, PAGE_SIZE)]  # row, first and second page, tokens
    row, budget, protected = (
        np.asarray([1], np.int32),
        np.full((2, 1, CONFIG.num_kv_heads), 1, np.int32),
        np.zeros((2, 1), np.int32),
    )
    sentences = SentenceMap(np.zeros((1, 16), np.int32), np.zeros((1, 16), np.float32))
    evict = jkv.random(1, recent=0).evict.static

    def outputs_on(on):
        state, run = prefilled(params, on, [0, 1]), programs if on is None else mesh.programs_on(on)
        distance = run.measure_pages(state, *pair, None)
        _, dropped, is_left, _ = run.compact(
            state, row, budget, row, protected, evict=evict, is_traced=True, sentences=sentences
        )
        return distance, dropped, is_left

    one, many = outputs_on(None), outputs_on(on)
    np.testing.assert_allclose(many[0], one[0], rtol=1e-5)
    np.testing.assert_array_equal(many[1], one[1])
    np.testing.assert_array_equal(many[2], one[2])
    assert 2 < np.asarray(one[2]).sum() < 13


def test_rows_on_two_replicas_equal_rows_on_one_device(params):
    """Four rows on one device, and two rows on each of two meshes of four devices."""
    row, key = np.arange(NUM_ROWS), np.zeros((NUM_ROWS, 2), np.uint32)
    settings = rows_of([jkv.Sampling(temperature=0)] * NUM_ROWS)
    policies = dict(enumerate([jkv.full(), jkv.h2o(10), jkv.full(), jkv.h2o(8)]))
    rules = chunk_inputs.step_rules(policies, NUM_ROWS, UNTIED.num_layers, {})
    remaining = np.asarray([16, 16, 5, 16], np.int32)
    inputs = programs.ChunkInputs(remaining, np.full((NUM_ROWS, 1), -1, np.int32), settings, key, rules)

    def decoded(rows, on):
        mine = jax.tree.map(lambda x: x[rows], inputs._replace(rules=None))
        mine = mine._replace(rules=jax.tree.map(lambda x: x[..., rows], rules))
        mine = jax.device_put(mine, None if on is None else mesh.replicated(on))
        decode = programs.decode_chunk if on is None else mesh.program_on(on, "decode_chunk")
        state = prefilled(params, on, rows)
        given = params if on is None else jkv.shard(params, on), state, mine, Carried()
        _, outputs, _ = decode(*given, 16, "greedy", True)
        assert state.cache.pool.kv.is_deleted()
        return jax.device_get(outputs)

    one = decoded(row, None)
    replicas = [decoded(row[:2], Mesh(jax.devices()[:4], ("tensor",))), decoded(row[2:], Mesh(jax.devices()[4:], ("tensor",)))]

    def joined(field, axis=1):
        return np.concatenate([getattr(replica, field) for replica in replicas], axis)

    np.testing.assert_array_equal(joined("token"), one.token)
    np.testing.assert_array_equal(joined("is_real"), one.is_real)
    np.testing.assert_array_equal(joined("dropped", axis=2), one.dropped)
    np.testing.assert_allclose(joined("log_prob"), one.log_prob, atol=1e-4)
    assert sum(replica.held_pages for replica in replicas) == one.held_pages > 0
    assert (one.dropped >= 0).any()


@pytest.mark.parametrize(
    ("config", "shape", "axes", "message"),
    [
        (
            {"num_kv_heads": 2, "num_query_heads": 4},
            (8,),
            ("tensor",),
            r"num_query_heads=4 must be a multiple of the 8 devices",
        ),
        (
            {"num_kv_heads": 6, "num_query_heads": 24},
            (4,),
            ("tensor",),
            r"num_kv_heads=6 must be .*, or divide their number; 6 / 4",
        ),
        ({"mlp_width": 44}, (8,), ("tensor",), r"mlp_width=44 must be .* 44 / 8 = 5\.50"),
        ({"vocab_size": 33}, (2,), ("tensor",), r"vocab_size=33 must be a multiple of the 2 devices"),
        ({}, (2, 4), ("data", "tensor"), r"one engine for each of the 2 rows"),
        ({}, (4,), ("model",), r'over an axis "tensor".*got \{\'model\': 4\}'),
        ({}, (4, 2), ("tensor", "expert"), r"'expert': 2"),
    ],
    ids=["heads", "kv heads", "width", "tokens", "replicas", "no-axis", "other-axis"],
)
def test_a_mesh_that_does_not_fit_is_refused(config, shape, axes, message):
    config = dataclasses.replace(CONFIG, **config)
    on = Mesh(np.reshape(jax.devices()[: np.prod(shape)], shape), axes)
    with pytest.raises(ValueError, match=message):
        jkv.Engine(init_params(config, jax.random.key(0)), mesh=on)


@pytest.mark.parametrize("name", mesh.PROGRAMS)
def test_no_program_splits_rows(name):
    square = Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "tensor"))
    with pytest.raises(ValueError, match="one engine for each of the 2 rows"):
        mesh.program_on(square, name)


def test_an_axis_of_one_device_is_left_out():
    thin = Mesh(np.reshape(jax.devices()[:4], (1, 4, 1)), ("data", "tensor", "expert"))
    assert mesh.arrange(thin) == devices_of(4)


def test_weights_are_restored_with_their_shardings(tmp_path):
    params, on = init_params(CONFIG, jax.random.key(0)), devices_of(8)
    jkv.save(params, tmp_path)
    restored = jkv.restore(tmp_path, jkv.shardings(jkv.weight_shapes(CONFIG), on))
    for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(jkv.shard(params, on)), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("count", MESHES)
def test_a_plan_counts_the_bytes_of_each_device(model, count):
    policy = REQUESTS["r_kv"]["policy"]
    device = jkv.Device("small", "cpu", 10**9)
    plan = jkv.plan(model, device, policy, length=MAX_SLOTS, prompt=20, batch=3, page_size=PAGE_SIZE, num_devices=count)
    engine = jkv.Engine(model, policies=[policy], mesh=devices_of(count), **plan.engine)
    for shard in range(count):

        def held(tree, shard=shard):
            return sum(x.addressable_shards[shard].data.nbytes for x in jax.tree.leaves(tree))

        assert held(engine.model.params) == plan.weight_bytes
        assert held(engine.runner.state) == plan.own.state_bytes


WINDOWED = tiny_model(config=dataclasses.replace(CONFIG, num_layers=4, window=6, window_layers=(0, 2)))
SUNK = with_random_vectors(tiny_model(config=dataclasses.replace(learned_sinks.CONFIG, num_query_heads=16, num_kv_heads=8)))


OLMO = olmo3.with_random_norms(tiny_model(config=dataclasses.replace(olmo3.CONFIG, num_query_heads=16, num_kv_heads=8)))

MIXED = gemma.random_model(dataclasses.replace(gemma.EXPERTS, num_query_heads=16, num_kv_heads=4, window_kv_heads=8))
SHARED = gemma.random_model(dataclasses.replace(gemma.SHARING, num_query_heads=16, num_kv_heads=8))
GEMMA = gemma.random_model(dataclasses.replace(gemma.GEMMA4, num_query_heads=16, num_kv_heads=4, window_kv_heads=8))

GLM = glm.with_random_biases(tiny_model(config=dataclasses.replace(glm.CONFIG, num_query_heads=16, num_kv_heads=8)))
RECURRENT = recurrent.recurrent_model(
    dataclasses.replace(
        recurrent.CONFIG,
        num_query_heads=16,
        num_kv_heads=8,
        delta_net=dataclasses.replace(recurrent.SIZES, num_key_heads=4, num_value_heads=8),
    )
)


@pytest.mark.everyday(where=lambda tiny: tiny is SUNK or tiny is RECURRENT)
@pytest.mark.parametrize(
    "tiny",
    [WINDOWED, SUNK, OLMO, GEMMA, MIXED, SHARED, GLM, RECURRENT],
    ids=[
        *("windows", "learned-sinks", "norms-over-all-heads", "heads-by-group", "experts-beside", "layers-that-share"),
        *("shared-block", "recurrent-states"),
    ],
)
def test_windows_learned_sinks_norms_over_all_heads_and_states_are_split_with_the_heads(tiny):
    model = dataclasses.replace(tiny, tokenizer=BreakingTokenizer())
    policies = {"r_kv": REQUESTS["r_kv"]["policy"], "h2o": REQUESTS["h2o"]["policy"]}

    def outcome(on):
        settings = {"max_running": 2, "max_slots": 64, "page_size": PAGE_SIZE, "num_pages": 2 * ROW, "mesh": on}
        # On the mesh, steps beside windows and recurrent layers append several tokens, which changes none.
        is_guessed = on is not None and (tiny is SUNK or tiny is RECURRENT)
        settings["speculate"] = jkv.ngram(drafts=2, least=1, history=32) if is_guessed else None
        engine = jkv.Engine(model, policies=list(policies.values()), return_trace=True, poison=True, **settings)
        names = "full", "forked", *policies
        tickets = [engine.submit(**REQUESTS[name], max_new_tokens=22, stop_ids=()) for name in names]
        engine.step()
        engine.sleep()
        engine.wake()
        engine.run()
        return [engine.result(ticket) for ticket in tickets]

    on = devices_of(4)
    for one, other in zip(outcome(None), outcome(on), strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
        params = jkv.shard(model.params, on)
        np.testing.assert_allclose(jkv.score(params, other, other.trace).logprobs, other.logprobs, atol=1e-4)


def test_a_mesh_that_does_not_divide_the_heads_of_states_is_refused():
    config = dataclasses.replace(recurrent.CONFIG, num_query_heads=16, num_kv_heads=8)
    with pytest.raises(ValueError, match=r"delta_net\.num_key_heads=2 must be a multiple of the 4 devices"):
        jkv.Engine(init_params(config, jax.random.key(0)), mesh=devices_of(4))
