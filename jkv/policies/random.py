"""Random eviction: the baseline that every score has to beat."""

from jkv.errors import InputError
from jkv.eviction.evict import Evict
from jkv.eviction.policy import Policy
from jkv.eviction.recipe import recipe
from jkv.eviction.schedules import Every, WholeBlocks
from jkv.eviction.scores import Uniform, UniformBlocks


@recipe("baseline", idea="keeps a new random set at every compaction")
def random(
    budget: int,
    interval: int = 128,
    seed: int = 0,
    recent: int = 1,
    sinks: int = 0,
    protect_prompt: bool = False,
    block: int = 1,
    whole: bool = False,
) -> Policy:
    """Keeps the last `recent` tokens and a random set, `budget` slots in total, drawn anew for each compaction and KV head.

    The first `sinks` tokens and, with `protect_prompt`, the prompt stay too. For a fair comparison, protect the same tokens as
    the policy beside it. With `block=page_size`, whole pages of the text stay or go; one block may be cut to fill the budget,
    and keeps its first tokens. With `whole=True`, none is cut: the blocks that hold protected tokens stay whole, the budget is
    filled with as many whole blocks as it holds, and no bytes move. Sealed pages (`kv_dtype="kvarn"`) take no other eviction.

    Rule:
      score = a uniform number that depends on the seed, layer, head, position // block and length alone, so it is
          batch-invariant

    Raises:
      ValueError: a setting out of its range, or, with `whole`, a budget that the protected blocks may exceed.

    >>> random(budget=64).name
    'random'
    """
    if whole:
        return whole_blocks(Uniform(seed, block), WholeBlocks(budget, interval, block), recent, sinks, protect_prompt)
    evict = Evict(Uniform(seed, block), sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    return Policy("random", evict, Every(budget, interval))


def whole_blocks(chance: Uniform, schedule: WholeBlocks, recent: int, sinks: int, protect_prompt: bool) -> Policy:
    """`random` with whole blocks; at least the newest one stays.

    Raises:
      ValueError: a budget that the protected blocks may exceed.
    """
    recent, block = max(1, recent), chance.block
    least = (-(-sinks // block) + (recent + block - 2) // block + 1) * block
    if protect_prompt or schedule.budget < least:
        got = "protect_prompt=True, and prompts of any length" if protect_prompt else f"budget={schedule.budget}"
        rule = (
            "random(block={block}, whole=True) keeps whole the blocks of the first {sinks} and the last {recent} tokens, up to "
            "{least} slots, which the {field} must hold; got {got}. Raise the {field}, or protect the prompt's first tokens by "
            "sinks=."
        )
        raise InputError(
            rule, field="budget", code="out_of_range", block=block, sinks=sinks, recent=recent, least=least, got=got
        )
    return Policy("random", Evict(UniformBlocks(chance, sinks, recent), sinks=sinks, recent=recent), schedule)
