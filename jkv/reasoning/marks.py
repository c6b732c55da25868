"""Between which marks a model thinks, and the text of its completions in which they can be found.

Most reasoning models write `<think>` and `</think>`. gpt-oss writes the harmony format (github.com/openai/harmony): messages
with a channel each, of which "analysis" is the thinking and "final" the answer. Gemma 4 has one channel, "thought", and the
answer is after it (ai.google.dev/gemma/docs/core/prompt-formatting-gemma4); where it shall not think, its template writes an
empty one at the end of the prompt. The marks of both are special tokens, which other texts leave out. A tokenizer that has them
is of that format.
"""

import functools
from typing import Any, NamedTuple

from jkv.reasoning.token_text import END_OF_THINKING, THINK, Decoder, byte_values, token_of
from jkv.reasoning.tool_calls import SPECIAL_MARKS

MOST_MARK = 16  # last tokens of a prompt, where it may begin the thinking


class Marks(NamedTuple):
    """The texts around what a model thinks.

    Attributes:
      begin: before the thinking; a chat template may have written it at the end of the prompt.
      ends: any of them ends the thinking. The one that begins first counts, and of these the longest.
      calls: further marks that end thinking, where the model calls functions (`jkv.reasoning.channels`).
    """

    begin: str
    ends: tuple[str, ...]
    calls: tuple[str, ...] = ()

    def cut(self, text: str) -> tuple[str, str, str]:
        """What is before the mark that ends the thinking, that mark, and what is after it, as `str.partition` gives them.

        >>> TAGS.cut("3*7=1</think>d=1")
        ('3*7=1', '</think>', 'd=1')
        """
        found = [(text.find(end), -len(end), end) for end in self.ends if end in text]
        return text.partition(min(found)[2]) if found else (text, "", "")

    def num_held(self, text: str) -> int:
        """How many characters at the end of a growing text may become a mark that ends the thinking.

        >>> TAGS.num_held("x = 3</th")
        4
        """
        return max(n for end in self.ends for n in range(len(end)) if text.endswith(end[:n]))

    def is_open(self, text: str) -> bool:
        """Whether a prompt has begun to think and not ended it."""
        return text.rfind(self.begin) > max(text.rfind(end) for end in self.ends)


TAGS = Marks(THINK, (END_OF_THINKING,))
FINAL = "<|channel|>final<|message|>"
CALLS = ("<|channel|>commentary", "<|start|>assistant to=")
HARMONY = Marks("<|channel|>analysis<|message|>", ("<|end|><|start|>assistant" + FINAL, FINAL), CALLS)
CHANNEL = Marks("<|channel>thought", ("<channel|>",))
SPECIAL = {HARMONY: ("<|start|>", "<|end|>", "<|channel|>", "<|message|>"), CHANNEL: ("<|channel>", "<channel|>")}


class Format(NamedTuple):
    """Marks, and the special tokens that they consist of."""

    marks: Marks
    tokens: frozenset[int] = frozenset()


def format_of(tokenizer: Any) -> Format:
    """The format in which a model with this tokenizer thinks: tags, where it has no special tokens for another."""
    return special_format_of(tokenizer) if getattr(tokenizer, "all_special_ids", None) else Format(TAGS)


@functools.lru_cache(maxsize=8)
def special_format_of(tokenizer: Any) -> Format:
    """The same of a tokenizer of transformers."""
    for marks, texts in SPECIAL.items():
        tokens = frozenset(token_of(tokenizer, text) for text in texts)
        if -1 not in tokens:
            return Format(marks, tokens)
    return Format(TAGS)


def marks_of(tokenizer: Any) -> Marks:
    """The marks between which a model with this tokenizer thinks."""
    return format_of(tokenizer).marks


@functools.lru_cache(maxsize=8)
def completion_decoder(tokenizer: Any) -> Decoder:
    """The text of a completion's tokens, without special tokens other than the marks, of tool calls too."""
    special = {index: str(token) for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    kept = format_of(tokenizer).tokens | {index for index, text in special.items() if text in SPECIAL_MARKS}
    if not kept:
        return Decoder(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True), byte_values(tokenizer))
    dropped = special.keys() - kept

    def decode(tokens: Any) -> str:
        return tokenizer.decode([token for token in map(int, tokens) if token not in dropped], skip_special_tokens=False)

    return Decoder(decode, byte_values(tokenizer))


def after_thinking(text: str) -> str:
    """What a text says after its thinking, of whatever format; all of it where no mark ends it.

    >>> after_thinking("<|channel|>analysis<|message|>1?<|end|><|start|>assistant<|channel|>final<|message|>2")
    '2'
    """
    for end in (END_OF_THINKING, FINAL, *CHANNEL.ends):
        text = text.rpartition(end)[2]
    return text
