"""The recipes of docs/your-own-policy.md: files of at most 40 lines, which do what the page says of them."""

import json
import re

import numpy as np
import pytest

import jkv
from jkv.policies import make
from jkv.testing import TinyTokenizer, random_view, tiny_model
from tests.repository.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "your-own-policy.md").read_text()
RECIPES = {block.split()[1]: block for block in blocks(PAGE, "python") if re.match(r"# \w+\.py\n", block)}
PROMPT, LIMIT, INTERVAL = list(range(1, 30)), 24, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The recipes as files."""
    path = tmp_path_factory.mktemp("recipes")
    for name, text in RECIPES.items():
        (path / name).write_text(text)
    return path


def run(policy):
    """A traced run of the small model."""
    model = tiny_model(tokenizer=TinyTokenizer())
    return jkv.generate(model, PROMPT, policy, max_new_tokens=LIMIT, stop_ids=(), page_size=4, return_trace=True)


def test_each_recipe_is_a_short_file():
    assert list(RECIPES) == ["mine.py", "heads.py", "trigrams.py"]
    assert max(len(text.splitlines()) for text in RECIPES.values()) <= 40


def test_lazy_eviction_remembers_the_last_peak_and_the_longest_time_between_two(folder):
    policy = make(f"{folder}/mine.py:lazy_eviction", {"budget": 24, "interval": INTERVAL, "peak": 0.05})
    view = random_view(np.random.default_rng(0), carried_names=policy.needs.carried)
    view = view._replace(carried={"last": view.position.astype(np.float32) / 2, "longest": view.carried["longest"]})
    score, carried = policy.evict.rate_and_carry(view)
    longest, last = (np.asarray(carried[name]) for name in ("longest", "last"))
    for b, k in ((0, 0), (1, 1)):
        position = np.asarray(view.position[b, k])
        filled, newest = position >= 0, int(view.position[b].max())
        own_last, own_longest = position.astype(float), np.asarray(view.carried["longest"][b, k], float).copy()
        for w in range(INTERVAL):
            time = newest - (INTERVAL - 1 - w)
            seen = filled & (position <= time)
            query = np.asarray(view.query[b, 2 * k : 2 * k + 2, w], float)
            logits = query @ np.asarray(view.key[b, k], float)[seen].T * 8**-0.5
            share = np.exp(logits - logits.max(axis=1, keepdims=True))
            share = (share / share.sum(axis=1, keepdims=True)).max(axis=0)
            for s in np.flatnonzero(seen)[share >= 0.05]:
                own_longest[s] = max(own_longest[s], time - own_last[s])
                own_last[s] = time
        np.testing.assert_allclose(last[b, k][filled], own_last[filled])
        np.testing.assert_allclose(longest[b, k][filled], own_longest[filled], rtol=1e-6)
        open_to_choice = filled & (position <= newest - INTERVAL)
        expected = (own_last - newest) / np.maximum(own_longest, 1)
        np.testing.assert_allclose(np.asarray(score)[b, k][open_to_choice], expected[open_to_choice], rtol=1e-5)
    assert run(policy).stats.evicted > 0


def test_heads_have_the_budgets_of_their_worth(folder):
    (folder / "heads.json").write_text(json.dumps([[1, 3], [2, 2]]))
    settings = {"budget": 16, "heads": str(folder / "heads.json"), "alike": 0.5, "interval": INTERVAL, "recent": 4}
    policy = make(f"{folder}/heads.py:head_kv", settings)
    assert policy.slots == ((12, 20), (16, 16))
    held = (run(policy).trace.end[0] > len(PROMPT)).sum(axis=-1) - LIMIT
    np.testing.assert_array_equal(held, policy.slots)
    duo = make(f"{folder}/heads.py:duo_attention", {"retrieval": [[0, 1]], "layers": 2, "heads": 2, "recent": 8})
    lost = (run(duo).trace.end[0] < len(PROMPT) + LIMIT).sum(axis=-1)
    assert lost[0, 1] == 0
    assert (np.delete(lost.ravel(), 1) > 0).all()


def test_thoughts_that_are_alike_but_for_digits_share_pages(folder):
    policy = make(f"{folder}/trigrams.py:share_trigrams", {"similarity": 0.5, "percentile": 100.0})
    encode = policy.share.filter.encoder
    assert (encode("b = 3 + 4") == encode("b=7+1")).all()
    assert not (encode("b = 3 + 4") == encode("wait, no")).all()
    model = jkv.load("tiny-reasoner")
    prompt, rest = (
        model.tokenizer.encode(text, add_special_tokens=False) for text in ("b=3;c=7;d=b*c;?d", "c=b+7 b=3 3+7=0\n\n" * 6)
    )
    shared = []
    for each in (policy, make(f"{folder}/trigrams.py:share_trigrams", {"similarity": 1.0, "percentile": 100.0})):
        shared.append(jkv.generate(model, [prompt], each, forced_tokens=[rest], page_size=4, progress=False).stats.shared)
    assert shared[0] > shared[1] == 0
