"""The text of a completion, each token shaded by how many heads keep it, with a slider over time (R-KV, Fig. 7; RPC, app. B).

One file of HTML that needs nothing else: the trace's changes are in it, packed (`jkv.viz.moments`), and a script draws any
moment. Texts are data to that script, never markup, and the page's policy lets no other script run and nothing be loaded.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.engine.results import Result
from jkv.reports import cut_text, visible
from jkv.viz.held import Held, check_sample, held_by
from jkv.viz.moments import moments_of, pack, stand_ins
from jkv.viz.pieces import pieces

HEIGHT = 620  # pixels in a notebook, where the text scrolls


class Kept:
    """A page of HTML: shown in a notebook, and saved by `save`. `html` is all of it."""

    def __init__(self, document: str) -> None:
        self.html = document

    def save(self, path: str | Path) -> None:
        """Writes the page, for a browser to open."""
        Path(path).write_text(self.html, encoding="utf-8")

    def _repr_html_(self) -> str:
        """A frame of its own for each picture: several in a notebook have nothing to do with each other."""
        look = f"width:100%;height:{HEIGHT}px;border:1px solid #8884;border-radius:6px"
        return f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts" title="kept tokens" style="{look}"></iframe>'


def kept(out: Result, sample: int | Sequence[int] | None = 0, title: str = "Kept tokens") -> Kept:
    """Which tokens the cache kept at any time, for one sample, several, or (None) all; `out` needs `return_trace=True`.

    A token's shade is the share of layers and KV heads whose cache holds it when the newest token's query reads it: before any
    compaction that follows. Shared pages are shown with the pages that replaced them. Bytes are those of keys and values. Where
    a policy chooses what to read (Quest), the picture shows what is read; the cache holds all of it.

    The page opens at the end; `#t=40&layer=2&head=1&sample=0` after its address opens it elsewhere.

    Raises:
      ValueError: no trace, or no such sample.
    """
    every = range(len(out.lengths)) if sample is None else [sample] if isinstance(sample, int) else sample
    for one in every:
        check_sample(out, one)
    if not every:
        raise ValueError("A picture needs at least one sample; got none.")
    return Kept(fill({"title": cut_text(title), "samples": [record_of(out, one) for one in every]}))


def record_of(out: Result, sample: int) -> dict[str, Any]:
    """What the page's script needs to know of a sample."""
    held = held_by(out, sample)
    moments = moments_of(held)
    ids = [*out.prompts[sample].tolist(), *out.tokens[sample, : out.lengths[sample]].tolist()]
    return {
        "sample": sample,
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
        "group_size": moments.group_size,
        "changes": pack(moments, held.num_tokens),
        "again": stand_ins(held.again).tolist(),
        "replaced": replaced(held).tolist(),
    }


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
    page, style, script = ((folder / f"kept.{ending}").read_text(encoding="utf-8") for ending in ("html", "css", "js"))
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
