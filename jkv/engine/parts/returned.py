"""What a chunk returns of its tokens besides their log-probabilities, where somebody asks for it."""

from typing import Annotated, Any

import numpy as np
from jaxtyping import Array, Float, Int

from jkv.cache.attention import Cache
from jkv.engine.parts.base import Draw, Rows, Step, StepPart
from jkv.model import experts, sampling


class Experts(StepPart):
    """The experts that each token goes through, by layer that has any (`jkv.EngineOptions.routed_experts`)."""

    sees_prompts = True

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.routed_experts

    @classmethod
    def of(cls, rows: Rows) -> "Experts":
        return cls()

    def take(self, step: Step, carry: Any) -> tuple[Step, Any]:
        config = step.params.config
        cache = step.cache._replace(experts=experts.no_routes(config, step.token))
        return step._replace(cache=cache, choose=experts.route_recorder(config)), carry

    def report(self, step: Step, hidden: Float[Array, "B T D"], cache: Cache, carry: Any) -> dict[str, Array]:
        assert cache.experts is not None
        return {"experts": cache.experts}


class HiddenStates(StepPart):
    """The hidden state of each token after the final norm, from which sentences are compared (SkipKV)."""

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return rows.needs.similarity

    @classmethod
    def of(cls, rows: Rows) -> "HiddenStates":
        return cls()

    def report(self, step: Step, hidden: Float[Array, "B T D"], cache: Cache, carry: Any) -> dict[str, Array]:
        return {"hidden": hidden}


class OwnLogProbs(StepPart):
    """Each token's log-probability under the model's own distribution (`jkv.RequestOptions.model_logprobs`)."""

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.model_logprobs for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "OwnLogProbs":
        return cls()

    def drawn(self, draw: Draw, token: Int[Array, "B T"]) -> dict[str, Array]:
        if draw.is_own:  # then it is the log-probability of the draw
            return {}
        return {"log_prob_own": sampling.own_log_prob(draw.own, token)}


class TopLogProbs(StepPart):
    """The most likely tokens of the model's own distribution at each place (`jkv.RequestOptions.top_logprobs`)."""

    is_asked: Annotated[Any, "B"]

    @classmethod
    def is_on(cls, rows: Rows) -> bool:
        return any(request.top_logprobs for request in rows.requests)

    @classmethod
    def of(cls, rows: Rows) -> "TopLogProbs":
        is_asked = np.zeros(rows.num_rows, bool)
        for i, sample in rows.running.items():
            is_asked[i] = bool(sample.request.top_logprobs)
        return cls(is_asked)

    def drawn(self, draw: Draw, token: Int[Array, "B T"]) -> dict[str, Array]:
        top_token, top_log_prob = sampling.top_log_probs(draw.own, self.is_asked.any())
        return {"top_token": top_token, "top_log_prob": top_log_prob}
