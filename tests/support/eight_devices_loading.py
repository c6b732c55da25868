"""Models that are loaded onto meshes of simulated devices: the same weights in the same places, and what they take meanwhile.

`tests/checkpoints/test_loading_on_mesh.py` runs this file.
"""

import dataclasses
import gc
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jkv
from jkv.checkpoints import gguf_files, weight_reading
from jkv.checkpoints import loading as checkpoint
from jkv.cli import main
from jkv.engine import memory
from jkv.engine.mesh import read_mesh
from jkv.model.eight_bits import quantise_weights
from jkv.model.weight_shapes import init_params
from jkv.model.weights import all_finite
from jkv.testing import TINY
from tests.model.test_decoder import CASES, GOLDEN
from tests.support.gguf_models import Kind, write_gguf

ONE_HEAD = ("gemma4", "gemma4_moe")
LARGE = dataclasses.replace(
    TINY,
    **{"family": "qwen3", "qk_norm": True, "qkv_bias": False, "num_layers": 1, "width": 256, "vocab_size": 8192},
    **{"num_query_heads": 16, "num_kv_heads": 8, "head_size": 16, "mlp_width": 4096},
)
OF_EXPERTS = {"num_experts": 8, "num_active_experts": 2, "normalises_experts": True}
MIXED = dataclasses.replace(LARGE, family="qwen3_moe", mlp_width=1024, **OF_EXPERTS)
SMALL = dataclasses.replace(MIXED, width=64, vocab_size=64, mlp_width=32)
NOISE = 2 << 20  # bytes of Python's own objects


def devices_of(count):
    return Mesh(jax.devices()[:count], ("tensor",))


def assert_same_places(found, expected):
    assert found.config == expected.config
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(expected), strict=True)
    for (path, one), (other_path, other) in pairs:
        assert path == other_path
        assert (one.dtype, one.sharding) == (other.dtype, other.sharding), path
        np.testing.assert_array_equal(one, other)


def assert_loads(name, on, weight_dtype=None, **settings):
    """Refutes that a model, loaded onto a mesh, is another than one that is loaded whole and then split."""
    split = settings.get("split_by_width", False)
    whole = jkv.load(name, weight_dtype=weight_dtype)
    whole = (jkv.split_by_width(whole) if split else whole).params
    assert_same_places(jkv.load(name, weight_dtype=weight_dtype, mesh=on, **settings).params, jkv.shard(whole, on))


SPLIT = [case for case in CASES if case not in ONE_HEAD]
EVERYDAY = {("gpt_oss", None), ("qwen3_moe", "int8")}  # interleaved experts, a tensor of each; phi3 fuses projections, below
FORMS = [
    pytest.param(case, form, id=f"{case}-{form or 'floats'}", marks=[] if (case, form) in EVERYDAY else pytest.mark.slow)
    for case in SPLIT
    for form in (None, "int8")
]


@pytest.mark.parametrize(("case", "weight_dtype"), FORMS)
def test_a_checkpoint_is_read_to_the_devices_that_get_it(case, weight_dtype):
    assert_loads(str(GOLDEN / case), devices_of(2), weight_dtype)


def test_experts_are_read_by_their_width():
    assert_loads(str(GOLDEN / "qwen3_moe"), devices_of(2), split_by_width=True)
    with pytest.raises(ValueError, match=r"Only experts can be split in two ways; this qwen3 model has none"):
        jkv.load(str(GOLDEN / "qwen3"), split_by_width=True)


def test_the_axis_data_of_a_mesh_holds_copies():
    square = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor"))
    assert_loads(str(GOLDEN / "phi3"), square)


def test_a_gguf_file_is_dequantised_to_the_devices(tmp_path):
    write_gguf(tmp_path / "model.gguf", GOLDEN / "phi3", Kind.BF16)
    assert_loads(str(tmp_path / "model.gguf"), devices_of(2), "int8")


def test_saved_weights_are_loaded_to_the_devices(tmp_path):
    params, on = init_params(SMALL, jax.random.key(0)), devices_of(4)
    jkv.save(params, tmp_path)
    narrow = params.replace(config=dataclasses.replace(SMALL, whole_experts=False))
    expected = jkv.shard(quantise_weights(narrow, "int8"), on)
    assert_same_places(jkv.load(tmp_path, weight_dtype="int8", mesh=on, split_by_width=True).params, expected)
    assert_same_places(jkv.load(tmp_path, dtype="bfloat16").params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))


def live_buffers():
    """Sizes of all buffers, by device and address."""
    parts = [part for array in jax.live_arrays() for part in array.addressable_shards]
    return {(part.device, part.data.unsafe_buffer_pointer()): part.data.nbytes for part in parts}


def most_of_a_device(buffers):
    """The bytes of the device that has the most."""
    return max(sum(size for (device, _), size in buffers.items() if device == one) for one in jax.devices())


@pytest.mark.parametrize("weight_dtype", [None, "int8"], ids=["floats", "int8"])
@pytest.mark.parametrize(
    ("config", "form"),
    [(LARGE, "safetensors"), (LARGE, "gguf"), (MIXED, "safetensors")],  # no family with experts is read from GGUF files
    ids=["dense-safetensors", "dense-gguf", "experts-safetensors"],
)
def test_no_host_holds_more_than_its_weights_and_one_tensor(config, weight_dtype, form, tmp_path, monkeypatch):
    """And no device more than its part and that of one weight. Measured whenever a part of a weight is read."""
    params = init_params(config, jax.random.key(0))
    largest, small = max(leaf.nbytes for leaf in jax.tree.leaves(params)), 1 << 18  # bytes: norms and the router are copied
    checkpoint.export(params, None, tmp_path, dtype=jnp.float32)
    name = tmp_path
    if form == "gguf":
        write_gguf(tmp_path / "model.gguf", tmp_path, Kind.F32)
        name = tmp_path / "model.gguf"
    on, read_between, peaks, read, before = devices_of(8), weight_reading.read_between, [], set(), live_buffers()

    def measured(*arguments):
        """Notes what the host has held since the last call, without what is a device's, and what the devices hold."""
        own = {key: size for key, size in live_buffers().items() if key not in before}
        now, peak = tracemalloc.get_traced_memory()  # the first peak is that of reading headers
        of_devices = sum(size for (_, address), size in own.items() if address in read)
        peaks.append(((peak if peaks else now) - began - of_devices, most_of_a_device(own)))
        tracemalloc.reset_peak()
        part = read_between(*arguments)
        read.add(part.ctypes.data)  # a buffer at this address is the part itself: a CPU need not copy it
        return part

    monkeypatch.setattr(weight_reading, "read_between", measured)
    monkeypatch.setattr(gguf_files, "CHUNK", 1 << 14)  # weights that are dequantised at once
    tracemalloc.start()
    try:
        for _ in range(2):  # the first time compiles and imports
            loaded = None
            gc.collect()
            read.clear()
            began = tracemalloc.get_traced_memory()[0]
            peaks.clear()
            loaded = jkv.load(name, mesh=on, weight_dtype=weight_dtype).params
    finally:
        tracemalloc.stop()
    own = most_of_a_device({key: size for key, size in live_buffers().items() if key not in before})
    assert own <= sum(leaf.nbytes for leaf in jax.tree.leaves(loaded)) / 8 + small
    of_host, of_device = map(max, zip(*peaks, strict=True))
    assert 2 * largest < sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert of_host <= largest + largest / 8 + NOISE  # a tensor, and the part of a device that it becomes
    assert of_device <= own + largest / 8 + small


@pytest.mark.parametrize("row", [0, 3, 7])
def test_a_number_that_is_not_finite_is_found_on_any_device(row):
    on = Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "tensor"))  # each part of a weight lies on two devices
    weight = np.ones((8, 2), np.float32)
    place = NamedSharding(on, PartitionSpec("tensor"))
    assert all_finite([weight, jax.device_put(weight, place)])
    weight[row] = np.inf
    assert not all_finite(jax.device_put(weight, place))


def test_a_loaded_model_runs_on_its_mesh(tmp_path):
    params = init_params(dataclasses.replace(LARGE, width=64, vocab_size=64, mlp_width=64), jax.random.key(0), scale=0.3)
    checkpoint.export(params, None, tmp_path, dtype=jnp.float32)
    settings = {"policy": jkv.r_kv(24, 16, window=4), "max_new_tokens": 40, "stop_ids": (), "return_trace": True}
    settings |= {"page_size": 4, "progress": False, "sampling": jkv.Sampling(temperature=0)}
    prompts = [[5, 1, 9], list(range(20))]
    expected = jkv.generate(params, prompts, **settings)
    model = jkv.load(tmp_path, mesh=devices_of(4))
    out = jkv.generate(model, prompts, **settings)
    np.testing.assert_array_equal(out.tokens, expected.tokens)
    np.testing.assert_allclose(jkv.score(model, out, out.trace).logprobs, out.logprobs, atol=1e-4)
    replicas = jkv.load(tmp_path, mesh=Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "tensor")))
    with pytest.raises(ValueError, match=r"one engine for each of the 2 rows"):
        jkv.Engine(replicas)
    np.testing.assert_array_equal(jkv.generate(replicas, prompts, **settings).tokens, expected.tokens)


def test_a_pool_is_sized_by_what_the_weights_leave_on_all_devices(monkeypatch):
    free, seen = 1 << 20, []

    def free_pool_bytes(params, num_shards, share=None):
        seen.append(params.embedding.devices())
        return free * num_shards

    monkeypatch.setattr(memory, "free_pool_bytes", free_pool_bytes)
    params, on = init_params(LARGE, jax.random.key(0)), devices_of(4)
    sizes = {"max_running": 64, "max_slots": 512, "page_size": 16}
    engine = jkv.Engine(params, mesh=on, **sizes)
    rollout = jkv.Rollout(params, max_prompt_tokens=256, max_new_tokens=256, mesh=on, max_running=64, page_size=16)
    assert 0.6 * 4 * free < engine.num_pages * engine.page_bytes <= 4 * free
    assert rollout.engine.num_pages == engine.num_pages
    assert all(devices == set(on.devices.flat) for devices in seen)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=2,tensor=8", r"at most the 8 devices of this process; got 'data=2,tensor=8'"),
        ("tensor=16", r"at most the 8 devices of this process; got 'tensor=16'"),
        ("tensor", r"written as axes with their numbers of devices, such as tensor=4 or .*; got 'tensor'"),
        ("tensor=0", r"such as tensor=4"),
        ("tensor=2,tensor=4", r"such as tensor=4"),
        ("expert=2", r'has the axes "data" .* and "tensor" .*; got \'expert=2\'. Write tensor=N'),
        ("", r'has the axes "data"'),
    ],
)
def test_a_mesh_in_words_that_cannot_be_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_mesh(text)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ("tensor", r"num_query_heads=4 must be a multiple of the 8 devices"),
        ("model", r'must have an axis "tensor"; got \{\'model\': 8\}'),
        (None, r"mesh must be"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_a_weight_is_read(axis, message, monkeypatch):
    monkeypatch.setattr(checkpoint, "read_weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match=message):
        jkv.load(str(GOLDEN / "qwen3"), mesh=Mesh(jax.devices(), (axis,)) if axis else "tensor=2")


@pytest.mark.parametrize("command", [("generate", "?"), ("eval",), ("serve", "tiny-reasoner", "--port", "0"), ("chat",)])
def test_a_command_loads_its_model_onto_its_mesh(command, monkeypatch):
    loaded = []
    monkeypatch.setattr(checkpoint, "load", lambda *_, mesh, **__: loaded.append(mesh) or sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main([*command, "--mesh", "tensor=2"])
    assert loaded == [devices_of(2)]


@pytest.mark.parametrize("command", [("generate", "?"), ("eval",)])
def test_a_command_loads_its_model_onto_the_mesh_of_its_replicas(command, monkeypatch):
    loaded = []
    monkeypatch.setattr(checkpoint, "load", lambda *_, mesh, **__: loaded.append(mesh) or sys.exit(7))
    with pytest.raises(SystemExit, match="7"):
        main([*command, "--mesh", "data=4,tensor=2"])
    assert loaded == [Mesh(np.reshape(jax.devices(), (4, 2)), ("data", "tensor"))]


@pytest.mark.parametrize("command", [("serve", "tiny-reasoner", "--port", "0"), ("chat",)])
def test_a_command_of_one_engine_refuses_replicas(command, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "load", lambda *_, **__: pytest.fail("weights were read"))
    assert main([*command, "--mesh", "data=4,tensor=2"]) == 2
    assert (
        "This command runs one engine, and no replicas; got 'data=4,tensor=2'. Write tensor=N alone." in capsys.readouterr().err
    )


def test_commands_run_on_a_mesh(capsys, tmp_path):
    def printed(*words):
        assert main(list(words)) == 0
        return capsys.readouterr().out

    one = "generate", "b=3;c=7;d=b*c;?d", "--policy", "r_kv", "--budget", "48", "--max-new-tokens", "24"
    assert printed(*one) == printed(*one, "--mesh", "tensor=2") == printed(*one, "--mesh", "data=2,tensor=2")
    asked = "eval", "--policies", "streaming_llm", "--budgets", "32", "--problems", "2", "--max-new-tokens", "24"
    assert "streaming_llm" in printed(*asked, "--mesh", "tensor=2", "--out", str(tmp_path))
    assert '"mesh": "tensor=2"' in (tmp_path / "tiny-reasoner.json").read_text()
