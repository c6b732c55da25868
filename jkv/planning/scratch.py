"""The memory of device programs in addition to weights and cache: what XLA allocates while one of them runs.

The compiler decides this, so these are upper estimates of the arrays that dominate. They were found by compiling ahead of time
for TPU v5e, v6e, the H200 and the T4; `tests/aot/test_plan.py` compares them with the compiler's own memory analysis.
"""

import dataclasses

from jkv.engine import chunk_inputs as chunks
from jkv.eviction import Policy
from jkv.model.experts import takes_few
from jkv.model.params import ModelConfig
from jkv.model.sampling import Sampling
from pallas_kernels.paged_attention.pieces import PIECE

CUT = 2  # copies of the logits in float32 that draws with a cut read again and again; others are fused
PENALISED = 1  # likewise, of draws with penalties
RESIDUALS = 6  # arrays as wide as the residual stream that a token takes, beside three as wide as the MLP
LISTED = 7  # 4-byte values per slot in a compaction: scores, positions and indices
STATE_COPIES = 4  # arrays of float32 that a token takes in a layer with a recurrent state, as wide as its convolution
MASS_COPIES = 12  # of a chunk's attention, where plain XLA adds it up
KEY_COPIES = 9  # of one layer's keys in a compaction, where plain XLA computes it


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The most bytes that each kind of program takes while it runs; one runs at a time."""

    prefill: int
    decode: int
    compaction: int

    @property
    def most(self) -> int:
        """Bytes that must always be free."""
        return max(self.prefill, self.decode, self.compaction)


def scratch_of(
    config: ModelConfig,
    policy: Policy,
    *,
    platform: str,
    itemsize: int,
    num_rows: int,
    max_slots: int,
    logits: int,
    sampling: Sampling,
    is_plain: bool = False,
    places: int = 1,
    states: int = 0,
) -> Scratch:
    """Scratch of an engine's programs on one device, whose part of the model is `config`.

    `logits` is the number of one row, and `states` are the bytes of the recurrent states of all rows, which a step of several
    `places` keeps after each place.

    Decode programs keep the arrays of two layers, and of each layer the queries that a row gets back where it does not run. On
    a GPU, decode attention may leave an output per piece of a row. A compaction may gather the keys and values of its one row
    in all layers. A GPU without Triton (`is_plain`) gathers the keys and values of all rows in a layer, and keeps each layer's
    hidden states, or its attention where a policy adds it up.
    """
    of_experts = config.mlp_width * max(config.own_experts, 1) + config.shared_width
    widest = max(of_experts, config.dense_width, config.sharing_mlp_width)
    token = (RESIDUALS * config.width + 3 * widest) * itemsize  # of all experts: `jkv.model.experts.by_all`
    mass = 8 * policy.needs.mass * config.num_query_heads * max_slots  # logits of a step's attention, and their mass
    pieces = -(-max_slots // PIECE) * (platform == "gpu" and not is_plain and max_slots > PIECE)
    parts = 4 * pieces * config.num_query_heads * (config.head_size + 1)
    copies = CUT * (sampling.draws == "truncated") + PENALISED * sampling.penalises
    rings = config.num_paged_layers * config.num_query_heads * config.head_size * itemsize * (policy.needs.window > 0)
    decode = num_rows * (places * (2 * token + mass + parts + copies * 4 * logits) + rings)
    if places > 1:
        decode += places * (num_rows * 4 * logits + states)
    if config.num_experts and takes_few(config, num_rows * places):
        copies = 4 if platform == "tpu" else 2  # in two layers; XLA for TPU transposes them
        decode += copies * 3 * num_rows * places * config.num_active_experts * config.mlp_width * config.width * itemsize
    key_bytes = config.num_kv_heads * max_slots * config.head_size * itemsize  # of one row in one layer
    chunk = (chunks.OF_CPU if platform == "cpu" else chunks.OF_OTHERS if is_plain else chunks.OF_KERNELS).sizes[-1]
    own = config.in_windows
    of_window = own.num_kv_heads * (config.window + chunk) * own.head_size * itemsize if config.window_layers else 0
    channels = 0 if config.delta_net is None else config.delta_net.num_channels
    of_state = RESIDUALS * config.width * itemsize + 4 * STATE_COPIES * channels
    prefill = 2 * max(key_bytes, of_window) + chunk * max(token, of_state)
    evict, compaction = policy.evict, 0
    if evict is not None:
        compaction = config.num_paged_layers * (4 * LISTED * config.num_kv_heads * max_slots + 2 * key_bytes)
        compaction += 4 * policy.needs.projected * config.width * max_slots  # of one query head
    if is_plain:
        logits_of_step = 4 * config.num_query_heads * max_slots
        decode += num_rows * (2 * key_bytes + logits_of_step)
        decode += num_rows * policy.needs.mass * config.num_paged_layers * logits_of_step
        prefill += chunk * config.num_layers * config.width * itemsize
        prefill += MASS_COPIES * chunk * policy.needs.mass * logits_of_step
        compaction = compaction * 23 // 20 + (evict is not None) * KEY_COPIES * key_bytes
    return Scratch(prefill, decode, compaction)
