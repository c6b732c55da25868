"""The data movement of compaction: moves keys and values between slots of the pool."""

from jaxtyping import Array, Int

from pallas_kernels.dispatch import Implementation, call
from pallas_kernels.quantised import Numbers
from pallas_kernels.take_slots import gpu, reference, tpu

IMPLEMENTATIONS = {
    "tpu": Implementation(tpu.take_slots, "tpu", tpu.why_not, reads_codes=True, reads_groups=True),
    "gpu": Implementation(gpu.take_slots, "cuda", gpu.why_not, reads_codes=True, reads_groups=True),
    "reference": Implementation(reference.take_slots),
}


def take_slots(
    kv: Numbers,
    slots: Int[Array, "R S"],
    source: Int[Array, "R MP"],
    target: Int[Array, "R MP"],
    *,
    implementation: str | None = None,
) -> Numbers:
    """The pool after each row's kept slots are moved together. Donate the pool, or it is copied.

    The pool is `[P, 2, page, H]`: floats, or codes with scales, which move alike.
    Slot s of a row (S = MP * page), in page `target[r, s // page]`, receives the contents of slot `slots[r, s]` of the row, in
    page `source[r, slots[r, s] // page]`. A target of 0, the null page, is not written. Afterwards, slots of a written page
    with a negative entry in `slots` may hold anything, and so may the null page. Within a row all reads happen before any
    write, in any order of `slots`. The caller ensures that no row reads or writes what another one writes, and that targets
    other than 0 are distinct: the pool writes only pages with one owner, or new ones.

    Raises:
      ValueError: an unknown implementation, or one that cannot run here or with these arguments.
    """
    return call("take_slots", IMPLEMENTATIONS, implementation, kv, slots, source, target)
