"""Calibration: moments of queries before RoPE against plain NumPy, their file, the command, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jkv
from jkv import cli
from jkv.analysis import calibration
from jkv.eviction.calibration import QueryMoments, QueryStatistics
from jkv.model import decoder
from jkv.model.params import RopeScaling
from jkv.replay.columns import dense_columns
from jkv.replay.score import ReplayAttention
from jkv.testing import TINY, TinyTokenizer, random_statistics, tiny_model

TEXT = "HELLO WORLD THIS IS A TEXT OF LETTERS"
KNOBS = {"max_new_tokens": 24, "stop_ids": (), "page_size": 4, "progress": False}


def plain_queries(model, tokens):
    """Every layer's queries without RoPE, [L, T, N, H] in float64, from the hidden states that enter the layer."""
    config, entered = model.config, []

    def enter(layer, hidden):
        entered.append(np.asarray(hidden[0], np.float64))
        return hidden

    token = jnp.asarray(tokens, jnp.int32)[None]
    position = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    attend = ReplayAttention(position, dense_columns(config, 1, len(tokens)), None)
    decoder.forward(model.params, token, position, attend, None, enter)
    queries = []
    for hidden, weights in zip(entered, model.params.layers, strict=True):
        normed = hidden / np.sqrt((hidden**2).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        flat = (normed * np.asarray(weights.attention_norm)) @ np.asarray(weights.query, np.float64)
        flat = flat + (0 if weights.query_bias is None else np.asarray(weights.query_bias))
        query = flat.reshape(len(tokens), config.num_query_heads, config.head_size)
        if config.qk_norm:
            query /= np.sqrt((query**2).mean(axis=-1, keepdims=True) + config.norm_epsilon)
        queries.append(query)
    return np.array(queries)


CONFIGS = {
    "plain": TINY,
    "partial": dataclasses.replace(TINY, rotary_size=4),
    "scaled": dataclasses.replace(TINY, rope_scaling=RopeScaling("linear", factor=4.0)),
    "qk_norm": dataclasses.replace(TINY, family="qwen3", qkv_bias=False, qk_norm=True),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_moments_are_those_of_the_queries_before_rope(config, monkeypatch):
    """Two texts, of which the longer one is read in pieces that each begin at position 0, up to the number of tokens."""
    monkeypatch.setattr(calibration, "PIECE", 24)
    rng, model = np.random.default_rng(0), tiny_model(config=config)
    texts = [rng.integers(0, 32, 60), rng.integers(0, 32, 30).tolist()]
    statistics = jkv.calibrate(model, texts, tokens=71)
    pieces = [texts[0][:24], texts[0][24:48], texts[0][48:], texts[1][:11]]
    query = np.concatenate([plain_queries(model, piece) for piece in pieces], axis=1)
    half = (config.rotary_size or config.head_size) // 2
    lengths = np.sqrt(query[..., :half] ** 2 + query[..., half : 2 * half] ** 2)
    np.testing.assert_allclose(statistics.arrays.mean, query.mean(axis=1), atol=2e-5)
    np.testing.assert_allclose(statistics.arrays.modulus, lengths.mean(axis=1), atol=2e-5)
    assert statistics.about["tokens"] == "71"


def test_a_string_a_list_of_strings_and_token_ids_are_the_same_text():
    model = tiny_model(tokenizer=TinyTokenizer())
    ids = model.tokenizer.encode(TEXT)
    first, *others = (jkv.calibrate(model, text) for text in (TEXT, [TEXT], ids, np.array(ids), [ids]))
    assert all(other == first for other in others)
    assert jkv.calibrate(model, TEXT[::-1]) != first


def test_statistics_survive_their_file_and_make_equal_policies(tmp_path):
    statistics = jkv.calibrate(tiny_model(), range(20))
    path = tmp_path / "queries.safetensors"
    statistics.save(path)
    loaded = QueryStatistics.load(path)
    assert loaded == statistics
    assert loaded.about == statistics.about
    one, two = jkv.tri_attention(64, path), jkv.tri_attention(64, statistics=statistics)
    assert one == two
    assert hash(one) == hash(two)
    assert one.definition == two.definition
    assert one != jkv.tri_attention(64, random_statistics(tiny_model()))


def test_a_model_is_known_by_its_weights_in_any_dtype_they_are_loaded_in():
    model = tiny_model()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    assert jkv.Model(rounded).digest == model.digest != tiny_model(seed=1).digest
    layer = model.params.layers[1]
    changed = layer.replace(down=layer.down.at[0, 3].multiply(1.01))
    assert jkv.Model(model.params.replace(layers=(model.params.layers[0], changed))).digest != model.digest


def other(**fields):
    """A configuration that differs in some fields."""
    return dataclasses.replace(TINY, **fields)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            lambda: tiny_model(seed=1),
            "with weights with the digest [0-9a-f]{16}; tri_attention has '[0-9a-f]{16}'.*jkv calibrate",
        ),
        (
            lambda: tiny_model(config=other(rope_theta=5e5)),
            "with RoPE theta 500000.0 for 8 channels, no scaling; tri_attention has 'theta 10000.0",
        ),
        (
            lambda: tiny_model(config=other(rope_scaling=RopeScaling("linear", 2.0))),
            "with RoPE .*linear.*factor=2.0.*; tri_attention has .*no scaling",
        ),
        (lambda: tiny_model(config=other(num_layers=3)), r"mean \(3, 4, 8\); tri_attention has \(2, 4, 8\)"),
        (lambda: tiny_model(config=other(rotary_size=4)), r"modulus \(2, 4, 2\); tri_attention has \(2, 4, 4\)"),
    ],
    ids=["weights", "theta", "scaling", "layers", "partial"],
)
def test_statistics_of_another_model_are_refused_with_what_differs(model, words):
    policy = jkv.tri_attention(16, jkv.calibrate(tiny_model(), range(20)))
    with pytest.raises(ValueError, match=words):
        jkv.generate(model(), [1, 2], policy=policy, **KNOBS)
    with pytest.raises(ValueError, match=words):
        jkv.Engine(model(), max_slots=64, policies=[policy])


def test_an_update_of_the_weights_leaves_the_statistics_in_use():
    model = tiny_model()
    policy = jkv.tri_attention(16, jkv.calibrate(model, range(20)), interval=8)
    engine = jkv.Engine(model, max_slots=64, policies=[policy], page_size=4)
    engine.update(tiny_model(seed=1).params)
    ticket = engine.submit([1, 2], policy, max_new_tokens=24, stop_ids=())
    engine.run()
    assert engine.result(ticket).stats.evicted > 0


def test_other_statistics_compile_nothing():
    from jkv.engine import programs

    model = tiny_model()
    one, two = (jkv.tri_attention(16, jkv.calibrate(model, range(n)), interval=8) for n in (20, 30))
    jkv.generate(model, [1, 2], policy=one, **KNOBS)
    before = programs.compact.num_compiled()
    assert jkv.generate(model, [1, 2], policy=two, **KNOBS).stats.evicted > 0
    assert programs.compact.num_compiled() == before


def spoiled(tmp_path, kind):
    """A file with one thing wrong."""
    path = tmp_path / f"{kind}.safetensors"
    statistics = random_statistics(tiny_model())
    statistics.save(path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-40])
    elif kind == "missing":
        path.unlink()
    elif kind == "pickled":
        path.write_bytes(b"\x80\x04K\x01.")
    elif kind == "vector":
        jkv.SteeringVector(np.ones((2, 32), np.float32)).save(path)
    else:
        arrays = load_file(path)
        arrays["mean"] = np.full_like(arrays["mean"], np.nan) if kind == "nan" else arrays["mean"][0]
        save_file(arrays, path, metadata=statistics.about)
    return path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "No such file"),
        ("truncated", ""),
        ("pickled", ""),
        ("vector", "mean"),
        ("nan", "must be finite"),
        ("flat", r"mean must be \[L, N, H\]"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, kind, words):
    with pytest.raises(ValueError, match=f"made by `jkv calibrate`.*{kind}.safetensors.*{words}"):
        jkv.tri_attention(64, spoiled(tmp_path, kind))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: jkv.calibrate(tiny_model(), []), "at least one token of text; got none"),
        (lambda: jkv.calibrate(tiny_model(), "HELLO"), "this model has no tokenizer. Pass token ids"),
        (lambda: jkv.calibrate(tiny_model(), [1, 32]), r"must lie in \[0, 32\)"),
        (lambda: jkv.calibrate(tiny_model(), [1], tokens=0), "tokens must be at least 1; got 0"),
        (lambda: jkv.tri_attention(64, 3), "tri_attention's statistics must be QueryStatistics or Path or a text; got 3"),
        (lambda: QueryStatistics(QueryMoments(np.ones((2, 4, 8)), np.ones((2, 4, 5)))), "got .2, 4, 8. and .2, 4, 5."),
    ],
)
def test_what_cannot_be_is_refused(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize("source", ["traces", "text"])
def test_the_command_writes_statistics_that_a_policy_takes(tmp_path, capsys, source):
    path, text = tmp_path / "queries.safetensors", tmp_path / "text.txt"
    text.write_text("b=3;c=7;d=b*c;?d " * 20)
    options = ["--text", str(text)] if source == "text" else ["--problems", "2"]
    assert cli.main(["calibrate", "--tokens", "200", *options, "--out", str(path)]) == 0
    assert "4 layers, 200 tokens" in capsys.readouterr().err
    problem = ["generate", "b=3;c=7;d=b*c;?d", "--policy", "tri_attention", "--budget", "48", "--interval", "16"]
    assert cli.main([*problem, "--statistics", str(path), "--max-new-tokens", "60"]) == 0
    assert "evicted" in capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_read_in_a_line(tmp_path, capsys):
    missing, out = str(tmp_path / "none.txt"), str(tmp_path / "out.safetensors")
    assert cli.main(["calibrate", "--text", missing, "--out", out]) == 2
    assert "none.txt" in capsys.readouterr().err
    assert cli.main(["calibrate", "--tokens", "0", "--out", out]) == 2
    assert "tokens must be at least 1; got 0" in capsys.readouterr().err
