"""The settings of an engine, documented once: `Engine`, `generate`, `Rollout` and the command line take the same names."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from jkv.checks import (
    check_between,
    check_counts,
    check_known,
    check_length,
    check_memory,
    check_most,
    did_you_mean,
    out_of_range,
    shown,
    typed,
)
from jkv.engine.drafters import AUTO, DRAFTERS, Drafter
from jkv.engine.scheduler import CHUNKS, ORDERS
from jkv.errors import InputError
from jkv.eviction import Policy
from jkv.limits import MOST
from jkv.model.sampling import SAMPLING_FIELDS
from pallas_kernels.choice import VARIABLE, parse_choices
from pallas_kernels.quantised import FORMATS, Format
from pallas_kernels.sealed import SEALED, SealedFormat, check_page

SIZES = "max_running", "max_slots", "page_size", "num_pages", "max_stop_ids"
COUNTS = *SIZES, "largest_prefill", "prefill_tokens", "prefix_piece"
GIVEN_ELSEWHERE = {  # settings that are not the engine's: where they are given
    **{name: f" Write sampling=jkv.Sampling({name}=...)." for name in SAMPLING_FIELDS},  # `generate` takes them as they are
    **dict.fromkeys(("stop", "stop_sequences"), " Write stop_strings=[...]."),
    **dict.fromkeys(("eos_token_id", "stop_token_ids"), " Write stop_ids=[...]."),
    **dict.fromkeys(("num_return_sequences", "num_generations", "group_size", "num_samples"), " Write n=."),
    **dict.fromkeys(("max_tokens", "max_completion_length", "max_length"), " Write max_new_tokens=."),
    **dict.fromkeys(("batch_size", "max_num_seqs"), " Write max_running=."),
    **dict.fromkeys(("messages", "prompt", "prompts", "input_ids"), " Pass messages, texts or token ids as the prompt."),
    **dict.fromkeys(
        ("logit_bias", "allowed_token_ids", "min_tokens", "bad_words", "form", "top_logprobs", "model_logprobs", "adapter"),
        " Give it to jkv.Engine(...).submit.",
    ),
    **dict.fromkeys(("response_format", "guided_json", "json_schema"), " Write form=jkv.forms.json(...)."),
    "attention_mask": " Write prompt_mask=.",
    "tokenizer": " The model has its own, model.tokenizer.",
    "do_sample": " Write temperature=0 to be greedy, and a higher one to draw.",
    "return_full_text": " Leave it out: `text` is the completion alone.",
    "streamer": " Write on_tokens=, a function that takes events.",
    "device": " Leave it out: JAX chooses it, as JAX_PLATFORMS says.",
    **{name: f" Write policy=jkv.r_kv({name}=...), or another of `jkv policies`." for name in ("budget", "interval", "window")},
}
MOST_POLICIES = 10_000  # of an engine's later requests


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is built: `jkv.Engine(model, max_running=8)` or `jkv.Engine(model, jkv.EngineOptions(max_running=8))`.

    Attributes:
      max_running: rows decoded together, refilled as they finish; at most 65,536. None is 8; for `generate` as many as there
        are samples, up to 32; for `Rollout` 32.
      max_slots: the most slots that a request may fill in a layer and KV head: prompt and completion, or, for a bounded policy,
        the longer of prompt and budget + interval; at most 2**24. It sizes the page tables. None is the model's positions, at
        most 4,096; `generate` and `Rollout` compute it from their requests.
      page_size: slots of a page, at most 65,536. None is 128 on a TPU and 16 elsewhere; `Stats.page_size` has it.
      kv_dtype: how the pool keeps keys and values: None in the weights' dtype; "int8" or "fp8" in codes of 8 bits with a scale
        for each slot's key and value, which take about half the bytes of bfloat16 and a quarter of float32's; "int4" in codes
        of 4 bits of rotated keys and values, with a scale for every 32 channels: less than a third of bfloat16. Its head sizes
        are 32, 64, 128 and so on, and attention is plain XLA. "kvarn" seals full pages, keys in 4 bits and values in 2, for
        policies that drop no slot of a page ("kvarn-k4v4": 4 and 4); pages are of 128 slots, or `page_size` 16, 32 or 64.
      kv_memory: bytes of the pool; "auto" is the device's free memory; None is the bytes of full rows. With less, fewer rows
        run at a time, and samples without a bounded policy may be preempted: swapped out to host memory and in again.
      num_pages: pages of the pool, instead of bytes.
      policies: the policies of later requests. The engine keeps the data that they need: last queries, the attention mass of
        slots (H2O, TOVA), numbers that slots carry between compactions (G-KV), bounds of pages (Quest), hidden states (SkipKV),
        vectors (SEAL). A request may have any policy that needs no other data. None keeps 8 queries, the default of R-KV and
        SnapKV. `generate` and `Rollout` set it.
      chunk: the most decode steps between two reads of the device by the host: 16, 8, 4, 2 or 1.
      largest_prefill: the most tokens that one prefill program reads, one of the sizes that the device has: 16, 64 and 128 on a
        CPU, 16, 64, 256 and 1,024 where kernels run. With smaller ones long prompts pass more programs, and rows that decode
        wait less for each. None is the largest.
      prefill_tokens: the most tokens of prompts that are prefilled between two chunks while rows decode, but at least one piece
        of `largest_prefill` tokens; None is two pieces. Chunks have at most 8 steps meanwhile. So no
        row waits for a long prompt. Tokens do not depend on it.
      first_chunk: the most decode steps of a chunk in which a row draws its first token: 16, 8, 4, 2 or 1. Fewer bring that
        token sooner to whoever reads along, and take more reads by the host, and more programs. None is as many as of other
        chunks; `jkv serve` sets 2.
      ahead: whether a chunk is dispatched before the tokens of the last one are read, so that the device does not wait for the
        host. Completions are the same, but events come a chunk later, and a row that ends by a stop token is free a chunk
        later. Policies that share, steer, compare sentences, stop evicting (`until`) or evict by a threshold wait for the
        tokens all the same. None is True except on a CPU, which would do both by itself.
      order: whom to admit first: "arrival", or "longest" (prompt and limit), which shortens the tail of a batch.
      max_stop_ids: the most stop ids of a request.
      return_trace: whether results carry attention columns for exact replay with `jkv.score`.
      routed_experts: whether results carry the experts that each token went through (`Result.routed_experts`), for scoring and
        training with the engine's own choice; of a model with a mixture of experts, and without a prefix cache.
      mesh: devices on which the engine runs tensor-parallel: `jax.sharding.Mesh(devices, ("tensor",))`. None is the mesh of the
        weights (`jkv.load(..., mesh=...)`), if they are on one; weights that are elsewhere are moved. KV heads are split over
        the devices, with their query heads, pages and weights (`jkv.shard`), so their number must divide the model's query
        heads, MLP width and vocabulary, and divide its KV heads or be a multiple of them: then several devices hold each. Pages
        and bytes are totals over all KV heads, each counted once; a number of pages that does not divide is rounded down.
        Results equal one device's except for rounding: partial sums are added in another order. Policies
        that compare KV heads (any scope but "head") gather the scores of all; a score itself sees the heads of one device.
        Where heads compete (Ada-KV), each device reserves the pages that its heads would take if they won. For more rows,
        `generate` and `Rollout` take a mesh with one more axis, "data", and run an engine of these sizes for each of its rows
        (`jkv.Replicas`). A mesh may have the devices of all processes of `jax.distributed`, which then make equal calls.
      kernels: None or "auto" takes the best kernels for the devices; "reference" computes all of them by plain XLA, on any
        device; "paged_attention=reference,take_slots=gpu" chooses some by hand. The environment variable JKV_KERNELS does the
        same for a whole process.
      prefix_cache: whether prompts stay in the pool after their requests, in pages that nothing else needs, so that later ones
        with the same beginning prefill the rest alone. `jkv serve` turns it on. Calls of `generate` and `Rollout` share the
        prefill of equal prompts without it, and their other prompts seldom begin with as many equal tokens, so they would hold
        memory in vain.
      prefix_piece: tokens of the pieces in which the prefix cache keeps prompts, or the least multiple that fills pages. None
        is as many as the largest prefill program has: then a prompt that is found has the same tokens and log-probabilities
        bit for bit. Shorter pieces find more; the rest of a prompt then passes through other programs, which may round
        otherwise. `jkv serve` sets 64.
      copy_kept: whether a row that is kept for a next turn is copied to host memory as well. Then it outlives the pool, which a
        device program that fails takes with it; without a copy, turns that continue it end with the reason "error". A copy
        takes the row's bytes, and the time to move them at the end of each turn.
      speculate: guesses of the next tokens, which a step checks all at once, so that a text that repeats itself takes fewer
        steps: `jkv.ngram()`, `jkv.siblings()`, their names, or a drafter of your own (`jkv.engine.drafters.Drafter`). With
        `jkv.draft_pages()` the model itself makes them, over some pages of its cache. Tokens are the same as in plain decoding.
        It pays where a step of several tokens a row takes hardly longer than a step of one: few rows, and a model that is not
        tiny. Rows whose policy decides with each token, or with penalties, take one token a step beside the others
        (`stats.not_drafted`). "auto" chooses `jkv.ngram` with as many guesses as should pay for `max_running` rows on this
        device, or none (`jkv.engine.policy_checks.guesses_for`). None appends one token in each step.
      max_adapters: places for low-rank adapters that requests may choose (`Engine.add_adapter`, `RequestOptions.adapter`), up
        to 1,024. Each place takes the bytes of an adapter of all matrices of attention, of feed-forward blocks and the
        unembedding. From the first adapter on, every row multiplies with one, be it zeros; before, programs have none.
      adapter_rank: the highest rank of such an adapter; lower ones are padded with zeros.
      poison: for tests: freed pages become NaN.

    Raises:
      ValueError: a setting out of its range.
    """

    max_running: int | None = None
    max_slots: int | None = None
    page_size: int | None = None
    kv_dtype: str | None = None
    kv_memory: int | str | None = None
    num_pages: int | None = None
    policies: Sequence[Policy] | None = None
    chunk: int = CHUNKS[0]
    largest_prefill: int | None = None
    prefill_tokens: int | None = None
    first_chunk: int | None = None
    ahead: bool | None = None
    order: str = "arrival"
    max_stop_ids: int = 8
    return_trace: bool = False
    routed_experts: bool = False
    mesh: jax.sharding.Mesh | None = None
    kernels: str | None = None
    prefix_cache: bool = False
    prefix_piece: int | None = None
    copy_kept: bool = False
    speculate: Drafter | str | None = None
    max_adapters: int = 0
    adapter_rank: int = 16
    poison: bool = False

    def __post_init__(self) -> None:
        for name in COUNTS:
            kind = int if name == "max_stop_ids" else int | None
            object.__setattr__(self, name, typed(name, getattr(self, name), kind))
            check_counts(**{name: getattr(self, name)})
            check_most(MOST[name], **{name: getattr(self, name)})
        typed("mesh", self.mesh, jax.sharding.Mesh | None)
        if self.policies is not None:
            if not isinstance(self.policies, Sequence) or isinstance(self.policies, str | bytes):
                rule = "{field} must be a list of the policies of later requests; got {got}. Write {field}=[...]."
                raise InputError(rule, field="policies", code="wrong_type", got=shown(self.policies))
            check_length("policies", self.policies, MOST_POLICIES, "policies")
        object.__setattr__(self, "chunk", typed("chunk", self.chunk, int))
        if self.chunk not in CHUNKS:
            raise out_of_range("chunk", f"be one of {CHUNKS}, so that few programs compile", self.chunk)
        if (first := typed("first_chunk", self.first_chunk, int | None)) is not None and first not in CHUNKS:
            raise out_of_range("first_chunk", f"be one of {CHUNKS}, or None", first)
        check_known(ORDERS, order=typed("order", self.order, str))
        if typed("kv_dtype", self.kv_dtype, str | None) not in (None, *FORMATS, *SEALED):
            rule, known = "{field} must be {known}, or None for the weights' own; got {got}. Choose one.", (*FORMATS, *SEALED)
            raise InputError(rule, field="kv_dtype", code="unknown_name", known=", ".join(known), got=shown(self.kv_dtype))
        if isinstance(self.kv_format, SealedFormat):
            check_page(self.kv_format)
        for name, least in {"max_adapters": 0, "adapter_rank": 1}.items():
            object.__setattr__(self, name, typed(name, getattr(self, name), int))
            check_between(least, MOST[name], **{name: getattr(self, name)})
        if self.kv_memory is not None and self.kv_memory != "auto":
            object.__setattr__(self, "kv_memory", check_memory(self.kv_memory))
        if isinstance(self.speculate, str):
            check_known((*DRAFTERS, AUTO), speculate=self.speculate)
            if self.speculate != AUTO:
                object.__setattr__(self, "speculate", DRAFTERS[self.speculate]())
        kernels = typed("kernels", self.kernels, str | None)
        parse_choices(os.environ.get(VARIABLE, "") if kernels is None else str(kernels))
        object.__setattr__(self, "ahead", typed("ahead", self.ahead, bool | None))
        for name in ("return_trace", "routed_experts", "prefix_cache", "copy_kept", "poison"):
            object.__setattr__(self, name, typed(name, getattr(self, name), bool))

    @property
    def kv_format(self) -> Format | None:
        """How the pool quantises keys and values; None if it does not."""
        if self.kv_dtype in SEALED:
            one = SEALED[self.kv_dtype]
            return dataclasses.replace(one, page=self.page_size or one.page)
        return None if self.kv_dtype is None else FORMATS[self.kv_dtype]

    def changed(self, settings: Mapping[str, Any], others: Iterable[str] = ()) -> "EngineOptions":
        """These options with other settings, by name; `others` are further parameters of the call that takes them.

        Raises:
          TypeError: an unknown name; the known ones are listed, and where the setting belongs, if it is another's.

        >>> EngineOptions().changed({"max_runing": 8})
        Traceback (most recent call last):
        TypeError: 'max_runing' is no setting of an engine. Did you mean max_running? The settings are: max_running, \
max_slots, page_size, kv_dtype, kv_memory, num_pages, policies, chunk, largest_prefill, prefill_tokens, first_chunk, \
ahead, order, max_stop_ids, return_trace, routed_experts, mesh, kernels, prefix_cache, prefix_piece, copy_kept, speculate, \
max_adapters, adapter_rank, poison.
        """
        known = [field.name for field in dataclasses.fields(self)]
        others = [name for name in others if name not in ("self", "settings")]
        for name in settings:
            if name not in known:
                what = f"{name!r} is no {'argument of this call, nor a setting' if others else 'setting'} of an engine."
                if name in GIVEN_ELSEWHERE:
                    raise TypeError(what + GIVEN_ELSEWHERE[name])
                hint = did_you_mean(name, [*others, *known, *GIVEN_ELSEWHERE])
                taken = f" The call takes: {', '.join(others)}." if others else ""
                raise TypeError(f"{what}{hint}{taken} The settings are: {', '.join(known)}.")
        return dataclasses.replace(self, **settings)
