"""What an engine refuses of policies, before anything compiles: more than it keeps, another model's parts, a second gate."""

from collections.abc import Iterable

from jkv.engine.options import EngineOptions
from jkv.engine.requests import Request
from jkv.model.params import Model, Params
from jkv.policies import Needs, Policy
from jkv.policies.gate import Gate
from jkv.policies.policy import check_parts
from jkv.policies.sealing import check_sealing, check_sealing_on
from pallas_kernels.dispatch import platform_of
from pallas_kernels.sealed import SealedFormat


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
        raise ValueError(
            f"An engine computes one gate for all of its rows; it has {gate}, and {policy.name} reads {policy.calibration}. "
            "Build an engine for each gate."
        )


def check_layout(params: Params, options: EngineOptions) -> None:
    """Refuses what an engine cannot do for a model's layers and experts, or while its pool holds sealed pages."""
    config = params.config
    check_sealing_on(platform_of(next(iter(params.embedding.devices()))), options.kv_format, config.head_size)
    if options.routed_experts and not config.num_experts:
        raise ValueError("routed_experts needs a model with a mixture of experts; this one has none. Leave it off.")
    if options.routed_experts and options.prefix_cache:
        raise ValueError(
            "routed_experts needs every token of a prompt to go through the model, and prefix_cache keeps the keys and values "
            "of some without their experts. Leave one off."
        )
    if isinstance(options.kv_format, SealedFormat) and config.num_sharing_layers:
        raise ValueError(
            f'kv_dtype="{options.kv_dtype}" needs a model whose layers all store their keys and values; '
            f'{config.num_sharing_layers} layers of this one share those of others. Use kv_dtype="int8", "fp8" or "int4".'
        )
    if config.window_layers and options.prefix_cache:
        raise ValueError(
            f"prefix_cache keeps prompts in the pool, and layers {list(config.window_layers)} keep their window of "
            f"{config.window} tokens outside of it, so later prompts could not start from them. Leave it off."
        )
    if config.state_layers and options.prefix_cache:
        raise ValueError(
            f"prefix_cache keeps prompts in the pool, and layers {list(config.state_layers)} have a recurrent state outside of "
            "it, so later prompts could not start from them. Leave it off."
        )
    if isinstance(options.kv_format, SealedFormat) and options.prefix_cache:
        raise ValueError(
            f'prefix_cache keeps prompts in the pool, and kv_dtype="{options.kv_dtype}" keeps the first and last tokens of a '
            "prompt outside of it, in floats, so later prompts could not start from them. Leave it off, or use "
            'kv_dtype="int8", "fp8" or "int4".'
        )


def check_request(request: Request, options: EngineOptions) -> None:
    """Refuses a request with more stop ids than the engine takes, or with a policy that its pool cannot serve."""
    check_sealing(request.policy, options.kv_format)
    most = options.max_stop_ids
    if len(request.stop_ids) > most:
        raise ValueError(
            f"This engine takes at most {most} stop ids a request; got {len(request.stop_ids)}. Build it with "
            f"max_stop_ids={len(request.stop_ids)}."
        )


def gate_of(policies: Iterable[Policy]) -> Gate | None:
    """The gate that policies read: the first's, with which `check_policy` compares the others'; None if none reads any."""
    gates = (policy.calibration for policy in policies if policy.needs.gate)
    return next((gate for gate in gates if isinstance(gate, Gate)), None)
