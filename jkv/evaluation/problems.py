r"""Questions and gold answers of data sets, and how they become prompts: the same for every policy.

A preset names the fields of a published set: AIME 2024 and 2025, MATH-500, GSM8K (whose answer follows "####"), GPQA (whose
choices are put in an order drawn for each question). Any other set names its fields.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jkv.checkpoints.chat_template import ChatText, has_chat_template, render_chats
from jkv.checkpoints.chat_tokens import encode_chat
from jkv.checks import check_known, check_list, shown
from jkv.errors import InputError, refused
from jkv.evaluation.datasets import Row, check_fields, read_rows
from jkv.evaluation.graders import read_box
from jkv.model.params import Model

QUESTION, CHOICES = "{question}", "ABCDEFGHIJ"
PLAIN = QUESTION
REASON = QUESTION + "\nPlease reason step by step, and put your final answer within \\boxed{}."
CHOOSE = QUESTION + "\nPlease reason step by step, and put the letter of your choice within \\boxed{}."


@dataclasses.dataclass(frozen=True)
class Problem:
    r"""A prompt and what the completion must answer, as `\boxed{answer}`.

    Attributes:
      prompt: what the model reads, chat template included.
      answer: the gold one.
      is_chat: whether the prompt has its special tokens already, so that encoding adds none.
    """

    prompt: str
    answer: str
    is_chat: bool = False


def problems_of(given: Any) -> list[Problem]:
    """Problems, of which each may also be a pair of texts, its prompt and its answer.

    Raises:
      InputError: anything else.
    """
    problems = []
    for one in check_list("problems", given):
        if isinstance(one, tuple | list) and len(one) == 2 and all(isinstance(part, str) for part in one):
            one = Problem(*one)
        if not isinstance(one, Problem):
            rule = "{field} must be pairs of texts, (prompt, answer), or Problems; got {got} among them."
            raise InputError(rule, field="problems", code="wrong_type", got=shown(one))
        problems.append(one)
    return problems


@dataclasses.dataclass(frozen=True)
class Preset:
    """The fields of a published set, in the spellings of its copies, and its default prompt and grader."""

    question: tuple[str, ...]
    answer: tuple[str, ...]
    grader: str = "math"
    template: str = REASON
    after: str = ""  # the answer is what follows the last of these
    wrong: tuple[str, ...] = ()  # fields of the choices that are not the answer


PRESETS = {
    "aime": Preset(("problem", "Problem", "question"), ("answer", "Answer")),
    "math-500": Preset(("problem",), ("answer",)),
    "gsm8k": Preset(("question",), ("answer",), after="####"),
    "gpqa": Preset(
        ("Question",),
        ("Correct Answer",),
        "choice",
        CHOOSE,
        wrong=("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    ),
}
OWN = Preset(("prompt",), ("answer",), "boxed", PLAIN)


def preset_of(name: str | None, question: str | None = None, answer: str | None = None) -> Preset:
    """A preset by name, or one for a set of one's own, its fields named by `question` and `answer`.

    Raises:
      ValueError: an unknown name.
    """
    if name is not None:
        check_known(PRESETS, preset=name)
    preset = OWN if name is None else PRESETS[name]
    if question is not None:
        preset = dataclasses.replace(preset, question=(question,))
    return preset if answer is None else dataclasses.replace(preset, answer=(answer,))


def read_questions(
    source: Path, preset: Preset, split: str | None = None, subset: str | None = None, shuffle_seed: int = 0
) -> list[tuple[str, str]]:
    """Every question of a set, its choices below it if it has any, and its gold answer.

    Raises:
      ValueError: no such set, or rows without these fields.
    """
    rows = read_rows(source, split, subset)
    if not rows:
        raise refused(f"{source} must hold at least one problem; it is empty.", source="missing")
    question, answer = (spelling(rows[0], names) for names in (preset.question, preset.answer))
    check_fields(source, rows, [question, answer, *preset.wrong])
    return [ask(row, question, answer, preset, (shuffle_seed, index)) for index, row in enumerate(rows)]


def spelling(row: Row, names: Sequence[str]) -> str:
    """The first name that a row has."""
    return next((name for name in names if name in row), names[0])


def ask(row: Row, question: str, answer: str, preset: Preset, seed: tuple[int, int]) -> tuple[str, str]:
    """One row's question and gold answer."""
    text, gold = str(row[question]), text_of(row[answer])
    if preset.after:
        if preset.after not in gold:
            rule = f'The answer must follow "{preset.after}", as this preset has it; row {seed[1]} has {gold[-60:]!r}.'
            raise refused(rule, answer="invalid")
        gold = gold.rpartition(preset.after)[2].strip()
    if "\\boxed{" in gold:  # some copies keep no answer but the whole solution
        gold = read_box(gold) or gold
    if not preset.wrong:
        return text, gold
    choices = [gold.strip(), *(str(row[field]).strip() for field in preset.wrong)]
    order = np.random.default_rng(seed).permutation(len(choices)).tolist()
    listed = "\n".join(f"{letter}) {choices[i]}" for letter, i in zip(CHOICES, order, strict=False))
    return f"{text.strip()}\n\n{listed}", CHOICES[order.index(0)]


def text_of(answer: Any) -> str:
    """A gold answer as text; a whole number that was stored as a float (a column with gaps) is written as one.

    >>> text_of(33.0), text_of("025"), text_of(0.5)
    ('33', '025', '0.5')
    """
    return str(int(answer)) if isinstance(answer, float) and answer.is_integer() else str(answer).strip()


def put(
    tokenizer: Any, questions: Sequence[tuple[str, str]], template: str = PLAIN, chat_template: bool = False
) -> list[Problem]:
    """The problems as the model reads them: each question in the template and, if asked for, as a user's turn of a chat.

    Raises:
      ValueError: a template without its place for the question, or a chat with a tokenizer that has no template, or one that
        fails.
    """
    if QUESTION not in template:
        raise refused(f"template must say where the question goes, as {QUESTION}; got {template!r}.", template="missing")
    asked = [(template.replace(QUESTION, question), answer) for question, answer in questions]
    if not chat_template:
        return [Problem(prompt, answer) for prompt, answer in asked]
    if not has_chat_template(tokenizer):
        rule = "chat_template needs a tokenizer that has one; this model's has none. Leave it out."
        raise refused(rule, chat_template="unsupported")
    turns = [[{"role": "user", "content": prompt}] for prompt, _ in asked]
    rendered = render_chats(tokenizer, turns, add_generation_prompt=True)
    return [Problem(prompt, answer, is_chat=True) for prompt, (_, answer) in zip(rendered, asked, strict=True)]


def tokens_of(model: Model, problem: Problem) -> Any:
    """What `generate` takes for a problem: its text, or the tokens of a chat, which carries its own special tokens."""
    if isinstance(problem.prompt, ChatText):
        return encode_chat(model.tokenizer, problem.prompt)
    return model.tokenizer.encode(problem.prompt, add_special_tokens=False) if problem.is_chat else problem.prompt
