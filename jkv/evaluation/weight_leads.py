"""Do survivors serve better with the weight of what was dropped? `python -m jkv.evaluation.weight_leads --out results`.

A policy that evicts forgets that there was more. Here a kept slot can have a weight m, whose logarithm is added to its logits,
as if its key had been read m times (as sharing does with the pages of repeated thoughts). Which slots are kept is as the policy
chose without weights. The texts are replayed with weights that come from the slots that it dropped, and the loss is compared
with that of the same slots without weights, paired by text. Traces, budget and interval are those of `jkv.evaluation.leads`.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.analysis.recall import Recall, Text, decode, loss_of, padded, queries_keys_values
from jkv.checkpoints import loading as checkpoint
from jkv.evaluation.leads import INTERVAL, OPEN, RECENT, SINKS, WIDE, WINDOW, Lead, line_of, rows_of, slots_of, traces
from jkv.eviction.scores import AttentionMass, Uniform
from jkv.limits import parse
from jkv.model import decoder
from jkv.model.params import Model, Params
from jkv.policies import full
from jkv.policies.cur import NormProduct
from jkv.policies.foresight import ExpectedReads, Foresight, shipped_networks
from jkv.policies.r_kv import ImportanceMinusRedundancy
from jkv.replay.other_groups import with_other_groups
from jkv.reports import about, footnote, write


class WeightedAttention(NamedTuple):
    """Attention in which the query at position t reads the key of position s with a weight (`jkv.model.decoder.Attend`)."""

    log_weight: Float[Array, "L K T S"]

    def __call__(
        self,
        layer: int,
        query: Float[Array, "1 T N H"],
        key: Float[Array, "1 T K H"],
        value: Float[Array, "1 T K H"],
        cache: None,
    ) -> tuple[Float[Array, "1 T N H"], None]:
        """Attention of a layer."""
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[3])
        logits = jnp.einsum("btkgh,bskh->bkgts", grouped, key, precision="highest") * query.shape[3] ** -0.5
        share = jax.nn.softmax(logits + self.log_weight[layer][:, None], axis=-1)
        out = jnp.einsum("bkgts,bskh->btkgh", share, value, precision="highest")
        return out.reshape(query.shape), None


class Moment(NamedTuple):
    """A compaction of one KV head."""

    weight: Float[np.ndarray, " T"]  # of each token before it
    is_dropped: np.ndarray  # [T]: what it drops
    is_kept: np.ndarray  # [T]: what is left
    now: int  # tokens seen
    key: Float[np.ndarray, "T H"]  # of the full cache


@dataclasses.dataclass(frozen=True)
class ToNearest:
    """Each dropped slot gives its weight to the kept slot with the nearest key, or only the `closest` share of them does."""

    closest: float = 1.0

    def __call__(self, moment: Moment) -> Float[np.ndarray, " T"]:
        dropped, kept = np.flatnonzero(moment.is_dropped), np.flatnonzero(moment.is_kept)
        apart = ((moment.key[dropped][:, None] - moment.key[kept]) ** 2).sum(axis=-1)
        giving = np.argsort(apart.min(axis=1), kind="stable")[: round(self.closest * len(dropped))]
        weight = moment.weight.copy()
        np.add.at(weight, kept[apart[giving].argmin(axis=1)], moment.weight[dropped[giving]])
        return weight


@dataclasses.dataclass(frozen=True)
class InverseProbability:
    """Each slot that a draw kept is divided by its probability to be kept (Horvitz and Thompson); of uniform draws only."""

    def __call__(self, moment: Moment) -> Float[np.ndarray, " T"]:
        place = np.arange(len(moment.weight))
        is_drawn = moment.is_kept & (place >= SINKS) & (place < moment.now - RECENT)
        probability = is_drawn.sum() / (is_drawn.sum() + moment.is_dropped.sum())
        return np.where(is_drawn, moment.weight / probability, moment.weight)


Rule = Callable[[Moment], Float[np.ndarray, " T"]]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Where weights come from, and the power to which they are raised."""

    name: str
    rule: Rule
    power: float = 1.0


BASES = (
    Lead("foresight", "", ExpectedReads(), OPEN),
    Lead("r_kv", "", ImportanceMinusRedundancy(AttentionMass(WINDOW), 0.1, 0.5, 1, False), WIDE | {"sinks": SINKS}),
    Lead("cur", "", NormProduct(20, 0)),
    Lead("random", "", Uniform()),
)
NEAREST = (
    Weights("nearest", ToNearest()),
    Weights("nearest, to the power 0.25", ToNearest(), 0.25),
    Weights("nearest, the closest quarter", ToNearest(0.25)),
)
DRAWN = (
    Weights("inverse probability", InverseProbability()),
    Weights("inverse probability, to the power 0.25", InverseProbability(), 0.25),
)
# Written down before the run: each of these is better than no weights.
CONTRASTS = tuple((base, weights) for base in BASES for weights in (*NEAREST, *(DRAWN if base.name == "random" else ())))


def weights_read(end: Int[np.ndarray, " T"], key: Float[np.ndarray, "T H"], rule: Rule) -> Float[np.ndarray, "T T"]:
    """The weight with which each query (row) of one KV head reads each key, 0 for what is dropped or not yet written.

    `end` is the first position that no longer reads a token.
    """
    total = len(end)
    place, weight = np.arange(total), np.ones(total)
    read = np.ones((total, total))
    for now, until in itertools.pairwise([*np.unique(end[end < total]).tolist(), total]):
        weight = rule(Moment(weight, end == now, (end > now) & (place < now), now, key))
        read[now:until] = np.where(end > now, weight, 0.0)
    return np.tril(read)


def log_weights(
    ends: Int[np.ndarray, "L K T"], keys: Sequence[np.ndarray], weights: Weights, width: int
) -> Float[np.ndarray, "L K S S"]:
    """What is added to the logits of each layer and KV head, padded to `width` tokens; `keys` are each layer's, [T, K, H]."""
    total = ends.shape[-1]
    out = np.full((*ends.shape[:2], width, width), -np.inf, np.float32)
    out[..., np.arange(width), np.arange(width)] = 0.0
    with np.errstate(divide="ignore"):
        for layer, head in np.ndindex(*ends.shape[:2]):
            read = weights_read(ends[layer, head], keys[layer][:total, head], weights.rule)
            out[layer, head, :total, :total] = weights.power * np.log(read)
    return out


@jax.jit
def log_probs(params: Params, token: Int[Array, "1 T"], log_weight: Float[Array, "L K T S"]) -> Float[Array, " T"]:
    """The log-probability of each token given those before it; the first one's means nothing."""
    position = jnp.arange(token.shape[1], dtype=jnp.int32)[None]
    attend = with_other_groups(params.config, WeightedAttention(log_weight), position)
    hidden = decoder.forward(params, token, position, attend, None)[0]
    log_share = jax.nn.log_softmax(decoder.unembed(params, hidden).astype(jnp.float32))
    return jnp.roll(jnp.take_along_axis(log_share, jnp.roll(token, -1, axis=1)[..., None], axis=-1)[0, :, 0], 1)


def weighted(params: Params, text: Text, ends: Int[np.ndarray, "L K T"], weights: Weights) -> np.ndarray:
    """The log-probabilities of a text's continuation under a policy's kept slots with weights."""
    tokens, start = [*text[0], *text[1]], len(text[0])
    token = padded(tokens)
    keys = [np.asarray(key) for _, key, _ in queries_keys_values(params, token)]
    added = log_weights(ends[..., : len(tokens)], keys, weights, token.shape[1])
    return np.asarray(log_probs(params, token, added))[start : len(tokens)]


def measure(model: Model, network: Foresight, texts: list[Text], budget: int) -> list[dict[str, Any]]:
    """A line for each base and for each of its contrasts."""
    settings = {"max_running": len(texts), "page_size": 4}
    dense, lines = decode(model, texts, full(), settings), []
    for base in BASES:
        kept = decode(model, texts, base.policy(budget, network), settings)
        plain = as_line(base.name, budget, loss_of(dense, kept))
        lines.append(line_of(plain, None, budget))
        for weights in (weights for of, weights in CONTRASTS if of == base):
            own = [weighted(model.params, text, trace.end[0], weights) for text, trace in zip(texts, kept.traces, strict=True)]
            loss = loss_of(dense, kept._replace(log_probs=own))
            lines.append(line_of(as_line(f"{base.name}, {weights.name}", budget, loss), plain, budget))
            print(f"{lines[-1]['name']}: {loss.mean():.4f} nats", file=sys.stderr, flush=True)
    return lines


def as_line(name: str, budget: int, loss: np.ndarray) -> Recall:
    """A loss without a recall: the slots of a base are the same with all weights."""
    return Recall(name, budget, np.full((len(loss), 1, 2), np.nan), loss)


def table(record: dict[str, Any]) -> str:
    """The table."""
    budget = record["leads"][0]["budget"]
    return "\n\n".join(
        [
            f"{record['texts']} traces of tiny-reasoner, {budget} slots ({record['share']:.0%} of the mean length), compacted "
            f"every {INTERVAL} tokens, replayed with weights for the kept slots; {len(CONTRASTS)} contrasts.",
            rows_of(record["leads"], has_recall=False),
            footnote(record),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=20, help="traces that are measured (default %(default)s)")
    parser.add_argument("--share", type=float, default=0.15, help="of the mean length that is kept (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for leads-weights.json and .md")
    options = parse(parser, argv)
    model = checkpoint.load("tiny-reasoner")
    texts, network = traces(model, options.texts), Foresight.load(shipped_networks()["tiny-reasoner"])
    record = {"about": about("python -m jkv.evaluation.weight_leads"), "texts": options.texts, "share": options.share}
    record["leads"] = measure(model, network, texts, slots_of(texts, options.share))
    print(table(record))
    if options.out:
        write("leads-weights", record, table(record), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
