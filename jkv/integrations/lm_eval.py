r"""`jkv` as a model of lm-evaluation-harness: its tasks, prompts and metrics, on a compressed cache.

    python -m jkv.integrations.lm_eval run --model jkv --tasks gsm8k --batch_size 32 \
        --model_args pretrained=<folder>,policy=r_kv,budget=1024 --apply_chat_template

This is the harness's own command line, with one model more; importing this module registers it. What a task scores by
likelihood is scored with the full cache (`jkv.score`), for a policy acts on what is generated. Tasks that run what a model
wrote (HumanEval, LiveCodeBench) do so in the harness, by its own `--confirm_run_unsafe_code`; jkv never does.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jkv.cache import DEFAULT_PAGE_SIZE
from jkv.engine.requests import DEFAULT_NEW_TOKENS
from jkv.generate import generate
from jkv.model import checkpoint
from jkv.model.sampling import Sampling
from jkv.policies import make
from jkv.replay.score import score

LOG = logging.getLogger(__name__)
SCORED_TOGETHER = 64  # sequences of similar length
GENERATION = ("until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample", "temperature", "top_p", "top_k")


@register_model("jkv")
class JKV(TemplateLM):
    """A model with a policy, as the harness calls it.

    Args:
      pretrained: what `jkv.load` takes.
      policy: the name of a policy; `budget` and every other argument not named here are its settings.
      batch_size: rows decoded together, which the harness sets to 1 by default; "auto" or None takes up to 32.
      max_gen_toks: the most new tokens of tasks that set no limit.
      max_length: the most tokens of prompt and completion; None takes the model's positions. Longer prompts lose their
        beginning.
      seed: of the draws of tasks that sample; fixed, so that policies are compared with the same noise.
      think_end_token: the text that ends thinking. With it, a task's stop strings apply to what follows alone, and that is
        all its metrics see.
      page_size, kv_memory: of the cache, as in `jkv.generate`.
      device, max_batch_size: taken from the harness, and of no use here: JAX chooses the device.

    Raises:
      ValueError: an unknown policy or setting.
    """

    def __init__(
        self,
        pretrained: str = "tiny-reasoner",
        policy: str = "full",
        batch_size: int | str | None = None,
        max_gen_toks: int = DEFAULT_NEW_TOKENS,
        max_length: int | None = None,
        seed: int = 0,
        think_end_token: str | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        kv_memory: int | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.policy = make(policy, settings)
        self.model = checkpoint.load(str(pretrained))
        if self.model.tokenizer is None:
            raise ValueError(f"The harness passes text, and {pretrained} has no tokenizer. Take a model that has one.")
        self.tokenizer = self.model.tokenizer
        self.max_length = min(max_length or self.model.config.max_positions, self.model.config.max_positions)
        self.max_running = None if batch_size in (None, "auto") else int(batch_size)
        self.max_gen_toks, self.seed, self.think_end_token = int(max_gen_toks), int(seed), think_end_token
        self.cache: dict[str, Any] = {"page_size": page_size, "kv_memory": kv_memory}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a completion."""
        return self.model.config.end_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is scored after: the first token of a text, or else the one that ends it."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The key of tokenizer and chat template in the harness's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids; special tokens are added unless the text begins with the first of them, as one of a chat does."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat.

        Raises:
          ValueError: the model's tokenizer has no chat template.
        """
        if not self.tokenizer.chat_template:
            raise ValueError(
                "--apply_chat_template needs a tokenizer with a chat template; this model's has none. Leave it out."
            )
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The completions, each cut before the first of its stop strings; equal prompts are further samples of one."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self.read_settings(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for (stops, limit, sampling), members in groups.items():
            prompts = [self.shorten(self.tok_encode(requests[i].args[0]), limit) for i in members]
            out = generate(
                self.model,
                prompts,
                policy=self.policy,
                sampling=sampling,
                max_new_tokens=limit,
                stop_strings=() if self.think_end_token else stops,
                max_running=self.max_running,
                progress=not disable_tqdm,
                **self.cache,
            )
            if "cancelled" in out.finish_reason:
                raise KeyboardInterrupt
            assert out.text is not None
            held = out.stats.kv_bytes_per_sample
            LOG.info("%s: %.0f bytes of cache a sample, %.0f tokens evicted", self.policy.name, held, out.stats.evicted)
            for i, text in zip(members, out.text, strict=True):
                texts[i] = postprocess_generated_text(text, list(stops), self.think_end_token)
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def read_settings(self, asked: dict[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
        """Stop strings, the most new tokens, and how to draw, from the settings of a task; greedy unless it samples.

        Raises:
          ValueError: a setting that jkv has not.
        """
        if unknown := sorted(set(asked) - set(GENERATION)):
            raise ValueError(f"A task may set {', '.join(GENERATION)} of a generation; got {', '.join(unknown)}.")
        until = asked.get("until") or []
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        limits = [asked[name] for name in GENERATION[1:4] if asked.get(name) is not None]
        temperature = float(asked.get("temperature") or 0.0) if asked.get("do_sample", True) else 0.0
        if asked.get("do_sample") and "temperature" not in asked:
            temperature = 1.0
        sampling = Sampling(temperature, float(asked.get("top_p") or 1.0), int(asked.get("top_k") or 0), self.seed)
        return stops, int(limits[0] if limits else self.max_gen_toks), sampling

    def shorten(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The end of a prompt, so that the completion fits after it."""
        room = self.max_length - new_tokens
        if room < 1:
            raise ValueError(f"max_gen_toks must leave room for a prompt in {self.max_length} tokens; got {new_tokens}.")
        if len(prompt) > room:
            LOG.warning("a prompt of %d tokens was cut to its last %d", len(prompt), room)
        return prompt[-room:]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text in nats, the full cache's, in windows as long as the model takes."""
        sums = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1)
            pairs = [(("", ""), *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, the full cache's; whether each of its tokens is the likeliest."""
        order = sorted(range(len(requests)), key=lambda i: len(requests[i][1]) + len(requests[i][2]))
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for start in range(0, len(order), SCORED_TOGETHER):
            chosen = order[start : start + SCORED_TOGETHER]
            pairs = [self.fit(*requests[i][1:]) for i in chosen]
            lengths = [len(continuation) for _, continuation in pairs]
            tokens = np.zeros((len(pairs), max(1, *lengths)), np.int32)
            for row, (_, continuation) in zip(tokens, pairs, strict=True):
                row[: len(continuation)] = continuation
            contexts = [context for context, _ in pairs]
            logprobs = score(self.model, tokens, prompts=contexts, lengths=lengths).logprobs
            likeliest = score(self.model, tokens, prompts=contexts, lengths=lengths, sampling=Sampling(top_k=1)).logprobs
            for i, values, cut in zip(chosen, np.asarray(logprobs), np.asarray(likeliest), strict=True):
                answers[i] = float(values.sum(dtype=np.float64)), bool(np.isfinite(cut).all())
                if requests[i][0] != ("", ""):
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return answers

    def fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """A context that has lost its beginning where the whole would be too long."""
        room = self.max_length - len(continuation)
        if room < 1:
            raise ValueError(f"A continuation must fit {self.max_length} tokens with one of context; got {len(continuation)}.")
        return context[-room:], continuation


def main() -> None:
    """The harness's command line."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
