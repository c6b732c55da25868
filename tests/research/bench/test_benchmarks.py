"""The benchmark commands at sizes of a test: they run, count what they say, and make their tables from what they wrote."""

import dataclasses
import importlib
import importlib.util
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jkv
from jkv.bench import throughput
from jkv.bench.rounds import in_turns
from research.bench import cost, countdown, papers, rollouts
from research.bench import kvpress_scores as scores
from research.bench.__main__ import PAGE, TABLES
from tests.support import commands

ROOT = Path(__file__).parents[3]


def bench(capsys, folder, name, *options):
    """What a benchmark wrote, after a look that it is what it showed."""
    assert commands.main(["bench", name, "--quick", "--out", str(folder), *map(str, options)]) == 0
    stem = f"{name}-{Path(options[options.index('--model') + 1]).stem}" if "--model" in options else name
    written = json.loads((folder / f"{stem}.json").read_text())
    table = (folder / f"{stem}.md").read_text()
    assert table == capsys.readouterr().out
    assert table == importlib.import_module(TABLES[name]).table(written) + "\n"
    program = "python -m research.bench" if TABLES[name].startswith("research") else "jkv bench"
    assert written["about"]["command"].startswith(f"{program} {name} --quick")
    assert written["about"]["versions"]["jax"]
    return written


def test_throughput_runs_the_same_requests_in_every_pool(capsys, tmp_path, shape):
    said = bench(capsys, tmp_path, "throughput", "--model", shape)
    assert (said["requests"], said["prompt"], said["new_tokens"]) == (4, 44, 64)
    assert len(said["records"]) == 4
    for one in said["records"]:
        assert one["tokens_per_second"] > 0
        assert 0 < one["concurrency"] <= one["peak_concurrency"] <= one["rows"] <= 4
        assert one["peak_kv_bytes"] <= one["pool_bytes"] + 10_000  # what is beside the pages: the last queries
        assert one["compile_seconds"] == 0  # the call before those that count compiled everything
        # 2 layers, 2 heads, whole pages of 16 slots: keys, values and positions
        assert one["pool_bytes"] == 4 * -(-one["pool_tokens"] // 16) * 16 * (2 * 8 * 4 + 4)
    ample, tight = ([one for one in said["records"] if one["pool_tokens"] == pool] for pool in (420, 131))
    assert [one["policy"] for one in ample] == ["full", "r_kv"]
    assert ample[0]["peak_concurrency"] == 4 > tight[0]["peak_concurrency"]
    assert ample[0]["compactions"] == 0
    assert ample[1]["compactions"] == 4 * 4  # 64 tokens, every 16
    assert ample[1]["ratio"] == pytest.approx(ample[1]["tokens_per_second"] / ample[0]["tokens_per_second"], rel=1e-3)
    assert ample[1]["paper_ratio"] == pytest.approx(0.876, abs=1e-3)  # R-KV is 12 % slower there


@pytest.mark.parametrize(
    ("ratios", "found", "share"),
    [
        ((0.9, 1.1, 2.0), "crossing", 0.75),
        ((0.5, 0.8, 1.6), "crossing", 0.4375),
        ((1.0, 2.0, 3.0), "always", 1.0),
        ((0.1, 0.2, 0.9), "never", None),
        ((1.2, 1.1, 0.9), "never", None),
        ((1.2, 0.8, 1.6), "crossing", 0.4375),
    ],
    ids=["between the first two", "between the last two", "always", "never", "slower where it is tight", "slower between"],
)
def test_compression_pays_from_where_it_is_as_fast_as_full(ratios, found, share):
    pools = zip((0.25, 1.0, 0.5), (ratios[2], ratios[0], ratios[1]), strict=True)  # in any order
    records = [{"policy": "r_kv", "pool_share": pool, "ratio": ratio} for pool, ratio in pools]
    records.append({"policy": "full", "pool_share": 1.0, "ratio": 1.0})
    assert throughput.pays_from(records, "r_kv") == {"found": found, "pool_share": share}


def test_cost_splits_an_engines_step_into_parts(capsys, tmp_path, shape):
    said = bench(capsys, tmp_path, "cost", "--model", shape)
    assert [(one["varied"], one["policy"]) for one in said["records"]] == [("length", "full"), ("budget", "r_kv")]
    plain, evicting = said["records"]
    assert "scoring" not in plain["parts_us"]
    assert evicting["slots"] == 32 + cost.INTERVAL // 2
    for one in said["records"]:
        parts = one["parts_us"]
        sizes = sum(map(abs, parts.values())) + one["step_us"]
        assert sum(parts.values()) == pytest.approx(one["step_us"], abs=1e-3 * sizes)  # four digits of each
        assert all(parts[name] > 0 for name in parts if name not in ("rest", "compaction"))  # that one is a difference
        assert one["tokens_per_second"] == pytest.approx(1e6 * one["batch"] / one["step_us"], rel=1e-2)


def test_latency_is_that_of_every_batch_chunk_and_policy(capsys, tmp_path, shape):
    said = bench(capsys, tmp_path, "latency", "--model", shape, "--batches", "1,2", "--chunks", "8,2")
    at = [(one["batch"], one["chunk"], one["policy"]) for one in said["records"]]
    assert at == list(itertools.product((1, 2), (8, 2), ("full", "r_kv")))
    for one in said["records"]:
        assert 0 < one["first_token_p50_ms"] <= one["first_token_p99_ms"]
        assert 0 < one["token_p50_ms"] <= one["token_p99_ms"]


def test_guesses_change_no_text_and_need_fewer_steps(capsys, tmp_path):
    said = bench(capsys, tmp_path, "speculate")
    assert [(one["policy"], one["drafts"]) for one in said["records"]] == [("full", 0), ("full", 3), ("r_kv", 0), ("r_kv", 3)]
    for plain, guessed in (said["records"][:2], said["records"][2:]):
        assert (plain["equal"], guessed["equal"]) == (1, 1)
        assert plain["tokens_per_step"] == plain["times_plain"] == 1
        assert 1 < guessed["tokens_per_step"] <= 4
        assert 0 < guessed["accepted"] <= 1


def test_a_server_is_started_and_loaded_at_each_rate_and_policy(capsys, tmp_path):
    pytest.importorskip("uvicorn")
    said = bench(capsys, tmp_path, "serve", "--rates", "40,inf")
    at = [(one["policy"], one["rate"]) for one in said["records"]]
    assert at == list(itertools.product(("full", "r_kv"), (40.0, None)))
    for one in said["records"]:
        assert (one["requests"], one["served"], one["refused"], one["failed"]) == (6, 6, 0, 0)
        assert one["tokens"] == said["records"][0]["tokens"]  # lengths are forced, and the same for all
        assert 6 * 12 <= one["tokens"] <= 6 * 36
        assert 0 < one["occupancy"] <= 1
        assert 0 < one["host_share"] < 1
        assert 0 < one["idle_share"] < 1
        assert one["first_token_ms"] == sorted(one["first_token_ms"])


def test_eviction_is_compared_with_its_own_arithmetic(capsys, tmp_path, shape):
    said = bench(capsys, tmp_path, "eviction", "--model", shape)
    # 2 layers * 2 rows * 2 heads, 64 slots: their similarities and 8 queries of 2 heads, 8 numbers each.
    own = 2 * 2 * 2 * 2 * 8 * 64 * (64 + 2 * 8)
    assert abs(said["r_kv"]["own_gflop"] / (own / 1e9) - 1) < 1e-3
    rates, times = said["r_kv"]["matrix_gflop_per_second"], said["r_kv"]["times_own_arithmetic"]
    for name in ("square", "own_shape"):
        expected = said["r_kv"]["compaction_seconds"] * rates[name] / (own / 1e9)
        assert abs(times[name] / expected - 1) < 2e-3  # three figures of four digits each
    assert said["steps"]["slots"] == 64
    temporary = list(said["memory"]["temporary_bytes"].values())
    assert 0 < temporary[0] < temporary[1] < temporary[2] <= 2 * temporary[1] <= 4 * temporary[0]


def test_rollouts_run_beside_tunix_s_sampler_to_the_same_lengths(capsys, tmp_path):
    if importlib.util.find_spec("tunix") is None:
        with pytest.raises(ValueError, match=r'pip install "jkv-cache\[tunix\]"'):
            rollouts.check_installed()
        pytest.skip('tunix takes no part: pip install "jkv-cache[tunix]"')
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # as tunix needs
    try:
        said = bench(capsys, tmp_path, "rollouts")
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
    assert [(one["mix"], one["contender"]) for one in said["records"]] == [
        (mix, contender) for mix in ("skewed", "equal") for contender in ("tunix", "full", "r_kv")
    ]
    for one in said["records"]:
        assert one["same_tokens"] == 1.0
        assert one["tokens"] == (2 * (1 + 6 + 40) if one["mix"] == "skewed" else 6 * 8)
        # 4 layers, 2 heads of 64, keys and values, prompt and limit; and where each row's ends
        tunix_row = 4 * (2 * 2 * 64 * (12 + (40 if one["mix"] == "skewed" else 8)) * 4 + 4)
        assert one["memory"] % tunix_row == 0
    tunix, full, r_kv = said["records"][:3]
    assert tunix["peak_kv_bytes"] == tunix["memory"] == tunix["rows"] * tunix_row_of(tunix)
    assert tunix["largest_n"] == tunix["rows"]
    assert r_kv["largest_n"] > full["largest_n"]


def tunix_row_of(one):
    return 4 * (2 * 2 * 64 * (12 + one["longest"]) * 4 + 4)


def test_a_countdown_ends_when_it_should():
    config = jkv.testing.TINY
    params = countdown.countdown(dataclasses.replace(config, vocab_size=64, width=64))
    lengths = countdown.skewed(6, mean=12, longest=40)
    prompts = [countdown.Numbers().encode(text) for text in countdown.prompts_for(lengths, 5, 64)]
    out = jkv.generate(
        params, prompts, sampling=jkv.Sampling(seed=0), stop_ids=(countdown.END,), max_new_tokens=60, progress=False
    )
    assert out.lengths.tolist() == lengths
    assert all(
        row[: length - 1].tolist() == list(range(length, 1, -1)) for row, length in zip(out.tokens, lengths, strict=True)
    )
    with pytest.raises(ValueError, match="A vocabulary of 30 counts from at most 28; got 40"):
        countdown.prompts_for(lengths, 5, 30)


def test_the_papers_ratios_stand_beside_ours(capsys, tmp_path):
    said = bench(capsys, tmp_path, "papers")
    assert [one["table"] for one in said["records"]] == ["R-KV 1", "RPC 5", "SkipKV 1"]
    r_kv, rpc, _ = said["records"]
    assert r_kv["paper_ratio"] == pytest.approx(3251.52 / 849.13, rel=1e-3)
    assert r_kv["pool_tokens"] == r_kv["requests"][1] * sum(r_kv["tokens"])
    assert rpc["requests"] == [8, 8]
    for one in said["records"]:
        assert one["ratio"] == pytest.approx(one["rate"] / one["full_rate"], rel=1e-3)
        assert max(one["peak_kv_bytes"]) > 0


def test_a_shrunk_model_keeps_its_groups_and_ratios():
    for config in papers.SHAPES.values():
        small = papers.shrunk(config)
        assert small.group_size == config.group_size
        assert small.mlp_width / small.width == config.mlp_width / config.width
        assert small.num_layers * 8 <= config.num_layers < (small.num_layers + 1) * 8
    assert [papers.shrunk(papers.SHAPES[name]).num_kv_heads for name in ("R1-Llama-8B", "R1-Qwen-7B")] == [2, 1]


def test_the_papers_cells_hold_no_figure_that_ran_out_of_memory():
    cells = [*papers.r_kv_cells(), *papers.rpc_cells()]
    assert all(cell.paper > 0 and cell.paper_full > 0 for cell in cells)
    (one,) = (
        cell
        for cell in cells
        if (cell.table, cell.batch, cell.new_tokens) == ("RPC 6", 16, 16384) and cell.settings["interval"] == 4096
    )
    assert round(one.paper / one.paper_full, 2) == 1.6  # what its abstract says
    assert len(cells) == 10 + 2 * (11 + 9)


@pytest.mark.parametrize("library", ["jkv", "transformers", "kvpress"])
def test_peers_run_side_by_side(capsys, tmp_path, library):
    from research.bench.peers import NEEDED

    if importlib.util.find_spec(NEEDED[library]) is None:
        pytest.skip(f'{library} takes no part: pip install "jkv-cache[peers]"')
    said = bench(capsys, tmp_path, "peers", "--contenders", library)
    groups = {(one["group"], one["library"], one["method"]) for one in said["records"]}
    assert ("full cache, batch 2", "jkv", "full") in groups
    by_policy = {one["method"]: one for one in said["records"] if one["group"].startswith("budget") and one["library"] == "jkv"}
    assert set(by_policy) == {"r_kv", "snap_kv", "key_diff", "knorm"}
    held = {name: one["kv_bytes_per_sequence"] for name, one in by_policy.items()}
    assert held["r_kv"] == held["snap_kv"] > held["key_diff"] == held["knorm"]  # the last queries are counted
    assert by_policy["r_kv"]["mean_tokens"] == 48
    graded = [one for one in said["records"] if "accuracy" in one and one["method"] == "full"]
    assert [one["accuracy"] for one in graded] == [1.0] * len(graded)
    for one in said["records"]:
        assert one["peak_rss"] > 1e7
        if one["library"] == "transformers" and one["batch"] == 2:
            assert one["equal_tokens"] == 1.0
            assert one["kv_bytes_per_sequence"] > 0
        if one["library"] == "kvpress" and one["group"].startswith("budget"):
            # 4 layers, 2 heads of 64 in float32; the prompts are longer than the budget, and stay for an interval
            assert 16 < one["kv_bytes_per_sequence"] / (4 * 2 * 2 * 64 * 4) <= 60 + 16


def test_scores_of_kvpress_are_those_of_its_papers():
    view = jkv.testing.random_view(np.random.default_rng(0))
    knorm, key_diff = (np.asarray(scores.SCORES[name](view)) for name in ("knorm", "key_diff"))
    key, filled = np.asarray(view.key), np.asarray(view.is_filled)
    for b, h in np.ndindex(key.shape[:2]):
        own = key[b, h, filled[b, h]]
        np.testing.assert_allclose(knorm[b, h, filled[b, h]], -np.linalg.norm(own, axis=-1), rtol=1e-5)
        unit = own / np.linalg.norm(own, axis=-1, keepdims=True)
        mean = unit.mean(axis=0)
        np.testing.assert_allclose(key_diff[b, h, filled[b, h]], -unit @ mean / np.linalg.norm(mean), rtol=1e-4, atol=1e-5)


def test_the_score_of_key_diff_is_a_policy():
    # Knorm is not put to it: a token said twice has two keys of one length, and rounding decides between them.
    report = jkv.verify(scores.policy_of("key_diff", {"budget": 24, "interval": 16}))
    assert report.is_ok, str(report)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("throughput", "--rounds", 0), "--rounds must be positive and below 2**31; got 0"),
        (("throughput", "--requests", 4), "Ask for at least 8 requests"),
        (("throughput", "--quick", "--policies", "foo"), "policy must be one of full"),
        (("cost", "--quick", "--lengths", "4000"), "must fit the model's 2048 positions"),
        (("cost", "--quick", "--model", "pyproject.toml"), "must have the fields of a jkv.ModelConfig"),
        (("eviction", "--quick", "--model", "no-such-model"), "tiny-reasoner"),
        (("peers", "--contenders", "vllm"), "contenders are jkv, transformers, kvpress; got vllm"),
        (("tables", "--results", "tests"), "tests holds none"),
        (("tables", "--page", "no-page.md"), "no-page.md does not exist"),
    ],
    ids=lambda value: " ".join(map(str, value))[:40] if isinstance(value, tuple) else "",
)
def test_each_error_is_one_line_that_says_what_to_do(capsys, arguments, words):
    assert commands.main(["bench", *map(str, arguments)]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[transformers]")]
    assert len(err) == 1
    assert words in err[0]


def test_stale_tables_are_found_and_made_anew(capsys, tmp_path):
    marks = "<!-- bench peers-other.1b -->\n", "<!-- /bench peers-other.1b -->\nafter\n"  # the record of a model of that name
    for name in ("peers", "peers-other.1b"):
        (tmp_path / f"{name}.json").write_text((ROOT / "results" / "peers.json").read_text())
    page = tmp_path / "page.md"
    page.write_text("before\n" + "old figures\n".join(marks))
    options = ["bench", "tables", "--results", str(tmp_path), "--page", str(page)]
    assert commands.main([*options, "--check"]) == 1
    assert "old figures" in page.read_text()
    assert commands.main(options) == 0
    made = page.read_text()
    assert made == "before\n" + (tmp_path / "peers-other.1b.md").read_text().join(marks)
    assert "| full cache" in made
    assert commands.main([*options, "--check"]) == 0
    (tmp_path / "peers.md").write_text("typed by hand")
    assert commands.main([*options, "--check"]) == 1
    page.write_text("<!-- bench cost -->\n<!-- /bench cost -->\n")
    assert commands.main(options) == 2
    assert "it marks 'cost'" in capsys.readouterr().err


@pytest.mark.parametrize("page", [PAGE, "docs/choosing.md"], ids=str)
def test_the_tables_in_the_repository_are_those_of_their_figures(page, capsys):
    status = commands.main(["bench", "tables", "--results", str(ROOT / "results"), "--page", str(ROOT / page), "--check"])
    assert status == 0, capsys.readouterr().out


def test_figures_are_timed_in_turns_after_a_call_that_counts_for_nothing():
    calls = []
    told = in_turns({name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}, rounds=2)
    assert calls == list("ababab")
    assert told == {"a": [3, 5], "b": [4, 6]}
