"""The examples of a training run: stages of a curriculum, and problems of a task packed into rows."""

import dataclasses
import string
from typing import Any

import numpy as np

from jkv.cache.attention import OPEN_END
from jkv.evaluation import chains, word_problems
from research.tasks import trails
from research.tasks.live_set import keep_live, live_slots, statements

DRILLS = {"values": chains.draw_values, "steps": chains.draw_steps}
LIVE_SHARES = 0.08, 0.14  # of a trail's length, between which the budget of one with a trimmed cache lies
LIVE_INTERVAL = 16  # tokens between two evictions of it
STEP_TOKENS = 20  # d= b * c _ b= 3 _ c= 7 _ 3 * 7 = 1 _ d= 1 and the blank line


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum: `steps` batches of `rows` packed rows of `length` tokens, problems of `low`..`high`.

    Attributes:
      steps, rows, length: of the stage.
      low, high: definitions of a chain, sums of a trail, or steps of a word problem.
      max_doubts: cuts a chain's verification passes, whose tokens are easy copies: fewer, and more of a batch is reasoning.
      drills: the share of the sequences that are no problems but drills of what a small model learns last. For chains: `values`
        to look up, asked for at random, or the formulas and results of `steps`; for trails: facts to look up. Only these are
        targets.
      drill: which drills of chains, in equal shares.
      linked: the share of the passes in drills of trails that another pass follows.
      early: the share of the chains that ask for a variable before the last.
      passes: the fewest and the most passes of a trail, or verifications of a word problem.
      branches: the most branches of a trail.
      sink: how strongly the loss draws the heads above the first layer to the text's first token, in nats.
      live: the share of the trails of which each query sees the first tokens, the live set and the last tokens alone, so that
        the model learns to read nothing else: the facts' first statements or their latest, as the draw has it.
    """

    steps: int
    rows: int
    length: int
    low: int
    high: int
    max_doubts: int = 4
    drills: float = 0.0
    drill: tuple[str, ...] = ("values",)
    linked: float = 0.0
    early: float = 0.2
    passes: tuple[int, int] = (4, 8)
    branches: int = 2
    sink: float = 0.0
    live: float = 0.0


def read_stage(fields: dict[str, Any]) -> Stage:
    """A stage from a table of a TOML file."""
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return Stage(**given)


def make_batch(tokenizer: Any, stage: Stage, seed: tuple[int, int], task: str = "chains") -> dict[str, np.ndarray]:
    """One packed batch: `token`, `segment` (which problem), `position` (within it), `end` (the place in its row from which on a
    token is not seen) and `is_target`, all `[rows, length]`.

    A trace that does not fit in what is left of a row is cut there, so no token of the batch is padding.
    """
    rng = np.random.default_rng(seed)
    shape = (stage.rows, stage.length + 1)
    batch = {name: np.zeros(shape, np.int32) for name in ("token", "segment", "position", "is_target")}
    batch["end"] = np.full(shape, OPEN_END, np.int32)
    for row in range(stage.rows):
        filled, segment = 0, 0
        while filled < shape[1]:
            tokens, is_target = DRAWS[task](tokenizer, stage, rng)
            size = min(len(tokens), shape[1] - filled)
            span = slice(filled, filled + size)
            batch["token"][row, span] = tokens[:size]
            batch["segment"][row, span] = segment
            batch["position"][row, span] = np.arange(size)
            batch["is_target"][row, span] = is_target[:size]
            if stage.live and tokens[-1] == tokenizer.eos_token_id and rng.random() < stage.live:
                end = ends(tokenizer, tokens, is_target.index(True), rng)[:size]
                batch["end"][row, span] = np.where(end == OPEN_END, end, filled + end)
            filled, segment = filled + size, segment + 1
    return batch


def ends(tokenizer: Any, tokens: list[int], start: int, rng: np.random.Generator) -> np.ndarray:
    """The token of a trail from which on each token is no longer seen, if the oracle of the live set decides what is kept."""
    live = live_slots(tokenizer.convert_ids_to_tokens(tokens), is_latest=bool(rng.random() < 0.5))
    budget = round(rng.uniform(*LIVE_SHARES) * len(tokens))
    return keep_live(live, start + int(rng.integers(LIVE_INTERVAL)), budget, LIVE_INTERVAL)


def draw_chain(tokenizer: Any, stage: Stage, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """A chain or a drill, and which of its tokens are to be learnt."""
    if rng.random() < stage.drills:
        kind = stage.drill[int(rng.integers(len(stage.drill)))]
        given, asked = (tokenizer.encode(text) for text in DRILLS[kind](rng))
        return given + asked, [False] * len(given) + drill_targets(tokenizer, asked, kind)
    problem = chains.draw_problem(rng, stage.low, stage.high, stage.early)
    prompt = tokenizer.encode(problem.prompt)
    trace = tokenizer.encode(chains.write_trace(problem, min(chains.num_doubts(problem, rng), stage.max_doubts)))
    return with_end(tokenizer, prompt, trace)


def draw_trail(tokenizer: Any, stage: Stage, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """A trail or a drill, and which of its tokens are to be learnt."""
    if rng.random() < stage.drills:
        given, text = trails.draw_facts(rng, stage.linked)
        prompt, asked = tokenizer.encode(given), tokenizer.encode(text, add_special_tokens=False)
        contents = {content for _, content in statements(tokenizer.convert_ids_to_tokens(asked))}
        return prompt + asked, [False] * len(prompt) + [i in contents for i in range(len(asked))]
    trail = trails.draw_trail(rng, stage.low, stage.high, stage.passes, stage.branches)
    trace = tokenizer.encode(trails.write_trace(trail), add_special_tokens=False)
    return with_end(tokenizer, tokenizer.encode(trail.prompt), trace)


def draw_word_problem(tokenizer: Any, stage: Stage, rng: np.random.Generator) -> tuple[list[int], list[bool]]:
    """A word problem with its solution, and which of its tokens are to be learnt."""
    problem = word_problems.draw_word_problem(rng, int(rng.integers(stage.low, stage.high + 1)))
    trace = word_problems.write_trace(problem, int(rng.integers(stage.passes[0], stage.passes[1] + 1)))
    return with_end(tokenizer, tokenizer.encode(problem.prompt), tokenizer.encode(trace, add_special_tokens=False))


DRAWS = {"chains": draw_chain, "trails": draw_trail, "words": draw_word_problem}


def with_end(tokenizer: Any, prompt: list[int], trace: list[int]) -> tuple[list[int], list[bool]]:
    """A problem and its trace with the end token; all but the prompt is to be learnt."""
    tokens = [*prompt, *trace, tokenizer.eos_token_id]
    return tokens, [i >= len(prompt) for i in range(len(tokens))]


def drill_targets(tokenizer: Any, asked: list[int], kind: str) -> list[bool]:
    """Which tokens of a drill can be known: every digit of values; the formula, sum and result of steps."""
    if kind == "steps":
        return [i % STEP_TOKENS in (1, 2, 3, 11, 12, 13, 15, 18) for i in range(len(asked))]
    digits = set(tokenizer.convert_tokens_to_ids(list(string.digits)))
    return [token in digits for token in asked]
