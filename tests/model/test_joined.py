"""Joined matrices compute what separate ones do, in every family; loading, saving, updates and meshes take both forms."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import jkv
from jkv.checkpoints import saved_weights
from jkv.checkpoints.loading import export
from jkv.model.joined import GROUPS, filled, is_joined, split
from jkv.model.params import LowRank
from jkv.model.sharding import shardings
from jkv.model.weight_shapes import init_params, weight_shapes
from jkv.serving.trainer import read_weights
from jkv.testing import TINY, adapted, tiny_model, unfolded
from tests.support.checkpoints import CONFIGS, GOLDEN, assert_equal, dense_logits, families, random_params

TOKENS = np.arange(3, 25)
FOLDERS = "llama_tied", "qwen2", "phi3", "qwen3_5", "gemma4", "gpt_oss"


def arrays_of(params):
    """The fields of each layer that have a matrix of several."""
    return [{name for name in GROUPS if getattr(weights, name) is not None} for weights in params.layers]


@families
def test_logits_are_those_of_separate_matrices(config):
    params = random_params(config)
    with_one = jkv.join_weights(params)
    assert is_joined(with_one)
    assert not is_joined(params)
    np.testing.assert_allclose(dense_logits(with_one, TOKENS), dense_logits(params, TOKENS), rtol=2e-4, atol=2e-4)


@families
def test_separation_gives_back_the_same_tree(config):
    params = random_params(config)
    assert_equal(jkv.separate_weights(jkv.join_weights(params)), params)
    assert_equal(jkv.join_weights(jkv.join_weights(params)), jkv.join_weights(params))
    shapes = jkv.separate_weights(jkv.join_weights(weight_shapes(config)))
    assert shapes == weight_shapes(config)


def test_columns_are_those_of_the_three_in_order():
    params = random_params(CONFIGS["llama-linear"])
    one, many = jkv.join_weights(params).layers[0], params.layers[0]
    np.testing.assert_array_equal(one.query_key_value, np.concatenate([many.query, many.key, many.value], axis=1))
    np.testing.assert_array_equal(one.gate_up, np.concatenate([many.gate, many.up], axis=1))
    assert one.query is one.key is one.value is one.gate is one.up is None


def test_a_layer_without_its_own_keys_joins_no_query():
    config = CONFIGS["gemma4-sharing"]
    arrays = arrays_of(jkv.join_weights(random_params(config)))
    shares = [layer >= config.num_owners for layer in range(config.num_layers)]
    assert [("query_key_value" in fields) for fields in arrays] == [not one for one in shares]
    assert any(shares)
    assert all("gate_up" in fields for fields in arrays)


def test_adapters_stay_as_they_are_with_the_others_of_their_group():
    given = adapted(random_params(CONFIGS["llama-linear"]))
    assert_equal(jkv.join_weights(given), given)
    layer = given.layers[0]
    partly = layer.replace(gate=layer.gate.base, up=layer.up.base)
    (fields, _) = arrays_of(jkv.join_weights(given.replace(layers=(partly, given.layers[1]))))
    assert fields == {"gate_up"}


def test_unfolded_matrices_are_folded():
    params = random_params(CONFIGS["llama-linear"])
    given = jkv.join_weights(unfolded(params)).layers[0]
    np.testing.assert_array_equal(given.query_key_value, jkv.join_weights(params).layers[0].query_key_value)


@pytest.mark.parametrize("weight_dtype", ["int8", "fp8"])
def test_codes_are_those_of_each_matrix(weight_dtype):
    params = random_params(CONFIGS["qwen3-tied"])
    one_first = jkv.quantise_weights(jkv.join_weights(params), weight_dtype)
    codes_first = jkv.join_weights(jkv.quantise_weights(params, weight_dtype))
    assert_equal(one_first, codes_first)
    assert_equal(jkv.separate_weights(one_first), jkv.quantise_weights(params, weight_dtype))
    assert one_first.layers[0].query_key_value.code.dtype.itemsize == 1


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_loads_as_it_is_joined_later(name, weight_dtype):
    folder = str(GOLDEN / name)
    params = jkv.load(folder, weight_dtype=weight_dtype).params
    one = jkv.load(folder, weight_dtype=weight_dtype, joined=True)
    assert_equal(one.params, jkv.join_weights(params))
    assert one.digest == jkv.Model(params).digest


def test_a_gpu_joins_by_default_and_a_cpu_does_not(monkeypatch):
    assert not is_joined(jkv.load("tiny-reasoner").params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert is_joined(jkv.load("tiny-reasoner", "float32").params)
    assert not is_joined(jkv.load("tiny-reasoner", "float32", joined=False).params)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    assert not is_joined(jkv.load("tiny-reasoner", "float32", mesh=mesh).params)


def test_saved_weights_are_separate_and_load_in_both_forms(tmp_path):
    params = random_params(CONFIGS["qwen3-tied"])
    for place, given in {"one": params, "other": jkv.join_weights(params)}.items():
        jkv.save(given, tmp_path / place)
        assert_equal(jkv.restore(tmp_path / place), params)
    assert_equal(jkv.load(tmp_path / "one", joined=True).params, jkv.join_weights(params))
    export(jkv.join_weights(params), None, tmp_path / "third", jnp.float32)
    assert_equal(jkv.load(tmp_path / "third").params, params)


def test_no_more_than_one_group_is_made_twice():
    """Loading 64 GB of weights leaves no room for a second copy."""
    shapes = jax.tree.leaves(weight_shapes(TINY))
    gc.collect()
    before, made, most = {id(x) for x in jax.live_arrays()}, 0, 0
    group = 2 * TINY.width * TINY.mlp_width  # the largest

    def make(index):
        nonlocal made, most
        held = sum(x.size for x in jax.live_arrays() if id(x) not in before)
        assert held <= made + group
        made += shapes[index].size
        most = max(most, held)
        return jnp.zeros(shapes[index].shape)

    filled(jax.tree.structure(weight_shapes(TINY)), make, joins=True)
    assert made == sum(one.size for one in shapes)
    assert most > 0.8 * made


def test_random_weights_are_the_same_numbers_joined():
    one = init_params(TINY, jax.random.key(3), joins=True)
    assert_equal(one, jkv.join_weights(init_params(TINY, jax.random.key(3))))


@pytest.mark.parametrize("starts_joined", [True, False])
def test_new_weights_may_come_in_the_other_form(starts_joined):
    first, second = tiny_model(), tiny_model(seed=1)
    given = jkv.join_weights(first.params) if starts_joined else first.params
    other = second.params if starts_joined else jkv.join_weights(second.params)
    engine = jkv.Engine(given, max_running=2, max_slots=32)
    found = []
    for update in (lambda: None, lambda: engine.update(other)):
        update()
        ticket = engine.submit([1, 2, 3], max_new_tokens=8)
        while engine.step():
            pass
        found.append(engine.result(ticket).tokens[0].tolist())
    wanted = [jkv.generate(one.params, [[1, 2, 3]], max_new_tokens=8, progress=False).tokens[0] for one in (first, second)]
    assert found == [one.tolist() for one in wanted]
    assert found[0] != found[1]


def test_a_mesh_takes_separate_matrices():
    params, mesh = jkv.join_weights(tiny_model().params), Mesh(np.array(jax.devices()[:1]), ("tensor",))
    with pytest.raises(ValueError, match=r"an array for each matrix.*jkv\.separate_weights\(params\)"):
        shardings(params, mesh)
    assert_equal(jkv.shard(params, mesh), jkv.shard(tiny_model().params, mesh))
    tokens = [
        jkv.generate(given, [[1, 2]], max_new_tokens=5, mesh=mesh, progress=False).tokens[0]
        for given in (params, tiny_model().params)
    ]
    assert tokens[0].tolist() == tokens[1].tolist()
    with pytest.raises(ValueError, match="joined must not be True with a mesh"):
        jkv.load("tiny-reasoner", mesh=mesh, joined=True)


def test_a_matrix_beside_the_joined_one_is_refused_wherever_it_would_be_ignored():
    params = jkv.join_weights(tiny_model().params)
    query = jnp.zeros((TINY.width, TINY.num_query_heads * TINY.head_size))
    layers = [params.layers[0].replace(query=query), params.layers[0].replace(gate=LowRank(None, query[:, :1], query[:1]))]
    for layer in layers:
        given = params.replace(layers=(layer, *params.layers[1:]))
        for use in (
            lambda given=given: jkv.generate(given, [[1, 2]], max_new_tokens=2, progress=False),
            lambda given=given: jkv.separate_weights(given),
            lambda given=given: jkv.join_weights(given),
        ):
            with pytest.raises(ValueError, match=r"either \w+ or its parts .* got \w+ and (query|gate)\. .*joined=False"):
                use()


def test_an_adapter_of_a_joined_matrix_becomes_one_of_each():
    params = jkv.join_weights(tiny_model().params)
    layer, rng = params.layers[0], np.random.default_rng(0)
    down, up = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((TINY.width, 2), (2, layer.gate_up.shape[1]))
    )
    given = params.replace(layers=(layer.replace(gate_up=LowRank(layer.gate_up, down, up, 0.5)), *params.layers[1:]))
    np.testing.assert_allclose(
        dense_logits(jkv.separate_weights(given), TOKENS % 50), dense_logits(given, TOKENS % 50), rtol=2e-4, atol=2e-4
    )


def test_matrices_of_two_dtypes_stay_apart():
    params = tiny_model().params
    layers = tuple(one.replace(query=one.query.astype(jnp.bfloat16)) for one in params.layers)
    assert arrays_of(jkv.join_weights(params.replace(layers=layers))) == [{"gate_up"}] * len(layers)


def test_bad_weights_in_the_other_form_are_refused_as_in_the_same_one():
    params = tiny_model().params
    engine = jkv.Engine(jkv.join_weights(params), max_running=2, max_slots=32)
    narrow = params.layers[0].replace(query=params.layers[0].query[:, :-1])
    half = params.layers[0].replace(query=params.layers[0].query.astype(jnp.bfloat16))
    gone = params.layers[0].replace(query=params.layers[0].query + 0)
    gone.query.delete()
    for layer, rule in ((narrow, "shapes and dtypes"), (half, "shapes and dtypes"), (gone, "must be alive")):
        with pytest.raises(ValueError, match=rule):
            engine.update(params.replace(layers=(layer, *params.layers[1:])))
    engine.update(params)


@pytest.mark.parametrize("form", ["joined", "separate"])
def test_replicas_run_both_forms_and_take_the_other(form):
    first, second = tiny_model().params, tiny_model(seed=1).params
    forms = (jkv.join_weights, jkv.separate_weights) if form == "joined" else (jkv.separate_weights, jkv.join_weights)
    wanted = [jkv.generate(one, [[1, 2, 3]], max_new_tokens=6, progress=False).tokens[0].tolist() for one in (first, second)]
    with jkv.Replicas(forms[0](first), num_replicas=2, max_running=2, max_slots=32) as replicas:
        found = [replicas.generate([[1, 2, 3]], max_new_tokens=6).tokens[0].tolist()]
        replicas.update(forms[1](second))
        found.append(replicas.generate([[1, 2, 3]], max_new_tokens=6).tokens[0].tolist())
    assert found == wanted


def test_a_score_on_a_mesh_is_that_of_separate_matrices():
    params, mesh = tiny_model().params, Mesh(np.array(jax.devices()[:1]), ("tensor",))
    one, other = (
        jkv.score(given, jnp.asarray([[4, 5, 6, 7]]), prompts=[[1, 2, 3]], mesh=mesh).logprobs
        for given in (params, jkv.join_weights(params))
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("weight_dtype", [None, "int8"])
def test_a_server_reads_new_weights_as_its_own_are_joined(tmp_path, weight_dtype):
    model = jkv.load("tiny-reasoner", weight_dtype=weight_dtype, joined=True)
    export(jkv.load("tiny-reasoner").params, None, tmp_path / "new", jnp.float32)
    assert_equal(read_weights(tmp_path / "new", model), model.params)


def test_saving_joined_weights_copies_none_on_the_device(tmp_path, monkeypatch):
    params, separate = jkv.join_weights(tiny_model().params), saved_weights.named_leaves
    gc.collect()
    before, more = len(jax.live_arrays()), []

    def count(given):
        more.append(len(jax.live_arrays()) - before)
        return separate(given)

    monkeypatch.setattr(saved_weights, "named_leaves", count)
    jkv.save(params, tmp_path / "one")
    assert more == [0]


def test_gradients_are_those_of_separate_matrices():
    params = tiny_model().params

    def loss(params):
        return jkv.score(params, jnp.asarray([[4, 5, 6, 7]]), prompts=[[1, 2, 3]]).logprobs.sum()

    of_separate = jax.tree.leaves(jax.grad(loss)(params))
    of_joined = jax.tree.leaves(jkv.separate_weights(jax.grad(loss)(jkv.join_weights(params))))
    for one, other in zip(of_separate, of_joined, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_parts_of_a_product_must_fill_it():
    with pytest.raises(AssertionError, match=r"\[2, 3\] columns of \(4, 6\)"):
        split(jnp.zeros((4, 6)), (2, 3))


def test_helpers_of_tests_take_both_forms():
    params = tiny_model().params
    assert_equal(unfolded(jkv.join_weights(params)), unfolded(params))
    assert isinstance(adapted(jkv.join_weights(params)).layers[0].query, LowRank)
