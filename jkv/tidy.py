"""Results as tidy tables: flat records, one for each policy and budget, or one for each policy, budget and text.

Commands write them beside their JSON, as `pandas.read_csv` takes them; `to_pandas` makes a data frame of what functions return.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jkv.checks import install, shown
from jkv.errors import refused


@runtime_checkable
class Tidy(Protocol):
    """A result that is one or several records of a table."""

    @property
    def tidy(self) -> list[dict[str, Any]]:
        """The records: numbers, texts, truth values and None, by the names of columns."""
        ...


def records_of(results: Tidy | Iterable[Tidy]) -> list[dict[str, Any]]:
    """The records of a result, or of several.

    Raises:
      ValueError: something that has none.
    """
    parts = [results] if isinstance(results, Tidy) else results
    if not isinstance(parts, Sequence) or isinstance(parts, str) or not all(isinstance(part, Tidy) for part in parts):
        raise refused(
            "A table is made of what jkv.choose, jkv.recall, jkv.evaluation.compare.compare or jkv.evaluation.probe.probe "
            f"returns; got {shown(results)}.",
            results="wrong_type",
        )
    return [record for part in parts for record in part.tidy]


def to_pandas(results: Tidy | Iterable[Tidy]) -> Any:
    """A `pandas.DataFrame` of results: a row for each policy and budget, and for each text where a text has figures of its own.

    Takes a `jkv.Choice`, and the lists that `jkv.recall`, `jkv.evaluation.compare.compare` and `jkv.evaluation.probe.probe`
    return. `docs/evaluation.md` describes the columns.

    Raises:
      ValueError: something else, or pandas is not installed.
    """
    records = records_of(results)
    try:
        import pandas
    except ImportError:
        raise refused(
            f"to_pandas needs pandas, which is not installed. Run: {install('eval')}", results="unsupported"
        ) from None
    return pandas.DataFrame(records)


def csv_of(records: Iterable[Mapping[str, Any]]) -> str:
    r"""Records as CSV with a head; what a record lacks, and None, is empty.

    >>> csv_of([{"policy": "a,b", "loss": 0.5}, {"policy": "c", "seed": 1}])
    'policy,loss,seed\n"a,b",0.5,\nc,,1\n'
    """
    records = list(records)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(dict.fromkeys(name for record in records for name in record)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return stream.getvalue()
