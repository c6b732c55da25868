"""How much of a trace repeats itself, by the measures of the papers whose methods are here; `jkv.analyze` counts them.

Each function returns the figures of one completion, by the names in `MEASURES`; None if there is nothing to measure. Sentences
and thoughts are those that the methods find while a model decodes. The figures called "steps" are of all thoughts of a
completion, as stage 1 of ReasonCache finds them; those called "thoughts" are of SEAL's thoughts, finished and inside the
thinking.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jkv.analysis.steering_vectors import thoughts
from jkv.errors import refused
from jkv.reasoning.sentences import ENDS, ends_of
from jkv.reasoning.steering import is_check, label
from jkv.reasoning.thoughts import SENTENCE, Filter, FilterStats, ThoughtFinder, make_index, sentence_encoder
from jkv.reasoning.token_text import END_OF_THINKING, THINK, TokenFacts, facts_of
from jkv.reasoning.word_tokenizer import Words

Figures = dict[str, float | None]


class Measure(NamedTuple):
    """What a figure means.

    Attributes:
      words: its name in tables.
      unit: "share", "bits", "times", or "count".
      source: where a paper reports it.
    """

    words: str
    unit: str
    source: str


ALIKE = (0.8, 0.9)  # cosines of thoughts in stage 1
SAID_AGAIN, HIGHLY_ALIKE = 0.75, 0.95  # cosines of sentences: RPC's, SkipKV's
COUNTERPARTS = (1, 2, 4)  # RPC's N
PREFIXES = tuple(128 << i for i in range(7))  # tokens; RPC has those from 1,024 to 8,192
STAGE_1 = Filter()

LENGTHS = {name: Measure(name, "count", "") for name in ("tokens", "steps", "sentences", "thoughts")}
STEPS = {
    **{f"similar_steps_{c}": Measure(f"similar steps, cosine > {c}", "share", "MemShare Fig. 2") for c in ALIKE},
    "shareable_steps": Measure("steps that pass stage 1", "share", "ReasonCache Eqs. 1, 2"),
}
N_GRAMS = {
    **{f"frequency_{n}": Measure(f"{n}-gram frequency", "times", "R-KV Fig. 2") for n in (1, 2)},
    "entropy_3": Measure("3-gram entropy, bits", "bits", "RPC Eq. 1"),
    **{f"entropy_3_first_{size}": Measure(f"the same, first {size} tokens", "bits", "RPC Fig. 3") for size in PREFIXES},
}
SENTENCES = {
    **{f"repeated_sentences_{n}": Measure(f"sentences with > {n} alike", "share", "RPC Fig. 6") for n in COUNTERPARTS},
    "similar_sentences": Measure("highly similar sentences", "share", "SkipKV Fig. 5"),
}
THOUGHTS = {
    "non_execution": Measure("non-execution thoughts", "share", "SkipKV Figs. 5, 14"),
    "checks": Measure("thoughts that check", "share", "SEAL"),
    "switches": Measure("thoughts that switch", "share", "SEAL"),
    "keyword_thoughts": Measure("thoughts with a keyword", "share", "SkipKV A.1"),
}
MEASURES = LENGTHS | STEPS | N_GRAMS | SENTENCES | THOUGHTS


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Tokenizes and measures texts.

    Attributes:
      tokenizer: whose tokens are counted: a model's, or `Words`.
      facts: of its tokens.
      encoder: how thoughts and sentences are embedded (`jkv.reasoning.thoughts.Filter`).
    """

    tokenizer: Any
    facts: TokenFacts
    encoder: str | Callable[[str], Any]

    def read(self, text: str) -> Figures:
        """All figures of one completion."""
        tokens = np.asarray(self.tokenizer.encode(text, add_special_tokens=False), np.int64)
        counted = tokens[self.facts.has_content[tokens]] if isinstance(self.tokenizer, Words) else tokens
        return (
            {"tokens": float(len(counted))}
            | of_n_grams(counted)
            | of_steps(self, tokens)
            | of_sentences(self, tokens)
            | of_thoughts(self, tokens, is_thinking=THINK not in text)
        )


def make_reader(texts: Sequence[str], tokenizer: Any, encoder: Any) -> Reader:
    """A reader of these texts, which `Words` tokenizes where there is no tokenizer.

    Raises:
      ValueError: an encoder that is none, or a tokenizer that has no token for the marks of thinking that the texts hold.
    """
    check_encoder(encoder)
    if callable(encoder) or encoder.startswith(SENTENCE):
        encode: Any = encoder if callable(encoder) else sentence_encoder(encoder)
        encoder = functools.lru_cache(maxsize=1 << 16)(encode)  # repeated text is encoded once
    if tokenizer is None:
        tokenizer = Words(texts)
        return Reader(tokenizer, facts_of(tokenizer, len(tokenizer)), encoder)
    vocabulary: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    facts = facts_of(tokenizer, max([len(tokenizer), *(token + 1 for token in vocabulary.values())]))
    marked = any(mark in text for text in texts for mark in (THINK, END_OF_THINKING))
    if marked and (facts.think < 0).any():
        raise refused(
            f"The texts mark their thinking with {THINK} and {END_OF_THINKING}, which must be one token each; in this "
            "tokenizer they are not. Give that of the model that wrote the texts, or none: then words are counted.",
            tokenizer="unsupported",
        )
    return Reader(tokenizer, facts, encoder)


def check_encoder(encoder: Any) -> None:
    """Refuses an encoder that needs a model."""
    Filter(encoder=encoder)
    if encoder == "embedding":
        raise refused(
            "encoder='embedding' is a table of a model, and a set of traces has none. Take 'tokens', 'sentence:<model>', or a "
            "function from text to a vector.",
            encoder="unsupported",
        )


def of_n_grams(tokens: np.ndarray) -> Figures:
    """How often the trace's n-grams occur in it, and their entropy in bits.

    Frequency (R-KV, arXiv 2505.24133, Fig. 2): how often a distinct n-gram occurs on average, `(T - n + 1) / distinct`. The
    paper gives no formula; this one fits its caption (5 to 7 times the ground truth's, at 8 to 14 times the length). It grows
    with the length. Entropy (RPC, arXiv 2505.13866, Eq. 1): `-sum p(g) log2 p(g)` over distinct 3-grams g; at most
    `log2(T - 2)`, so traces are compared at one length, their first tokens (its Fig. 3), where both have as many.
    """
    frequency = {f"frequency_{n}": frequency_of(tokens, n) for n in (1, 2)}
    first = {f"entropy_3_first_{size}": entropy_of(tokens[:size], 3) if len(tokens) >= size else None for size in PREFIXES}
    return frequency | {"entropy_3": entropy_of(tokens, 3)} | first


def n_grams(tokens: np.ndarray, n: int) -> np.ndarray:
    """How often each distinct n-gram occurs, the n-grams in order.

    >>> n_grams(np.array([5, 6, 5, 6, 5]), 2)
    array([2, 2])
    """
    if len(tokens) < n:
        return np.zeros(0, np.int64)
    return np.unique(np.lib.stride_tricks.sliding_window_view(tokens, n), axis=0, return_counts=True)[1]


def frequency_of(tokens: np.ndarray, n: int) -> float | None:
    """How often a distinct n-gram occurs on average, at least 1; None where there is none."""
    count = n_grams(tokens, n)
    return float(count.mean()) if len(count) else None


def entropy_of(tokens: np.ndarray, n: int) -> float | None:
    """The entropy of n-grams in bits; None where there is none."""
    count = n_grams(tokens, n)
    share = count / max(count.sum(), 1)
    return abs(float((share * np.log2(share)).sum())) if len(count) else None


def of_steps(reader: Reader, tokens: np.ndarray) -> Figures:
    """The share of thoughts that are similar to an earlier one; the answer and an unfinished last thought are included.

    MemShare and ReasonCache (arXiv 2507.21433), Fig. 2: the cosine of two bags of tokens exceeds 0.8 (MemShare also 0.9),
    without a penalty on lengths and without formulas. `shareable_steps` is stage 1 of ReasonCache: the cosine is multiplied by
    the ratio of lengths, the threshold falls as the trace repeats itself, and formulas must be equal.
    """
    rules = [Filter(cosine, cosine, structure=False, penalises_length=False) for cosine in ALIKE]
    out: Figures = {}
    for name, plain in zip(STEPS, [*rules, STAGE_1], strict=True):
        rule, stats = dataclasses.replace(plain, encoder=reader.encoder), FilterStats()
        index = make_index(rule, len(reader.facts.is_break), lambda: np.zeros((0, 0)))
        finder = ThoughtFinder(rule, reader.facts, reader.tokenizer.decode, index, stats)
        found = [finder.take(token, 0) for token in tokens.tolist()] + [finder.close(0)]
        out |= {"steps": float(stats.steps), name: share_of([bool(event[1]) for event in found if event])}
    return out


def of_sentences(reader: Reader, tokens: np.ndarray) -> Figures:
    """The share of sentences that the trace repeats.

    RPC, 4.2 and Fig. 6: sentences with more than N others, N of 1, 2 and 4, whose cosine with them exceeds 0.75. SkipKV (arXiv
    2512.07993), Fig. 5: sentences with another one at a cosine of 0.95 or more. Both papers embed by a sentence encoder
    (`encoder="sentence:all-MiniLM-L6-v2"` is RPC's); bags of tokens, which are the default, miss paraphrases. Neither states
    how it splits sentences; these end as SkipKV's method has it, with a token of `jkv.reasoning.sentences.ENDS`.
    """
    is_end = ends_of(reader.tokenizer, len(reader.facts.is_break), ENDS)
    index = make_index(Filter(encoder=reader.encoder), len(is_end), lambda: np.zeros((0, 0)))
    pieces = np.split(tokens, np.flatnonzero(is_end[tokens]) + 1)
    sentences = [piece for piece in pieces if reader.facts.has_content[piece].any()]
    counterparts, is_similar = np.zeros(len(sentences), int), np.zeros(len(sentences), bool)
    for i, piece in enumerate(sentences):
        text = functools.partial(reader.tokenizer.decode, piece.tolist())
        cosine = index.compare(piece[reader.facts.has_content[piece]].tolist(), text)
        counterparts[:i] += cosine > SAID_AGAIN
        counterparts[i] = (cosine > SAID_AGAIN).sum()
        is_similar[:i] |= cosine >= HIGHLY_ALIKE
        is_similar[i] = (cosine >= HIGHLY_ALIKE).any()
    repeated = {f"repeated_sentences_{n}": share_of(counterparts > n) for n in COUNTERPARTS}
    return {"sentences": float(len(sentences)), "similar_sentences": share_of(is_similar)} | repeated


def of_thoughts(reader: Reader, tokens: np.ndarray, is_thinking: bool) -> Figures:
    """The share of thoughts that check or switch in place of going on.

    SkipKV, Figs. 5 and 14, by the labels of SEAL (arXiv 2504.07986): the phrases of `jkv.reasoning.steering`. And the share
    with one of SkipKV's own keywords (A.1: Wait, Alternatively, again), by which its method counts. Thoughts are finished
    paragraphs of the thinking, the first left out, as SEAL has them; a trace that never opens its thinking (`is_thinking`)
    begins in it.
    """
    facts = reader.facts
    found = [text for _, text in thoughts(reader.tokenizer, tokens, facts.is_break, facts.think, is_thinking)]
    kinds = [label(text) for text in found]
    return {
        "thoughts": float(len(found)),
        "non_execution": share_of([kind != "go on" for kind in kinds]),
        "checks": share_of([kind == "check" for kind in kinds]),
        "switches": share_of([kind == "switch" for kind in kinds]),
        "keyword_thoughts": share_of([is_check(text) for text in found]),
    }


def share_of(marks: Sequence[bool] | np.ndarray) -> float | None:
    """The share of true marks; None of none."""
    return float(np.mean(marks)) if len(marks) else None
