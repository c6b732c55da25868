"""Recall: the share of a full cache's attention that goes to the keys a policy still reads, compared with the best possible.

A text is decoded as it stands under each policy by the engine (`forced_tokens`), so the kept sets are the real ones:
compacted again and again, computed from the states that the policy left. How much attention each key would get comes from one
pass with the full cache. The oracle knows that pass to its end, and keeps in each layer and KV head what will be read most.

Attention is counted in two ways: as it is, and squared, which counts sharp look-ups and leaves out what is spread thinly. The
second is what runs depend on. On tiny-reasoner an oracle of plain attention makes 40 % of the runs token for token with 71
slots, and an oracle of squared attention 75 % (40 runs, mean length 450, compacted every 16 tokens; 20 and 35 % with 47 slots).

A minute of this resolves what an accuracy needs thousands of problems for, because every query of every text counts. It says
how much of the attention is lost, and not what the loss does to an answer.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.cache.attention import OPEN_END
from jkv.checks import check_list, need_tokenizer, shown
from jkv.engine.prompts import encode_prompts
from jkv.engine.requests import wrong_policy
from jkv.engine.results import complete
from jkv.errors import InputError, refused
from jkv.eviction import Policy
from jkv.eviction.calibration import identity_of
from jkv.eviction.scores import attention
from jkv.generate import generate
from jkv.model import decoder
from jkv.model.params import Model, Params
from jkv.policies import full
from jkv.policies.oracle import FutureReads, Reads
from jkv.replay.columns import Columns, dense_columns, trace_columns
from jkv.replay.other_groups import with_other_groups
from jkv.replay.score import ReplayAttention, hidden_states, over_blocks, round_up, score
from jkv.replay.trace import Trace, join_traces
from jkv.reports import markdown
from jkv.statistics import with_interval

POWERS = (1, 2)  # of the attention that is counted
LOCAL = 16  # attention to keys nearer than this is left out: nearly every policy keeps them
Text: TypeAlias = tuple[Sequence[int], Sequence[int]]  # token ids: what is prefilled, and what follows


@dataclasses.dataclass(frozen=True)
class Recall:
    """What one policy keeps of the attention; each figure has one value a text.

    Attributes:
      name: of the policy, or "oracle".
      budget: slots for each layer and KV head; None if no number is fixed.
      by_layer: the share of the full cache's attention to older keys that the policy still reads, in each layer, for each of
        `POWERS`. It counts queries beyond the budget, as nothing has to go before.
      loss: by how many nats a token is less likely than with the full cache, averaged over the text.
      identical: whether a greedy run would be the text, token for token; None where that was not computed.
    """

    name: str
    budget: int | None
    by_layer: Float[np.ndarray, "texts L powers"]
    loss: Float[np.ndarray, " texts"]
    identical: np.ndarray | None = None

    @property
    def tidy(self) -> list[dict[str, Any]]:
        """A record for each text (`jkv.tidy`)."""
        figures = {name: getattr(self, name).tolist() for name in ("recall", "sharp_recall", "loss")}
        figures["identical"] = [None] * len(self.loss) if self.identical is None else self.identical.tolist()
        own = {"policy": self.name, "budget": self.budget}
        return [own | {"text": i} | {name: each[i] for name, each in figures.items()} for i in range(len(self.loss))]

    @property
    def recall(self) -> Float[np.ndarray, " texts"]:
        """The share of attention, averaged over layers."""
        return self.by_layer[:, :, 0].mean(axis=1)

    @property
    def sharp_recall(self) -> Float[np.ndarray, " texts"]:
        """The share of squared attention, averaged over layers."""
        return self.by_layer[:, :, 1].mean(axis=1)


class Kept(NamedTuple):
    """A policy's traces of all texts, and the log-probabilities of their tokens."""

    name: str
    budget: int | None
    traces: list[Trace]
    log_probs: list[np.ndarray]
    identical: np.ndarray | None = None


def recall(
    model: Model,
    texts: Sequence[Text | tuple[str, str]],
    policies: Sequence[Policy],
    *,
    interval: int = 16,
    recent: int = 1,
    local: int = LOCAL,
    **settings: Any,
) -> list[Recall]:
    """The recall of each policy on the texts, and of an oracle for each of their budgets.

    Args:
      model: whose attention it is.
      texts: pairs, the prompt and its continuation, each a text or token ids.
      policies: whose kept slots are compared.
      interval: generated tokens between two evictions of the oracle.
      recent: last tokens that the oracle always keeps.
      local: queries nearer to a key than this are not counted for it.
      settings: of the engine (`jkv.EngineOptions`).

    Raises:
      ValueError: no texts, or one without a continuation.
    """
    texts = ids_of(model, texts)
    for policy in check_list("policies", policies):
        if not isinstance(policy, Policy):
            raise wrong_policy(policy)
    if not texts or not all(len(prompt) and len(rest) for prompt, rest in texts):
        rule = "Recall needs texts, each with a prompt and tokens that follow; got none, or an empty one."
        raise refused(rule, texts="missing")
    dense, *runs = [decode(model, texts, policy, settings) for policy in (full(), *policies)]
    budgets = sorted({run.budget for run in runs if run.budget is not None})
    ends: dict[int, list[Any]] = {budget: [] for budget in budgets}
    shares: list[list[Any]] = [[] for _ in range(len(budgets) + len(runs))]  # of the oracles, then of the policies
    for i, (prompt, rest) in enumerate(texts):
        own_ends, own_shares = [], []
        for layer, received in enumerate(attention_received(model.params, [*prompt, *rest])):  # one layer's at a time
            dropped = [keep_what_is_read(received[-1], len(prompt), budget, interval, recent) for budget in budgets]
            best = [(budget, *columns_of(end)) for budget, end in zip(budgets, dropped, strict=True)]
            kept = [(run.budget, *run.traces[i].columns(0, layer)) for run in runs]
            own_ends.append(dropped)
            own_shares.append(
                [
                    [share_read(each, columns, max(len(prompt), budget or 0), local) for each in received]
                    for budget, *columns in [*best, *kept]
                ]
            )
        for budget, end in zip(budgets, zip(*own_ends, strict=True), strict=True):
            ends[budget].append(trace_of(np.stack(end)))
        for each, of_text in zip(shares, zip(*own_shares, strict=True), strict=True):
            each.append(of_text)
    oracles = [replay(model, texts, "oracle", budget, traces) for budget, traces in ends.items()]
    return [
        Recall(run.name, run.budget, np.array(by_layer), loss_of(dense, run), run.identical)
        for run, by_layer in zip([*oracles, *runs], shares, strict=True)
    ]


def loss_of(dense: Kept, run: Kept) -> Float[np.ndarray, " texts"]:
    """By how many nats a token of each text is less likely than with the full cache."""
    return np.array([(full - own).mean() for full, own in zip(dense.log_probs, run.log_probs, strict=True)])


def ids_of(model: Model, texts: Any) -> list[Text]:
    """The token ids of pairs of texts; of pairs of token ids, the same.

    Raises:
      InputError: something that is no pair.
    """
    pairs = []
    for one in check_list("texts", texts):
        if not isinstance(one, tuple | list) or len(one) != 2:
            rule = "{field} must be pairs, (prompt, continuation), each a text or token ids; got {got} among them."
            raise InputError(rule, field="texts", code="wrong_type", got=shown(one))
        prompt, rest = one
        if isinstance(prompt, str):
            prompt = encode_prompts(model, [prompt])[0].tolist()
        if isinstance(rest, str):
            need_tokenizer(model.tokenizer, "Texts are of tokens")
            rest = model.tokenizer.encode(rest, add_special_tokens=False)
        pairs.append((prompt, rest))
    return pairs


def decode(model: Model, texts: Sequence[Text], policy: Policy, settings: dict[str, Any]) -> Kept:
    """The texts decoded under a policy."""
    prompts, forced = ([list(part) for part in parts] for parts in zip(*texts, strict=True))
    out = complete(generate(model, prompts, policy, forced_tokens=forced, return_trace=True, progress=False, **settings))
    assert out.trace is not None
    traces = [out.trace.part(slice(i, i + 1)) for i in range(len(texts))]
    log_probs = [row[:length] for row, length in zip(np.asarray(out.logprobs), out.lengths, strict=True)]
    return Kept(policy.name, policy.budget, traces, log_probs)


def replay(model: Model, texts: Sequence[Text], name: str, budget: int, traces: list[Trace]) -> Kept:
    """The texts under traces that no engine recorded."""
    log_probs, identical = [], []
    for (prompt, rest), trace in zip(texts, traces, strict=True):
        log_probs.append(np.asarray(score(model, np.array([rest]), trace, prompts=[prompt]).logprobs)[0])
        identical.append(follows(model.params, [*prompt, *rest], len(prompt), trace))
    return Kept(name, budget, traces, log_probs, np.array(identical))


def padded(tokens: Sequence[int] | np.ndarray) -> Int[np.ndarray, "1 T"]:
    """Tokens at one of a few widths."""
    return np.pad(np.asarray(tokens, np.int32), (0, round_up(len(tokens)) - len(tokens)))[None]


class Watch(NamedTuple):
    """Attention over the full cache that also collects each layer's queries, keys and values (`jkv.model.decoder.Attend`)."""

    dense: ReplayAttention

    def __call__(
        self, layer: int, query: Array, key: Array, value: Array, cache: tuple[Any, ...], sink: Array | None = None
    ) -> tuple[Array, Any]:
        return self.dense(layer, query, key, value, None, sink)[0], (*cache, (query[0], key[0], value[0]))


@jax.jit
def queries_keys_values(params: Params, token: Int[Array, "1 T"]) -> tuple[Any, ...]:
    """Each layer's queries [T, N, H], keys and values [T, K, H]."""
    position = jnp.arange(token.shape[1], dtype=jnp.int32)[None]
    dense = ReplayAttention(position, dense_columns(params.config, 1, token.shape[1]), None)
    return decoder.forward(params, token, position, with_other_groups(params.config, Watch(dense), position), ())[1]


def sinks_of(params: Params) -> list[Float[Array, " N"] | None]:
    """The learned sinks of each layer with full attention."""
    return [params.layers[layer].sink for layer in params.config.paged_layers]


@functools.partial(jax.jit, static_argnames="power")
def received_so_far(
    query: Float[Array, "T N H"], key: Float[Array, "T K H"], power: int, sink: Float[Array, " N"] | None = None
) -> Float[Array, "K S1 S"]:
    """The attention to a power that the queries before each position gave each key, a mean over a KV head's query heads.

    A layer's learned sinks are in the denominator of the attention.
    """
    (total, num_heads, size), num_kv_heads = query.shape, key.shape[1]
    grouped = query.reshape(total, num_kv_heads, num_heads // num_kv_heads, size).astype(jnp.float32)
    is_seen = jnp.tril(jnp.ones((total, total), bool))

    def of_head(args: tuple[Array, Array, Array | None]) -> Float[Array, "S1 S"]:
        query_TGH, key_SH, sink_G = args
        sink_G11 = None if sink_G is None else sink_G[:, None, None]
        logits_GTS = jnp.einsum("tgh,sh->gts", query_TGH, key_SH, precision="highest") * size**-0.5
        share_TS = (attention(logits_GTS, is_seen, sink_G11) ** power).mean(axis=0)
        return jnp.pad(jnp.cumsum(share_TS, axis=0), ((1, 0), (0, 0)))

    by_head = jnp.moveaxis(grouped, 1, 0), jnp.moveaxis(key, 1, 0).astype(jnp.float32)
    return jax.lax.map(of_head, (*by_head, None if sink is None else sink.astype(jnp.float32).reshape(num_kv_heads, -1)))


def attention_received(
    params: Params, tokens: Sequence[int], powers: Sequence[int] = POWERS
) -> Iterator[list[Float[np.ndarray, "K T1 T"]]]:
    """`received_so_far` of each layer, for each of the powers."""
    for (query, key, _), sink in zip(queries_keys_values(params, padded(tokens)), sinks_of(params), strict=True):
        received = [np.asarray(received_so_far(query, key, power, sink)) for power in powers]
        yield [x[:, : len(tokens) + 1, : len(tokens)] for x in received]


def keep_what_is_read(
    received: Float[np.ndarray, "K T1 T"], start: int, budget: int, interval: int, recent: int
) -> Int[np.ndarray, "K T"]:
    """When the oracle drops each position of a layer: it keeps those that all later queries together read most."""
    num_heads, _, total = received.shape
    end = np.full((num_heads, total), OPEN_END, np.int32)
    position = np.arange(total)
    for now in range(start, total, interval):
        later = received[:, total] - received[:, now]
        later = np.where(position >= now - recent, np.inf, later)
        later = np.where((end == OPEN_END) & (position < now), later, -np.inf)
        order = np.argsort(-later, axis=1, kind="stable")[:, budget:]
        drops = np.zeros(end.shape, bool)
        np.put_along_axis(drops, order, True, axis=1)
        end[drops & (later > -np.inf)] = now
    return end


def future_reads(model: Model, text: Text, interval: int, width: int = 0) -> FutureReads:
    """What an oracle knows of a text that follows a prompt: how much each token will be read, every `interval` tokens.

    Attention is squared, as runs depend on sharp look-ups. `width` is the text's length in tokens, padded so that the arrays of
    several texts have one shape.
    """
    prompt, rest = text
    total = len(prompt) + len(rest)
    width = max(width, total)
    shape = model.config.num_paged_layers, model.config.num_kv_heads, 1 + width // interval, width
    later: Any = np.zeros(shape, np.float32)
    for layer, (received,) in enumerate(attention_received(model.params, [*prompt, *rest], powers=(2,))):
        from_moment = received[:, total, None] - received[:, len(prompt) : total : interval]
        later[layer, :, : from_moment.shape[1], :total] = from_moment
    return FutureReads(Reads(later), identity_of(model) | {"tokens": str(total)})


def trace_of(end: Int[np.ndarray, "L K T"]) -> Trace:
    """A trace in which each position is dropped at its end."""
    own = np.broadcast_to(np.arange(end.shape[-1], dtype=np.int32), end.shape)[None]
    return Trace.of(own, own, end[None])


def columns_of(end: Int[np.ndarray, "K T"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every token's own column, with its end."""
    own = np.broadcast_to(np.arange(end.shape[-1], dtype=np.int32), end.shape)
    return own, own, end


def share_read(received: Float[np.ndarray, "K T1 T"], columns: Sequence[np.ndarray], start: int, local: int) -> float:
    """The share of a layer's attention to older keys that went to keys which `columns` let the queries read."""
    num_heads, _, total = received.shape
    position = np.arange(total)
    first = np.minimum(np.maximum(position + local, start), total)
    everything = read = 0.0
    for head in range(num_heads):
        of_head = received[head]
        everything += float((of_head[total] - of_head[first, position]).sum())
        source, begin, end = distinct(*(np.asarray(field[head]) for field in columns), total=total)
        begin = np.maximum(begin, first[source])
        is_read = begin < end
        read += float((of_head[end, source] - of_head[begin, source])[is_read].sum())
    return read / everything if everything > 0 else 1.0


def distinct(
    source: np.ndarray, begin: np.ndarray, end: np.ndarray, *, total: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns cut to the text, in which no query reads a token twice: sharing may leave several columns of a token."""
    order = np.lexsort((begin, source))
    source, begin, end = (x[order].astype(np.int64) for x in (source, begin, np.minimum(end, total)))
    is_column = (begin < end) & (source < total)
    source, begin, end = source[is_column], begin[is_column], end[is_column]
    far = total + 1
    latest = np.maximum.accumulate(source * far + end)  # ends so far, those of an earlier source below all of this one's
    earlier = np.concatenate([[0], latest[:-1]]) - source * far
    return source, np.maximum(begin, earlier), end


@jax.jit
def is_most_likely(params: Params, token: Int[Array, "1 T"], columns: Columns) -> Float[Array, "1 T"]:
    """1 for each token that a greedy step under these columns would have drawn, from the second on."""
    hidden = hidden_states(params, token, columns)

    def pick(hidden_nID: Float[Array, "n I D"], target_nI: Int[Array, "n I"]) -> Float[Array, "n I"]:
        return (decoder.unembed(params, hidden_nID).argmax(axis=-1) == target_nI).astype(jnp.float32)

    return over_blocks(pick, hidden, jnp.roll(token, -1, axis=1))


def follows(params: Params, tokens: Sequence[int], start: int, trace: Trace) -> bool:
    """Whether a greedy run that reads what the trace says would make the tokens from `start` on."""
    token = padded(tokens)
    drawn = np.asarray(is_most_likely(params, token, trace_columns(join_traces([trace]), token.shape[1])))[0]
    return bool(drawn[start - 1 : len(tokens) - 1].all())


def table(figures: Sequence[Recall]) -> str:
    """One line for each policy and budget, with 95 % intervals over texts."""
    rows = [
        (
            one.name,
            "" if one.budget is None else one.budget,
            with_interval(one.recall, ".3f"),
            with_interval(one.sharp_recall, ".3f"),
            with_interval(one.loss),
            "" if one.identical is None else f"{one.identical.mean():.0%}",
        )
        for one in sorted(figures, key=lambda one: (one.budget or 0, -one.sharp_recall.mean()))
    ]
    return markdown(("policy", "slots", "recall", "of look-ups", "loss, nats a token", "identical runs"), rows)
