"""Texts with places whose tokens are scored: how well does a model still know what comes, when a policy trimmed its cache?

All are made here from what every Python brings, with fixed seeds, so nothing is downloaded:

- `stream`: passages of the Python manual (`pydoc_data.topics`). Prose and tables, scored from a place on.
- `doses`: pass keys that are said once or several times among sentences of the manual, and asked for at the end.
- `chains`: word problems that are solved step by step in English, and then verified several times.

`docstrings` is a text to train and calibrate on: other documents, of a similar kind.
"""

import ast
import itertools
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jkv.errors import refused
from jkv.evaluation.word_problems import NAMES, draw_word_problem, write_solution

CITIES = ("Oslo", "Lima", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Rome", "Dublin", "Kiev", "Accra", "Sofia")
NUM_FACTS = 3  # of a document of `doses`, each asked for
TAIL = 96  # tokens of filler between the last fact and the first question: several compactions
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
PROSE = re.compile(r"[A-Z][A-Za-z ,;'\-]{40,160}\.")


class Probe(NamedTuple):
    """One text.

    Attributes:
      group: what it has in common with others, such as "said 4 times"; groups are compared separately.
      prompt: token ids that are prefilled.
      rest: those that follow, one at a time.
      scored: places in `rest` whose tokens are scored.
    """

    group: str
    prompt: list[int]
    rest: list[int]
    scored: list[int]


def manual() -> str:
    """The topics of the Python language reference, as `help()` shows them."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def docstrings() -> str:
    """The docstrings of the standard library, by path; its modules are read, not imported."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "__pycache__"}
    found: dict[str, None] = {}  # in order, each once
    for path in sorted(folder.rglob("*.py")):
        if not left_out & set(path.relative_to(folder).parts):
            found.update(dict.fromkeys(docstrings_of(path)))
    return "\n\n".join(found)


def docstrings_of(path: Path) -> Iterator[str]:
    """The docstrings of a module that are longer than a line."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # a few files are there to be refused
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and "\n" in text:
                yield text


def stream(tokenizer: Any, count: int, length: int, *, prompt: int = 32, first: int = 0) -> list[Probe]:
    """Passages of the manual at even distances.

    Args:
      tokenizer: of the model.
      count: passages.
      length: tokens of each.
      prompt: tokens that are prefilled.
      first: the first token of a passage that is scored, so that all policies are compared on tokens that come after the cache
        was full; a quarter of the length, if 0.

    Raises:
      ValueError: passages that the manual is too short for, or shorter than their prompt.
    """
    if max(prompt, first) >= length:
        rule = f"prompt and first must lie in a passage; got {prompt} and {first} of length {length}. Raise length."
        raise refused(rule, length="does_not_fit")
    tokens = tokenizer.encode(manual(), add_special_tokens=False)
    if count * length > len(tokens):
        rule = f"The manual has {len(tokens):,} tokens; got {count} passages of {length}. Lower count or length."
        raise refused(rule, length="does_not_fit")
    scored = list(range(max(0, (first or length // 4) - prompt), length - prompt))
    return [Probe("", part[:prompt], part[prompt:], scored) for part in passages_of(tokens, count, length)]


def passages_of(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """Passages of `length` tokens at even distances.

    >>> passages_of(range(10), 2, 3)
    [[0, 1, 2], [7, 8, 9]]
    """
    starts = [i * (len(tokens) - length) // max(count - 1, 1) for i in range(count)]
    return [list(tokens[i : i + length]) for i in starts]


def doses(tokenizer: Any, count: int, length: int, *, times: Sequence[int] = (1, 2, 4), seed: int = 0) -> list[Probe]:
    """Documents of filler that repeat each of three pass keys a number of times; the answers to three questions are scored.

    There are `count` documents for each number in `times`. Documents for different numbers differ only where facts replace
    filler.

    Args:
      tokenizer: of the model.
      count: documents for each number of times.
      length: tokens of each document, less the questions.
      times: how often each fact is said.
      seed: of cities, keys, filler and places.

    Raises:
      ValueError: facts that take more than half of a document.
    """
    filler = [sentence for sentence in SENTENCE.split(" ".join(manual().split())) if PROSE.fullmatch(sentence)]
    encode = encoder(tokenizer)
    probes = []
    for i in range(count):
        for often in times:
            rng = np.random.default_rng([seed, i])
            cities = rng.choice(CITIES, NUM_FACTS, replace=False)
            keys = rng.integers(10_000, 100_000, NUM_FACTS)
            facts = [encode(f" The pass key of {city} is {key}.") for city, key in zip(cities, keys, strict=True)]
            order = rng.permutation(len(filler)).tolist()
            body = length - TAIL - often * sum(map(len, facts))
            if body < length // 2:
                raise refused(
                    f"Facts said {often} times and {TAIL} tokens after them must leave half of {length} tokens to filler. "
                    "Raise length, or say them less often.",
                    length="does_not_fit",
                )
            pieces, sentences = take(order, filler, encode, body)
            tail, _ = take(order[sentences:], filler, encode, TAIL)
            said = [fact for _ in range(often) for fact in facts]
            places = np.sort(rng.integers(0, len(pieces) + 1, len(said)))
            for place, fact in zip(places[::-1], said[::-1], strict=True):
                pieces.insert(place, fact)
            document = [*itertools.chain(*pieces, *tail)]
            asked: list[int] = []
            scored: list[int] = []
            for city, key in zip(cities, keys, strict=True):
                asked += encode(f"\nQuestion: What is the pass key of {city}?\nAnswer: The pass key of {city} is")
                answer = scored_ids(encode, f" {key}")
                scored += range(len(document) + len(asked), len(document) + len(asked) + len(answer))
                asked += answer + encode(".")
            prompt = 32
            rest = document[prompt:] + asked
            probes.append(Probe(f"said {often} times", document[:prompt], rest, [place - prompt for place in scored]))
    return probes


def take(order: Sequence[int], filler: Sequence[str], encode: Any, length: int) -> tuple[list[list[int]], int]:
    """Sentences of filler in this order, up to so many tokens, and how many they are."""
    pieces: list[list[int]] = []
    total = 0
    for i in order:
        piece = encode(" " + filler[i])
        if total + len(piece) > length:
            break
        pieces.append(piece)
        total += len(piece)
    return pieces, len(pieces)


def chains(tokenizer: Any, count: int, *, passes: Sequence[int] = (0, 2, 4), steps: int = 6, seed: int = 0) -> list[Probe]:
    """Word problems with a solution and a number of verifications in other words; the numbers of the last pass and of the
    answer are scored. A blank line ends each, as it ends a thought.

    Args:
      tokenizer: of the model.
      count: problems, each with every number of `passes`.
      passes: verifications after the solution.
      steps: of a solution.
      seed: of the problems.

    Raises:
      ValueError: more steps than there are people.
    """
    if steps >= len(NAMES):
        raise refused(f"steps must be below {len(NAMES)}, the number of people; got {steps}.", steps="out_of_range")
    probes = []
    for i in range(count):
        for verified in passes:
            rng = np.random.default_rng([seed, i])
            problem = draw_word_problem(rng, steps)
            name = f"{verified} verifications"
            probes.append(marked(tokenizer, name, problem.prompt, write_solution(problem, verified)))
    return probes


def marked(tokenizer: Any, group: str, prompt: str, text: str) -> Probe:
    """A text in which what stands in <> is scored."""
    encode = encoder(tokenizer)
    rest: list[int] = []
    scored: list[int] = []
    for i, part in enumerate(re.split("[<>]", text)):
        ids = scored_ids(encode, part) if i % 2 else encode(part)
        scored += range(len(rest), len(rest) + len(ids)) if i % 2 else ()
        rest += ids
    return Probe(group, encode(prompt), rest, scored)


def scored_ids(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """The tokens of a text that is scored.

    Raises:
      ValueError: it has none, and would count as certain.
    """
    ids = encode(text)
    if not ids:
        rule = f"A text that is scored must have a token; {text!r} has none. Take a model whose tokenizer reads it."
        raise refused(rule, text="invalid")
    return ids


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Text to ids, without special tokens."""
    return lambda text: tokenizer.encode(text, add_special_tokens=False) if text else []


KINDS: dict[str, Callable[..., list[Probe]]] = {"stream": stream, "doses": doses, "chains": chains}
