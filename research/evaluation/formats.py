"""What quantised pages and weights do to next-token distributions: `python -m research.evaluation.formats --out results`.

Passages of the Python manual are read once in floats, once with keys and values as pages of each format give them back, and
once with the weights in each format of theirs, in one forward pass each. For each passage: the mean divergence
KL(floats || format) of the next token's distribution in nats, how often the most likely token is the same, and by how much the
passage's own tokens lose likelihood. Passages are paired, and intervals are bootstrapped over passages. Of a record that is
there already, lines are kept, and only formats that it lacks are measured, each written when it is; a record of another model
or of other passages is refused.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.cache.slot_size import slot_bytes
from jkv.checkpoints import loading as checkpoint
from jkv.evaluation.generations import NEW_FOLDER
from jkv.evaluation.probe_texts import stream
from jkv.limits import parse
from jkv.model import decoder
from jkv.model.eight_bits import FORMATS as WEIGHTS
from jkv.model.eight_bits import quantise_weights
from jkv.model.params import Codes, Model, Params, count_weights
from jkv.replay.columns import dense_columns
from jkv.replay.score import hidden_states
from jkv.reports import about, digits, footnote, markdown, write
from jkv.resuming import check_same, digest_of
from jkv.statistics import bootstrap
from jkv.text_files import read_json
from pallas_kernels.quantised import FORMATS, Format
from pallas_kernels.sealed import SEALED

MEASURES = "kl", "same", "loss"
PAGES: dict[str, Format] = FORMATS | {
    f"{name}, pages of {page}": dataclasses.replace(form, page=page) for name, form in SEALED.items() for page in (128, 32)
}


@functools.partial(jax.jit, static_argnames="kv_format")
def compare(params: Params, others: Params, token: Int[Array, "1 T"], kv_format: Format | None) -> Float[Array, "3"]:
    """Divergence, share of equal choices, and rise of the loss with other weights or pages: means of a passage."""
    floats = dense_columns(params.config, *token.shape)
    one, other = (
        jax.nn.log_softmax(decoder.unembed(weights, hidden_states(weights, token, columns)[0, :-1]).astype(jnp.float32))
        for weights, columns in ((params, floats), (others, floats._replace(kv_format=kv_format)))
    )
    index, target = jnp.arange(len(one)), token[0, 1:]
    divergence = (jnp.exp(one) * (one - other)).sum(axis=-1)
    same = one.argmax(axis=-1) == other.argmax(axis=-1)
    return jnp.stack([divergence.mean(), same.mean(), (one - other)[index, target].mean()])


def measure(
    model: Model, passages: Sequence[Sequence[int]], known: Sequence[dict[str, Any]] = ()
) -> Iterator[list[dict[str, Any]]]:
    """All lines so far, after each format of pages and of weights that is measured; those that are known are not."""
    size, done = model.config.head_size, {line["format"]: line for line in known}
    of_weights = {f"weights in {kind}": kind for kind in WEIGHTS}
    for name in (*PAGES, *of_weights):
        if name in done:
            continue
        others, kv_format = model.params, PAGES.get(name)
        if name in of_weights:
            others = quantise_weights(model.params, of_weights[name])
            smaller = 2 * count_weights(model.params) / num_bytes(others)
        else:
            smaller = slot(size, None) / slot(size, kv_format)
        done[name] = line_of(name, smaller, [compare(model.params, others, each(one), kv_format) for one in passages])
        yield [done[one] for one in (*PAGES, *of_weights) if one in done]


def record_in(folder: Path | None, model: str, setting: dict[str, Any]) -> dict[str, Any]:
    """The record of the same model and passages in a folder; one without lines if there is none.

    Raises:
      ValueError: a record of others, or of an older version, without the digests that show it.
    """
    path = None if folder is None else folder / f"formats-{model}.json"
    if path is not None and path.exists():
        found: dict[str, Any] = read_json(path, ("about", "lines"))
        own = {name: found[name] for name in setting if name in found}
        check_same(f"{path} holds a record of something else", own, setting, NEW_FOLDER)
        return found
    return {"about": about("python -m research.evaluation.formats"), **setting, "lines": []}


def each(passage: Sequence[int]) -> Any:
    """A passage as a batch of one."""
    return jnp.asarray([passage], jnp.int32)


def num_bytes(params: Params) -> int:
    """Bytes of weights, where floats are bfloat16."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Codes))
    return sum(x.code.nbytes + x.scale.nbytes if isinstance(x, Codes) else 2 * x.size for x in leaves)


def line_of(name: str, smaller: float, measured: Sequence[Any]) -> dict[str, Any]:
    """A format's means and intervals."""
    figures = np.array(measured)
    line: dict[str, Any] = {"format": name, "times_smaller": digits(smaller, 3)}
    for i, field in enumerate(MEASURES):
        interval = [digits(end, 3) for end in bootstrap(figures[:, i])]
        line |= {field: digits(figures[:, i].mean(), 3), f"{field}_interval": interval}
    return line


def slot(head_size: int, kv_format: Format | None) -> int:
    """Bytes of a slot with its position, where floats are bfloat16."""
    return slot_bytes(head_size, jnp.dtype(jnp.bfloat16), kv_format)


def table(record: dict[str, Any]) -> str:
    """The figures in Markdown."""

    def cell(line: dict[str, Any], name: str) -> str:
        low, high = line[f"{name}_interval"]
        return f"{line[name]:.3g} [{low:.3g}, {high:.3g}]"

    rows = [
        (line["format"], f"{line['times_smaller']:.3g}", *(cell(line, name) for name in MEASURES)) for line in record["lines"]
    ]
    head = (
        "format",
        "times smaller than in bfloat16",
        "KL, nats (95 %)",
        "same choice (95 %)",
        "rise of the loss, nats (95 %)",
    )
    what = f"{record['model']}, {record['texts']} passages of {record['length']} tokens, all tokens kept."
    return "\n\n".join([what, markdown(head, rows), footnote(record)])


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a model's name or folder (default %(default)s)")
    parser.add_argument("--texts", type=int, default=16, help="passages (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for formats-MODEL.json and .md")
    options = parse(parser, argv)
    model = checkpoint.load(options.model)
    passages = [one.prompt + one.rest for one in stream(model.tokenizer, options.texts, options.length)]
    name = Path(options.model).name
    setting = {"model": name, "texts": options.texts, "length": options.length}
    record = record_in(options.out, name, setting | model.digests | {"data": digest_of(passages)})
    if record["lines"]:
        record.setdefault("added", []).append(about(record["about"]["command"]))
    for lines in measure(model, passages, record["lines"]):
        record["lines"] = lines
        print(f"measured {len(lines)} formats", file=sys.stderr, flush=True)
        if options.out:
            write(f"formats-{name}", record, table(record), options.out)
    print(table(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
