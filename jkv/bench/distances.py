"""Distances between the pages of one trace, as a picture: `python -m jkv.bench.distances --out results`.

Every pair of full pages of one greedy completion with the full cache, by ReasonCache's distance
(`jkv.reasoning.sharing.distances`), on rotated keys, on raw keys, and on values; circles mark pairs whose tokens are the same,
place by place (its Fig. 3).
"""

import argparse
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import pallas_kernels as kernels
from jkv import viz
from jkv.bench.rounds import GREEDY
from jkv.checkpoints import loading as checkpoint
from jkv.engine.results import complete
from jkv.evaluation.held_out import held_out
from jkv.generate import generate
from jkv.limits import parse
from jkv.model.decoder import forward
from jkv.model.params import Model, Params
from jkv.model.rotary import rotary_frequency
from jkv.reasoning.sharing import COMPARED, Share, distances
from jkv.reports import write_figure, write_json


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-reasoner", help="a shipped model, a checkpoint folder, or a hub name")
    parser.add_argument("--prompt", help="default: a held-out problem")
    parser.add_argument("--page-size", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path, required=True, help="a folder for distances.png and distances.json")
    options = parse(parser)
    options.out.mkdir(parents=True, exist_ok=True)
    model = checkpoint.load(options.model)
    prompt = options.prompt or held_out(1)[0].prompt
    out = complete(generate(model, prompt, sampling=GREEDY, max_new_tokens=options.max_new_tokens, progress=False))
    sequence = np.concatenate([out.prompts[0], out.tokens[0, : out.lengths[0]]]).astype(np.int32)
    page_size, num_pages = options.page_size, len(sequence) // options.page_size
    pages = sequence[: num_pages * page_size].reshape(num_pages, page_size)
    is_same = (pages[:, None] == pages[None]).all(axis=-1) & ~np.eye(num_pages, dtype=bool)
    found = {name: all_distances(model, sequence, page_size, name) for name in COMPARED}
    record = {"prompt": prompt, "page_size": page_size, "pages": num_pages} | {
        name: describe(distance, is_same) for name, distance in found.items()
    }
    write_json(options.out / "distances.json", record)
    write_figure(options.out / "distances.png", viz.distances(found, is_same))
    print(json.dumps(record, indent=1))


def all_distances(model: Model, sequence: np.ndarray, page_size: int, compare_on: str) -> np.ndarray:
    """The distance of every two pages: [P, P]."""
    num_pages = len(sequence) // page_size
    kv = page_contents(model.params, jnp.asarray(sequence[: num_pages * page_size]), page_size)
    layers, heads = kv.shape[0], kv.shape[2]
    index = np.arange(kv[..., 0, 0, 0].size, dtype=np.int32).reshape(layers, num_pages, heads)
    pool = kv.reshape(-1, *kv.shape[3:])
    out = np.zeros((num_pages, num_pages))
    share, tokens = Share(compare_on=compare_on), np.full(num_pages, page_size, np.int32)
    measure = jax.jit(kernels.block_distance)
    for page in range(num_pages):
        one, other = np.broadcast_to(index[:, page], (num_pages, layers, heads)), np.moveaxis(index, 1, 0)
        shift = (page - np.arange(num_pages)) * page_size
        angle = shift[:, None] * np.asarray(rotary_frequency(model.config)) if compare_on == "raw" else None
        out[page] = distances(share, np.asarray(measure(pool, one, other, tokens, angle)), tokens, heads)[0]
    return out


def page_contents(params: Params, token: Int[Array, " T"], page_size: int) -> Float[Array, "L MP K 2 page H"]:
    """Keys and values of a sequence, page by page."""

    def attend(layer: int, query: Any, key: Any, value: Any, cache: Any) -> tuple[Any, Any]:
        return jax.nn.dot_product_attention(query, key, value, is_causal=True), [*cache, jnp.stack([key[0], value[0]])]

    _, kept = forward(params, token[None], jnp.arange(len(token), dtype=jnp.int32)[None], attend, [])
    kv = jnp.stack(kept)  # [L, 2, T, K, H]
    kv = kv.reshape(*kv.shape[:2], -1, page_size, *kv.shape[3:])
    return kv.transpose(0, 2, 4, 1, 3, 5)


def describe(distance: np.ndarray, is_same: np.ndarray) -> dict[str, float]:
    """The median distance of pairs with the same tokens and of other pairs, and how often the first are nearer."""
    upper = np.triu(np.ones_like(is_same), 1)
    same, other = distance[upper & is_same], distance[upper & ~is_same]
    if not len(same):
        return {"pairs_of_the_same_tokens": 0}
    nearer = float((same[:, None] < other[None]).mean())
    return {
        "pairs_of_the_same_tokens": len(same),
        "median_same": round(float(np.median(same)), 4),
        "median_other": round(float(np.median(other)), 4),
        "same_is_nearer": round(nearer, 4),
    }


if __name__ == "__main__":
    main()
