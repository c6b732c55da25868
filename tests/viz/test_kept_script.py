"""The page's script, run by node where there is one: its counts are those of the trace."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import jkv
from tests.viz.pages import data_of, recount

NODE = shutil.which("node")
COUNTS = (Path(jkv.viz.__file__).parent / "kept_counts.js").read_text()
pytestmark = pytest.mark.skipif(NODE is None, reason="node, which runs JavaScript, is not installed")


def run(out, code, **settings):
    """What JavaScript returns that knows the `views` of a page's first sample, all heads chosen."""
    data = json.dumps(data_of(jkv.viz.kept(out, **settings)))
    script = f"""{COUNTS}
(async () => {{
  const views = await Promise.all({data}.panels.map(([sample]) => load(sample)));
  for (const view of views) choose(view, groupsOf(view.sample, -1, -1));
  process.stdout.write(JSON.stringify(await (async () => {{ {code} }})()));
}})();"""
    done = subprocess.run([NODE, "-"], input=script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def cut_after(out, count):
    """The same result, ended after so many tokens."""
    return dataclasses.replace(out, lengths=np.minimum(out.lengths, count), finish_reason=["stop"] * len(out.lengths))


def with_token(out, place, token=0):
    """The same result with another token at a place of its completion."""
    tokens = out.tokens.copy()
    tokens[0, place] = token if tokens[0, place] != token else token + 1
    return dataclasses.replace(out, tokens=tokens)


@pytest.mark.parametrize("which", ["evicting", "choosing", "sharing", "keeping"])
def test_the_script_counts_what_the_trace_says(which, request):
    out = request.getfixturevalue(which)
    found = run(
        out,
        """const [view] = views, every = Array.from({ length: view.total }, (_, token) => token), found = [];
        for (let head = -1; head < view.sample.heads; head++) {
          choose(view, groupsOf(view.sample, head < 0 ? -1 : 1, head));
          found.push({ sizes: view.sizes, kept: view.stops.map((stop) => every.map((token) => keptAt(view, token, stop))) });
        }
        return found;""",
    )
    first = len(out.prompts[0]) - 1
    for found_of, heads in zip(found, (slice(None), slice(2, 3), slice(3, 4)), strict=True):
        for i, (size, kept) in enumerate(zip(found_of["sizes"], found_of["kept"], strict=True)):
            expected = recount(out, first + i)[heads]
            assert kept[: first + i + 1] == expected.sum(axis=0)[: first + i + 1].tolist()
            assert size == pytest.approx(expected.sum() / len(expected))


def test_a_page_opens_where_the_first_panel_evicts(evicting, sliding, keeping):
    code = "const found = openingOf(views); return found && [found.time, ...found.first.map(({ sample }) => sample.name)];"
    firsts = {}
    for out in (evicting, sliding):
        lost = [p for p in range(4, 30) if not recount(out, p)[:, : p + 1].all()]
        firsts[out.policies[0].name] = lost[0] - 4
    assert firsts["streaming_llm"] < firsts["r_kv"]
    expected = [firsts["streaming_llm"], "streaming_llm"]
    assert run([evicting, sliding], code) == run([sliding, evicting], code) == run([keeping, sliding], code) == expected
    assert run(evicting, code) == [firsts["r_kv"], "r_kv"]
    assert run({"a": evicting, "b": evicting}, code) == [firsts["r_kv"], "a", "b"]
    assert run(keeping, code) is None


def test_texts_are_compared_token_by_token(evicting):
    code = "return sharedTokens(views);"
    assert run(evicting, code) is None
    assert run([evicting, evicting], code) is None
    assert run([evicting, with_token(evicting, 7)], code) == 7
    assert run([evicting, with_token(evicting, 0)], code) == 0
    assert run([evicting, cut_after(evicting, 9)], code) == 9
    assert run([cut_after(evicting, 9), evicting], code) == 9


def test_a_panel_that_ended_stays_at_its_end(evicting):
    code = """const times = timesOf(views), positions = times.map((t) => views.map((view) => view.stops[stopAt(view, t)]));
        return [times, positions, stateOf(views[1], 9), stateOf(views[1], 10)];"""
    times, positions, at_end, after = run([evicting, cut_after(evicting, 9)], code)
    assert times == list(range(45))
    assert positions == [[4 + t, 4 + min(t, 9)] for t in times]
    assert at_end.startswith("keeps 14 of 14 tokens, mean over 4 heads, 3.6\N{NO-BREAK SPACE}kB of 3.6\N{NO-BREAK SPACE}kB")
    assert after == at_end + ", ended after 9 tokens (stop)"


def test_what_a_token_says_is_what_the_trace_says(evicting):
    (line,) = {tuple(run(evicting, "return [tell(views[0], 40, 30), tell(views[0], 48, 48)].flatMap((x) => x.split('\\n'));"))}
    assert line[0].endswith(f"id {evicting.tokens[0, 35]}, position 40")
    assert line[1] == "not generated yet"
    assert line[3:] == ("kept by 4 of 4 heads (100%)", "never evicted")
