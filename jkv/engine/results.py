"""What comes back: completions, events of a stream, statistics."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jkv.cache.attention import NEVER
from jkv.engine.requests import Request
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.reasoning.sharing import SharingStats
from jkv.reasoning.token_text import cut
from jkv.replay.score import SteerTrace, Trace
from pallas_kernels.dispatch import taken

if TYPE_CHECKING:
    from jkv.engine.samples import Sample


@dataclasses.dataclass(frozen=True)
class Event:
    """What a chunk brought for one sample.

    Attributes:
      ticket: of the request (`Engine.submit`); for `jkv.generate`, the index of the prompt.
      sample: index among the request's samples.
      tokens: the new ones.
      logprobs: theirs.
      text: what they add to the text, if a tokenizer is there and somebody listens. Characters that may yet turn out to be
        part of a stop string wait for the next event.
      finish_reason: empty as long as the sample goes on.
    """

    ticket: int
    sample: int
    tokens: list[int]
    logprobs: list[float]
    text: str | None
    finish_reason: str


@dataclasses.dataclass
class Completion:
    """What the engine made of a request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    log_probs_full: list[float] = dataclasses.field(default_factory=list)  # before top-k and top-p
    versions: list[int] = dataclasses.field(default_factory=list)  # of the weights that drew each token
    finish_reason: str = ""
    ends: np.ndarray | None = None  # [L, K, T] int32, traced requests only: when each token's key was dropped, or NEVER
    reads: list[np.ndarray] = dataclasses.field(default_factory=list)  # [steps, L, K, MP] bool: traced Quest's chunks
    columns: tuple[np.ndarray, ...] | None = None  # source, begin, end [L, K, C], where `ends` cannot say it
    sink_shift: np.ndarray | None = None  # [T] int32, traced and moving sinks only: see `Trace`
    steered: np.ndarray | None = None  # [T] float32, traced and steered only: how much of the vector each token got
    again: "AgainColumns | None" = None  # traced and sharing only: tokens that are read more than once
    compactions: int = 0
    evicted: float = 0.0  # tokens dropped, averaged over layers and KV heads
    shared: int = 0  # tokens whose page another stands for
    saved: float = 0.0  # the share of its pages that sharing and eviction had freed in the end
    preemptions: int = 0
    is_forked: bool = False
    peak_kv_bytes: int = 0
    queued_seconds: float = 0.0
    first_seconds: float = 0.0
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.tokens)


class AgainColumns:
    """Columns of tokens that stand for others: the same token, read once more, from some query on."""

    def __init__(self) -> None:
        self.source, self.begin = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self.end = np.zeros((1, 1, 0), np.int32)  # [L, K, n] once an eviction made layers and heads differ

    def add(self, source: np.ndarray, now: int) -> None:
        """Tokens that queries from `now` on read once more."""
        new_end = np.full((*self.end.shape[:2], len(source)), NEVER, np.int32)
        self.source = np.concatenate([self.source, source.astype(np.int32)])
        self.begin = np.concatenate([self.begin, np.full(len(source), now, np.int32)])
        self.end = np.concatenate([self.end, new_end], axis=-1)

    def drop(self, is_dropped: np.ndarray, now: int) -> None:
        """Ends the columns of tokens that were dropped at `now`, by position: [T] or [L, K, T]."""
        self.end = np.where(is_dropped[..., self.source] & (self.end == NEVER), now, self.end)

    def columns(self, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """All columns (source, begin, end: [L, K, C]), `end` being those of every token's own."""
        own = np.arange(end.shape[-1], dtype=np.int32)
        source, begin = (np.concatenate([own, extra]) for extra in (self.source, self.begin))
        whole = np.concatenate([end, np.broadcast_to(self.end, (*end.shape[:2], len(self.source)))], axis=-1)
        return np.broadcast_to(source, whole.shape), np.broadcast_to(begin, whole.shape), whole


@dataclasses.dataclass(frozen=True)
class SampleStats:
    """How one sample fared. Seconds count from its submission, and include compilation.

    Attributes:
      num_tokens: of its completion.
      peak_kv_bytes: of the pages that its row held, those shared with other rows counted in full.
      queued_seconds: until it had a row.
      first_seconds: until its first tokens were there.
      seconds: until it was finished.
      compactions: of its row.
      evicted: tokens dropped, averaged over layers and KV heads.
      shared: tokens whose page another stands for.
      saved: the share of its pages that was free again when it ended.
      preemptions: how often it was put aside to host memory.
      is_forked: whether it started from a prompt that was prefilled for several samples.
      error: what its callback, or an encoder of its policy, raised, if anything.
    """

    num_tokens: int
    peak_kv_bytes: int
    queued_seconds: float
    first_seconds: float
    seconds: float
    compactions: int
    evicted: float
    shared: int
    saved: float
    preemptions: int
    is_forked: bool
    error: BaseException | None

    @property
    def tokens_per_second(self) -> float:
        """Of its completion, from when it had a row."""
        return self.num_tokens / max(self.seconds - self.queued_seconds, 1e-9)


@dataclasses.dataclass
class RunStats:
    """What an engine held and how long it took, counted on the pool itself; bytes and seconds, without compile time."""

    kv_bytes: float = 0.0  # mean over decode chunks
    kv_bytes_per_sample: float = 0.0  # the same, by the samples that were running
    peak_kv_bytes: int = 0
    peak_sentence_bytes: int = 0  # of embeddings in host memory, for policies that go by sentences
    dense_kv_bytes: int = 0  # what full caches of the same rows would have held at their peak
    seconds: float = 0.0  # all of `Engine.step`, with or without rows
    decode_seconds: float = 0.0  # waiting for decode chunks, and for the compactions before them
    prefill_seconds: float = 0.0
    swap_seconds: float = 0.0  # to and from host memory
    compile_seconds: float = 0.0
    chunks: int = 0
    sample_chunks: int = 0  # summed over the chunks' running samples
    row_steps: int = 0  # rows times decode steps
    tokens: int = 0  # of them, those that made a token
    prefills: int = 0
    forks: int = 0  # samples that started from a prompt prefilled for several
    preemptions: int = 0
    started: int = 0  # samples that got a row
    amsr: float = 0.0  # mean over decode steps of the share of pages that rows would hold and do not hold, or not read
    steps: int = 0  # of decoding
    platform: str = "cpu"  # of the device: cpu, tpu, cuda
    sharing: SharingStats = dataclasses.field(default_factory=SharingStats)
    queued_seconds: float = 0.0  # they waited for it, together

    @property
    def kernels(self) -> dict[str, str]:
        """Which implementations of each kernel the programs of this process take on this platform."""
        return taken(self.platform)

    @property
    def occupancy(self) -> float:
        """The share of decode steps of rows that made a token."""
        return self.tokens / max(self.row_steps, 1)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by all seconds but those of compiling."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def host_seconds(self) -> float:
        """What the loop itself took: everything but waiting for device programs, and compiling."""
        return self.seconds - self.decode_seconds - self.prefill_seconds - self.swap_seconds


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call held and took, counted on the pool itself. Bytes, and seconds without compile time."""

    prompt_tokens: int
    generated_tokens: int
    evicted: float  # tokens dropped from the cache, averaged over layers and KV heads, summed over samples
    shared: int  # tokens whose page another stands for, summed over samples
    amsr: float  # average memory saving ratio: mean over decode steps of the share of the rows' pages that are saved
    final_amsr: float  # the same when each sample ended, mean over those that started
    affected_ratio: float  # tokens evicted or shared, by all tokens, prompts included
    sharing: SharingStats | None  # what sharing found; None where no policy shares
    compactions: int  # summed over samples
    kv_bytes: int  # held, mean over decode chunks
    kv_bytes_per_sample: float  # the same, by the samples that were running
    peak_kv_bytes: int
    peak_sentence_bytes: int  # of embeddings in host memory, for policies that go by sentences
    dense_kv_bytes: int  # what full caches of the same rows would have held at their peak
    tokens_per_second: float  # generated tokens by all seconds but those of compiling
    decode_tokens_per_second: float  # by decode seconds alone
    seconds: float
    decode_seconds: float  # compaction included
    prefill_seconds: float
    swap_seconds: float
    host_seconds: float  # of the loop itself
    compile_seconds: float
    occupancy: float  # share of decode steps of rows that made a token
    prefills: int
    forks: int  # samples that started from a prompt prefilled for several
    preemptions: int
    queued_seconds: float  # mean over samples, until they had a row
    kernels: dict[str, str]  # implementations of each that programs took so far: "tpu", "gpu", "cpu", plain XLA's "reference"
    seed: int  # of the random draws: given, or drawn

    @property
    def kv_bytes_saved(self) -> int:
        """What full caches of the same rows would have held at their peak, less what was held; below 0 for a full cache, whose
        last pages are partly empty.
        """
        return self.dense_kv_bytes - self.peak_kv_bytes


@dataclasses.dataclass(frozen=True)
class Result:
    """Completions, prompt-major: the n samples of the first prompt, then of the second, also for one prompt.

    Attributes:
      text: completions without end tokens or anything from a stop string on; None without a tokenizer.
      tokens: `[n, T]` int32, end tokens included, right-padded with 0.
      lengths: `[n]` tokens of each completion.
      logprobs: `[n, T]` float32, of each token under the exact distribution it was drawn from (temperature 0: temperature
        1's); 0 in padding.
      logprobs_full: the same, before top-k and top-p cut other tokens: of the whole vocabulary, temperature alone.
      finish_reason: of each sample: "stop" (an end token, a stop id or a stop string), "length", "cancelled" (by the caller, or
        Ctrl-C; what there was is kept), "error" (its callback or encoder raised), or "nan" (the model gave no finite
        probabilities).
      stats: one record for the call.
      trace: attention columns for `jkv.score`, when asked for.
      prompts: the token ids before each completion.
      sampling: the settings of each sample.
      samples: how each sample fared.
      tokenizer: the model's, None without one.
      slot_bytes: of a token's key and value in one layer and KV head.
    """

    text: list[str] | None
    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    finish_reason: list[str]
    stats: Stats
    trace: Trace | None
    prompts: list[np.ndarray]
    sampling: list[Sampling]
    samples: list[SampleStats]
    logprobs_full: np.ndarray
    tokenizer: Any = dataclasses.field(default=None, repr=False, compare=False)
    slot_bytes: int = 0


def make_result(model: Model, samples: "Sequence[Sample]", run: RunStats, is_traced: bool) -> Result:
    """Padded arrays, texts, statistics and the trace."""
    requests, completions = [sample.request for sample in samples], [sample.completion for sample in samples]
    prompts = [request.prompt for request in requests]
    lengths = np.array([len(c.tokens) for c in completions], np.int32)
    tokens = np.zeros((len(completions), np.max(lengths, initial=0)), np.int32)
    log_probs, log_probs_full = np.zeros((2, *tokens.shape), np.float32)
    for i, completion in enumerate(completions):
        tokens[i, : lengths[i]], log_probs[i, : lengths[i]] = completion.tokens, completion.log_probs
        log_probs_full[i, : lengths[i]] = completion.log_probs_full
    text = None
    if model.tokenizer is not None:
        decoded = (model.tokenizer.decode(completion.tokens, skip_special_tokens=True) for completion in completions)
        text = [cut(whole, request.stop_strings) for whole, request in zip(decoded, requests, strict=True)]
    fields = [field.name for field in dataclasses.fields(SampleStats)]
    each = [SampleStats(**{name: getattr(completion, name) for name in fields}) for completion in completions]
    num_tokens = int(lengths.sum())
    stats = Stats(
        prompt_tokens=sum(map(len, prompts)),
        generated_tokens=num_tokens,
        evicted=sum((one.evicted for one in each), 0.0),
        shared=sum(one.shared for one in each),
        amsr=run.amsr,
        final_amsr=sum((one.saved for one in each), 0.0) / max(sum(one.num_tokens > 0 for one in each), 1),
        affected_ratio=sum((one.evicted + one.shared for one in each), 0.0) / max(1, sum(map(len, prompts)) + num_tokens),
        sharing=copy.deepcopy(run.sharing) if any(request.policy.share for request in requests) else None,
        compactions=sum(one.compactions for one in each),
        kv_bytes=round(run.kv_bytes),
        kv_bytes_per_sample=run.kv_bytes_per_sample,
        peak_kv_bytes=run.peak_kv_bytes,
        peak_sentence_bytes=run.peak_sentence_bytes,
        dense_kv_bytes=run.dense_kv_bytes,
        tokens_per_second=run.tokens_per_second,
        decode_tokens_per_second=run.tokens / max(run.decode_seconds, 1e-9),
        seconds=run.seconds,
        decode_seconds=run.decode_seconds,
        prefill_seconds=run.prefill_seconds,
        swap_seconds=run.swap_seconds,
        host_seconds=run.host_seconds,
        compile_seconds=run.compile_seconds,
        occupancy=run.occupancy,
        prefills=run.prefills,
        forks=run.forks,
        preemptions=run.preemptions,
        queued_seconds=sum((one.queued_seconds for one in each), 0.0) / max(len(each), 1),
        kernels=run.kernels,
        seed=requests[0].seed if requests else 0,
    )
    return Result(
        text=text,
        tokens=tokens,
        lengths=lengths,
        logprobs=log_probs,
        finish_reason=[completion.finish_reason for completion in completions],
        stats=stats,
        trace=make_trace(completions, requests) if is_traced and requests else None,
        prompts=prompts,
        sampling=[request.sampling for request in requests],
        samples=each,
        logprobs_full=log_probs_full,
        tokenizer=model.tokenizer,
        slot_bytes=2 * model.params.config.head_size * model.params.embedding.dtype.itemsize,
    )


def make_trace(completions: Sequence[Completion], requests: Sequence[Request]) -> Trace:
    """The columns of every sample: each token's own, ended where it was evicted."""
    ends = [completion.ends for completion in completions if completion.ends is not None]
    sinks, shift = None, None
    if any(request.policy.moves_sinks for request in requests):
        sinks = np.array([request.policy.num_moving_sinks for request in requests], np.int32)
        none = np.zeros(1, np.int32)
        shift = stack_padded([none if c.sink_shift is None else c.sink_shift for c in completions])
    steer = make_steer_trace(completions, requests) if any(request.policy.steer for request in requests) else None
    if all(completion.columns is None for completion in completions):
        end = stack_padded(ends)
        own = np.broadcast_to(np.arange(end.shape[-1], dtype=np.int32), end.shape)  # a view: costs no memory
        return Trace(own, own, end, sinks, shift, steer)
    columns = []
    for completion, end in zip(completions, ends, strict=True):
        own = np.broadcast_to(np.arange(end.shape[-1], dtype=np.int32), end.shape)
        columns.append((own, own, end) if completion.columns is None else completion.columns)
    source, begin, end = (stack_padded(field) for field in zip(*columns, strict=True))
    return Trace(source, begin, end, sinks, shift, steer)


def make_steer_trace(completions: Sequence[Completion], requests: Sequence[Request]) -> SteerTrace:
    """What was added to each sample's hidden states; nothing for those that no policy steers."""
    steers = [request.policy.steer for request in requests]
    width = next(steer.values.shape[0] for steer in steers if steer)
    amount = stack_padded([np.zeros(1, np.float32) if c.steered is None else c.steered for c in completions])
    layer = np.array([steer.layer if steer else 0 for steer in steers], np.int32)
    vector = np.stack([steer.values.astype(np.float32) if steer else np.zeros(width, np.float32) for steer in steers])
    return SteerTrace(amount, layer, vector)


def stack_padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays of different width as one, filled up with zeros: columns that nobody reads."""
    width = max(array.shape[-1] for array in arrays)
    return np.stack([np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]) for array in arrays])
