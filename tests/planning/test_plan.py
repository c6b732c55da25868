"""The figures of `jkv.plan` against engines that are built, rows that are decoded, and arithmetic by hand."""

import dataclasses
import functools
import json
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jkv
from jkv import cli
from jkv.checkpoints.model_shapes import SHAPES, find_shape, read_shape
from jkv.engine.memory import state_bytes
from jkv.model.params import count_weights
from jkv.model.weight_shapes import init_params, weight_shapes
from jkv.planning.roofline import lifetime
from jkv.reasoning.steering import SteeringVector
from jkv.testing import TINY, tiny_model
from pallas_kernels.models import MODELS, ModelShape
from tests.support.mixes import BreakingTokenizer
from tests.support.recurrent import recurrent_model

# A device so small that a tiny model's rows do not all fit, with round figures.
SMALL = jkv.Device("small", "gpu", 2_000_000, bandwidth=1e9, rate=1e9)
PENALISED = jkv.Sampling(top_p=0.95, top_k=20, frequency_penalty=0.5)
VECTOR = SteeringVector(np.ones((TINY.num_layers, TINY.width), np.float32))
POLICIES = {
    "full": jkv.full(),
    "r_kv": jkv.r_kv(16, 8, window=4),
    "pyramid_kv": jkv.pyramid_kv(16, interval=8, window=4),
    "ada_kv": jkv.ada_kv(16, interval=8, window=4),
    "snap_kv-prefill": jkv.snap_kv(16, when="prefill", window=4),
    "rpc": jkv.rpc(interval=8, window=4),
    "h2o": jkv.h2o(14),
    "tova": jkv.tova(14),
    "streaming_llm": jkv.streaming_llm(14, interval=8),
    "quest": jkv.quest(12, dense_layers=1),
    "skip_kv": jkv.skip_kv(16, 8, window=4),
    "seal": jkv.seal(VECTOR),
    "reason_cache": jkv.reason_cache(),
    "aligned": jkv.reason_cache(align_steps=True),
    "shared-and-evicted": jkv.chain(jkv.reason_cache(), jkv.r_kv(16, 8, window=4)),
}
PUBLISHED = {  # weights, as the checkpoints' own indices count them
    "phi-4": 14_659_507_200,
    "qwq-32b": 32_763_876_352,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "magistral-small": 23_572_403_200,
    "glm-4.5-air": 110_468_824_832 - 3_616_573_568,  # without the layer of multi-token prediction
    "glm-4.5": 358_337_791_296 - 5_539_962_272,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "olmo3-7b": 7_298_011_136,
    "olmo3-32b": 32_233_522_176,
    "qwen3.5-4b": 4_205_751_296,  # and of Qwen3.5 by the sizes of its tensors: the indices count images too
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,  # without images, here and below: what transformers' text model counts
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "gemma4-e2b": 4_628_569_344 + 35,  # and the scales of layers, here and below
    "gemma4-e4b": 7_463_013_376 + 42,
    "gemma4-26b-a4b": 25_233_141_760 + 30,
    "gemma4-31b": 30_697_345_280 + 60,
    "smollm3-3b": 3_075_098_624,
    "r1-llama-8b": 8_030_261_248,
    "r1-qwen-1.5b": 1_777_088_000,
    "r1-qwen-7b": 7_615_616_512,
    "r1-qwen-14b": 14_770_033_664,
    "r1-qwen-32b": 32_763_876_352,
    "smollm2-135m": 134_515_008,
}


def num_bytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


# Bytes, against real arrays and engines.


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_are_those_of_the_engine_that_is_built(name):
    page_size, batch, dtype = [(4, 3, "float32"), (16, None, "bfloat16")][list(POLICIES).index(name) % 2]
    model = dataclasses.replace(
        tiny_model(tokenizer=BreakingTokenizer()), params=init_params(TINY, jax.random.key(0), dtype=dtype)
    )
    plan = jkv.plan(model, SMALL, POLICIES[name], length=60, prompt=20, page_size=page_size, batch=batch)
    engine = jkv.Engine(model, policies=[POLICIES[name]], **plan.engine)
    assert plan.dtype == dtype
    assert plan.weight_bytes == num_bytes(model.params)
    assert plan.own.state_bytes == num_bytes(engine.runner.state)
    assert plan.own.num_pages == engine.num_pages
    pool = engine.runner.state.cache.pool
    of_token = (pool.kv.nbytes + pool.position.nbytes) * TINY.num_layers * TINY.num_kv_heads
    assert plan.bytes_per_token == of_token // pool.position.size


@pytest.mark.parametrize("tied", [True, False])
def test_places_for_adapters_are_those_of_the_engine(tied):
    model = tiny_model(config=dataclasses.replace(TINY, tie_embeddings=tied))
    setting = {"length": 60, "prompt": 20, "page_size": 4, "batch": 3}
    plain, own = (jkv.plan(model, SMALL, **setting, max_adapters=count, adapter_rank=3) for count in (0, 2))
    engine = jkv.Engine(model, **own.engine)
    assert own.adapter_bytes == num_bytes(engine.runner.adapters.stacks) > plain.adapter_bytes == 0
    more = own.own.scratch.most - plain.own.scratch.most
    assert more >= 0
    assert own.own.total_bytes - plain.own.total_bytes == own.adapter_bytes + more
    of_row = own.own.scratch.decode - plain.own.scratch.decode, own.own.scratch.prefill - plain.own.scratch.prefill
    assert of_row == (3 * of_row[1], of_row[1])
    assert of_row[1] == own.adapter_bytes // 3
    assert "places for 2 adapters of rank 3" in str(own)
    assert "adapter" not in str(plain)


def test_places_of_a_mesh_are_split_as_their_matrices_are():
    whole, split = (jkv.plan("r1-llama-8b", "h200", max_adapters=8, num_devices=count) for count in (1, 4))
    assert whole.adapter_bytes / 4 < split.adapter_bytes < whole.adapter_bytes
    assert split.adapter_bytes < 0.8 * whole.adapter_bytes


def test_the_counts_of_penalties_are_those_of_the_engine():
    model = tiny_model(tokenizer=BreakingTokenizer())
    sampling = jkv.Sampling(presence_penalty=0.5, seed=0)
    setting = {"length": 60, "prompt": 20, "page_size": 4, "batch": 3}
    plain, own = (jkv.plan(model, SMALL, **setting, sampling=one) for one in (jkv.Sampling(), sampling))
    engine = jkv.Engine(model, **own.engine)
    engine.submit(range(20), max_new_tokens=8, sampling=sampling)
    engine.step()
    counts = engine.runner._carried.generated.nbytes + engine.runner._settings.parts.penalties.is_prompted.nbytes
    assert own.own.state_bytes - plain.own.state_bytes == counts
    assert own.own.scratch.decode > plain.own.scratch.decode


@pytest.mark.parametrize("name", ["states", pytest.param("windows", marks=pytest.mark.slow)])
def test_what_speculation_holds_is_that_of_the_engine(name):
    """More slots of rings, more of the last queries, and the tokens that a drafter sees."""
    windows = tiny_model(config=dataclasses.replace(TINY, num_layers=4, window=6, window_layers=(0, 2)))
    model = windows if name == "windows" else recurrent_model()
    device, policy = dataclasses.replace(SMALL, memory=8_000_000), jkv.r_kv(16, 8, window=4)
    setting = {"length": 60, "prompt": 20, "page_size": 4, "batch": 2}
    plain, plan = (jkv.plan(model, device, policy, **setting, speculate=one) for one in (None, jkv.ngram(drafts=4)))
    engine = jkv.Engine(model, policies=[policy], **plan.engine)
    engine.submit(range(1, 21), policy, max_new_tokens=8, stop_ids=())
    engine.step()
    assert plan.own.state_bytes == num_bytes((engine.runner.state, engine.runner._carried))
    states = state_bytes(model.config, 2, "float32")
    assert plan.own.scratch.decode >= plain.own.scratch.decode + 5 * states
    assert plan.own.state_bytes > plain.own.state_bytes


@pytest.mark.parametrize("name", ["full", "r_kv"])
def test_as_many_rows_run_as_were_planned_and_not_one_page_is_to_spare(name):
    model = tiny_model(tokenizer=BreakingTokenizer())
    plan = jkv.plan(model, SMALL, POLICIES[name], length=60, prompt=40, page_size=4, batch=3)

    def play(num_pages):
        engine = jkv.Engine(model, policies=[POLICIES[name]], **plan.engine | {"num_pages": num_pages})
        for first in range(3):
            engine.submit([first] * 40, POLICIES[name], max_new_tokens=20, stop_ids=())
        most = 0
        while not engine.is_idle:
            engine.step()
            most = max(most, len(engine.scheduler.running))
        return most, engine.stats.preemptions

    most, preemptions = play(plan.own.num_pages)
    assert (most, preemptions) == (3, 0)
    if POLICIES[name].is_bounded:  # a bounded row reserves all of its pages at once
        assert play(plan.own.num_pages - 1)[0] == 2


def test_no_further_row_would_fit():
    plan = jkv.plan(TINY, SMALL, jkv.r_kv(16, 8, window=4), length=60, prompt=20, page_size=4)
    assert plan.own.total_bytes <= plan.usable_bytes == 1_800_000
    assert plan.own.batch > 10
    with pytest.raises(ValueError, match=f"B short; {plan.own.batch} rows fit"):
        jkv.plan(TINY, SMALL, jkv.r_kv(16, 8, window=4), length=60, prompt=20, page_size=4, batch=plan.own.batch + 1)


@pytest.mark.parametrize("name", ["pyramid_kv", "rpc"])
def test_the_planned_lifetime_of_a_row_is_the_engines(name):
    policy, model = POLICIES[name], tiny_model(tokenizer=BreakingTokenizer())
    out = jkv.generate(model, list(range(20)), policy, max_new_tokens=61, stop_ids=(), page_size=4, progress=False)
    life, sample = lifetime(policy, 20, 61, TINY.num_layers), out.samples[0]
    assert life.compactions == sample.compactions
    assert float((life.slots_before - life.slots_after).mean()) == sample.evicted


def test_a_long_lifetime_repeats_its_cycles():
    policy = jkv.r_kv(16, 8, window=4)
    slots, compactions = [], 0
    filled = 12
    for step in range(1, 5001):
        filled += 1
        slots.append(filled)
        if step % 8 == 0 and filled > 16 and step < 5000:
            filled, compactions = 16, compactions + 1
    life = lifetime(policy, 12, 5000, 2)
    assert life.compactions == compactions
    np.testing.assert_allclose(life.mean_slots, np.mean(slots))


# Speed, by hand.


def test_the_bound_is_what_a_step_reads_over_the_bandwidth():
    config = dataclasses.replace(find_shape("r1-qwen-1.5b")[1])
    slow = jkv.Device("slow", "gpu", 200 * 10**9, bandwidth=1e9, rate=1e15)
    plan = jkv.plan(config, slow, length=1256, prompt=256, batch=2, dtype="bfloat16")
    weights = 1_777_088_000 - 151_936 * 1536  # all but the embedding table, which is looked up
    mean = 256 + (1 + 1000) / 2
    phases = {
        "weights": weights * 2 / 1e9,
        "attention": 2 * 28 * 2 * mean * 2 * 128 * 2 / 1e9,
        "sampling": 2 * 8 * 151_936 / 1e9,
        "host": 0.0,  # it works while the device decodes
    }
    assert plan.own.mean_slots == mean
    assert plan.own.phases == pytest.approx(phases)
    assert plan.own.tokens_per_second == pytest.approx(2 / sum(phases.values()))
    assert plan.own.limited_by == "memory bandwidth"


def test_penalties_read_their_counts_and_the_logits_once_more():
    slow, sampling = jkv.Device("slow", "gpu", 200 * 10**9, bandwidth=1e9, rate=1e15), jkv.Sampling(repetition_penalty=1.1)
    settings = {"length": 1256, "batch": 2, "dtype": "bfloat16"}
    plain, own = (jkv.plan("r1-qwen-1.5b", slow, **settings, sampling=one).own for one in (None, sampling))
    added = 2 * (4 + 1 + 8) * 151_936 / 1e9  # an integer, a flag, and float32 written and read
    assert own.phases == pytest.approx(plain.phases | {"sampling": plain.phases["sampling"] + added})
    assert own.tokens_per_second < plain.tokens_per_second


def test_the_bound_is_what_a_step_computes_over_the_rate():
    config = find_shape("r1-qwen-1.5b")[1]
    fast = jkv.Device("fast", "gpu", 200 * 10**9, bandwidth=1e15, rate=1e12)
    plan = jkv.plan(config, fast, jkv.r_kv(budget=1024), length=256 + 128 * 100, prompt=256, batch=2)
    weights = 1_777_088_000 - 151_936 * 1536
    step = 2 * (2 * weights + 4 * 28 * 12 * 128 * plan.own.mean_slots)
    compactions = 100 - 6 - 1  # the first six leave at most 1,024 slots; the end of a row is none
    one = 28 * 2 * 128 * (8 * 12 * 1152 + 2 * 1152**2)
    passed_logits = 2 * 8 * 151_936 / 1e15
    seconds = 128 * 100 * (step / 1e12 + passed_logits) + 2 * compactions * one / 1e12
    assert plan.own.tokens_per_second == pytest.approx(2 * 128 * 100 / seconds)
    assert plan.own.compaction_share == pytest.approx(2 * compactions * one / 1e12 / seconds)
    assert plan.own.limited_by == "arithmetic"


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_step_reads_the_experts_that_some_row_chooses(rows):
    """Of 128 experts 8 for each row: one row reads 3.3 of 30.5 billion weights, 64 rows 98 % of the experts."""
    plan = jkv.plan("qwen3-30b-a3b", "h200", jkv.r_kv(1024), batch=rows)
    experts = 48 * 128 * 3 * 768 * 2048
    dense = 30_532_122_624 - 151_936 * 2048 - experts
    share = 1 - (120 / 128) ** rows
    assert plan.own.phases["weights"] == pytest.approx(2 * (dense + share * experts) / jkv.DEVICES["h200"].bandwidth)


def test_phases_add_up_where_each_has_another_limit():
    """Many rows of an 8B model on an H200: products are limited by arithmetic, attention by bandwidth."""
    plan = jkv.plan("r1-llama-8b", "h200", jkv.r_kv(budget=1024), length=16_384, batch=700)
    phases, weights = plan.own.phases, 8_030_261_248 - 128_256 * 4096
    assert phases["weights"] == pytest.approx(2 * 700 * weights / jkv.DEVICES["h200"].rate)
    assert phases["attention"] == pytest.approx(
        700 * 32 * 8 * plan.own.mean_slots * 2 * 128 * 2 / jkv.DEVICES["h200"].bandwidth
    )
    assert plan.own.limited_by == "memory bandwidth"
    assert 17_000 < plan.own.tokens_per_second < 700 / (phases["weights"] + phases["attention"])


def test_a_host_that_is_slower_than_the_device_sets_the_pace():
    quick = jkv.Device("quick", "gpu", 200 * 10**9, bandwidth=1e15, rate=1e18)
    plan = jkv.plan("r1-qwen-1.5b", quick, length=1256, prompt=256, batch=8)
    assert sum(plan.own.phases.values()) == pytest.approx(22e-6 + 8 * 1.9e-6)
    assert plan.own.phases["host"] > plan.own.phases["attention"]


@pytest.mark.parametrize("device", ["h200", "7x"])
@pytest.mark.parametrize("model", ["r1-qwen-1.5b", "r1-llama-8b"])
def test_r_kv_s_compactions_take_little_of_the_steps_between(model, device):
    shares = [jkv.plan(model, device, jkv.r_kv(1024), 16_384, batch=rows).own.compaction_share for rows in (1, 32, 128)]
    assert 0 < shares[0] < shares[1] < shares[2] <= 0.03


def test_quest_reads_less_than_it_holds_and_frees_nothing():
    plan = jkv.plan("r1-qwen-1.5b", "h200", jkv.quest(budget=512), batch=8)
    assert plan.own.state_bytes > plan.full.state_bytes
    assert plan.own.tokens_per_second > plan.full.tokens_per_second
    assert plan.rows_pay_from is None
    assert plan.speed_pays_from is not None


# When it pays.


@pytest.mark.parametrize("policy", [jkv.r_kv(budget=1024), jkv.rpc(interval=1024)], ids=lambda p: p.name)
def test_compression_pays_from_its_length_on_and_not_before(policy):
    plan = jkv.plan("r1-qwen-1.5b", "v5e", policy)
    assert plan.own.batch > plan.full.batch
    assert plan.own.tokens_per_second > plan.full.tokens_per_second

    def at(length):
        return jkv.plan("r1-qwen-1.5b", "v5e", policy, length=length)

    pays, before = at(plan.rows_pay_from), at(plan.rows_pay_from - 1)
    assert pays.own.batch > pays.full.batch
    assert before.own.batch <= before.full.batch
    pays, before = at(plan.speed_pays_from), at(plan.speed_pays_from - 1)
    assert pays.own.tokens_per_second > 1.01 * pays.full.tokens_per_second
    assert before.own.tokens_per_second <= 1.01 * before.full.tokens_per_second


def test_a_policy_as_large_as_the_full_cache_never_pays():
    plan = jkv.plan("r1-qwen-1.5b", "v5e", jkv.r_kv(budget=131_072))
    assert (plan.rows_pay_from, plan.speed_pays_from) == (None, None)
    assert "at no length that the model has" in str(plan)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (jkv.quest(budget=512), "quest frees nothing"),
        (jkv.rpc(), "rpc's cache grows with the text"),
        (jkv.reason_cache(), "depend on the text"),
        (jkv.seal(SteeringVector(np.ones((28, 1536), np.float32))), "seal steers"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_report_lists_what_the_figures_leave_out(policy, words):
    assert words in str(jkv.plan("r1-qwen-1.5b", "h200", policy, batch=4))


# Models and devices.


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_count_the_published_weights_and_are_those_of_the_kernels(name):
    config = read_shape(SHAPES[name])
    assert count_weights(weight_shapes(config)) == PUBLISHED[name]
    heads = config.num_layers, config.num_query_heads, config.num_kv_heads, config.head_size
    assert heads == tuple(ModelShape.read(SHAPES[name]))


def test_every_real_model_of_the_kernels_can_be_planned():
    assert set(SHAPES) == set(PUBLISHED)
    assert set(MODELS) == {"tiny-reasoner"} | {name for name in SHAPES if ModelShape.read(SHAPES[name]).head_size == 128}


def test_a_model_may_be_a_name_a_file_a_folder_or_loaded(tmp_path):
    _, by_name = find_shape("tiny-reasoner")
    model = jkv.load("tiny-reasoner")
    assert dataclasses.replace(model.config, end_ids=()) == by_name
    file = tmp_path / "mine.toml"
    file.write_text(SHAPES["r1-llama-8b"].read_text())
    assert find_shape(file) == ("mine", find_shape("r1-llama-8b")[1])
    assert find_shape(str(file))[1].rope_scaling.kind == "llama3"
    folder = tmp_path / "no-weights"
    folder.mkdir()
    fields = Path(str(resources.files("jkv"))) / "assets" / "tiny-reasoner" / "config.json"
    (folder / "config.json").write_text(fields.read_text())
    assert find_shape(folder) == ("no-weights", by_name)
    assert find_shape(model.params)[1] == model.config


def test_a_shape_without_its_fields_is_refused(tmp_path):
    (tmp_path / "bad.toml").write_text('family = "llama"\n')
    with pytest.raises(ValueError, match="must have the fields"):
        find_shape(tmp_path / "bad.toml")


def test_the_cpu_is_this_machine_and_has_no_speed():
    plan = jkv.plan("tiny-reasoner", "cpu", jkv.r_kv(budget=128), length=1024, batch=2)
    assert plan.dtype == "float32"
    assert plan.own.tokens_per_second is None
    assert plan.speed_pays_from is None
    assert "tokens/s" not in str(plan)
    assert "may be faster" not in str(plan)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_float32_has_its_own_rate(itemsize):
    assert jkv.DEVICES["h200"].rate_of(itemsize) == {2: 989e12, 4: 495e12}[itemsize]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "b201"}, "device must be one of b200, gh200"),
        ({"length": 256}, "above prompt=256"),
        ({"length": 131_073}, "at most the model's 131072 positions"),
        ({"prompt": 0}, "prompt must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"batch": 10_000}, "short; 51 rows fit"),
        ({"dtype": "int8"}, "dtype must be float32, bfloat16 or float16"),
        ({"dtype": "often"}, "dtype must be float32, bfloat16 or float16"),
        ({"num_devices": 3}, "num_kv_heads=8 must be a multiple of the 3 devices"),
        ({"memory_share": 1.5}, "must lie in"),
        ({"sampling": 0.7}, "sampling must be"),
        ({"max_adapters": -1}, "max_adapters must lie in"),
        ({"adapter_rank": 0}, "adapter_rank must lie in"),
        ({"max_adapters": 1000, "adapter_rank": 64}, "weights 16.1 GB [+] adapters .* Use .*fewer adapters or a lower rank"),
        ({"device": "t4"}, "1 row of full must fit t4: weights 32.1 GB "),
        ({"model": 3}, "A model must be a jkv.Model"),
    ],
    ids=str,
)
def test_bad_input_is_refused_with_a_way_out(arguments, words):
    with pytest.raises(ValueError, match=words):
        jkv.plan(**{"model": "r1-llama-8b", "device": "h200"} | arguments)


def test_an_unknown_model_lists_the_known():
    with pytest.raises(FileNotFoundError, match="r1-llama-8b"):
        jkv.plan("llama-9b", "h200")


@pytest.mark.parametrize("field", ["memory", "bandwidth", "rate"])
def test_a_device_has_positive_figures(field):
    with pytest.raises(ValueError, match=f"{field} must be above 0"):
        dataclasses.replace(SMALL, **{field: 0 if field == "memory" else 0.0})


# The command line.


def run(capsys, *arguments):
    status = cli.main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_command_prints_the_report_and_writes_json(capsys, tmp_path):
    options = ("--policy", "r_kv", "--budget", 1024, "--set", "interval=64", "--length", 16_384)
    status, out, _ = run(capsys, "r1-llama-8b", "--device", "h200", *options, "--out", tmp_path / "plan.json")
    plan = jkv.plan("r1-llama-8b", "h200", jkv.r_kv(budget=1024, interval=64), length=16_384)
    assert status == 0
    assert out == f"{plan}\n"
    assert f"{plan.own.batch:,}" in out
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(dataclasses.asdict(plan)))
    assert json.loads(run(capsys, "r1-llama-8b", "--device", "h200", *options, "--json")[1])["own"]["batch"] == plan.own.batch


def test_the_command_takes_adapters(capsys):
    plan = jkv.plan("r1-llama-8b", "h200", max_adapters=4, adapter_rank=32)
    out = run(capsys, "r1-llama-8b", "--device", "h200", "--max-adapters", 4, "--adapter-rank", 32)[1]
    assert out == f"{plan}\n"
    assert "places for 4 adapters of rank 32" in out


def test_the_command_takes_the_sampling(capsys):
    options = ("--policy", "r_kv", "--budget", 1024, "--batch", 32, "--frequency-penalty", 0.5, "--top-k", 20)
    plan = functools.partial(jkv.plan, "r1-llama-8b", "h200", jkv.r_kv(budget=1024), batch=32)
    assert run(capsys, "r1-llama-8b", "--device", "h200", *options)[1] == f"{plan(sampling=PENALISED)}\n" != f"{plan()}\n"
    greedy = json.loads(run(capsys, "r1-llama-8b", "--device", "h200", *options[:6], "--temperature", 0, "--json")[1])
    assert greedy["own"]["scratch"]["decode"] < plan().own.scratch.decode


def test_the_command_lists_models_and_devices(capsys):
    status, out, _ = run(capsys, "--list")
    assert status == 0
    assert all(name in out for name in (*SHAPES, *jkv.DEVICES, "cpu"))


def test_the_command_takes_a_device_s_figures(capsys):
    options = ("--length", 1024, "--batch", 1, "--memory", 1, "--bandwidth", 10, "--rate", 0.001, "--json")
    found = json.loads(run(capsys, "tiny-reasoner", "--device", "cpu", *options)[1])
    assert found["device"] == {
        "name": "cpu",
        "platform": "cpu",
        "memory": 10**9,
        "bandwidth": 1e10,
        "rate": 1e9,
        "rate_float32": None,
        "compute_capability": None,
    }
    assert found["own"]["limited_by"] == "arithmetic"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("r1-qwen-7b",), "jkv plan --list"),
        (("--device", "h200"), "jkv plan --list"),
        (("r1-qwen-7b", "--device", "h201"), "device must be one of"),
        (("nobody", "--device", "h200"), "a TOML file of a model's shape"),
        (("r1-qwen-7b", "--device", "t4"), 'no rows fit. Use weight_dtype="int8", more devices'),
        (("r1-qwen-7b", "--device", "l4", "--dtype", "float32"), 'Use dtype="bfloat16", weight_dtype="int8", more devices'),
        (("r1-qwen-32b", "--device", "t4"), "Use a smaller model, more devices"),
        (
            ("r1-llama-8b", "--device", "rtx-4090", "--batch", 500),
            "Use fewer rows, a shorter length, a policy with a fixed budget",
        ),
        (("r1-qwen-7b", "--device", "h200", "--policy", "r_kv", "--budget", 4), "must hold its sinks and recent slots"),
        (("r1-qwen-7b", "--device", "h200", "--length", 10), "length counts prompt and completion"),
        (("r1-qwen-7b", "--device", "h200", "--out", "no/such/folder.json"), "a file in a folder that exists"),
        (("r1-qwen-7b", "--device", "h200", "--memory", -1), "memory must be above 0"),
        (("r1-qwen-7b", "--device", "h200", "--top-p", 0), "top_p must lie in"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else "",
)
def test_the_command_reports_an_error_in_one_line(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("jkv: error: ")
    assert words in err
    assert err.count("\n") == 1


def test_dtypes_count():
    one, two = (jkv.plan("tiny-reasoner", "v5e", length=1024, batch=1, dtype=dtype) for dtype in (jnp.bfloat16, "float32"))
    assert 2 * one.weight_bytes == two.weight_bytes
