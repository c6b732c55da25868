"""Budgets in bytes: `jkv.r_kv(budget="64MB")` is a budget in slots once the model and the format of its pool are known.
Beside them, what a policy must keep to where old pages are sealed in fewer bits (`check_sealing`).
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from jkv.cache.slot_size import SlotSize
from jkv.checks import shown, size
from jkv.errors import InputError, refused
from jkv.eviction.policy import Policy, noted
from jkv.eviction.schedules import WholeBlocks
from jkv.eviction.scores import UniformBlocks
from pallas_kernels.quantised import Format
from pallas_kernels.sealed import SealedFormat
from pallas_kernels.sealed_attention.tpu import LANES


def check_sealing(policy: Policy, kv_format: Format | None) -> None:
    """Refuses a policy that would write to sealed pages, or drop a page that is not sealed yet.

    Raises:
      ValueError: it drops slots or shares pages, and full pages are sealed.
    """
    if not isinstance(kv_format, SealedFormat) or (policy.evict is None and policy.share is None):
        return
    page = kv_format.page
    if drops_whole_pages(policy, page):
        return
    what = "drops slots of full pages" if policy.evict is not None else "shares pages"
    own = f"jkv.random(budget, block={page}, whole=True, sinks={page}, recent={page + 1})"
    rule = (
        'kv_dtype="{format}" seals full pages, whose slots have scales in common, so no slot of them can be dropped or moved, '
        'nor their pages shared; {got}. Use kv_dtype="int8", "fp8" or "int4", or jkv.full(), jkv.quest() or {own}, whose first '
        "page and last two, of {page} slots, stay in floats."
    )
    got = f"{policy.name} {what}"
    raise InputError(rule, field="policy", code="unsupported", format=kv_format.name, got=got, own=own, page=page)


def check_sealing_on(platform: str, kv_format: Format | None, head_size: int) -> None:
    """Refuses sealed pages on a device that would scatter the scales of a page over the whole pool.

    Raises:
      ValueError: a TPU, with heads or pages of other sizes than 128.
    """
    if not isinstance(kv_format, SealedFormat) or platform != "tpu":
        return
    if head_size != LANES:
        raise refused(
            f'kv_dtype="{kv_format.name}" on a TPU needs heads of {LANES} channels, which fill the lanes of its memory; got '
            f'{head_size}. Use kv_dtype="int8", or "int4" with heads of 64.',
            kv_dtype="unsupported",
        )
    if kv_format.page != LANES:
        raise refused(
            f'kv_dtype="{kv_format.name}" on a TPU needs pages of {LANES} slots, which fill the lanes of its memory; got '
            f"page_size={kv_format.page}. Leave page_size out.",
            page_size="unsupported",
        )


def drops_whole_pages(policy: Policy, page: int) -> bool:
    """Whether it only ever drops whole pages of the text, and never the first one nor the newest two."""
    evict, schedule = policy.evict, policy.schedule
    if evict is None or policy.share is not None or policy.until is not None or not policy.is_even:
        return False
    if not (isinstance(evict.score, UniformBlocks) and isinstance(schedule, WholeBlocks)):
        return False
    return schedule.block == evict.score.chance.block == page and evict.score.sinks > 0 and evict.score.recent > page


UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
TEXT = re.compile(r"(\d{1,12}(?:\.\d{1,12})?) {0,4}(B|kB|KB|MB|GB|KiB|MiB|GiB)")
PROBE = 1 << 24  # slots that every recipe takes, to check its other settings at once
MOST_SLOTS = 1 << 30


@dataclasses.dataclass(frozen=True, repr=False)
class ByteBudget:
    """A policy whose budget is in bytes: the most bytes of keys, values and positions that a row keeps.

    Over all layers and KV heads, after a compaction, as a budget in slots has it: until the next one a row grows.

    Attributes:
      name: the recipe's name.
      build: the recipe without its checks.
      settings: what it was called with, by name.
    """

    name: str
    build: Callable[..., Policy]
    settings: tuple[tuple[str, Any], ...]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.settings)})"

    @property
    def budget(self) -> str:
        """As it was typed."""
        return dict(self.settings)["budget"]

    def with_slots(self, slots: int) -> Policy:
        """The policy with a budget in slots, which shows what was typed."""
        settings = dict(self.settings)
        return noted(self.build(**settings | {"budget": slots}), self.name, (), settings)

    def in_slots(self, slot: SlotSize) -> Policy:
        """The policy of a model and format, with as many slots as the bytes hold.

        Raises:
          ValueError: fewer slots than the policy takes, with the arithmetic.
        """
        num_bytes = parse_bytes(self.budget)
        slots = num_bytes // slot.whole
        try:
            if slots > 0:
                return self.with_slots(min(slots, MOST_SLOTS))
        except ValueError:
            pass
        least = self.least()
        found = f"{self!r}: {size(num_bytes)} / ({slot}) is {slots} slots"
        rule = "{found}, and {name} takes at least {least} with its settings = {needed}. Raise the {field}, or quantise pages."
        needed = size(least * slot.whole)
        raise InputError(rule, field="budget", code="out_of_range", found=found, name=self.name, least=least, needed=needed)

    def least(self) -> int:
        """The fewest slots that the recipe takes with its settings."""
        refused, accepted = 0, PROBE
        while accepted - refused > 1:
            middle = (refused + accepted) // 2
            try:
                self.with_slots(middle)
                accepted = middle
            except ValueError:
                refused = middle
        return accepted


def in_bytes(name: str, build: Callable[..., Policy], settings: dict[str, Any]) -> ByteBudget:
    """A recipe's policy with a budget in bytes, its other settings checked.

    Raises:
      ValueError: a text that is no number of bytes, a setting out of its range, or a policy whose budget holds no memory.
    """
    parse_bytes(settings["budget"], f"{name}'s")
    policy = ByteBudget(name, build, tuple(settings.items()))
    if policy.with_slots(PROBE).budget is None:
        rule = "{name} keeps every token, so its {field} is a number of slots that a step reads; got {got}. Give slots."
        raise InputError(rule, field="budget", code="wrong_type", name=name, got=shown(settings["budget"]))
    return policy


def parse_bytes(text: str, whose: str = "a") -> int:
    """The bytes of a text.

    Raises:
      ValueError: the text is no number with a unit, or no bytes at all.

    >>> parse_bytes("64MB"), parse_bytes("1.5 KiB")
    (64000000, 1536)
    """
    found = TEXT.fullmatch(text.strip())
    num_bytes = int(float(found[1]) * UNITS[found[2]]) if found else 0
    if num_bytes < 1:
        rule = '{whose} {field} must be a whole number of slots, or bytes such as "64MB" or "1.5 GiB"; got {got}.'
        raise InputError(rule, field="budget", code="wrong_type", whose=whose, got=shown(text))
    return num_bytes


def is_bytes(text: str) -> bool:
    """Whether a text is a number of bytes with its unit."""
    return TEXT.fullmatch(text.strip()) is not None


def in_slots(policy: Any, slot: SlotSize) -> Any:
    """A policy whose budget in bytes is one in slots; anything else as it is."""
    return policy.in_slots(slot) if isinstance(policy, ByteBudget) else policy
