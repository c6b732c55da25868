"""A page of kept tokens read back by plain loops, and the same counted from the trace itself."""

import base64
import json
import re
import zlib

import numpy as np


def data_of(page):
    """What the page's script reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    return json.loads(text)


def records_of(page, panel=0):
    """The samples of a panel."""
    return data_of(page)["panels"][panel]


def counts_of(record, position):
    """Heads of each group that keep each token when the query at `position` reads: [groups, tokens], by the page."""
    total = len(record["ids"])
    groups = record["layers"] * record["heads"] // record["group_size"]
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(record["changes"])), "<i2")
    counts, rest = numbers[: groups * total], numbers[groups * total :]
    ticks, changes = np.split(rest, 2)
    kept, at = np.zeros((groups, total), int), 0
    for group in range(groups):
        for token in range(total):
            mine = range(at, at + counts[group * total + token])
            at += counts[group * total + token]
            if token <= position:
                kept[group, token] = record["group_size"] + sum(
                    int(changes[i]) for i in mine if record["ticks"][ticks[i]] <= position
                )
    assert at == len(ticks)
    return kept


def recount(out, position, sample=0):
    """Whether each layer and KV head has a column of each token that the query at `position` reads: [L * K, tokens]."""
    total = len(out.prompts[sample]) + out.lengths[sample]
    source, begin, end = (field[sample] for field in (out.trace.source, out.trace.begin, out.trace.end))
    layers, heads, width = source.shape
    kept = np.zeros((layers * heads, total), bool)
    for layer in range(layers):
        for head in range(heads):
            for column in range(width):
                if begin[layer, head, column] <= position < end[layer, head, column]:
                    kept[layer * heads + head, source[layer, head, column]] = True
    return kept
