"""The text of a completion, each token shaded by how many heads keep it, with a slider over time (R-KV, Fig. 7; RPC, app. B).

One file of HTML that needs nothing else: the trace's changes are in it, packed (`jkv.viz.moments`), and a script draws any
moment. Texts are data to that script, never markup, and the page's policy lets no other script run and nothing be loaded.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.engine.results import Result
from jkv.errors import refused
from jkv.eviction.policy import Policy
from jkv.reports import cut_text, visible
from jkv.viz.held import Held, check_sample, held_by
from jkv.viz.look import LONGEST
from jkv.viz.moments import first_loss, has_heads, moments_of, pack, stand_ins
from jkv.viz.pieces import pieces

HEIGHT = 620  # pixels in a notebook, where the text scrolls
MAX_PANELS = 2
FILES = ("kept.html", "kept.css", "kept_counts.js", "kept.js")


class Kept:
    """A page of HTML: shown in a notebook, and saved by `save`. `html` is all of it."""

    def __init__(self, document: str) -> None:
        self.html = document

    def __repr__(self) -> str:
        return f"Kept tokens, a page of {len(self.html):,} characters: .save('kept.html') writes it for a browser"

    def save(self, path: str | Path) -> None:
        """Writes the page, for a browser to open.

        Raises:
          ValueError: the name ends as another kind of file's, such as a picture's.
        """
        if Path(path).suffix not in ("", ".html", ".htm"):
            rule = f"The page must be written to an HTML file; got {path}. Write {Path(path).with_suffix('.html')}."
            raise refused(rule, path="unsupported")
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        """A frame of its own for each picture: several in a notebook have nothing to do with each other."""
        look = f"width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:6px"
        return f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="kept tokens" style="{look}"></iframe>'


def kept(
    out: Result | Sequence[Result] | Mapping[str, Result],
    sample: int | Sequence[int] | None = 0,
    title: str = "Kept tokens",
) -> Kept:
    """Which tokens the cache kept at any time, for one sample, several, or (None) all; each result needs `return_trace=True`.

    Two results are shown side by side, under one slider; a mapping gives them names, otherwise they have their policies'. They
    must come from the same prompts. Each panel has its own text: after the first token that differs, the texts are two.

    A token's shade is the share of layers and KV heads whose cache holds it when the newest token's query reads it: before any
    compaction that follows. Shared pages are shown with the pages that replaced them. Bytes count keys and values. Where
    a policy chooses what to read (Quest), the picture shows what is read; the cache holds all of it.

    The page opens at the first eviction, or at the end if there is none; `#t=40&layer=2&head=1&sample=0` after its address
    opens it elsewhere. It needs no mouse, and follows the reader's settings for colours and motion.

    Raises:
      ValueError: no trace, no such sample, more than two results, or two that cannot be compared.
    """
    if isinstance(sample, Result):
        raise refused("Two results are one argument; got two. Write jkv.viz.kept([one, other]).", out="wrong_type")
    every = [out] if isinstance(out, Result) else out
    pairs = list(every.items()) if isinstance(every, Mapping) else [(None, one) for one in every]
    if not 1 <= len(pairs) <= MAX_PANELS:
        raise refused(f"A page shows one result, or {MAX_PANELS} side by side; got {len(pairs)}.", out="too_long")
    names, outs = [name for name, _ in pairs], [one for _, one in pairs]
    rows = [records_of(names, outs, one) for one in samples_of(outs, sample)]
    return Kept(fill({"title": cut_text(title), "panels": [list(column) for column in zip(*rows, strict=True)]}))


def samples_of(outs: Sequence[Result], sample: int | Sequence[int] | None) -> Sequence[int]:
    """The samples to show, all of which every result has, from the same prompt.

    Raises:
      ValueError: a sample or a trace is missing, or results differ in prompt or shape.
    """
    counts = [len(out.lengths) for out in outs]
    if sample is None and len(set(counts)) > 1:
        rule = f"With sample=None both results need the same number of samples; got {counts[0]} and {counts[1]}."
        raise refused(rule, sample="conflict")
    every = range(counts[0]) if sample is None else [sample] if isinstance(sample, int) else sample
    if not every:
        raise refused("A picture needs at least one sample; got none.", out="missing")
    for out in outs:
        for one in every:
            check_sample(out, one)
    for other in outs[1:]:
        check_pair(outs[0], other, every)
    return every


def check_pair(first: Result, other: Result, every: Sequence[int]) -> None:
    """Refuses results that have no common layers and heads, or no common prompts.

    Raises:
      ValueError: either.
    """
    assert first.trace is not None
    assert other.trace is not None
    shapes = [trace.shape[1:3] for trace in (first.trace, other.trace)]
    if shapes[0] != shapes[1]:
        rule = f"Results side by side need the same layers and KV heads; got {shapes[0]} and {shapes[1]}."
        raise refused(rule, out="conflict")
    for one in every:
        if not np.array_equal(first.prompts[one], other.prompts[one]):
            raise refused(f"Results side by side need the same prompts; the prompts of sample {one} differ.", out="conflict")


def records_of(names: Sequence[Any], outs: Sequence[Result], sample: int) -> list[dict[str, Any]]:
    """The record of a sample in each result; all keep heads apart, or none does."""
    every = [held_by(out, sample) for out in outs]
    by_head = all(map(has_heads, every))
    return [record_of(*one, sample, by_head) for one in zip(names, outs, every, strict=True)]


def record_of(name: Any, out: Result, held: Held, sample: int, by_head: bool) -> dict[str, Any]:
    """What the page's script needs to know of a sample; without a name it has its policy's."""
    policy = out.policies[sample]
    moments = moments_of(held, by_head)
    ids = [*out.prompts[sample].tolist(), *out.tokens[sample, : out.lengths[sample]].tolist()]
    return {
        "sample": sample,
        "name": visible(cut_text(str(policy.name if name is None else name), LONGEST)),
        "limit": limit_of(policy),
        "ids": ids,
        "pieces": pieces(ids[: held.num_prompt], out.tokenizer) + pieces(ids[held.num_prompt :], out.tokenizer),
        "is_text": out.tokenizer is not None,
        "finish": out.finish_reason[sample],
        "prompt": held.num_prompt,
        "layers": held.num_layers,
        "heads": held.num_heads,
        "slot_bytes": out.slot_bytes,
        "comes_back": held.comes_back,
        "stops": None if len(moments.stops) == held.num_tokens - held.num_prompt + 1 else moments.stops.tolist(),
        "ticks": moments.ticks.tolist(),
        "first": first_loss(moments),
        "group_size": moments.group_size,
        "changes": pack(moments, held.num_tokens),
        "again": stand_ins(held.again).tolist(),
        "replaced": replaced(held).tolist(),
    }


def limit_of(policy: Policy) -> str:
    """What a policy allows a layer and KV head to hold, in a few words."""
    parts = [f"budget {policy.budget:,}"] if policy.budget is not None else []
    if policy.read is not None:
        parts.append(f"reads up to {policy.read.budget:,}")
    if policy.share is not None:
        parts.append("shares pages")
    return ", ".join(parts) or ("no fixed budget" if policy.evict is not None else "no budget")


def replaced(held: Held) -> np.ndarray:
    """Tokens whose page another replaced: they ended everywhere at once, when others began to be read again."""
    total = held.num_tokens
    first, last = np.full(total, total), np.zeros(total, np.int64)
    np.minimum.at(first, held.spans.token, held.spans.end)
    np.maximum.at(last, held.spans.token, held.spans.end)
    return np.flatnonzero((first == last) & np.isin(last, np.unique(held.again.begin)))


def fill(record: dict[str, Any]) -> str:
    """The page of a record: markup, style, script and data in one document."""
    folder = Path(__file__).parent
    page, style, counts, drawing = ((folder / name).read_text(encoding="utf-8") for name in FILES)
    script = counts + drawing
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(visible(record["title"])),
        "digest": digest,
        "style": style,
        "script": script,
        "data": as_script(record),
    }
    return re.sub(r"<!--(\w+)-->", lambda found: parts[found[1]], page)


def as_script(record: dict[str, Any]) -> str:
    """JSON that no text in it can end or turn into markup: what means something to HTML is escaped."""
    text = json.dumps(record, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
