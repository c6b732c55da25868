"""What docs/findings.md says of the second task is what was recorded."""

import json

from tests.repository.pages import ROOT

PAGE = ROOT / "docs" / "findings.md"
SHARES = 0.05, 0.1, 0.2, 0.34


def record_of(name):
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def section():
    text = PAGE.read_text().partition("## A second task")[2].partition("\n## ")[0]
    return " ".join(text.split())


def test_the_gate_is_passed_as_the_page_says():
    gate = record_of("gate-tiny-reasoner-2")
    share = {one["name"]: f"{100 * one['value']:.1f} %" for one in gate["criteria"]}
    assert all(one["passed"] for one in gate["criteria"])
    for said in (
        "all five hold",
        f"{share['full']} of the answers are right",
        f"{share['oracle']} of the runs stay the same",
        f"{share['semantic']} are right with the live set alone",
        f"foresees {share['foreseen']} of what the oracle keeps",
    ):
        assert said in section(), said


def test_the_figures_of_policies_are_those_that_were_recorded():
    every = record_of("tiny-2-tiny-reasoner-2")["outcomes"]
    right = {(one["policy"], one["share"]): 100 * one["accuracy"] for one in every}
    held = {one["policy"]: f"{100 * one['kv_share']:.0f}" for one in every if one["policy"].startswith("rpc")}
    best = max(figure for (name, share), figure in right.items() if share and name != "foresight")
    at_most = {name: f"{right[name, SHARES[-1]]:.1f} %" for name, share in right if share == SHARES[-1]}
    foresight = [f"{right['foresight', share]:.1f}" for share in SHARES]
    assert right["full", None] == 100
    for said in (
        f"Foresight answers {', '.join(foresight[:3])} and {foresight[3]} % with 5, 10, 20 and 34 %",
        f"With these 8 recent slots, no published score answers more than {best:.1f} % at any of these budgets",
        f"with 34 %, H2O {at_most['h2o']}, SnapKV {at_most['snap_kv']}, SkipKV {at_most['skip_kv']}, R-KV {at_most['r_kv']}, "
        f"its redundancy alone {at_most['r_kv-redundancy']}, random slots {at_most['random']}, the last tokens "
        f"{at_most['streaming_llm']}",
        f"holds {held['rpc-256']} and {held['rpc-64']} % of the full cache's bytes, answers {right['rpc-256', None]:.1f} % "
        f"with intervals of 256 tokens and {right['rpc-64', None]:.1f} % with 64",
    ):
        assert said in section(), said


def test_the_contrasts_that_hold_are_those_of_the_page():
    report = (ROOT / "results" / "tiny-2-tiny-reasoner-2.md").read_text().partition("| contrast |")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("| ")]
    change = {
        (pair, budget.partition("(")[2].removesuffix(")")): difference.split()[0].lstrip("+")
        for pair, budget, difference, _, corrected in rows
        if float(corrected.lstrip("< ")) < 0.05
    }
    assert len(rows) == 25
    assert set(change) == {
        *(("foresight - r_kv", f"{share}% each") for share in (10, 20, 34)),
        ("h2o - r_kv", "34% each"),
        ("rpc-256 - rpc-64", ""),
    }
    for said in (
        f"(by {change['foresight - r_kv', '10% each']} to {change['foresight - r_kv', '34% each']} points)",
        f"H2O over R-KV with 34 % ({change['h2o - r_kv', '34% each']})",
        f"RPC's long interval over the short one ({change['rpc-256 - rpc-64', '']})",
    ):
        assert " ".join(said.split()) in section(), said


def test_with_the_prompt_protected_the_figures_are_those_that_were_recorded():
    right = {one["policy"]: f"{100 * one['accuracy']:.1f} %" for one in record_of("tiny-2-prompt-tiny-reasoner-2")["outcomes"]}
    report = (ROOT / "results" / "tiny-2-prompt-tiny-reasoner-2.md").read_text().partition("| contrast |")[2]
    corrected = [line.split("|")[-2].strip() for line in report.splitlines() if " - random |" in line]
    assert corrected == ["< 0.001"] * 5
    assert (
        f"the prompt and the last tokens answer {right['streaming_llm']}, the prompt and random slots {right['random']}, "
        f"R-KV {right['r_kv']}, SnapKV {right['snap_kv']}, H2O {right['h2o']}, foresight {right['foresight']}."
    ) in section()
    recent = next(one for one in record_of("tiny-2-recent-tiny-reasoner-2")["outcomes"] if one["policy"] == "r_kv")
    said = f"it answers {100 * recent['accuracy']:.1f} % with {100 * recent['kv_share']:.0f} % of the bytes"
    assert said in section()
