"""What guessing the next tokens gains: tokens a step, and time beside plain decoding, by rows, policy and guesses.

The texts are the model's own: greedy continuations of lists and code, which repeat themselves; continuations of prose, drawn at
temperature 1, as a small model's greedy prose repeats itself too; or the problems of tiny-reasoner, drawn likewise. Engines
take turns, and the tokens of every engine are compared. Time is that of decoding, compiling excluded: the programs run once
before.
"""

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jkv.bench.fixtures import usual_page_size
from jkv.bench.rounds import in_turns
from jkv.checks import check_known
from jkv.engine.drafters import DRAFTERS
from jkv.engine.engine import Engine
from jkv.engine.results import complete
from jkv.errors import refused
from jkv.evaluation.held_out import held_out
from jkv.eviction import Policy
from jkv.model.params import Model
from jkv.model.sampling import Sampling
from jkv.reports import Report, digits, footnote, markdown

OWN = "tiny-reasoner"
TEXTS = {
    "repeats": (
        'Prices, as JSON lines:\n{"name": "apple", "price": 3, "unit": "kg"}\n{"name": "pear", "price": 4, "unit": "kg"}\n'
        '{"name": "plum", "price": 5, "unit": "kg"}\n',
        "def test_one():\n    assert double(1) == 2\n\n\ndef test_two():\n    assert double(2) == 4\n\n\ndef test_three():\n",
        "| day | morning | evening |\n|---|---|---|\n| Monday | milk, bread | soup, bread |\n| Tuesday | milk, tea | rice |\n",
        "The law says: a member may speak once. A member may vote once. A member may leave once. The law says: a member may",
    ),
    "prose": (
        "The old lighthouse keeper had never told anyone what he saw in the winter of 1911, until one evening",
        "Bread rises because yeast turns sugar into gas. Bakers of long ago did not know this, and so they believed",
        "When the committee met again in spring, nobody remembered why the bridge had been built where it was, but",
        "My grandmother kept three clocks in her kitchen, none of which agreed with any other. On Sundays she would",
    ),
}


def texts_of(model: Model) -> Mapping[str, Sequence[str]]:
    """Prompts by kind.

    Raises:
      ValueError: a model without a tokenizer.
    """
    if model.tokenizer is None:
        rule = f"jkv bench speculate reads texts, and {model.name} has no tokenizer. Name a model that `jkv models` lists."
        raise refused(rule, model="unsupported")
    return {"its problems": [one.prompt for one in held_out(8)]} if (model.name or "").startswith(OWN) else TEXTS


def measure(
    model: Model,
    policies: Sequence[Policy],
    *,
    batches: Sequence[int],
    drafts: Sequence[int],
    new_tokens: int,
    rounds: int,
    drafter: str = "ngram",
    report: Report = print,
) -> dict[str, Any]:
    """Figures of every kind of text, number of rows, policy and number of guesses; 0 guesses are plain decoding.

    Raises:
      ValueError: an unknown drafter, or a model without a tokenizer.
    """
    check_known(DRAFTERS, drafter=drafter)
    records, kinds = [], texts_of(model)
    for batch in batches:
        for policy in policies:
            engines = {number: engine_of(model, policy, batch, number, new_tokens, kinds, drafter) for number in (0, *drafts)}
            for kind, prompts in kinds.items():
                chosen = [prompts[i % len(prompts)] for i in range(max(batch, len(prompts)))]
                temperature = 0.0 if kind == "repeats" else 1.0
                runs = {
                    number: functools.partial(decode, engine, policy, chosen, new_tokens, temperature, batch)
                    for number, engine in engines.items()
                }
                turns = in_turns(runs, rounds)
                plain, expected = median_seconds(turns[0]), turns[0][0]["texts"]
                for number, each in turns.items():
                    figures = {
                        "text": kind,
                        "batch": batch,
                        "policy": policy.name,
                        "drafts": number,
                        "tokens_per_step": digits(each[0]["tokens_per_step"]),
                        "accepted": digits(each[0]["accepted"]),
                        "idle": digits(each[0]["idle"]),
                        "ms_per_token": digits(1e3 * median_seconds(each)),
                        "times_plain": digits(plain / median_seconds(each)),
                        "equal": sum(a == b for a, b in zip(each[0]["texts"], expected, strict=True)) / len(chosen),
                    }
                    records.append(figures)
                    report(figures)
    about = {"model": repr(model), "drafter": drafter, "new_tokens": new_tokens, "page_size": usual_page_size()}
    return about | {"rounds": rounds, "records": records}


def median_seconds(turns: Sequence[dict[str, Any]]) -> float:
    """Seconds of decoding for a token of each row, the median of several runs."""
    return statistics.median(turn["seconds"] for turn in turns)


def engine_of(
    model: Model, policy: Policy, batch: int, drafts: int, new_tokens: int, kinds: Mapping[str, Sequence[str]], drafter: str
) -> Engine:
    """An engine for whole rows; with 0 guesses, of plain steps."""
    assert model.tokenizer is not None
    longest = max(len(model.tokenizer.encode(text)) for texts in kinds.values() for text in texts) + new_tokens
    speculate = DRAFTERS[drafter](drafts) if drafts else None
    return Engine(model, max_running=batch, max_slots=longest + 8, policies=[policy], speculate=speculate)


def decode(
    engine: Engine, policy: Policy, prompts: Sequence[str], new_tokens: int, temperature: float, batch: int
) -> dict[str, Any]:
    """Decodes one sample of each prompt, `batch` of them at a time."""
    engine.reset_stats()
    sampling = Sampling(temperature=temperature, seed=0)
    tickets = [
        engine.submit(prompt, policy, sampling, max_new_tokens=new_tokens, first_sample=i, stop_ids=())
        for i, prompt in enumerate(prompts)
    ]
    engine.run()
    stats, results = engine.stats, [complete(engine.result(ticket)) for ticket in tickets]
    idle = stats.idle_row_steps / max(stats.idle_row_steps + stats.speculated_steps, 1)
    return {
        "seconds": stats.decode_seconds * batch / stats.tokens,
        "tokens_per_step": stats.tokens_per_step,
        "accepted": stats.accepted / max(stats.drafted, 1),
        "idle": idle,
        "texts": [np.asarray(result.tokens).tolist() for result in results],
    }


def table(record: dict[str, Any]) -> str:
    """One line for each text, number of rows, policy and number of guesses."""
    head = (
        *("text", "rows", "policy", "guesses a step", "tokens a step", "guesses that proved right", "row steps idle"),
        *("ms a token of each row", "times plain", "equal texts"),
    )
    rows = [
        (
            *(one["text"], one["batch"], one["policy"], one["drafts"], f"{one['tokens_per_step']:.2f}"),
            *(f"{one['accepted']:.0%}", f"{one['idle']:.0%}", f"{one['ms_per_token']:,.3g}"),
            *(f"{one['times_plain']:.2f}", f"{one['equal']:.0%}"),
        )
        for one in record["records"]
    ]
    about = (
        f"{record['model']}: {record['new_tokens']} tokens of each row, guesses by `jkv.{record['drafter']}`. "
        f"Median of {record['rounds']} rounds; engines take turns. A row is idle while it waits for the others of its chunk."
    )
    return f"{about}\n\n{markdown(head, rows)}\n\n{footnote(record)}"
