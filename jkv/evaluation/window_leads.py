"""Does each KV head need a window of its own? `python -m jkv.evaluation.window_leads --out results`.

SnapKV and R-KV score slots by the attention of the last queries, as many in every layer and head. Here some traces are decoded
with each of several windows, and each layer and KV head takes the window under which most of the squared attention of its later
queries went to slots that it had kept. On other traces, that is compared with the one window that was best for all heads by the
same count. Every window protects as many recent tokens. Traces, budget and interval are those of `jkv.evaluation.leads`.
"""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.analysis.recall import LOCAL, Text, attention_received, decode, recall, share_read
from jkv.checkpoints import loading as checkpoint
from jkv.evaluation.leads import INTERVAL, RECENT, SINKS, WINDOW, line_of, rows_of, slots_of, traces
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.schedules import Every
from jkv.eviction.scores import AttentionMass, layer_of
from jkv.eviction.view import CacheView
from jkv.limits import parse
from jkv.model.params import Model
from jkv.policies.r_kv import redundancy_of
from jkv.reports import about, footnote, write

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
POWER = 1  # the index of squared attention in `jkv.analysis.recall.POWERS`


@dataclasses.dataclass(frozen=True)
class ByHead:
    """SnapKV's importance with a window for each layer and KV head, less R-KV's redundancy if `importance` is below 1.

    All slots are candidates, so that a window may be longer than the recent tokens that stay.
    """

    windows: tuple[tuple[int, ...], ...]  # [L][K]
    importance: float = 1.0

    @property
    def needs(self) -> Needs:
        """The queries of the longest window."""
        return Needs(window=max(map(max, self.windows)), compares_keys=self.importance < 1)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        of_row = jnp.asarray(self.windows, jnp.int32)[layer_of(view)][..., None]
        score = jnp.zeros(view.position.shape, jnp.float32)
        for window in sorted({window for heads in self.windows for window in heads}):
            score = jnp.where(of_row == window, AttentionMass(window, candidates="all")(view), score)
        if self.importance == 1:
            return score
        return self.importance * score - (1 - self.importance) * redundancy_of(view, 0.5)


class Family(NamedTuple):
    """A score that has windows, and its weight of importance."""

    name: str
    importance: float


# Written down before the run: with a window of its own for each head, both lose less than with one for all.
FAMILIES = (Family("snap_kv", 1.0), Family("r_kv", 0.1))


def policy_of(family: Family, name: str, windows: Int[np.ndarray, "L K"], budget: int) -> Policy:
    """A policy with these windows."""
    score = ByHead(tuple(map(tuple, windows.tolist())), family.importance)
    return Policy(f"{family.name}, {name}", Evict(score, sinks=SINKS, recent=WINDOW), Every(budget, INTERVAL))


def recall_by_head(model: Model, texts: Sequence[Text], policies: Sequence[Policy], budget: int) -> Float[np.ndarray, "P L K"]:
    """The share of squared attention to older keys that went to kept slots, a mean over texts, of each policy and head."""
    settings = {"max_running": len(texts), "page_size": 4}
    runs, shares = [decode(model, texts, policy, settings).traces for policy in policies], []
    for i, (prompt, rest) in enumerate(texts):
        for layer, received in enumerate(attention_received(model.params, [*prompt, *rest])):
            for head in range(model.config.num_kv_heads):
                of_head = received[POWER][head : head + 1]
                shares += [
                    share_read(of_head, [x[head : head + 1] for x in run[i].columns(0, layer)], max(len(prompt), budget), LOCAL)
                    for run in runs
                ]
    shape = len(texts), model.config.num_paged_layers, model.config.num_kv_heads, len(policies)
    return np.moveaxis(np.reshape(shares, shape).mean(axis=0), -1, 0)


def measure(model: Model, calibration: Sequence[Text], texts: Sequence[Text], budget: int) -> dict[str, Any]:
    """Lines of each family, and the windows that its heads took."""
    shape = model.config.num_paged_layers, model.config.num_kv_heads
    lines, chosen = [], {}
    for family in FAMILIES:
        fixed = [policy_of(family, f"window {window}", np.full(shape, window), budget) for window in WINDOWS]
        shares = recall_by_head(model, calibration, fixed, budget)
        best = int(shares.mean(axis=(1, 2)).argmax())
        own = np.array(WINDOWS)[shares.argmax(axis=0)]
        chosen[family.name] = {"one": WINDOWS[best], "by_head": own.tolist(), "recall": shares.mean(axis=(1, 2)).tolist()}
        print(family.name, chosen[family.name], file=sys.stderr, flush=True)
        policies = [*fixed, policy_of(family, "a window for each head", own, budget)]
        settings = {"interval": INTERVAL, "recent": RECENT, "max_running": len(texts), "page_size": 4}
        *of_fixed, of_own = recall(model, texts, policies, **settings)[1:]
        lines += [line_of(one, None, budget) for one in of_fixed]
        lines += [line_of(of_own, of_fixed[best], budget)]
    return {"leads": lines, "chosen": chosen}


def table(record: dict[str, Any]) -> str:
    """The table, and which windows were chosen."""
    budget = record["leads"][0]["budget"]
    chosen = [
        f"`{name}`: {one['one']} for all; by head "
        + ", ".join(f"{count} of {window}" for window, count in counted_heads(one["by_head"]))
        + "."
        for name, one in record["chosen"].items()
    ]
    return "\n\n".join(
        [
            f"{record['texts']} traces of tiny-reasoner, {budget} slots ({record['share']:.0%} of the mean length), compacted "
            f"every {INTERVAL} tokens; {SINKS} sinks and {WINDOW} recent tokens stay. Windows are chosen by "
            f"{record['calibration']} other traces; {len(record['chosen'])} contrasts.",
            rows_of(record["leads"]),
            *chosen,
            footnote(record),
        ]
    )


def counted_heads(windows: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """How many heads have each window."""
    return sorted(collections.Counter(window for heads in windows for window in heads).items())


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20, help="traces that are measured (default %(default)s)")
    parser.add_argument("--calibration", type=int, default=12, help="traces that choose the windows (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.15, help="of the mean length that is kept (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for leads-windows.json and .md")
    options = parse(parser, argv)
    model = checkpoint.load("tiny-reasoner")
    texts, calibration = traces(model, options.texts), traces(model, options.calibration, options.texts)
    record = {"about": about("python -m jkv.evaluation.window_leads"), "texts": options.texts, "share": options.share}
    record |= {"calibration": options.calibration}
    record |= measure(model, calibration, texts, slots_of(texts, options.share))
    print(table(record))
    if options.out:
        write("leads-windows", record, table(record), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
