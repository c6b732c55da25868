r"""jkv as a model of lm-evaluation-harness: the harness's tasks, prompts and metrics, with a compressed cache.

    python -m jkv.integrations.lm_eval run --model jkv --tasks gsm8k --batch_size 32 \
        --model_args pretrained=<folder>,policy=r_kv,budget=1024 --apply_chat_template

This is the command line of the harness; importing this module registers the model `jkv`. Likelihoods are computed with the
full cache (`jkv.score`), because a policy acts only on generated tokens. Tasks that run generated programs (HumanEval,
LiveCodeBench) run them in the harness, with its option `--confirm_run_unsafe_code`; jkv never runs them.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jkv.checkpoints import loading as checkpoint
from jkv.checkpoints.chat_template import USER, ChatRenderer, ChatText
from jkv.checkpoints.chat_tokens import encode_chat
from jkv.checkpoints.tokenizer import is_framed
from jkv.checks import need_tokenizer, shown
from jkv.engine.interrupts import ending_at_interrupt
from jkv.engine.results import complete
from jkv.errors import refused
from jkv.generate import generate
from jkv.model.sampling import Sampling
from jkv.policies import make
from jkv.replay.score import score
from jkv.rollout import DEFAULT_NEW_TOKENS

LOG = logging.getLogger(__name__)
SCORE_BATCH = 64  # sequences of similar length
SHOWN = 40  # last characters of a context that an error shows
PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}  # and what leaves logits as they are
GENERATION = (
    *("until", "max_gen_toks", "max_new_tokens", "max_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p"),
    *PENALTIES,
)


@register_model("jkv")
class JKV(TemplateLM):
    """A model and a policy, with the interface of the harness.

    Args:
      pretrained: an argument of `jkv.load`.
      policy: the name of a policy. `budget` and all arguments that are not listed here are its settings.
      batch_size: rows that decode together. The default of the harness is 1; "auto" or None means up to 32.
      max_gen_toks: the limit of new tokens for tasks that set none.
      max_length: the limit of prompt and completion in tokens; None means the model's maximum. Longer prompts are cut at
        their beginning.
      seed: the seed of tasks that sample; it is fixed, so that policies are compared with the same noise.
      think_end_token: the text that ends thinking. With it, stop strings and metrics apply only to the text after it.
      page_size, kv_memory, kv_dtype: as in `jkv.generate`.
      device, max_batch_size: arguments of the harness, which are ignored; JAX chooses the device.

    Raises:
      ValueError: the policy or a setting is unknown, or the model has no tokenizer.
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
        page_size: int | None = None,
        kv_memory: int | None = None,
        kv_dtype: str | None = None,
        device: str | None = None,
        max_batch_size: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.policy = make(policy, settings)
        self.model = checkpoint.load(str(pretrained))
        need_tokenizer(self.model.tokenizer, "The harness passes text")
        self.tokenizer = self.model.tokenizer
        self.renderer: ChatRenderer | None = None
        self.has_warned = False
        self.max_length = min(max_length or self.model.config.max_positions, self.model.config.max_positions)
        self.max_running = None if batch_size in (None, "auto") else int(batch_size)
        self.max_gen_toks, self.seed, self.think_end_token = int(max_gen_toks), int(seed), think_end_token
        self.cache: dict[str, Any] = {"page_size": page_size, "kv_memory": kv_memory, "kv_dtype": kv_dtype}

    @property
    def eot_token_id(self) -> int:
        """The token that ends a completion."""
        return self.model.config.end_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that is scored without context: the BOS token, or else the end token."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The key of the tokenizer and its chat template in the caches of the harness."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        """Token ids. Special tokens are added unless the text already begins with them, as a chat does.

        In a chat that the harness left as it was rendered, only the template makes control tokens.
        """
        if add_special_tokens is None:
            add_special_tokens = not is_framed(self.tokenizer, string)
        if isinstance(string, ChatText):
            return encode_chat(self.tokenizer, string, add_special_tokens)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat.

        Raises:
          ValueError: the model's tokenizer has no chat template, or it fails (`jkv.checkpoints.chat_template`).
        """
        if not self.tokenizer.chat_template:
            rule = "--apply_chat_template needs a tokenizer with a chat template; this one has none. Leave the option out."
            raise refused(rule, apply_chat_template="unsupported")
        if self.renderer is None:
            self.renderer = ChatRenderer(self.tokenizer)
        return self.renderer.render(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The completions, each cut before its first stop string. Equal prompts become samples of one prompt."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(self.read_settings(request.args[1]), []).append(index)
        texts = [""] * len(requests)
        for (stops, limit, sampling), members in groups.items():
            prompts = [self.shorten(self.tok_encode(requests[i].args[0]), limit) for i in members]
            with ending_at_interrupt():
                out = complete(
                    generate(
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
                )
            assert out.text is not None
            num_bytes = out.stats.kv_bytes_per_sample
            LOG.info("%s: %.0f bytes of cache per sample, %.0f tokens evicted", self.policy.name, num_bytes, out.stats.evicted)
            for i, text in zip(members, out.text, strict=True):
                texts[i] = postprocess_generated_text(text, list(stops), self.think_end_token)
                self.cache_hook.add_partial("generate_until", requests[i].args, texts[i])
        return texts

    def read_settings(self, asked: dict[str, Any]) -> tuple[tuple[str, ...], int, Sampling]:
        """Stop strings, the limit of new tokens, and the sampling of a task; greedy unless the task samples.

        Raises:
          ValueError: a setting is unknown.
        """
        if unknown := sorted(set(asked) - set(GENERATION)):
            rule = f"The generation settings of a task may be {', '.join(GENERATION)}; got {', '.join(unknown)}."
            raise refused(rule, **{unknown[0]: "unknown_name"})
        until = asked.get("until") or []
        stops = tuple(stop for stop in ([until] if isinstance(until, str) else until) if stop)
        limits = [asked[name] for name in GENERATION[1:4] if asked.get(name) is not None]
        temperature = float(asked.get("temperature") or 0.0) if asked.get("do_sample", True) else 0.0
        if asked.get("do_sample") and "temperature" not in asked:
            temperature = 1.0
        cuts = float(asked.get("top_p") or 1.0), int(asked.get("top_k") or 0), float(asked.get("min_p") or 0.0)
        given = {name: asked[name] for name in PENALTIES if asked.get(name) is not None}
        penalties: Any = {name: float(value) for name, value in (PENALTIES | given).items()}
        sampling = Sampling(temperature, *cuts, self.seed, **penalties)
        return stops, int(limits[0] if limits else self.max_gen_toks), sampling

    def shorten(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The prompt, cut at its beginning so that the completion fits."""
        room = self.max_length - new_tokens
        if room < 1:
            rule = f"max_gen_toks must leave room for a prompt in {self.max_length} tokens; got {new_tokens}."
            raise refused(rule, max_gen_toks="out_of_range")
        if len(prompt) > room:
            LOG.warning("a prompt of %d tokens was cut to its last %d", len(prompt), room)
        return prompt[-room:]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text in nats, with the full cache, in windows of the maximum length."""
        sums = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1)
            pairs = [(("", ""), *make_disjoint_window(window)) for window in windows]
            sums.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of a context and of its continuation, by the harness's rule: both encoded together, and cut after as many
        tokens as the context has alone. Warns where the context's tokens are others with the continuation.
        """
        whole, alone = context + continuation, context.rstrip()  # spaces at its end belong to the continuation
        if isinstance(context, ChatText):
            whole = ChatText(whole, context.marks + USER * len(continuation))
            alone = ChatText(alone, context.marks[: len(alone)])
        context_ids, ids = self.tok_encode(alone), self.tok_encode(whole)
        continuation_ids = ids[len(context_ids) :]
        if ids[: len(context_ids)] != context_ids and not self.has_warned:
            self.has_warned = True
            LOG.warning(
                "A token lies across the end of a context: %r after %r. As in the harness, the score leaves out what the "
                "context's last token holds of the continuation.",
                continuation,
                context[-SHOWN:],
            )
        return context_ids, continuation_ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **options: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, with the full cache, and whether it is the greedy one."""
        for (context, continuation), _, rest in requests:
            if not rest:
                raise refused(
                    "A continuation must be at least one token after its context; "
                    f"{shown(continuation)} after {shown(context[-SHOWN:])} is none: a token of the context, encoded "
                    "with it, holds all of it. The harness refuses it, too. Begin the choices at a word, such as by a space.",
                    requests="invalid",
                )
        order = sorted(range(len(requests)), key=lambda i: len(requests[i][1]) + len(requests[i][2]))
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for start in range(0, len(order), SCORE_BATCH):
            chosen = order[start : start + SCORE_BATCH]
            pairs = [self.fit(*requests[i][1:]) for i in chosen]
            lengths = [len(continuation) for _, continuation in pairs]
            tokens = np.zeros((len(pairs), max(1, *lengths)), np.int32)
            for row, (_, last) in zip(tokens, pairs, strict=True):
                row[: len(last)] = last
            contexts = [context for context, _ in pairs]
            logprobs = score(self.model, tokens, prompts=contexts, lengths=lengths).logprobs
            likeliest = score(self.model, tokens, prompts=contexts, lengths=lengths, sampling=Sampling(top_k=1)).logprobs
            for i, values, cut in zip(chosen, np.asarray(logprobs), np.asarray(likeliest), strict=True):
                answers[i] = float(values.sum(dtype=np.float64)), bool(np.isfinite(cut).all())
                if requests[i][0] != ("", ""):
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], answers[i])
        return answers

    def fit(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """The context and the continuation; a context that is too long is cut at its beginning."""
        room = self.max_length - len(continuation)
        if room < 1:
            rule = f"A continuation must fit into {self.max_length} tokens with one token of context; got {len(continuation)}."
            raise refused(rule, requests="does_not_fit")
        return context[-room:], continuation


def main() -> None:
    """The command line of the harness."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
