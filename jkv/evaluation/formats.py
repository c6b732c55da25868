"""What quantised pages do to a model's next-token distributions: `python -m jkv.evaluation.formats --out results` records it.

Passages of the Python manual are read once with keys and values in floats, and once as pages of each format give them back, in
one forward pass each. For each passage: the mean divergence KL(floats || format) of the next token's distribution in nats, how
often the most likely token is the same, and by how much the passage's own tokens lose likelihood. Passages are paired, and
intervals are bootstrapped over passages.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jkv.cache.slot_size import slot_bytes
from jkv.evaluation.probe_texts import stream
from jkv.model import checkpoint, decoder
from jkv.model.params import Model, Params
from jkv.replay.score import dense_columns, hidden_states
from jkv.reports import about, digits, footnote, markdown, write
from jkv.statistics import bootstrap
from pallas_kernels.quantised import FORMATS, Format

MEASURES = "kl", "same", "loss"


@functools.partial(jax.jit, static_argnames="kv_format")
def compare(params: Params, token: Int[Array, "1 T"], kv_format: Format) -> Float[Array, "3"]:
    """Divergence, share of equal choices, and rise of the loss, averaged over the tokens of a passage."""
    floats = dense_columns(params.config, *token.shape)
    one, other = (
        jax.nn.log_softmax(decoder.unembed(params, hidden_states(params, token, columns)[0, :-1]).astype(jnp.float32))
        for columns in (floats, floats._replace(kv_format=kv_format))
    )
    index, target = jnp.arange(len(one)), token[0, 1:]
    divergence = (jnp.exp(one) * (one - other)).sum(axis=-1)
    same = one.argmax(axis=-1) == other.argmax(axis=-1)
    return jnp.stack([divergence.mean(), same.mean(), (one - other)[index, target].mean()])


def measure(model: Model, passages: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """A line for each format."""
    lines, size = [], model.config.head_size
    for name, kv_format in FORMATS.items():
        figures = np.array([compare(model.params, jnp.asarray([one], jnp.int32), kv_format) for one in passages])
        line: dict[str, Any] = {"format": name, "times_smaller": digits(slot(size, None) / slot(size, kv_format), 3)}
        for i, measured in enumerate(MEASURES):
            interval = [digits(end, 3) for end in bootstrap(figures[:, i])]
            line |= {measured: digits(figures[:, i].mean(), 3), f"{measured}_interval": interval}
        lines.append(line)
    return lines


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
        "slots in the bytes of one in bfloat16",
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
    options = parser.parse_args(argv)
    model = checkpoint.load(options.model)
    passages = [one.prompt + one.rest for one in stream(model.tokenizer, options.texts, options.length)]
    name = Path(options.model).name
    record: dict[str, Any] = {"about": about("python -m jkv.evaluation.formats"), "model": name}
    record |= {"texts": options.texts, "length": options.length, "lines": measure(model, passages)}
    print(table(record))
    if options.out:
        write(f"formats-{name}", record, table(record), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
