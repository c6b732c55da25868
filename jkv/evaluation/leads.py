"""What was tried for a policy of our own: `python -m jkv.evaluation.leads --out results`.

Each lead is a score in place of one that is shipped, with the same protection and interval, on tiny-reasoner's own traces of
problems that no network was trained on. A line has the share of the full cache's attention that the kept slots receive, and by
how many nats a token is less likely than with the full cache, beside the score that the lead was to improve: the difference is
paired by text. A second table says what each part of `foresight` is worth.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jkv.analysis.foresee import foresee
from jkv.analysis.recall import Recall, Text, recall
from jkv.checkpoints import loading as checkpoint
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.schedules import Every
from jkv.eviction.scores import Uniform, layer_of, uniform
from jkv.eviction.view import CacheView
from jkv.limits import parse
from jkv.model.params import Model
from jkv.policies import full
from jkv.policies.cur import NormProduct
from jkv.policies.foresight import ExpectedReads, Foresight, shipped_networks
from jkv.policies.g_kv import largest_attention
from jkv.reports import about, digits, footnote, markdown, write
from jkv.statistics import bootstrap
from jkv.tasks.evaluate import held_out, solve

SEED = 5  # of the problems, which are those of no other experiment
INTERVAL, SINKS, RECENT, WINDOW = 16, 4, 4, 16
LEAST = 1e-7
INPUTS_NEED = Needs(rope=True, calibration=True)


def gumbel(view: CacheView) -> Float[Array, "B K S"]:
    """Standard Gumbel noise: added to logarithms of weights, the largest are a draw in proportion to the weights."""
    return -jnp.log(-jnp.log(jnp.clip(uniform(view, 1), LEAST, 1 - LEAST)))


@dataclasses.dataclass(frozen=True)
class DrawnNorms:
    """A draw by CUR's product of norms to the power `1 / temperature`, in place of the largest under a fresh projection."""

    temperature: float
    needs = Needs()

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        return jnp.log(NormProduct(0, 0)(view) + LEAST) + self.temperature * gumbel(view)


@dataclasses.dataclass(frozen=True)
class ProjectedByHead:
    """CUR with projections of its own for each KV head, for keys and for values."""

    rank: int
    needs = Needs()

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        heads, size = view.key.shape[1], view.key.shape[-1]

        def draw(layer: Array, num_seen: Array) -> Float[Array, "2 K H r"]:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), layer), num_seen)
            return jax.random.normal(key, (2, heads, size, self.rank)) * self.rank**-0.5

        projections = jax.vmap(draw)(layer_of(view), view.num_seen)
        project = functools.partial(jnp.einsum, "bksh,bkhr->bksr", precision="highest")
        key, value = project(view.key, projections[:, 0]), project(view.value, projections[:, 1])
        return (key**2).sum(axis=-1) * (value**2).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Stratified:
    """CUR's ranks within blocks of positions: each block keeps its best slot before any keeps its second."""

    block: int
    needs = Needs()

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        product = NormProduct(20, 0)(view)
        block = view.position // self.block
        shares = (block[..., :, None] == block[..., None, :]) & view.is_filled[..., None, :]
        rank = (shares & (product[..., None, :] > product[..., :, None])).sum(axis=-1)
        return product / (product.max(axis=-1, keepdims=True) + LEAST) * 0.99 - rank.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Remembered:
    """The attention of the last queries, remembered from compaction to compaction: the largest, or the fading sum."""

    decay: float
    is_sum: bool = False
    needs = Needs(window=WINDOW, carried=True)

    def __call__(self, view: CacheView) -> tuple[Float[Array, "B K S"], Float[Array, "B K S"]]:
        assert view.carried is not None
        now, before = largest_attention(view, WINDOW), self.decay * view.carried
        kept = now + before if self.is_sum else jnp.maximum(now, before)
        return kept, kept


@dataclasses.dataclass(frozen=True)
class ForesightAndMemory:
    """Foresight's logarithm plus `weight` times that of the largest attention so far."""

    weight: float
    needs = INPUTS_NEED | Needs(window=WINDOW, carried=True)

    def __call__(self, view: CacheView) -> tuple[Float[Array, "B K S"], Float[Array, "B K S"]]:
        assert view.carried is not None
        largest = jnp.maximum(largest_attention(view, WINDOW), view.carried)
        return ExpectedReads()(view) + self.weight * jnp.log(largest + 1e-3), largest


@dataclasses.dataclass(frozen=True)
class DrawnForesight:
    """A draw by what foresight expects, in place of the largest."""

    temperature: float
    needs = INPUTS_NEED

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        return ExpectedReads()(view) + self.temperature * gumbel(view)


@dataclasses.dataclass(frozen=True)
class ExpectedShares:
    """What foresight expects as shares of each head, which can compete for a layer's slots."""

    needs = INPUTS_NEED

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        return jax.nn.softmax(jnp.where(view.is_filled, ExpectedReads()(view), -jnp.inf), axis=-1)


@dataclasses.dataclass(frozen=True)
class Lead:
    """A score to try: its name, the name of the one that it was to improve, and how it is protected and ranked."""

    name: str
    beside: str
    score: Any
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)

    def policy(self, budget: int, network: Foresight) -> Policy:
        """The lead as a policy."""
        settings = {"sinks": SINKS, "recent": RECENT} | self.settings
        calibration = network if self.score.needs.calibration else None
        return Policy(self.name, Evict(self.score, **settings), Every(budget, INTERVAL), calibration=calibration)


OPEN, WIDE = {"sinks": 0}, {"sinks": 0, "recent": WINDOW}
LEADS = (
    Lead("foresight", "", ExpectedReads(), OPEN),
    Lead("foresight, heads compete, floor 0.2", "foresight", ExpectedShares(), OPEN | {"scope": "compete"}),
    Lead("foresight, heads compete, floor 0.5", "foresight", ExpectedShares(), OPEN | {"scope": "compete", "floor": 0.5}),
    Lead("foresight, drawn, temperature 0.5", "foresight", DrawnForesight(0.5), OPEN),
    Lead("foresight, drawn, temperature 1", "foresight", DrawnForesight(1.0), OPEN),
    Lead("foresight, 16 recent", "", ExpectedReads(), WIDE),
    Lead("foresight and memory, weight 0.25", "foresight, 16 recent", ForesightAndMemory(0.25), WIDE),
    Lead("foresight and memory, weight 1", "foresight, 16 recent", ForesightAndMemory(1.0), WIDE),
    Lead("memory of attention, largest", "", Remembered(1.0), WIDE | {"sinks": SINKS}),
    Lead("memory of attention, sum, decay 0.9", "", Remembered(0.9, is_sum=True), WIDE | {"sinks": SINKS}),
    Lead("cur", "", NormProduct(20, 0)),
    Lead("cur, exact norms", "cur", NormProduct(0, 0)),
    Lead("cur, rank 5", "cur", NormProduct(5, 0)),
    Lead("cur, projections by head", "cur", ProjectedByHead(20)),
    Lead("cur, exact norms, drawn, temperature 1", "cur", DrawnNorms(1.0)),
    Lead("cur, stratified by 8 positions", "cur", Stratified(8)),
    Lead("random", "", Uniform()),
)
PARTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "without age": {"without": ["age"]},
    "without key": {"without": ["key"]},
    "without value": {"without": ["value"]},
    "plain attention": {"power": 1},
    "4 hidden units": {"hidden": 4},
}


def traces(model: Model, count: int, skip: int = 0) -> list[Text]:
    """The model's own traces of unseen problems."""
    out, _ = solve(model, held_out(skip + count, SEED, model.tokenizer)[skip:], full(), progress=False)
    return [(out.prompts[i].tolist(), out.tokens[i, : out.lengths[i]].tolist()) for i in range(count)]


def slots_of(texts: list[Text], share: float) -> int:
    """A share of the mean length of the texts."""
    return round(share * float(np.mean([len(prompt) + len(rest) for prompt, rest in texts])))


def measure(
    model: Model, network: Foresight, texts: list[Text], leads: list[Lead], share: float, report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """A line for each lead, a few of them at a time, as each keeps the traces of its texts."""
    budget = slots_of(texts, share)
    found: dict[str, Recall] = {}
    for start in range(0, len(leads), 4):
        policies = [lead.policy(budget, network) for lead in leads[start : start + 4]]
        for one in recall(model, texts, policies, interval=INTERVAL, recent=RECENT, max_running=len(texts), page_size=4):
            found[one.name] = one
            report(f"{one.name}: {one.loss.mean():.4f} nats")
    lines = [line_of(found["oracle"], None, budget)]
    return lines + [line_of(found[lead.name], found.get(lead.beside), budget) for lead in leads]


def ablate(model: Model, training: list[Text], texts: list[Text], share: float, steps: int) -> list[dict[str, Any]]:
    """A line for foresight with each part left out, all trained alike."""
    budget = slots_of(texts, share)
    joined = [[*prompt, *rest] for prompt, rest in training]
    lead, policies = LEADS[0], []
    for name, settings in PARTS.items():
        network = foresee(model, joined, steps=steps, **settings)
        policies.append(dataclasses.replace(lead.policy(budget, network), name=name))
    whole, *others = recall(model, texts, policies, interval=INTERVAL, recent=RECENT, max_running=len(texts), page_size=4)[1:]
    return [line_of(whole, None, budget), *(line_of(one, whole, budget) for one in others)]


def line_of(one: Recall, beside: Recall | None, budget: int) -> dict[str, Any]:
    """The figures of a lead, and its loss over that of the score that it was to improve, with a 95 % interval."""
    line: dict[str, Any] = {"name": one.name, "budget": budget}
    line |= {"recall": digits(one.recall.mean(), 3), "sharp_recall": digits(one.sharp_recall.mean(), 3)}
    line |= {"loss": digits(one.loss.mean(), 3)}
    if beside is not None:
        difference = one.loss - beside.loss
        line |= {"beside": beside.name, "change": digits(difference.mean(), 3)}
        line |= {"interval": [digits(end, 3) for end in bootstrap(difference)]}
    return line


def rows_of(lines: list[dict[str, Any]], has_recall: bool = True) -> str:
    """A table with a row for each line, without the columns of recall where a lead changes only how the kept slots are read."""
    columns, rows = ["score", "loss, nats", "change (95 %)", "beside"], []
    for line in lines:
        change = f"{line['change']:+.3f} [{line['interval'][0]:+.3f}, {line['interval'][1]:+.3f}]" if "change" in line else ""
        rows.append([line["name"], f"{line['loss']:.3f}", change, line.get("beside", "")])
        if has_recall:
            rows[-1][1:1] = [f"{line['recall']:.3f}", f"{line['sharp_recall']:.3f}"]
    if has_recall:
        columns[1:1] = ["recall", "of look-ups"]
    return markdown(columns, rows)


def table(record: dict[str, Any]) -> str:
    """Both tables."""
    budget, count = record["leads"][0]["budget"], record["texts"]
    return "\n\n".join(
        [
            f"{count} traces of tiny-reasoner, {budget} slots ({record['share']:.0%} of the mean length), compacted every "
            f"{INTERVAL} tokens.",
            rows_of(record["leads"]),
            f"Networks trained alike ({record['training']} traces, {record['steps']} steps), without one part each:",
            rows_of(record["ablation"]),
            footnote(record),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20, help="traces that are measured (default %(default)s)")
    parser.add_argument("--training", type=int, default=60, help="traces for the networks (default %(default)s)")
    parser.add_argument("--steps", type=int, default=800, help="of their training (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.15, help="of the mean length that is kept (default %(default)s)")
    parser.add_argument("--leads", help="names of some of the scores, separated by semicolons; default: all")
    parser.add_argument("--out", type=Path, help="a folder for leads.json and leads.md")
    options = parse(parser, argv)
    wanted = None if options.leads is None else [name.strip() for name in options.leads.split(";")]
    leads = [lead for lead in LEADS if wanted is None or lead.name in wanted]
    model = checkpoint.load("tiny-reasoner")
    texts, training = traces(model, options.texts), traces(model, options.training, options.texts)
    record: dict[str, Any] = {"about": about("python -m jkv.evaluation.leads"), "texts": options.texts, "share": options.share}
    record |= {"training": options.training, "steps": options.steps}
    network = Foresight.load(shipped_networks()["tiny-reasoner"])
    record["leads"] = measure(
        model, network, texts, leads, options.share, lambda line: print(line, file=sys.stderr, flush=True)
    )
    record["ablation"] = ablate(model, training, texts, options.share, options.steps)
    print(table(record))
    if options.out:
        write("leads", record, table(record), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
