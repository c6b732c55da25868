"""The figures in the text of `docs/findings.md` and `docs/results.md` are those that were recorded."""

import itertools
import json
import re

import numpy as np
import pytest

from jkv.cache.slot_size import slot_bytes
from jkv.evaluation.probe import Reading, rows_of
from jkv.statistics import paired_change, with_interval
from pallas_kernels.quantised import FORMATS
from research.bench.excerpts import EXCERPTS
from tests.repository.pages import ROOT

PAGE = ROOT / "docs" / "findings.md"
IN_BFLOAT16 = slot_bytes(64, np.dtype("float16"), None) / slot_bytes(64, np.dtype("float32"), None)  # of tiny-reasoner's slots


def change_of(outcomes, policy, other, share):
    """One policy's accuracy less another's on the same problems, and its interval, as the page writes them."""
    right = (np.array([[mark == "1"] for mark in outcomes[name, share]["right"]]) for name in (policy, other))
    change, low, high = (100 * value for value in paired_change(*right))
    return f"{change:.1f} points ({low:+.1f} to {high:+.1f})"


def accuracies(name):
    """Whole percents by policy and share."""
    every = json.loads((ROOT / "results" / f"{name}-tiny-reasoner.json").read_text())["outcomes"]
    return {(outcome["policy"], outcome["share"]): round(100 * outcome["accuracy"]) for outcome in every}


def cells_of(name):
    """The cells of each line of a report's tables."""
    report = (ROOT / "results" / f"{name}.md").read_text()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("| ")]


def said_of_a_real_model():
    """The words of the section on SmolLM2 that hold figures, and what it says of order and contrasts."""
    readings = [Reading(**one) for one in json.loads((ROOT / "results" / "probe-smollm2.json").read_text())["readings"]]
    rows = rows_of(readings, "stream")
    loss = {(row.policy, row.budget): float(row.loss.mean()) for row in rows}
    for budget in (48, 96, 192):
        order = [row.policy for row in rows if row.budget == budget]
        assert order[:2] == ["oracle", "foresight"]
        assert {"r_kv", "snap_kv"} < set(order[: order.index("random")])
        assert "cur" in order[order.index("random") :]
    cells = [cells for cells in cells_of("probe-smollm2") if " - " in cells[0]]
    holds = {(cell[0], int(cell[3])) for cell in cells if float(cell[6].removeprefix("< ")) < 0.05}
    pairs = ("foresight - r_kv", "foresight - h2o", "h2o - r_kv", "r_kv - random", "r_kv - redundancy")
    assert holds == {(pair, budget) for pair in pairs for budget in (48, 96, 192)} | {("r_kv - snap_kv", 48)}
    over_snap_kv = {int(cell[3]): cell for cell in cells if cell[0] == "r_kv - snap_kv"}

    def of(name):
        return "{:.3f}, {:.3f} and {:.3f}".format(*(loss[name, budget] for budget in (48, 96, 192)))

    return [
        f"{of('foresight')} nats under foresight, {of('r_kv')} under R-KV",
        f"{of('snap_kv')} under SnapKV, {of('random')} with random",
        f"and {of('oracle')} under the oracle",
        f"reads {len(readings[0].log_prob)} passages",
        f"of the {len(readings)} readings",
        f"Of the {len(cells)} contrasts, {len(holds)} hold",
        f"with 48 slots, by {over_snap_kv[48][4].split()[0].lstrip('-')} nats",
        f"with 96 (p of {over_snap_kv[96][6]}) nor with 192 (p of {over_snap_kv[192][6]})",
    ]


def said_of_protection():
    """The words on what protecting tokens is worth."""
    lines = cells_of("probe-smollm2-protection")
    loss = {cells[0]: cells[4].split()[0] for cells in lines if len(cells) == 5}
    contrasts = {cells[0]: cells for cells in lines if " - " in cells[0]}
    gain = {name: cells[4].split()[0] for name, cells in contrasts.items()}
    below = [name for name, cells in contrasts.items() if float(cells[4].split(",")[1].strip(" ]")) < 0]
    assert below == ["random-sinks - random", "random-recent - random-sinks"]
    first, second = (contrasts[name][6] for name in below)
    assert all(float(cells[6]) > 0.05 for cells in contrasts.values())
    return [
        f"by {gain['r_kv-sinks - r_kv']} nats, of SnapKV by {gain['snap_kv-sinks - snap_kv']}, of H2O by "
        f"{gain['h2o-sinks - h2o']} and of TOVA by {gain['tova-sinks - tova']}",
        f"costs R-KV {gain['r_kv-recent - r_kv-sinks'].lstrip('+')} more",
        f"they lose {loss['random'].lstrip('+')} nats without protection, {loss['random-sinks'].lstrip('+')} with 4 sinks, and "
        f"{loss['random-recent'].lstrip('+')} with 24 recent",
        f"(p of {first} and {second})",
    ]


def said_of_facts():
    """The words on facts and chains that hold figures, and what they say of contrasts."""
    lines = cells_of("probe-smollm2-facts")
    doses = {cells[0]: [cell.split()[0].lstrip("+") for cell in cells[4:]] for cells in reversed(lines) if cells[1] == "64"}
    contrasts = {(cells[0], cells[2]): cells for cells in lines if " - " in cells[0]}
    holds = {pair for pair, cells in contrasts.items() if float(cells[6].removeprefix("< ")) < 0.05}
    groups = [f"said {times} times" for times in (1, 2, 4)], [f"{times} verifications" for times in (0, 2, 4)]
    for group in groups[0]:
        assert {("r_kv - snap_kv", group), ("r_kv - random", group), ("r_kv - redundancy", group)} < holds
        assert contrasts["r_kv - redundancy", group][4].startswith("+")
        assert (("foresight - r_kv", group) in holds) == (group != groups[0][0])
    for group in groups[1]:
        assert not {("r_kv - snap_kv", group), ("r_kv - random", group)} & holds
        assert (("r_kv - redundancy", group) in holds) == (("h2o - r_kv", group) in holds) == (group != groups[1][0])

    def of(policy):
        return "{}, {} and {}".format(*doses[policy])

    return [
        f"{of('foresight')} nats a token of the answer over the full cache against {of('r_kv')}",
        f"redundancy alone loses {of('redundancy')}",
        f"adds up attention: {of('h2o')}",
        f"The oracle loses {of('oracle')}",
        f"Foresight loses {contrasts['foresight - r_kv', '4 verifications'][4].split()[0].lstrip('+')} more than R-KV with 4",
    ]


def losses(name, texts, policy, group=""):
    """Nats that each text of a group loses over the full cache, a mean over a policy's seeds."""
    record = json.loads((ROOT / "results" / f"{name}.json").read_text())
    readings = [one for one in record["readings"] if one["texts"] == texts]
    (full,) = (one for one in readings if one["policy"] == "full")
    own = np.mean([one["log_prob"] for one in readings if one["policy"] == policy], axis=0)
    return (np.array(full["log_prob"]) - own)[[one.startswith(group) for one in full["groups"]]]


def said_of_what_was_not_fair():
    """The words on H2O with its own half, on its settings, and on foresight against random slots on chains."""
    settings = [one["settings"] for one in json.loads((ROOT / "results" / "probe-smollm2.json").read_text())["readings"]]
    assert {re.search(r"recent=\d+.*Every\(budget=\d+, interval=(\d+)", one)[1] for one in settings if "'h2o'" in one} == {"16"}
    every = json.loads((ROOT / "results" / "all-tiny-reasoner.json").read_text())["outcomes"]
    assert {one["policy"] for one in every if "EachStep" in one["settings"]} == {"h2o", "tova"}
    settings = [
        one["settings"] for one in json.loads((ROOT / "results" / "probe-smollm2-protection.json").read_text())["readings"]
    ]
    assert all(("EachStep" in one) == ("'tova" in one) for one in settings if "Evict" in one)
    assert all("recent=48" in one for one in settings if "'h2o" in one)  # of 96
    mean, low, high = re.findall(
        r"[\d.+-]+",
        with_interval(
            losses("probe-smollm2-protection", "stream", "h2o") - losses("probe-smollm2-protection", "stream", "r_kv")
        ),
    )
    said = [f"{mean.lstrip('+')} nats more ({low} to {high})"]
    for passes in (4, 2):
        names = ("foresight", "random")
        mine, other = (losses("probe-smollm2-facts", "chains", name, f"{passes} verif") for name in names)
        mean, low, high = (one.lstrip("+") for one in re.findall(r"[\d.+-]+", with_interval(mine - other)))
        said.append(f"by {mean}" + " nats" * (passes == 4) + f" ({low} to {high}) with {passes}")
        if passes == 4:
            said.append(f"on {(mine > other).sum()} of the {len(mine)} texts")
    return said


def said_of_sharing_by_a_chat_model():
    """The words on sharing by likeness and by chance, and what they say of contrasts."""
    lines = cells_of("probe-smollm2-share")
    loss = {cells[0]: cells[4].split()[0] for cells in lines if len(cells) == 5}
    held = {cells[0]: cells[2] for cells in lines if len(cells) == 5}
    p = {cells[0]: cells[6] for cells in lines if " - " in cells[0]}
    assert all(float(value) < 0.05 for value in p.values())

    def of(name):
        return "{}, {} and {}".format(*(loss[f"{name}={share}"].lstrip("+") for share in (20, 50, 80)))

    return [
        f"by {of('p')} nats a token",
        f"it rises by {of('random-p')}.",
        "(p of {}, {} and {})".format(*(p[f"p={share} - random-p={share}"] for share in (20, 50, 80))),
        f"hold {held['p=80']} kB at the 80th percentile where the full cache holds {held['full']},",
    ]


def said_of_serving():
    """The words on the share of a device's time that waits for the host."""
    full, r_kv = json.loads((ROOT / "results" / "serve-smollm2-135m.json").read_text())["records"]
    assert f"{100 * full['idle_share']:.1f}" == f"{100 * r_kv['idle_share']:.1f}"
    return [f"the device had nothing to do for {100 * full['idle_share']:.1f} % of the time, with the full cache and with R-KV"]


def said_of_formats():
    """The words on quantised pages, and what they say of contrasts."""
    lines = {one["format"]: one for one in json.loads((ROOT / "results" / "formats-smollm2-135m.json").read_text())["lines"]}
    int8, fp8, int4 = (lines[name] for name in ("int8", "fp8", "int4"))
    sealed, even = (lines[f"kvarn, pages of {page}"] for page in (128, 32))
    finer, finest = (lines[f"kvarn-k4v4, pages of {page}"] for page in (128, 32))
    assert sealed["kl"] < fp8["kl"]
    assert finer["kl"] < int8["kl"]
    assert [round(int4["kl"] / one["kl"], -1 if one is finest else 0) for one in (even, finest)] == [6, 50]
    every = json.loads((ROOT / "results" / "formats-tiny-reasoner.json").read_text())["outcomes"]
    right = {(one["policy"], one["share"]): f"{100 * one['accuracy']:.1f} %" for one in every}
    (held,) = (one["kv_share"] for one in every if (one["policy"], one["share"]) == ("foresight-int8", 0.25))
    contrasts = {(cells[0], cells[1]): cells for cells in cells_of("formats-tiny-reasoner") if " - " in cells[0]}
    assert min(float(cells[4]) for cells in contrasts.values()) > 0.05
    intervals = {key: cells[2].split("(")[1].strip(")").split(" to ") for key, cells in contrasts.items()}
    assert [key for key, (low, high) in intervals.items() if float(low) > 0 or float(high) < 0] == [
        ("cur-fp8 - cur", "216 (46%)")
    ]
    change = {key: float(cells[2].split()[0]) for key, cells in contrasts.items()}

    def of(policy):
        return " and ".join(f"{change[f'{policy}-int8 - {policy}', budget]:g}" for budget in ("117 (25%)", "216 (46%)"))

    def from_records(page):
        """Of all pairs of a query and a key in 1,024 tokens: the first page is read as floats, and the last two are."""
        pages = 1024 // page
        return f"{100 * sum(range(1, pages - 2)) / (pages**2 / 2):.0f} %"

    of_int8, of_fp8 = (lines[f"weights in {name}"] for name in ("int8", "fp8"))
    return [
        f"kvarn with pages of 128 slots is {sealed['times_smaller']} times smaller than bfloat16 and moves the "
        f"distributions by {sealed['kl']:.3g} nats ({sealed['kl_interval'][0]:.3g} to {sealed['kl_interval'][1]:.3g})",
        f"kvarn-k4v4 is {finer['times_smaller']} times smaller and moves them by {finer['kl']:.3g}",
        f"read {from_records(128)} of their keys from records. With pages of 32 slots it is {from_records(32)}",
        f"by {even['kl']:.3g} nats ({even['times_smaller']} times smaller), kvarn-k4v4 by {finest['kl']:.3g} "
        f"({finest['times_smaller']} times)",
        f"int8 the distributions move by {of_int8['kl']:.3g} nats (95 % interval "
        f"{of_int8['kl_interval'][0]:.3g} to {of_int8['kl_interval'][1]:.3g})",
        f"the same at {100 * of_int8['same']:.1f} % of the places, with fp8 by {of_fp8['kl']:.3g} nats",
        f"and at {100 * of_fp8['same']:.1f} %.",
        f"then {of_int8['times_smaller']:.3g} times smaller",
        f"move by {int8['kl']:.3g} nats (KL, 95 % interval {int8['kl_interval'][0]:.3g} to {int8['kl_interval'][1]:.3g})",
        f"stays the same at {100 * int8['same']:.1f} % of the places. With fp8 they move by {fp8['kl']:.3g} nats",
        f"With int4 they move by {int4['kl']:.3g} nats ({int4['kl_interval'][0]:.3g} to {int4['kl_interval'][1]:.3g})",
        f"stays the same at {100 * int4['same']:.1f} % of the places: on a model this small, 4 bits cost "
        f"{int4['kl'] / int8['kl']:.0f} times",
        f"answers {right['full', None]} in floats and {right['int8', None]} in int8. None of the {len(contrasts)} contrasts",
        f"int8 are {change['int8 - full', '']:.1f} points (full), {of('r_kv')} (R-KV",
        f"{of('cur')} (CUR), {of('foresight')} (foresight)",
        f"CUR at 46 %, {change['cur-fp8 - cur', '216 (46%)']:g} points",
        f"R-KV answers {right['r_kv-int8', 0.46]} in place of {right['r_kv', 0.25]}",
        f"CUR {right['cur-int8', 0.46]} in place of {right['cur', 0.25]}",
        f"foresight {right['foresight-int8', 0.46]} in place of {right['foresight', 0.25]}",
        f"in int8 holds {100 * held:.0f} % of its bytes, which would be {100 * held / IN_BFLOAT16:.0f} % of a full cache in "
        "bfloat16",
    ]


def said_of_sealed_pages():
    """The words on sealed pages."""
    record = json.loads((ROOT / "results" / "sealed-tiny-reasoner.json").read_text())
    every = {one["policy"]: one for one in record["outcomes"]}
    right = {name: f"{100 * one['accuracy']:.1f} %" for name, one in every.items()}
    contrasts = [cells for cells in cells_of("sealed-tiny-reasoner") if " - " in cells[0]]
    assert len(contrasts) == 2
    (of_kvarn,) = (cells[2] for cells in contrasts if cells[0] == "kvarn - full")
    cost, fewer, more = re.fullmatch(r"-([\d.]+) \(-([\d.]+) to \+([\d.]+)\)", of_kvarn).groups()
    speed = {cells[0]: int(cells[-1]) for cells in cells_of("sealed-tiny-reasoner") if cells[0] in every}
    return [
        f"answers {right['full']} in floats, {right['int4']} in int4, {right['kvarn']} in kvarn",
        f"and {right['kvarn-k4v4']} in kvarn-k4v4. Neither contrast holds (p of at least "
        f"{min(float(cells[3]) for cells in contrasts):.3f} before the correction)",
        f"kvarn costs {cost} points, with an interval from {fewer} fewer to {more} more",
        f"holds {100 * every['kvarn']['kv_share']:.0f} % of the bytes",
        f"at {speed['kvarn']:,} tokens/s where int4 does {speed['int4']:,} and floats {speed['full']:,}",
    ]


def said_of_equal_bytes():
    """The words on floats, int8 and int4 in the same bytes, and what they say of contrasts."""
    record = json.loads((ROOT / "results" / "equal-bytes-tiny-reasoner.json").read_text())
    every = {one["policy"]: one for one in record["outcomes"]}
    right = {name: f"{100 * one['accuracy']:.1f}" for name, one in every.items()}
    names, formats = ("r_kv", "cur", "foresight"), ("", "-int8", "-int4")
    contrasts = {cells[0]: cells for cells in cells_of("equal-bytes-tiny-reasoner") if " - " in cells[0]}
    more = [f"{name}{bits} - {name}{than}" for than, bits in itertools.pairwise(formats) for name in names]
    assert {cells[4] for name, cells in contrasts.items() if name in more} == {"< 0.001"}
    assert len(contrasts) == 7
    floats, int8, int4 = ({every[name + kv_format]["budget"] for name in names} for kv_format in formats)
    ((of_floats,), (of_int8,), (of_int4,)) = floats, int8, int4
    marks = (np.array([[mark == "1"] for mark in every[name]["right"]]) for name in ("foresight-int4", "full"))
    fewer, most, least = (f"{-100 * value:.1f}" for value in paired_change(*marks))
    change, interval = contrasts["int4 - full"][2].split(" ", 1)

    def of(name):
        return "{}, {} and {} %".format(*(right[name + kv_format] for kv_format in formats))

    return [
        f"equal-bytes.toml`, {record['about']['problems']} problems",
        f"float32 holds {of_floats} slots, int8 {of_int8} and int4 {of_int4}",
        f"R-KV answers {of('r_kv')}, CUR {of('cur')}, and foresight {of('foresight')}. These six contrasts",
        f"answers {right['full']} % in floats and {right['int4']} % in int4, a change of {change} points {interval}",
        f"answers {fewer} points ({least} to {most}) fewer",
        f"with {100 * every['foresight-int4']['kv_share']:.0f} % of its bytes",
        f"{100 * every['foresight-int4']['kv_share'] / IN_BFLOAT16:.0f} % of what a full cache in bfloat16 would take, and "
        f"{100 * every['foresight-int4']['kv_bytes'] / every['int4']['kv_bytes']:.0f} % of the full cache in int4",
    ]


def said_of_formats_of_a_chat_model():
    """The words on a chat model's floats, int8 and int4 in the same bytes, and what they say of contrasts."""
    readings = [Reading(**one) for one in json.loads((ROOT / "results" / "probe-smollm2-formats.json").read_text())["readings"]]
    loss = {row.policy: float(row.loss.mean()) for row in rows_of(readings, "stream")}
    p = {cells[0]: cells[6] for cells in cells_of("probe-smollm2-formats") if " - " in cells[0]}
    assert {name for name, words in p.items() if float(words.removeprefix("< ")) >= 0.05} == {"foresight-int4 - foresight-int8"}
    assert len(p) == 6
    floats, int8, int4 = (
        slot_bytes(64, np.dtype("float16"), kv_format) for kv_format in (None, FORMATS["int8"], FORMATS["int4"])
    )
    assert [48 * floats // size for size in (int8, int4)] == [89, 164]
    assert loss["full-int4"] / loss["r_kv-int4"] == pytest.approx(1 / 3, abs=0.05)

    def of(name):
        return "{:.3f}, {:.3f} and {:.3f}".format(*(loss[name + kv_format] for kv_format in ("", "-int8", "-int4")))

    return [
        f"On {len(readings[0].log_prob)} passages of the manual, R-KV loses {of('r_kv')} nats a token, "
        f"SnapKV {of('snap_kv')}, and foresight {of('foresight')}",
        f"gains nothing that holds (p of {p['foresight-int4 - foresight-int8']})",
        f"The full cache loses {loss['full-int8']:.3f} nats in int8 and {loss['full-int4']:.3f} in int4",
        f"loses {loss['full-fp8']:.3f} with all tokens, {loss['r_kv-fp8']:.3f} with R-KV, "
        f"{loss['snap_kv-fp8']:.3f} with SnapKV and {loss['foresight-fp8']:.3f} with foresight",
    ]


def said_of_parts_of_foresight():
    """The words on the accuracy of foresight's parts that hold figures, and what they say of contrasts."""
    every = json.loads((ROOT / "results" / "ablate-foresight-tiny-reasoner.json").read_text())["outcomes"]
    right = {(one["policy"], one["share"]): f"{100 * one['accuracy']:.1f} %" for one in every}
    lines = [cells for cells in cells_of("ablate-foresight-tiny-reasoner") if " - " in cells[0]]
    assert len(lines) == 10
    found = {(pair.removeprefix("whole - "), budget.partition("(")[2][:2]): (words, p) for pair, budget, words, _, p in lines}
    holds = {key for key, (_, p) in found.items() if float(p.removeprefix("< ")) < 0.05}
    parts = ("no-age", "no-key", "power-1", "hidden-4")
    assert holds == {*((part, "15") for part in parts), ("no-key", "25"), ("hidden-4", "25")}
    points = {key: words.split()[0].lstrip("+") for key, (words, _) in found.items()}
    age, key, target, hidden = (found[part, "15"][0].replace("+", "") for part in parts)
    values = [found["no-value", budget][0] for budget in ("15", "25")]
    fewer = [f"{words.split()[0].lstrip('-')}" for words in values]
    ends = [words.partition(" ")[2] for words in values]
    return [
        f"At 15 % of the length {right['whole', 0.15]} are right",
        f"the age {age.replace(' (', ' points (')}, the key {key}, squared attention as the target {target}",
        f"32 hidden units over 4 {hidden}",
        f"At 25 % the key ({points['no-key', '25']}) and the hidden units ({points['hidden-4', '25']}) hold",
        f"the age ({points['no-age', '25']}, p of {found['no-age', '25'][1]}) and the target ({points['power-1', '25']})",
        f"with it {fewer[0]} points fewer are right at 15 % {ends[0]} and {fewer[1]} fewer at 25 % {ends[1]}",
        f"The oracle answers {right['oracle', 0.15]} and {right['oracle', 0.25]}",
    ]


def outcomes_of(name):
    """The outcomes of a comparison on tiny-reasoner without budgets, or with the first of them, by policy."""
    every = json.loads((ROOT / "results" / f"{name}-tiny-reasoner.json").read_text())["outcomes"]
    return {outcome["policy"]: outcome for outcome in reversed(every)}


def said_of_sharing():
    """The words of the paragraphs on sharing that hold figures, and what they say of contrasts and of equal rows."""
    shared = outcomes_of("share-savings")
    right, saved = ({name: f"{100 * one[field]:.1f} %" for name, one in shared.items()} for field in ("accuracy", "amsr"))
    held = {name: f"{100 * one['kv_share']:.0f} % of the bytes" for name, one in shared.items()}
    same = ("embedding", "fixed-0.7", "fixed-0.9", "with-prompt")
    assert all(shared[name]["right"] == shared["reason_cache"]["right"] for name in same)
    near = ("raw", "values", "cosine", "unbiased", "all-pairs")
    assert all(abs(shared[name]["accuracy"] - shared["reason_cache"]["accuracy"]) <= 0.0401 for name in near)
    assert not any((one["sharing"] or {}).get("filter_waits") for one in shared.values())
    lines = [cells for cells in cells_of("share-savings-tiny-reasoner") if " - " in cells[0]]
    assert len(lines) == 5
    pairs = {
        "p=50 - random-p=50": "holds",
        "reason_cache - random_share": "does not hold after the correction",
        "p=20 - random-p=20": "not found",
        "match - random-p=20": "not found",
        "reason_cache - mem_share": "holds",
    }
    said = []
    for pair, _, difference, _, p in lines:
        first, second = pair.split(" - ")
        assert (pairs[pair] == "holds") == (float(p.removeprefix("< ")) < 0.05)
        said.append(f"| {saved[first]} and {saved[second]} | {difference} | {p} | {pairs[pair]}")
    found = shared["reason_cache"]
    change = f"{100 * found['change']:.1f} points ({100 * found['change_low']:.1f} to {100 * found['change_high']:.1f})"
    return [
        *said,
        f"{right['reason_cache']} of the answers are right with `reason_cache`, {right['full']} with the full cache",
        f"a change of {change}. It saves {saved['reason_cache']} of the pages and holds {held['reason_cache']}",
        f"reach that here: {saved['mem_share']} are saved and {right['mem_share']} are right",
        f"SnapKV saves {saved['snap_kv']} of the pages and answers {right['snap_kv']}",
        f"{saved['quest']} of the pages unread and answers {right['quest']}, but holds {held['quest']}",
        f"saves less: {right['p=50']} at the 50th percentile, {right['p=20']} at the 20th",
        f"{right['cos']} at a saving of {saved['cos']} without it, {right['cos+tree']} at {saved['cos+tree']} with it",
        f"Raw keys ({right['raw']}), values ({right['values']}), cosine ({right['cosine']}), no weight for multiplicity ",
        f"({right['unbiased']}) and all pairs of pages ({right['all-pairs']}) are within 4 points of {right['reason_cache']}",
        f"make it worse, {right['aligned']}. With the 20th percentile {right['aligned-p=20']} are right",
        f"more than is saved: {held['aligned-p=20']}",
        f"takes {found['sharing']['filter_ms_per_step']:.2f} ms for each thought",
        *said_of_older_sharing(),
    ]


def said_of_older_sharing():
    """The words on the tables with a filter of our own that hold figures."""
    shared, pages_of_one, encoded = (outcomes_of(name) for name in ("share", "share-page-1", "share-sentence"))
    found, one, random = shared["reason_cache"], pages_of_one["reason_cache"], pages_of_one["random_share"]
    shifted, candidates = (found["sharing"][field] for field in ("shifted", "candidates"))
    assert encoded["sentence"]["right"] == encoded["reason_cache"]["right"]
    return [
        f"which saves so little, {100 * found['amsr']:.1f} %",
        f"{100 * shifted / (shifted + candidates):.0f} % hold the text at another offset",
        f"{100 * one['amsr']:.1f} % are saved and {100 * one['accuracy']:.0f} % are right. With random sharing of such pages",
        f"{100 * random['amsr']:.1f} % are saved and {100 * random['accuracy']:.0f} % are right",
        f"bags of tokens, in {encoded['sentence']['sharing']['filter_ms_per_step']:.0f} ms a thought",
    ]


def test_the_figures_of_the_page_are_those_that_were_recorded():
    page = PAGE.read_text()
    said = []
    every = json.loads((ROOT / "results" / "all-tiny-reasoner.json").read_text())["outcomes"]
    one = {(outcome["policy"], outcome["share"]): outcome for outcome in every}
    right = {key: f"{100 * outcome['accuracy']:.1f} %" for key, outcome in one.items()}
    said += [f"R-KV answers {right['r_kv', 0.25]}, H2O {right['h2o', 0.25]}, random slots {right['random', 0.25]}"]
    said += [f"answers {right['oracle', 0.25]} at a quarter of the slots and {right['oracle', 0.15]} at 15 %"]
    said += [f"CUR answers {right['cur', 0.25]} and LagKV {right['lag_kv', 0.25]}, and {right['cur', 0.5]} and"]
    said += [
        f"{right['lag_kv', 0.5]} at a half",
        f"answers {right['foresight', 0.25]} at a quarter and {right['foresight', 0.15]}",
    ]
    said += [f"in place of 16, {right['foresight-own', 0.25]} and {right['foresight-own', 0.15]}"]
    change = change_of(one | {("full", 0.5): one["full", None]}, "foresight", "full", 0.5)
    said += [f"({right['foresight', 0.5]}, a change of {change})"]
    said += [f"of the same traces ({right['tri_attention', 0.25]})", f"every budget ({right['g_kv', 0.25]} at a quarter)"]
    said += [f"({right['pyramid_kv', 0.5]} and {right['snap_kv', 0.5]} at a half)"]
    read = 100 * (1 - one["quest", 0.25]["amsr"])
    said += [f"Quest reads {read:.0f} % of the pages at a quarter and answers {right['quest', 0.25]}"]
    contrasts = (ROOT / "results" / "all-tiny-reasoner.md").read_text()
    for pair, share, words in (
        ("foresight - cur", 15, "44.2"),
        ("foresight - cur", 25, "31.2"),
        ("foresight - cur", 50, "11.7"),
        ("cur - r_kv", 15, "12.3"),
        ("cur - r_kv", 50, "35.3"),
        ("skip_kv - r_kv", 50, "11.0"),
        ("skip_kv - r_kv", 75, "17.5"),
        ("r_kv - random", 75, "9.3"),
        ("r_kv - snap_kv", 25, "3.0"),
        ("r_kv - snap_kv", 75, "5.0"),
    ):
        line = next(line for line in contrasts.splitlines() if line.startswith(f"| {pair} |") and f"({share}%)" in line)
        assert f"| +{words} (" in line
        said += [words]
    skip, r_kv, rpc = (accuracies(f"ablate-{name}") for name in ("skip_kv", "r_kv", "rpc"))
    said += [f"{skip['tau-0.8', 0.5]} % at half the length with tau 0.8, {skip['sentences', 0.5]} % with 0.9"]
    said += [f"{skip['tau-0.98', 0.5]} % with its default of 0.98, {skip['r_kv', 0.5]} % without sentences"]
    said += [f"0 ({r_kv['importance-0', 0.5]} %), where only redundancy counts, to 0.5 ({r_kv['importance-0.5', 0.5]} %)"]
    rarer = [rpc[name, None] for name in ("interval-32", "rpc", "interval-128")]
    said += [
        "{} %, {} % and {} % for intervals of 32, 64 and 128".format(*rarer),
        f"a quarter does matter ({rpc['ratio-2', None]} %)",
    ]
    apart = json.loads((ROOT / "results" / "distances.json").read_text())
    raw, rotated, num_pages = apart["raw"], apart["rotated"], apart["pages"]
    said += [
        f"are {raw['median_same']:.1f} apart in raw keys and values, other pages {raw['median_other']:.1f}",
        f"{rotated['median_same']:.1f} and {rotated['median_other']:.1f}",
    ]
    said += [f"{num_pages * (num_pages - 1) // 2:,} pairs of pages, only {raw['pairs_of_the_same_tokens']} hold"]
    said += said_of_parts_of_foresight() + said_of_sharing() + said_of_a_real_model() + said_of_protection()
    said += (
        said_of_what_was_not_fair()
        + said_of_facts()
        + said_of_sharing_by_a_chat_model()
        + said_of_formats()
        + said_of_equal_bytes()
    )
    said += said_of_formats_of_a_chat_model()
    said += said_of_sealed_pages()
    said += said_of_serving()
    missing = [words for words in said if words not in " ".join(page.split())]
    assert not missing


def test_the_short_page_has_the_figures_of_the_records():
    page = " ".join((ROOT / "docs" / "results.md").read_text().split())
    choosing = (ROOT / "docs" / "choosing.md").read_text()
    assert all(f"<!-- bench {name} -->" in page + choosing for name in EXCERPTS)
    rows = json.loads((ROOT / "results" / "device-nvidia-h200.json").read_text())["rows"]
    full, _, many = (row for row in rows if row["part"] == "stress")
    roofline = full["roofline_milliseconds"] / many["roofline_milliseconds"] * many["batch"] / full["batch"]
    every = json.loads((ROOT / "results" / "all-tiny-reasoner.json").read_text())["outcomes"]
    right = {(outcome["policy"], outcome["share"]): f"{100 * outcome['accuracy']:.1f} %" for outcome in every}
    second, protected, recent = (
        json.loads((ROOT / "results" / f"tiny-2-{name}tiny-reasoner-2.json").read_text())["outcomes"]
        for name in ("", "prompt-", "recent-")
    )
    best = max(one["accuracy"] for one in second if one["share"] and one["policy"] != "foresight")
    eight, more = (next(one["accuracy"] for one in outcomes if one["policy"] == "r_kv") for outcomes in (protected, recent))
    formats = {one["format"]: one for one in json.loads((ROOT / "results" / "formats-smollm2-135m.json").read_text())["lines"]}
    mixed = json.loads((ROOT / "results" / "formats-tiny-reasoner.json").read_text())["outcomes"]
    coded = {(one["policy"], one["share"]): f"{100 * one['accuracy']:.1f} %" for one in mixed}
    shared = outcomes_of("share-savings")
    for said in (
        f"{many['tokens_per_second'] / full['tokens_per_second']:.1f} times the tokens per second of the full cache**",
        f"{many['batch']} rows fit into the memory in place of {full['batch']}",
        f"it would be {roofline:.1f} times",
        f"The full cache answers {right['full', None]}",
        f"An oracle answers {right['oracle', 0.25]} with a quarter of the slots and {right['oracle', 0.15]} with 15 %",
        f"R-KV answers {right['r_kv', 0.25]} at a quarter, H2O {right['h2o', 0.25]}, random slots {right['random', 0.25]}",
        f"CUR {right['cur', 0.25]}, LagKV {right['lag_kv', 0.25]}",
        f"`foresight` answers {right['foresight', 0.25]}, and {right['foresight', 0.5]} with half of the slots",
        f"no published score answers more than {100 * best:.1f} %",
        f"R-KV answers {100 * eight:.1f} % with 8 recent tokens and {100 * more:.1f} % with 48",
        f"int8 moves the next-token distributions by {formats['int8']['kl']:.3g} nats, int4 by "
        f"{formats['int4']['kl']:.3g}, sealed pages of 128 slots by {formats['kvarn, pages of 128']['kl']:.3g}",
        f"R-KV answers {coded['r_kv-int8', 0.46]} in place of {coded['r_kv', 0.25]}",
        f"{100 * shared['reason_cache']['accuracy']:.1f} % of the answers are right where "
        f"{100 * shared['reason_cache']['amsr']:.1f} % of the pages are saved, {100 * shared['full']['accuracy']:.1f} %",
    ):
        assert said in page, said


def said_of_later_leads():
    """The words on weights of survivors and windows by head that hold figures, and what they say of intervals."""
    weights, windows = (json.loads((ROOT / "results" / f"leads-{name}.json").read_text()) for name in ("weights", "windows"))
    weighted, windowed = ({line["name"]: line for line in record["leads"]} for record in (weights, windows))
    contrasts = [line for line in weighted.values() if "change" in line]
    assert len(contrasts) == 14
    assert [line["name"] for line in contrasts if line["interval"][1] < 0] == ["random, nearest, the closest quarter"]
    better = weighted["random, nearest, the closest quarter"]
    assert round(-100 * better["change"] / weighted["random"]["loss"]) == 1
    assert weighted["foresight, nearest"]["interval"][0] > 0
    for base in ("r_kv", "cur", "random"):
        low, high = weighted[f"{base}, nearest"]["interval"]
        assert low < 0 < high
    own = {name: windowed[f"{name}, a window for each head"] for name in ("snap_kv", "r_kv")}
    assert all(line["interval"][0] < 0 < line["interval"][1] and line["beside"].endswith("64") for line in own.values())
    of_64 = [sum(window == 64 for heads in windows["chosen"][name]["by_head"] for window in heads) for name in own]
    loss = {name: f"{line['loss']:.3f}" for name, line in windowed.items()}
    assert min(loss, key=loss.get) == "r_kv, window 32"
    change = {name: f"{line['change']:+.3f}" for name, line in (weighted | windowed).items() if "change" in line}
    return [
        f"makes foresight worse ({change['foresight, nearest']}), and gains nothing with R-KV ({change['r_kv, nearest']}), CUR "
        f"({change['cur, nearest']}) and random slots ({change['random, nearest']})",
        f"give their weight ({better['change']:+.3f})",
        f"probability gain nothing ({change['random, inverse probability']})",
        f"with SnapKV ({own['snap_kv']['change']:+.3f}) or R-KV ({own['r_kv']['change']:+.3f};",
        f"64 is the choice of {of_64[0]} and {of_64[1]} of the 8 heads",
        f"SnapKV loses {loss['snap_kv, window 1']} with one query and {loss['snap_kv, window 64']} with 64, R-KV "
        f"{loss['r_kv, window 1']} and {loss['r_kv, window 64']} ({loss['r_kv, window 32']} with 32, which recall did not",
        f"chosen by recall on {windows['calibration']} other traces",
    ]


def said_of_rules():
    """The words on budgets by head, blocks and repairs that hold figures, and what they say of intervals."""
    record = json.loads((ROOT / "results" / "rules-tiny-reasoner.json").read_text())
    lines = {line["name"]: line for line in record["lines"]}
    heads, repaired = (
        {name: lines[f"{name}, {what}"] for name in ("cur", "r_kv", "snap_kv")}
        for what in ("budgets by head", "repaired by twin_kv")
    )
    blocks = {(name, size): lines[f"{name}, blocks of {size}"] for name in ("cur", "random", "key_diff") for size in (4, 16)}
    assert all(line["interval"][1] < 0 for line in heads.values())
    assert all(line["recall"] < lines[name]["recall"] for name, line in heads.items())
    assert round(lines["cur"]["loss"] / heads["cur"]["loss"]) == 2
    for line in heads.values():
        slots = np.array(line["slots"])
        assert (slots[0] == slots.min()).all()
        assert round(slots.max() / record["budget"]) == 2
    covers = {key for key, line in blocks.items() if line["interval"][0] < 0 < line["interval"][1]}
    assert covers == {key for key in blocks if key[0] != "cur"}
    assert repaired["cur"]["interval"][0] > 0 < repaired["r_kv"]["interval"][0]
    assert repaired["snap_kv"]["interval"][0] < 0 < repaired["snap_kv"]["interval"][1]
    less, traces = {name: f"{-line['change']:.3f}" for name, line in heads.items()}, record["calibration"]
    return [
        f"on {traces} other traces (`jkv.head_budgets`) lower the loss of CUR (by {less['cur']} nats, half of it), "
        f"R-KV (by {less['r_kv']}) and SnapKV (by {less['snap_kv']})",
        f"of 4 and 16 tokens raise CUR's loss by {blocks['cur', 4]['change']:.3f} and {blocks['cur', 16]['change']:.3f} nats",
        f"raises the loss of CUR by {repaired['cur']['change']:.3f} and of R-KV by {repaired['r_kv']['change']:.3f} nats, and "
        f"does not help SnapKV ({repaired['snap_kv']['change']:+.3f}, the interval covers 0)",
    ]


def test_the_log_of_leads_is_quoted_as_recorded():
    def lines(name):
        return {line["name"]: line for line in json.loads((ROOT / "results" / "leads.json").read_text())[name]}

    leads, parts = lines("leads"), lines("ablation")
    section = (ROOT / "docs" / "methods.md").read_text().partition("### What was tried")[2].partition("## Learned")[0]
    words = " ".join(section.split())

    def loss(name):
        return f"{leads[name]['loss']:.3f}"

    def change(name):
        return f"{leads[name]['change']:+.3f}"

    def part(name):
        return f"{abs(parts[name]['change']):.3f}"

    for said in (
        f"The oracle loses {loss('oracle')}, foresight {loss('foresight')}, CUR {loss('cur')}, random slots {loss('random')}.",
        f"which lose {parts['whole']['loss']:.3f}). Without the age a token loses {part('without age')} nats more",
        f"the target {part('plain attention')}, without the key {part('without key')}, with 4",
        f"hidden units {part('4 hidden units')}. Without the value it loses {part('without value')} less",
        f"({change('foresight, heads compete, floor 0.2')} and {change('foresight, heads compete, floor 0.5')}, both",
        f"({change('foresight and memory, weight 0.25')}, {change('foresight and memory, weight 1')})",
        f"({change('cur, exact norms, drawn, temperature 1')}), and the largest",
        f"exact norms lose more ({change('cur, exact norms')})",
        f"({change('foresight, drawn, temperature 0.5')} at temperature 0.5, {change('foresight, drawn, temperature 1')} at 1)",
        f"({change('cur, projections by head')}, covers 0), and slots",
        f"stratified by position lose a lot ({change('cur, stratified by 8 positions')})",
        *said_of_later_leads(),
        *said_of_rules(),
    ):
        assert said in words, said
