"""`jkv.analyze`: the redundancy of a set of traces, and how it differs between right and wrong ones."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jkv.analysis.redundancy import MEASURES, Figures, Measure, make_reader
from jkv.errors import refused
from jkv.reasoning.word_tokenizer import Words
from jkv.reports import digits, markdown, write_json
from jkv.statistics import bootstrap, mean_of

CLASSES = ("all", "right", "wrong")
RESAMPLES = 2_000  # an analysis has over a hundred intervals


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over samples and its 95 % bootstrap interval.

    Attributes:
      count: the samples that have the figure; for a difference, the fewer of both classes.
      mean: None where no sample has it.
      low, high: None with fewer than two samples.
    """

    count: int
    mean: float | None = None
    low: float | None = None
    high: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Analysis:
    """The redundancy of a set of traces; printed, it is a Markdown table.

    Attributes:
      counted_in: what tokens are, "tokens" or "words".
      right: of each sample, None where it is not known.
      figures: of each sample, by the names in `jkv.analysis.redundancy.MEASURES`; None where a trace has none.
      estimates: for each measure, the mean over "all", "right" and "wrong" samples, and the "difference", wrong less right.
    """

    counted_in: str
    right: tuple[bool | None, ...]
    figures: tuple[Figures, ...]
    estimates: dict[str, dict[str, Estimate]]

    def count(self, name: str) -> int:
        """How many samples are in a class."""
        return len(self.right) if name == "all" else self.right.count(name == "right")

    @property
    def known(self) -> dict[str, dict[str, Estimate]]:
        """The estimates of measures that any sample has."""
        return {name: row for name, row in self.estimates.items() if row["all"].mean is not None}

    def __str__(self) -> str:
        """A line a measure."""
        columns = ["measure", *(f"{name} ({self.count(name):,})" for name in CLASSES), "wrong - right", "source"]
        return markdown(columns, (self._cells(MEASURES[name], row) for name, row in self.known.items()))

    __repr__ = __str__

    def _cells(self, measure: Measure, row: dict[str, Estimate]) -> list[str]:
        words = measure.words.replace("tokens", self.counted_in)
        cells = [describe(row[name], measure.unit, self.count(name)) for name in CLASSES]
        return [words, *cells, describe(row["difference"], measure.unit, None), measure.source]

    def record(self) -> dict[str, Any]:
        """All of it for JSON: samples' figures by measure, rounded to six digits."""
        return {
            "counted_in": self.counted_in,
            "right": list(self.right),
            "estimates": {
                name: {kind: dataclasses.asdict(estimate) for kind, estimate in row.items()}
                for name, row in self.estimates.items()
            },
            "figures": {
                name: [None if (one := of[name]) is None else digits(one, 6) for of in self.figures] for name in MEASURES
            },
        }

    def save(self, path: Any) -> None:
        """Writes `record` as JSON."""
        write_json(path, self.record())


def analyze(
    texts: Any,
    right: Any = None,
    tokenizer: Any = None,
    encoder: Any = "tokens",
) -> Analysis:
    r"""The redundancy measures of five papers over a set of completions, all, right and wrong ones.

    Shares of similar steps, repeated sentences and non-execution thoughts, n-gram frequency and entropy: what each means, and
    from which paper it is, stands in `jkv.analysis.redundancy`. Each is a mean over samples, with a bootstrap interval
    (BCa) that takes samples as independent (several of one problem are not quite).

    Args:
      texts: completions, the prompts left out.
      right: whether each answers right, None where that is not known.
      tokenizer: whose tokens are counted, with `encode`, `decode` and a length, such as `model.tokenizer`; None counts words
        and signs, without white space and the marks of thinking.
      encoder: what steps and sentences are compared as: "tokens", bags of them; "sentence:<model>", a sentence encoder
        by name or folder; or a function from a text to a vector.

    Raises:
      ValueError: no texts, something else than texts, marks of another length, or what `jkv.analysis.redundancy.make_reader`
        refuses.

    >>> analyze(["<think>\n\na=1\n\na=1\n\n"], [True]).estimates["similar_steps_0.8"]["right"].mean
    0.5
    """
    texts = [texts] if isinstance(texts, str) else list(texts)
    marks = check_marks(right, check_texts(texts))
    if tokenizer is not None and not all(hasattr(tokenizer, name) for name in ("encode", "decode", "__len__")):
        raise refused(
            f"tokenizer has encode, decode and a length, such as model.tokenizer; got {type(tokenizer).__name__}. Without one "
            "(None), words are counted.",
            tokenizer="wrong_type",
        )
    reader = make_reader(texts, tokenizer, encoder)
    figures = tuple(reader.read(text) for text in texts)
    estimates = {name: estimate_classes(np.array([one[name] for one in figures], float), marks) for name in MEASURES}
    return Analysis("words" if isinstance(reader.tokenizer, Words) else "tokens", marks, figures, estimates)


def check_texts(texts: Sequence[Any]) -> int:
    """How many completions there are."""
    if not texts:
        raise refused("texts are completions, at least one; got none.", texts="missing")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            rule = f"texts are strings; number {i} is {text!r:.60}. A model without a tokenizer gives no texts."
            raise refused(rule, texts="wrong_type")
    return len(texts)


def check_marks(right: Any, count: int) -> tuple[bool | None, ...]:
    """A mark for each sample."""
    marks = [None] * count if right is None else list(right)
    if len(marks) != count:
        raise refused(f"right has one mark for each text; got {len(marks)} for {count}.", right="does_not_fit")
    for i, mark in enumerate(marks):
        if not (mark is None or isinstance(mark, bool | np.bool_)):
            rule = f"right holds True, False, or None for what is not known; number {i} is {mark!r}."
            raise refused(rule, right="wrong_type")
    return tuple(None if mark is None else bool(mark) for mark in marks)


def estimate_classes(values: np.ndarray, right: tuple[bool | None, ...]) -> dict[str, Estimate]:
    """The means of a figure over all samples and each class, and the difference of the classes; NaN is no figure."""
    has_figure = np.isfinite(values)
    members = {"all": has_figure, **{name: has_figure & [mark is (name == "right") for mark in right] for name in CLASSES[1:]}}
    out = {name: estimate(values[chosen]) for name, chosen in members.items()}
    return out | {"difference": estimate(values[members["wrong"]], values[members["right"]])}


def estimate(*groups: np.ndarray) -> Estimate:
    """The mean of a group, or of the first less that of the second, and its interval."""
    fewest = min(map(len, groups))
    if fewest == 0:
        return Estimate(0)
    return Estimate(fewest, float(mean_of(*groups)), *(bootstrap(*groups, resamples=RESAMPLES) if fewest > 1 else (None, None)))


def describe(estimate: Estimate, unit: str, expected: int | None) -> str:
    """A cell; how many samples have the figure, where not all `expected` do; for a difference (None), with its sign.

    >>> describe(Estimate(8, 0.25, 0.2, 0.3), "share", 10), describe(Estimate(0), "bits", 0)
    ('25.0% (20.0 to 30.0), n=8', '-')
    """
    if estimate.mean is None:
        return "-"
    scale, digits = (100 if unit == "share" else 1), (1 if unit in ("share", "count") else 2)
    form = f"{'+' if expected is None else ''}z,.{digits}f"
    mark = "%" if unit == "share" and expected is not None else ""
    text = f"{scale * estimate.mean:{form}}{mark}"
    if estimate.low is not None and estimate.high is not None:
        text += f" ({scale * estimate.low:{form}} to {scale * estimate.high:{form}})"
    return text + (f", n={estimate.count:,}" if expected is not None and estimate.count < expected else "")
