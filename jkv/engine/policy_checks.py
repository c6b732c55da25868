"""What an engine refuses of policies, before anything compiles: more than it keeps, another model's parts, a second gate."""

from collections.abc import Iterable

import jax

from jkv.engine import mesh as meshes
from jkv.engine.options import EngineOptions
from jkv.engine.requests import Request
from jkv.model.params import Model, ModelConfig
from jkv.policies import Needs, Policy
from jkv.policies.gate import Gate
from jkv.policies.policy import check_parts


def check_policy(
    policy: Policy,
    needs: Needs,
    model: Model,
    mesh: jax.sharding.Mesh | None,
    is_trained: bool = False,
    gate: Gate | None = None,
) -> None:
    """Refuses a policy that needs more than the engine keeps, compares KV heads of different shards, or reads another gate."""
    needs.check(policy.name, policy.needs)
    check_parts(policy, model, is_trained)
    if mesh is not None:
        meshes.check_policy(policy, mesh.size)
    if policy.needs.gate and policy.calibration != gate:
        raise ValueError(
            f"An engine computes one gate for all of its rows; it has {gate}, and {policy.name} reads {policy.calibration}. "
            "Build an engine for each gate."
        )


def check_windows(config: ModelConfig, options: EngineOptions) -> None:
    """Refuses what an engine cannot do for a model with sliding windows."""
    if config.window_layers and options.prefix_cache:
        raise ValueError(
            f"prefix_cache keeps prompts in the pool, and layers {list(config.window_layers)} keep their window of "
            f"{config.window} tokens outside of it, so later prompts could not start from them. Leave it off."
        )


def check_num_stops(request: Request, most: int) -> None:
    """Refuses a request with more stop ids than the engine takes."""
    if len(request.stop_ids) > most:
        raise ValueError(
            f"This engine takes at most {most} stop ids a request; got {len(request.stop_ids)}. Build it with "
            f"max_stop_ids={len(request.stop_ids)}."
        )


def gate_of(policies: Iterable[Policy]) -> Gate | None:
    """The gate that policies read: the first's, with which `check_policy` compares the others'; None if none reads any."""
    gates = (policy.calibration for policy in policies if policy.needs.gate)
    return next((gate for gate in gates if isinstance(gate, Gate)), None)
