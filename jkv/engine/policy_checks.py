"""What an engine refuses of policies, before anything compiles: more than it keeps, another model's parts, a second gate, and
scores and schedules that raise, or that return something else.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jkv.checks import described, shown
from jkv.engine.adapter_store import unknown
from jkv.engine.drafters import Drafter, DraftPages, check_drafter, ngram
from jkv.engine.interrupts import call, deferred_interrupts
from jkv.engine.options import EngineOptions
from jkv.engine.parts.drafting import why_by_step
from jkv.engine.requests import Request
from jkv.engine.row_views import facts_for, view_of_rows
from jkv.engine.state import State
from jkv.errors import InputError, refused
from jkv.eviction import Needs, Policy
from jkv.eviction.byte_budget import check_sealing, check_sealing_on
from jkv.eviction.evict import Evict
from jkv.eviction.gate import Gate
from jkv.eviction.policy import check_parts
from jkv.eviction.schedules import check_answers
from jkv.eviction.view import ScoreError, name_of
from jkv.model import row_invariance
from jkv.model.adapter_stacks import has_adapter
from jkv.model.experts import refuse_adapters
from jkv.model.params import Model, ModelConfig, Params
from pallas_kernels.dispatch import own_platform, platform_of
from pallas_kernels.sealed import SealedFormat

ON_CPU, ON_ACCELERATOR = 8, 32  # tokens of a step that hardly takes longer than one of a token of each row


def check_policy(
    policy: Policy,
    needs: Needs,
    model: Model,
    is_trained: bool = False,
    gate: Gate | None = None,
) -> None:
    """Refuses a policy that needs more than the engine keeps, or reads another gate."""
    needs.check(policy.name, policy.needs)
    check_parts(policy, model, is_trained)
    if policy.needs.gate and policy.calibration != gate:
        rule = "An engine computes one gate for all of its rows; it has {own}, and {name} reads {got}. Build one for each gate."
        got = str(policy.calibration)
        raise InputError(rule, field="policy", code="unsupported", own=str(gate), name=policy.name, got=got)


def check_speculation(
    options: EngineOptions, policies: Sequence[Policy], config: ModelConfig, num_rows: int, max_pages: int
) -> Drafter | None:
    """The drafter of an engine, if it has one that works there; a row has at most `max_pages` in a layer and KV head.

    Raises:
      ValueError: what is wrong with it, or why no row of these policies can be guessed: each decides in every step.
    """
    if options.speculate is None:
        return None
    reasons = [why_by_step(policy) for policy in policies]
    if reasons and all(reasons):
        rule = "speculate needs rows that take several tokens in a step, and none here can: {reasons}. Leave it out."
        raise InputError(rule, field="speculate", code="unsupported", reasons="; ".join(dict.fromkeys(map(str, reasons))))
    if isinstance(options.speculate, DraftPages):
        check_draft_pages(options.speculate, options, config, max_pages)
    return check_drafter(options.speculate, config.vocab_size, num_rows)


def check_draft_pages(drafter: DraftPages, options: EngineOptions, config: ModelConfig, max_pages: int) -> None:
    """Refuses to let a model decode ahead over some of a row's pages where there are none to choose from."""
    rule, how = "", "Use jkv.ngram() instead."
    if config.num_paged_layers == 0:
        rule = "draft_pages needs layers whose keys and values are in pages; this model has none."
    elif isinstance(options.kv_format, SealedFormat):
        rule = f'draft_pages needs pages that can be written over, and kv_dtype="{options.kv_dtype}" seals them.'
    elif drafter.pages > max_pages:
        rule = f"draft_pages reads {drafter.pages} pages, and a row has at most {max_pages} here, so it would save nothing."
        how = f"Write jkv.draft_pages(pages={max_pages}) or less, or use jkv.ngram()." if max_pages > 1 else how
    if rule:
        raise refused(f"{rule} {how}", speculate="unsupported")


def guesses_for(
    params: Params, policies: Sequence[Policy], num_rows: int, kv_format: Any = None, has_adapters: bool = False
) -> Drafter | None:
    """What `speculate="auto"` means for a number of rows: guesses from a row's own text, or None if guesses do not pay.

    - On a GPU and a TPU a step of up to 32 tokens waits for its weights, whatever it computes: up to 4 tokens of each of 8
      rows. That is arithmetic of their speeds, and no device has timed it.
    - On a CPU a step of up to 8 tokens takes at most about 1.4 times one of 1 (SmolLM2-135M, two cores): up to 8 tokens of one
      row, 4 of two, 2 of four. It must also be possible to pass one token where no row has a guess, or texts without
      repetition would pay for nothing (`jkv.model.row_invariance`): so there are none beside adapters by request.
    """
    if policies and all(map(why_by_step, policies)):
        return None
    if own_platform() == "cpu":
        places = ON_CPU // num_rows
        places = places if places > 1 and not has_adapters and row_invariance.holds(params, kv_format, num_rows * places) else 1
    else:
        places = min(ON_ACCELERATOR // num_rows, 4)
    return ngram(places - 1) if places > 1 else None


class Trials:
    """Tries what the author of a policy has written, before a request with it is admitted. Nothing is computed or compiled.

    A score is tried with a `CacheView` of the shapes and types that it will get, once for all engines where they are the same;
    a schedule is asked once for each length of prompts, and again for a longer row.

    Args:
      state: the shapes of the engine's state; on a mesh, of one with all KV heads.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._passed: set[Evict] = set()
        self._asked: dict[tuple[Policy, int], int] = {}  # the most tokens after a prompt of that length

    def check(self, request: Request, model: Model) -> None:
        """Refuses a policy that fails, by its author's name.

        Raises:
          ValueError: what raised or returned what is none, and how to correct it. Ctrl-C is no fault of the policy.
        """
        policy, evict = request.policy, request.policy.evict
        if evict is None:
            return
        prompt, new = request.first_prompt, request.most_tokens - request.first_prompt
        if attempt(f"{policy.name} must be hashable", self._asked.get, (policy, prompt), 0) < new:
            rule = f"{policy.name}'s schedule must answer for every number of tokens"
            attempt(rule, check_answers, policy.name, policy.schedule, prompt, new)
            self._asked[policy, prompt] = new
        if evict.static not in self._passed:
            rule = f"{name_of(evict.score)} must return float32 [B, K, S], a score of each slot, where JAX traces it"
            attempt(rule, self._try_score, policy, evict, model)
            self._passed.add(evict.static)

    def _try_score(self, policy: Policy, evict: Evict, model: Model) -> None:
        num_layers, _, num_heads, _ = self._state.cache.pool.page_table.shape
        row, budget = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((num_layers, 1, num_heads), jnp.int32)
        similarity = jax.ShapeDtypeStruct((), jnp.float32) if evict.needs.similarity else None
        scores.eval_shape(self._state, row, budget, row, similarity, facts_for(policy, model), evict.static)


@functools.partial(jax.jit, static_argnames="evict")
def scores(state: State, row: Array, budget: Array, prompt: Array, similarity: Array | None, facts: Any, evict: Evict) -> Any:
    """The scores of rows, for their shapes: JAX knows the shapes of what it has traced before."""
    view = view_of_rows(state.cache, row, evict, budget, prompt, None, facts)
    if similarity is not None:
        view = view._replace(similarity=jnp.broadcast_to(similarity, view.position.shape))
    return evict.rate_and_carry(view)


HINTS = {
    jax.errors.ConcretizationTypeError: "It decides by numbers that are not known yet: use jnp.where in place of if, and "
    "shapes in place of counts.",
    jax.errors.TracerArrayConversionError: "Use jax.numpy in place of numpy.",
    jax.errors.NonConcreteBooleanIndexError: "A mask has no fixed number of slots: use jnp.where(mask, score, 0.0).",
}


def attempt(rule: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function of a policy's author returns.

    Raises:
      ValueError: the rule, and whatever the function raised, exits included.
    """
    results: list[Any] = []
    with deferred_interrupts() as presses:
        error = call(lambda: results.append(function(*arguments)))
    if error is None or isinstance(error, ScoreError):
        if error is not None:
            raise error
        return results[0]
    if presses:
        raise KeyboardInterrupt
    hint = next((hint for kind, hint in HINTS.items() if isinstance(error, kind)), "Correct it; jkv.verify(policy) tries it.")
    text = "{what}; it raised {got}. {hint}"
    raise InputError(text, field="policy", what=rule, got=described(error), hint=hint) from error


def check_layout(params: Params, options: EngineOptions) -> None:
    """Refuses what an engine cannot do for a model's layers and experts, or while its pool holds sealed pages."""
    config = params.config
    for layer in params.layers:
        if layer.experts is not None:
            refuse_adapters(layer.experts)
    if options.max_adapters and has_adapter(params):
        rule = "{field} takes a model without an adapter; got one with it. Load the base, and give the adapter to add_adapter."
        raise InputError(rule, field="max_adapters", code="conflict")
    check_sealing_on(platform_of(next(iter(params.embedding.devices()))), options.kv_format, config.head_size)
    if options.routed_experts and not config.num_experts:
        rule = "{field} needs a model with a mixture of experts; this one has none. Leave it off."
        raise InputError(rule, field="routed_experts", code="unsupported")
    if options.routed_experts and options.prefix_cache:
        rule = (
            "{field} needs every token of a prompt to go through the model, and prefix_cache keeps the keys and values of some "
            "without their experts. Leave one off."
        )
        raise InputError(rule, field="routed_experts", code="conflict")
    if isinstance(options.kv_format, SealedFormat) and config.num_sharing_layers:
        rule = (
            '{field}="{got}" needs a model whose layers all store their keys and values; {count} layers of this one share '
            'others. Use {field}="int8", "fp8" or "int4".'
        )
        count = config.num_sharing_layers
        raise InputError(rule, field="kv_dtype", code="unsupported", got=options.kv_dtype, count=count)
    why = ""
    if config.window_layers:
        why = f"layers {list(config.window_layers)} keep their window of {config.window} tokens outside of it"
    elif config.state_layers:
        why = f"layers {list(config.state_layers)} have a recurrent state outside of it"
    elif isinstance(options.kv_format, SealedFormat):
        why = f'kv_dtype="{options.kv_dtype}" keeps the first and last tokens of a prompt outside of it, in floats'
    if why and options.prefix_cache:
        rule = "{field} keeps prompts in the pool, and {why}, so later ones could not start from them. Leave it off."
        raise InputError(rule, field="prefix_cache", code="unsupported", why=why)


def check_request(request: Request, options: EngineOptions, adapters: Sequence[str] = ()) -> None:
    """Refuses a request with more stop ids than the engine takes, a policy that its pool cannot serve, or another adapter."""
    check_sealing(request.policy, options.kv_format)
    check_adapter(request, adapters)
    most = options.max_stop_ids
    if len(request.stop_ids) > most:
        rule = "{field} must be at most {most} token ids; got {got}. Pass fewer, or raise {max_stop_ids}."
        raise InputError(rule, field="stop_ids", code="too_long", most=most, got=len(request.stop_ids))


def gate_of(policies: Iterable[Policy]) -> Gate | None:
    """The gate that policies read: the first's, with which `check_policy` compares the others'; None if none reads any."""
    gates = (policy.calibration for policy in policies if policy.needs.gate)
    return next((gate for gate in gates if isinstance(gate, Gate)), None)


def check_adapter(request: Request, known: Sequence[str]) -> None:
    """Refuses a request with an adapter that the engine lacks, or whose score reads weights without it."""
    if not request.adapter:
        return
    if request.adapter not in known:
        raise unknown(request.adapter, known)
    if request.policy.needs.projected:
        rule = "{name} reads the output projection of the model itself; got {field}={got}. Use another policy."
        got = shown(request.adapter)
        raise InputError(rule, field="adapter", code="unsupported", name=request.policy.name, got=got)
