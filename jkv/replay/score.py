"""Log-probabilities of given tokens in one parallel forward pass, with a full cache or replaying a compressed one.

A trace is a set of attention columns `(source, begin, end)` for each layer and KV head: the query at position q reads the key
of token `source` when `begin <= q < end`. Every token starts as the column (t, t, `OPEN_END`); eviction sets its end. A replay
of the trace gives the log-probabilities that the engine drew from, and their gradients, which training on compressed rollouts
needs. It also tests pool, compaction, kernels and engine at once.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv.checkpoints.adapters import Adapter, load_adapter
from jkv.checks import check_between, check_counts, typed
from jkv.errors import refused
from jkv.model import decoder
from jkv.model import sampling as distributions
from jkv.model.experts import check_experts, given_routes
from jkv.model.padding import check_not_padded, parts_of, without_padding
from jkv.model.params import Model, Params
from jkv.model.rotary import rotary_angle
from jkv.model.sampling import MOST_TOP, Sampling, SamplingRows, TokenCounts, counts_in_block, rows_of
from jkv.model.top_tokens import NO_TOKEN, TopTokens, find_top, log_probs_at
from jkv.reasoning import steering
from jkv.replay import sealed
from jkv.replay.columns import Columns, dense_columns, fit_tokens, trace_columns
from jkv.replay.on_mesh import AnyMesh, mesh_of, num_row_shards, on_mesh
from jkv.replay.other_groups import with_other_groups
from jkv.replay.trace import Trace
from pallas_kernels.quantised import straight_through
from pallas_kernels.sealed import SealedFormat

UNEMBED_BLOCK = 64  # tokens whose logits exist at once
MAX_TOKENS = 65_536  # of a program, padding included
DENSE = "dense"  # in place of a trace, for the full cache


@runtime_checkable
class Completed(Protocol):
    """The fields of a result that `score` reads; `jkv.Result` has them."""

    tokens: np.ndarray  # [n, T]
    lengths: np.ndarray  # [n]
    prompts: list[np.ndarray]
    sampling: list[Sampling]


@dataclasses.dataclass(frozen=True, repr=False)
class Scores:
    """Log-probabilities of completions.

    Attributes:
      logprobs: `[n, T]` float32, of each completion token under the distribution it was drawn from; 0 in padding.
      top: the most likely tokens of these distributions: `tokens` and `logprobs`, `[n, T, k]`, best first, and `rest`,
        `[n, T]`, the log-probability of all others together. None unless asked for.
      vocab_size: of the model.
    """

    logprobs: Float[Array, "n T"]
    top: TopTokens | None = None
    vocab_size: int = 0

    def __repr__(self) -> str:
        top = "" if self.top is None else f", top: {self.top.tokens.shape[-1]} tokens"
        return f"Scores(logprobs: {self.logprobs.dtype} {list(self.logprobs.shape)}{top})"


class ReplayAttention(NamedTuple):
    """Every token of a sequence attends over columns (`jkv.model.decoder.Attend`); nothing is cached.

    Where the columns have a format, keys and values are quantised and dequantised first, with the gradient of doing neither.
    """

    place: Int[Array, "n T"]  # of each token in its row, which is its position where the row is one sequence
    columns: Columns
    turn: Float[Array, "n T half"] | None  # radians by which queries are rotated for the sinks
    unrotated: tuple[int, ...] = ()  # layers without RoPE

    def __call__(
        self,
        layer: int,
        query: Float[Array, "n T N H"],
        key: Float[Array, "n T K H"],
        value: Float[Array, "n T K H"],
        cache: None,
        sink: Float[Array, " N"] | None = None,
        is_stored: bool = False,
    ) -> tuple[Float[Array, "n T N H"], None]:
        """Attention over the columns of a layer."""
        sinks, columns, sorts = self.columns.sinks, self.columns.of_layer(layer), self.columns.walk.sorts
        if isinstance(self.columns.kv_format, SealedFormat):
            key, value, columns = sealed.with_records(key, value, columns, self.columns.kv_format)
        elif self.columns.kv_format is not None:
            key, value = (straight_through(x, self.columns.kv_format) for x in (key, value))
        if sinks is None:
            return kernels.replay_attention(query, key, value, self.place, *columns, sink=sink, sorts=sorts), None
        # One softmax over sinks and other keys: heads are twice as wide, the first half for other keys, the second for sinks.
        assert self.turn is not None
        turned = query if layer in self.unrotated else decoder.rotate(query, jnp.cos(self.turn), jnp.sin(self.turn))
        is_sink = (jnp.arange(key.shape[1], dtype=jnp.int32) < sinks[:, None])[..., None, None]
        query = jnp.concatenate([query, turned], axis=-1) * 2**0.5  # the kernel divides by the root of the doubled size
        key = jnp.concatenate([jnp.where(is_sink, 0, key), jnp.where(is_sink, key, 0)], axis=-1)
        value = jnp.concatenate([value, jnp.zeros_like(value)], axis=-1)
        out = kernels.replay_attention(query, key, value, self.place, *columns, sink=sink, sorts=sorts)
        return out[..., : out.shape[-1] // 2], None


def score(
    model: Model | Params,
    out_or_tokens: Completed | Any,
    trace: Trace | str | None = DENSE,
    *,
    prompts: Sequence[Any] | None = None,
    prompt_mask: Any = None,
    lengths: Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_tokens: int = MAX_TOKENS,
    mesh: AnyMesh | None = None,
    routed_experts: Any = None,
    top: int = 0,
    adapter: Adapter | None = None,
) -> Scores:
    """The log-probability of every completion token in nats: with a full cache, or (`trace=out.trace`) with the compressed one.

    `out_or_tokens` is what `generate` returned, with its prompts and sampling settings; or completion tokens `[n, T]`, with
    `prompts` (token ids, one for each row; padded rows have a `prompt_mask` with a 1 for each token, as a tokenizer's
    `attention_mask`), `lengths` (default: all T) and `sampling` (default: temperature 1). Differentiable
    with respect to the weights. One forward pass: no T x T mask and no `[n, T, V]` array ever exists. It takes the rows in
    groups of at most `max_tokens` tokens, padding included, and at least one row, which bounds its memory.

    On a `mesh`, by default that of the weights (`jkv.shard`), each device computes its heads, and its rows where the mesh has
    other axes than "tensor".

    With `routed_experts=out.routed_experts`, tokens go through the experts that they went through in the engine, with the
    weights that the router gives these (`jkv.model.experts`); None lets the router choose.

    With top-k or top-p, a token that the scored distribution cuts has `-inf`: compressed and dense distributions may cut
    different tokens.

    With `top=k`, up to 64, `Scores.top` has the k most likely tokens at each place, under the same distribution, such as a
    teacher's for `jkv.rl.distillation`. Another k compiles another program.

    With `adapter`, a folder of peft or weights that have one, the model scores with it (`jkv.load_adapter`).

    Raises:
      ValueError: tokens without prompts, a trace or experts of another shape, the trace None of a result that recorded none,
        a `top` out of its range, or a mesh that does not divide the model.
    """
    if adapter is not None:
        model = load_adapter(model if isinstance(model, Model) else Model(model), adapter)
    params = model.params if isinstance(model, Model) else model
    check_between(0, MOST_TOP, top=(top := typed("top", top, int)))
    mesh, max_tokens = mesh_of(params, mesh), typed("max_tokens", max_tokens, int)
    check_counts(max_tokens=max_tokens)
    if not isinstance(trace, Trace) and trace != DENSE:
        raise refused(
            f'trace must be what generate(..., return_trace=True) recorded, or "{DENSE}", the default, for the full cache; got '
            f"{trace!r}. Generate with return_trace=True, or leave trace out.",
            trace="wrong_type",
        )
    columns = trace if isinstance(trace, Trace) else None
    if prompts is None:
        if prompt_mask is not None:
            rule = "prompt_mask is of prompts=; a result has its prompts without padding. Leave it out."
            raise refused(rule, prompt_mask="conflict")
        if not isinstance(out_or_tokens, Completed):
            rule = "Scoring bare tokens needs `prompts`, the token ids before each row; got none. Pass prompts."
            raise refused(rule, prompts="missing")
        tokens, prompts, lengths = out_or_tokens.tokens, out_or_tokens.prompts, out_or_tokens.lengths.tolist()
        sampling = out_or_tokens.sampling if sampling is None else sampling
    else:
        tokens = np.asarray(out_or_tokens)
        prompts, prompt_mask = parts_of(prompts, prompt_mask)
        if prompt_mask is None:
            check_not_padded(model if isinstance(model, Model) else None, prompts)
        else:
            prompts = without_padding(prompts, prompt_mask)
    num_samples, width = tokens.shape
    counts = [width] * num_samples if lengths is None else [int(length) for length in lengths]
    settings = [sampling] * num_samples if isinstance(sampling, Sampling) else list(sampling or [Sampling()] * num_samples)
    if not len(prompts) == len(counts) == len(settings) == num_samples:
        got = f"{num_samples} rows of tokens, {len(prompts)} prompts, {len(counts)} lengths, {len(settings)} settings"
        rule = f"Every row of tokens needs one prompt, one length and one sampling setting; got {got}."
        raise refused(rule, tokens="conflict")
    check_tokens(params, tokens, prompts)
    totals = [len(prompt) + count for prompt, count in zip(prompts, counts, strict=True)]
    check_trace(columns, params, totals, is_whole=isinstance(out_or_tokens, Completed))
    experts = None if routed_experts is None else check_experts(routed_experts, params.config, totals)
    if not num_samples:
        best = TopTokens(jnp.zeros((*tokens.shape, top), jnp.int32), jnp.zeros((*tokens.shape, top)), jnp.zeros(tokens.shape))
        return Scores(jnp.zeros(tokens.shape), best if top else None, params.config.vocab_size)
    parts = []
    shards = num_row_shards(mesh)
    most = shards * max(1, max_tokens // round_up(max(totals, default=1)) // shards)
    for start in range(0, num_samples, most):
        rows = slice(start, min(start + most, num_samples))
        part = None if columns is None else columns.part(rows)
        of_rows = None if experts is None else experts[rows]
        parts.append(score_rows(params, tokens[rows], prompts[rows], counts[rows], settings[rows], part, mesh, of_rows, top))
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return Scores(whole.log_prob, whole.top, params.config.vocab_size)


def check_tokens(params: Params, tokens: np.ndarray, prompts: Sequence[Any]) -> None:
    """Refuses tokens and prompts that cannot be scored."""
    size = params.config.vocab_size
    for i, ids in enumerate([*prompts, tokens]):
        name = f"prompt {i}" if i < len(prompts) else "tokens"
        if isinstance(ids, str):
            rule = f"Scoring takes token ids; {name} is text. Encode it with the model's tokenizer."
            raise refused(rule, tokens="wrong_type")
        ids = np.asarray(ids)
        if ids.size == 0 and i < len(prompts):
            rule = f"A prompt must hold at least one token, which the first completion token follows; {name} is empty."
            raise refused(rule, prompts="missing")
        if ids.size and (ids.min() < 0 or ids.max() >= size):
            rule = f"Token ids must lie in [0, {size}); {name} holds {ids[(ids < 0) | (ids >= size)][0]}."
            raise refused(rule, tokens="out_of_range")


def check_trace(trace: Trace | None, params: Params, totals: Sequence[int], is_whole: bool) -> None:
    """Refuses a trace of another model or batch, or of texts that were shorter than the rows of `totals` tokens.

    Where the rows are whole results, so are the texts of their trace; bare tokens may be the first ones of a longer text.
    """
    config = params.config
    expected = (len(totals), config.num_paged_layers, config.num_kv_heads)
    if trace is not None and trace.shape[:3] != expected:
        raise refused(
            f"A trace must have columns for each sample, layer with full attention and KV head, here {expected}; got "
            f"{trace.shape[:3]}. Pass the trace of the call that made the tokens, `out.trace`.",
            trace="does_not_fit",
        )
    for row, total in enumerate(totals if trace is not None else ()):
        assert trace is not None
        source, begin, end = trace.columns(row, 0)
        covered = 1 + int(np.max(source[0], where=end[0] > begin[0], initial=-1))
        if covered < total or (is_whole and covered > total):
            raise refused(
                f"A trace must cover the tokens that are scored; row {row} has {total}, and the trace {covered}. Pass the "
                "trace of the call that made the tokens, `out.trace`.",
                trace="does_not_fit",
            )


def score_rows(
    params: Params,
    tokens: np.ndarray,
    prompts: Sequence[Any],
    lengths: Sequence[int],
    settings: Sequence[Sampling],
    trace: Trace | None,
    mesh: AnyMesh | None = None,
    experts: np.ndarray | None = None,
    top: int = 0,
) -> "TokenScores":
    """`score` of the rows of one program, by completion; those that a mesh needs more are copies of the last."""
    num_samples, width = tokens.shape
    more = -num_samples % num_row_shards(mesh)
    if more:
        index = [*range(num_samples), *[num_samples - 1] * more]
        rows: Any = ([values[i] for i in index] for values in (prompts, lengths, settings))
        part = None if trace is None else trace.part(np.array(index))
        of_rows = None if experts is None else experts[index]
        scores = score_rows(params, tokens[index], *rows, trace=part, mesh=mesh, experts=of_rows, top=top)
        return jax.tree.map(lambda x: x[:num_samples], scores)
    sequence, starts = join(tokens, prompts, lengths)
    total = sequence.shape[1]
    columns = dense_columns(params.config, num_samples, total) if trace is None else trace_columns(trace, total)
    scores = token_scores(
        params,
        jnp.asarray(sequence),
        columns._replace(experts=fit_tokens(experts, total)),
        rows_of(settings),
        start=starts,
        mesh=mesh,
        top=top,
    )
    offset = np.arange(width, dtype=np.int32)
    row, place = np.arange(num_samples, dtype=np.int32)[:, None], np.minimum(starts[:, None] + offset, total - 1)
    is_token = offset < np.array(lengths, np.int32)[:, None]
    picked = jax.tree.map(lambda x: x[row, place], scores)
    return scores_where(is_token, picked)


def join(tokens: np.ndarray, prompts: Sequence[Any], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each prompt followed by its completion, `[n, T]`, right-padded to one of a few widths; and where completions start."""
    starts = np.array([len(prompt) for prompt in prompts], np.int32)
    sequence = np.zeros((len(tokens), round_up(int(np.max(starts + np.array(lengths, np.int32), initial=1)))), np.int32)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        sequence[i, : starts[i]] = prompt
        sequence[i, starts[i] : starts[i] + length] = tokens[i, :length]
    return sequence, starts


class TokenScores(NamedTuple):
    """Of the distribution that each token is drawn from, in nats; 0 for the first token, which nothing precedes."""

    log_prob: Float[Array, "n T"]  # the token's own
    entropy: Float[Array, "n T"] | None = None  # the distribution's; None where it is not asked for, as what follows
    top: TopTokens | None = None  # the most likely tokens
    classes: Float[Array, "n T classes"] | None = None  # the tokens that were asked for, and last all others together


def scores_where(mask: Any, scores: TokenScores) -> TokenScores:
    """The scores where the mask is True; elsewhere log-probabilities and entropies of 0, and no most likely tokens."""

    def put(x: Any, fill: float) -> Any:
        return jnp.where(mask if x.ndim == 2 else mask[..., None], x, jnp.asarray(fill, x.dtype))

    found, top = jax.tree.map(lambda x: put(x, 0), scores), scores.top
    if top is None:
        return found
    return found._replace(top=TopTokens(put(top.tokens, NO_TOKEN), put(top.logprobs, -jnp.inf), put(top.rest, 0)))


@functools.partial(jax.jit, static_argnames=("with_entropy", "mesh", "remat", "top"))
def token_scores(
    params: Params,
    token: Int[Array, "n T"],
    columns: Columns,
    settings: SamplingRows,
    start: Int[Array, " n"] | None = None,
    mesh: AnyMesh | None = None,
    remat: bool = False,
    with_entropy: bool = False,
    top: int = 0,
    asked: Int[Array, "n T k"] | None = None,
) -> TokenScores:
    """The log-probability of each token given those before it, and what else is asked for. Logits are computed in blocks.

    `top` is how many most likely tokens, and `asked` has other tokens at each place, whose log-probabilities are wanted.
    `start` is where completions begin, which penalties need. With `remat`, a gradient keeps the residual stream alone between
    layers, and computes each layer once more. Cuts are data: another top-p, or the first one, compiles nothing.
    """
    run = functools.partial(scores_of_rows, remat=remat, with_entropy=with_entropy, top=top)
    if mesh is None:
        return run(params, columns, token, settings, start, asked)
    return on_mesh(run, mesh, params, columns, (token, settings, start, asked))


def scores_of_rows(
    params: Params,
    columns: Columns,
    token: Int[Array, "n T"],
    settings: SamplingRows,
    start: Int[Array, " n"] | None,
    asked: Int[Array, "n T k"] | None,
    *,
    remat: bool,
    with_entropy: bool,
    top: int,
) -> TokenScores:
    """`token_scores` of the rows, and with the heads, of one device."""
    hidden_nTD, count = hidden_states(params, token, columns, remat), counter_of(params, settings, token, start)

    @jax.checkpoint
    def pick(
        hidden_nID: Float[Array, "n I D"],
        target_nI: Int[Array, "n I"],
        position_nI: Int[Array, "n I"],
        *asked_nIk: Int[Array, "n I k"],
    ) -> TokenScores:
        log_probs_nIV = log_distributions(params, hidden_nID, settings, count(position_nI))
        own_nI = jnp.take_along_axis(log_probs_nIV, target_nI[..., None], axis=-1)[..., 0]
        return TokenScores(
            own_nI,
            entropy_of(log_probs_nIV) if with_entropy else None,
            find_top(log_probs_nIV, top) if top else None,
            log_probs_at(log_probs_nIV, *asked_nIk) if asked_nIk else None,
        )

    following = [jnp.roll(x, -1, axis=1) for x in (token, asked) if x is not None]
    scores = over_blocks(pick, hidden_nTD, following[0], positions_of(token), *following[1:])
    return jax.tree.map(lambda x: jnp.roll(x, 1, axis=1).at[:, 0].set(0), scores)


def entropy_of(log_probs: Float[Array, "*n V"]) -> Float[Array, "*n"]:
    """The entropy of distributions in nats, from 0 to ln V; tokens that are cut (`-inf`) add nothing."""
    is_there = log_probs > -jnp.inf
    return -(jnp.exp(log_probs) * jnp.where(is_there, log_probs, 0.0)).sum(axis=-1)


def counter_of(
    params: Params, settings: SamplingRows, token: Int[Array, "n T"], start: Int[Array, " n"] | None
) -> Callable[[Int[Array, "n I"]], TokenCounts | None]:
    """A function of a block of positions: the counts after the token at each, which penalties read; None without any."""
    if settings.penalties is None:
        return lambda position: None
    assert start is not None
    return lambda position: counts_in_block(token, start, position, params.config.vocab_size)


def positions_of(token: Int[Array, "n T"]) -> Int[Array, "n T"]:
    """The position of each token."""
    return jnp.broadcast_to(jnp.arange(token.shape[1], dtype=jnp.int32), token.shape)


def hidden_states(params: Params, token: Int[Array, "n T"], columns: Columns, remat: bool = False) -> Float[Array, "n T D"]:
    """The final hidden state of each token when attention reads `columns`; unembedded, it gives the next token's logits."""
    place = position = positions_of(token)
    if columns.first is not None:
        position = place - columns.first
    turn = None if columns.sink_shift is None else rotary_angle(params.config, columns.sink_shift)
    enter, steer = None, columns.steer
    if steer is not None:
        enter = functools.partial(steering.push, steer.vector, steer.layer, steer.amount)
    paged = ReplayAttention(place, columns, turn, params.config.unrotated)
    attend = with_other_groups(params.config, paged, place, columns.first)
    choose = given_routes(params.config, columns.experts)
    return decoder.forward(params, token, position, attend, None, enter, choose=choose, remat=remat)[0]


def log_distributions(
    params: Params,
    hidden: Float[Array, "n I D"],
    settings: SamplingRows,
    counts: TokenCounts | None = None,
) -> Float[Array, "n I V"]:
    """The log-probabilities of every vocabulary token as the next one, under each row's settings."""
    truncates = distributions.any_cuts(settings)
    settings = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], hidden.shape[:2]), settings)
    return distributions.log_distribution(decoder.unembed(params, hidden), settings, truncates, counts)


def over_blocks(f: Callable[..., Any], *arrays: Array) -> Any:
    """`f` of arrays `[n, T, ...]`, one block of tokens at a time, so that only one block of logits exists at once.

    `f` returns arrays `[n, I, ...]` of a block's tokens; returned are these arrays of all tokens, `[n, T, ...]`.
    """
    num_samples, total = arrays[0].shape[:2]

    def blocks(x: Array) -> Array:
        padded = jnp.pad(x, [(0, 0), (0, -total % UNEMBED_BLOCK)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(padded.reshape(num_samples, -1, UNEMBED_BLOCK, *x.shape[2:]), 1, 0)

    out = jax.lax.map(lambda block: f(*block), tuple(blocks(x) for x in arrays))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(num_samples, -1, *x.shape[3:])[:, :total], out)


def round_up(size: int) -> int:
    """The next of a few sizes (1, 1.25, 1.5 and 1.75 times a power of two), so that few shapes ever compile.

    >>> [round_up(n) for n in (1, 100, 1152, 1500)]
    [16, 112, 1280, 1536]
    """
    quarter = max(16, 1 << (size - 1).bit_length()) // 8
    return max(16, -(-size // quarter) * quarter)
