"""Settings of replicas: how items are generated, and how actors are placed and watched."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from jkv.checks import check_counts, out_of_range
from jkv.eviction import Policy
from jkv.model.sampling import Sampling


class RequestSettings(TypedDict, total=False):
    """The fields of `jkv.RequestOptions`, by name."""

    policy: Policy | Sequence[Policy] | None
    sampling: Sampling | None
    max_new_tokens: int | None
    n: int
    stop_ids: Sequence[int] | None
    stop_strings: Sequence[str]
    first_sample: int
    forced_tokens: Sequence[int] | Sequence[Sequence[int]] | None
    cache_salt: str
    adapter: str | None
    prompt_piece: int | None
    parse_special: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayOptions:
    """How replicas run as actors of Ray.

    Attributes:
      tensor: devices of each, over which its engine runs tensor-parallel.
      actor: options of each actor, as Ray's own `.options(...)` takes them: `num_gpus`, `resources`, `runtime_env`,
        `scheduling_strategy` and so on. By default Ray spreads actors over its machines.
      timeout: seconds after which a replica counts as lost that does not answer, or has items and decodes nothing. Programs
        compile in this time, too.
      snapshot_chunks: a snapshot of the running rows is taken after so many chunks of decode steps, and what a lost actor had
        goes on from there; 0 takes none, and it starts again. Both give equal tokens. Snapshots stay in Ray's object store.

    Raises:
      ValueError: a number out of its range.
    """

    tensor: int = 1
    actor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    timeout: float = 600.0
    snapshot_chunks: int = 0

    def __post_init__(self) -> None:
        check_counts(tensor=self.tensor, snapshot_chunks=self.snapshot_chunks or None)
        if not self.timeout > 0:
            raise out_of_range("timeout", "be above 0 seconds", self.timeout)
