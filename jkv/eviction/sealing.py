"""Which policies can read sealed pages (`jkv.cache.sealed_pages`): those that drop whole pages, or none, and share none."""

from jkv.errors import InputError
from jkv.eviction.policy import Policy
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
        raise ValueError(
            f'kv_dtype="{kv_format.name}" on a TPU needs heads of {LANES} channels, which fill the lanes of its memory; got '
            f'{head_size}. Use kv_dtype="int8", or "int4" with heads of 64.'
        )
    if kv_format.page != LANES:
        raise ValueError(
            f'kv_dtype="{kv_format.name}" on a TPU needs pages of {LANES} slots, which fill the lanes of its memory; got '
            f"page_size={kv_format.page}. Leave page_size out."
        )


def drops_whole_pages(policy: Policy, page: int) -> bool:
    """Whether it only ever drops whole pages of the text, and never the first one nor the newest two."""
    evict, schedule = policy.evict, policy.schedule
    if evict is None or policy.share is not None or policy.until is not None or policy.pyramid != 1:
        return False
    if not (isinstance(evict.score, UniformBlocks) and isinstance(schedule, WholeBlocks)):
        return False
    return schedule.block == evict.score.chance.block == page and evict.score.sinks > 0 and evict.score.recent > page
