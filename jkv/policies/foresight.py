"""Foresight, jkv's own policy: keeps the slots that a small network expects to be read, trained on what will be read."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jkv.checkpoints.loading import shipped_folders
from jkv.checks import shown
from jkv.errors import refused
from jkv.eviction.calibration import Calibration
from jkv.eviction.evict import Evict
from jkv.eviction.needs import Needs
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every
from jkv.eviction.view import CacheView
from jkv.model.params import ModelConfig
from jkv.model.rotary import Rope, unrotate

INPUTS = ("key", "value", "age")  # what a network reads of a slot
AGES = tuple(2 ** (i / 4) for i in range(8, 57))  # tokens, from 4 to 16,384: the nodes between which a slot's age lies


class Network(NamedTuple):
    """A network with one hidden layer for each layer and KV head of a model, or for each batch row of a view.

    It reads a slot's key before RoPE, its value and its age, F numbers, and returns how much the slot is expected to be read.
    Older slots than training had count as `longest_age` tokens old: the weights of ages that it never saw are random.
    """

    into: Float[Array, "L K F I"]
    bias: Float[Array, "L K I"]
    out: Float[Array, "L K I"]
    longest_age: Float[Array, " L"]  # tokens


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Foresight(Calibration):
    """The `Network` of a model, as `jkv.foresee` trains it."""

    kind = Network
    what = "The networks of foresight"
    command = "jkv foresee"

    def check_shapes(self) -> None:
        into, bias, out, longest_age = self.arrays
        if into.ndim != 4 or not (*into.shape[:2], into.shape[3]) == bias.shape == out.shape:
            rule = f"into must be [L, K, F, I], bias and out [L, K, I]; got {into.shape}, {bias.shape}, {out.shape}."
            raise refused(rule, network="wrong_type")
        if longest_age.shape != into.shape[:1] or not (AGES[0] <= longest_age).all() or not (longest_age <= AGES[-1]).all():
            rule = f"longest_age must be [L], tokens in [{AGES[0]:g}, {AGES[-1]:,g}]; got {shown(longest_age)}."
            raise refused(rule, network="out_of_range")

    def shapes_for(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        heads, hidden = (config.num_paged_layers, config.num_kv_heads), self.arrays.into.shape[-1]
        num_features = 2 * config.head_size + len(AGES)
        return {
            "into": (*heads, num_features, hidden),
            "bias": (*heads, hidden),
            "out": (*heads, hidden),
            "longest_age": heads[:1],
        }


def features(
    rope: Rope,
    key: Float[Array, "B K S H"],
    value: Float[Array, "B K S H"],
    position: Int[Array, "B K S"],
    age: Float[Array, "B K S"],
) -> Float[Array, "B K S F"]:
    """What the network reads of each slot: the key before RoPE, the value, and where its age lies between the nodes of `AGES`.

    The last is one number a node: 1 at the node, falling to 0 at its neighbours, evenly in the logarithm of the age.
    """

    def of_head(key: Float[Array, "B S H"], position: Int[Array, "B S"]) -> Float[Array, "B S H"]:
        return unrotate(rope, key[:, :, None], position)[:, :, 0]

    plain = jax.vmap(of_head, in_axes=1, out_axes=1)(key, position)
    place = 4 * jnp.log2(jnp.clip(age, AGES[0], AGES[-1])) - 8
    hats = jnp.maximum(0.0, 1.0 - jnp.abs(place[..., None] - jnp.arange(len(AGES), dtype=jnp.float32)))
    return jnp.concatenate([plain, value.astype(jnp.float32), hats], axis=-1)


def expected_reads(network: Network, x: Float[Array, "B K S F"]) -> Float[Array, "B K S"]:
    """The logarithm of how much each slot will be read, up to a constant of its row and head."""
    hidden = jnp.einsum("bksf,bkfi->bksi", x, network.into, precision="highest") + network.bias[:, :, None]
    return jnp.einsum("bksi,bki->bks", jax.nn.silu(hidden), network.out, precision="highest")


@dataclasses.dataclass(frozen=True)
class ExpectedReads:
    """What the network of each layer and KV head expects of each slot."""

    needs = Needs(rope=True, calibration=True)

    def __call__(self, view: CacheView) -> Float[Array, "B K S"]:
        assert view.rope is not None
        assert view.calibration is not None
        age = jnp.minimum(view.age.astype(jnp.float32), view.calibration.longest_age[:, None, None])
        return expected_reads(view.calibration, features(view.rope, view.key, view.value, view.position, age))


def shipped_networks() -> dict[str, Path]:
    """The files of networks in the package, by the name of their model."""
    files = {name: folder / "foresight.safetensors" for name, folder in shipped_folders().items()}
    return {name: file for name, file in files.items() if file.exists()}


@recipe("Foresight", idea="keeps the slots that a small network, trained on the model's own text, expects to be looked up")
def foresight(
    budget: int,
    network: Foresight | Path | str,
    interval: int = 128,
    sinks: int = 4,
    recent: int = 4,
    protect_prompt: bool = False,
) -> Policy:
    """Foresight with `budget` slots for each layer and KV head, compacted every `interval` generated tokens.

    `network` is what `jkv.foresee` returns, the file that `jkv foresee` writes, or the name of a model in the package; it is
    trained once for each model, in minutes. The first `sinks` tokens, the last `recent` and, with `protect_prompt`, the prompt
    are never evicted. It reads no queries and stores nothing beside keys and values: the network is applied to the cached slots
    at each compaction.

    Rule:
      x = (key before RoPE, value, age: 49 nodes from 4 to 16,384 tokens, and between two of them a share of each;
          an age above the longest that training saw counts as that one)
      score = out . silu(into x + bias), with weights of each layer and KV head
      trained so that the softmax of the scores over old slots is the distribution of the squared attention that all later
          queries of the text give them, which is known in training

    Squared attention counts sharp look-ups and leaves out attention that is spread thinly (`jkv.analysis.recall`). On texts
    that differ from the training texts, it can be worse than random slots (docs/findings.md). Its nearest relatives:
      - KVP (arXiv 2602.10238): a network a head ranks cached keys and values, rewarded for future attention at all budgets.
      - ForesightKV (arXiv 2602.03203): at each compaction, a network reads cached keys, values and statistics of the attention
        so far; it learns the order of later attention, then the loss of the text by reinforcement.
      - TRIM-KV (arXiv 2512.03324): a gate scores a token as it is written, and the score decays with the token's age.
      - KVzap (arXiv 2601.07891) and Fast KVzip (arXiv 2601.17668): gates on hidden states as tokens are written, without age.

    Raises:
      ValueError: a file that holds no networks, or a setting out of its range. Networks of another model are refused when an
        engine meets them.
    """
    loaded = network if isinstance(network, Foresight) else Foresight.load(shipped_networks().get(str(network), network))
    evict = Evict(ExpectedReads(), sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("foresight", evict, Every(budget, interval), calibration=loaded)
