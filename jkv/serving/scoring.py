"""How likely the tokens of prompts are: `echo` with `logprobs`, which evaluation harnesses ask for.

Prompts are scored in a thread beside the engine's own, one at a time for all clients, so that no turn waits for them and no
program is compiled in the engine's thread. Nobody waits for a client that has gone: what is left of its prompts is dropped.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from jkv.model.params import Model
from jkv.replay.score import score
from jkv.serving.errors import RefusalError
from jkv.serving.requests import MOST_TOP
from jkv.serving.responses import Likely


class PromptScorer:
    """Scores prompts with a full cache.

    Args:
      seconds: the most for the prompts of one call.

    Attributes:
      is_ending: whether no further prompt is begun.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.is_ending, self._turn = seconds, False, asyncio.Lock()

    async def score(self, model: Model, prompts: Sequence[np.ndarray], count: int) -> list[list[Likely | None]]:
        """How likely each prompt token is after those before it, None for the first, and `count` best tokens of each place.

        Raises:
          RefusalError: it takes too long, or the server ends.
        """
        found: list[list[Likely | None]] = []
        try:
            async with asyncio.timeout(self.seconds):
                for prompt in prompts:
                    async with self._turn:
                        if self.is_ending:
                            raise RefusalError(503, "A server that ends scores no more prompts. Send them to another.")
                        found.append([None, *await asyncio.to_thread(likely_tokens, model, prompt, count)])
        except TimeoutError:
            raise RefusalError(
                503,
                f"The prompts of a call must be scored within {self.seconds:g} seconds; {len(found)} of {len(prompts)} were. "
                "Send fewer.",
            ) from None
        return found


def likely_tokens(model: Model, prompt: np.ndarray, count: int) -> list[Likely]:
    """How likely each token of a prompt is, from the second on, and the `count` best ones of its place."""
    length = len(prompt) - 1
    tokens = prompt[None, 1:].astype(np.int32)
    scores = score(model, tokens, prompts=[prompt[:1]], lengths=[length], top=MOST_TOP if count else 0)  # two programs
    log_probs = np.asarray(scores.logprobs)[0].tolist()
    if scores.top is None:
        return [Likely(log_prob, {}) for log_prob in log_probs]
    most = min(count, model.config.vocab_size)
    choices, best = (np.asarray(x)[0, :, :most].tolist() for x in (scores.top.tokens, scores.top.logprobs))
    return [Likely(log_prob, dict(zip(*place, strict=True))) for log_prob, *place in zip(log_probs, choices, best, strict=True)]
