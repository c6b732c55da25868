# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The kernel ladder
#
# Attention over a paged cache, from a Python loop to the kernels of the package. Each version is checked against the one before.
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jkv-project/jkv/blob/main/notebooks/5_the_kernel_ladder.ipynb)

# %%
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# JAX for the accelerator of this machine. The JAX that is installed stays (Colab brings its own), unless it is too old.
DEVICE = ",cuda12" if shutil.which("nvidia-smi") else ",tpu" if "TPU_ACCELERATOR_TYPE" in os.environ else ""
SOURCE = f"jkv-cache[eval{DEVICE}] @ git+https://github.com/jkv-project/jkv"
for folder in (Path.cwd(), Path.cwd().parent):  # a checkout around this notebook comes first, and needs no network
    if (folder / "jkv" / "__init__.py").exists():
        SOURCE = f"{folder}[eval{DEVICE}]"
        sys.path.insert(0, str(folder))
        break
try:
    importlib.import_module("jkv")
except ImportError:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", SOURCE], check=True)
    importlib.invalidate_caches()
import jax

print(jax.devices())

# %% [markdown]
# For each new token, each query head reads the whole cache of its KV head once. There is little arithmetic: the time is spent on
# reading keys and values from memory. So for each rung of this ladder the question is: *how many bytes move, and does the computation
# wait for them?*
#
# Everything here runs on a CPU, the Pallas kernels in interpret mode. Interpret mode shows whether a kernel is correct, but not how
# fast it is. So this notebook counts bytes and times nothing.
#
# ## The cache
#
# A pool of pages, each with 16 keys and 16 values. The page table of a row lists its pages. Free pages, and slots after the last token
# of a row, must never be read: here they are NaN.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

ROWS, GROUP, HEAD_SIZE, PAGE, MAX_PAGES = 3, 8, 128, 16, 8  # rows, query heads of a KV head, and so on
rng = np.random.default_rng(0)
length = np.array([5, 70, 128], np.int32)
page_table = rng.permutation(np.arange(1, 1 + ROWS * MAX_PAGES, dtype=np.int32)).reshape(ROWS, MAX_PAGES)
query = rng.standard_normal((ROWS, GROUP, HEAD_SIZE), dtype=np.float32)
kv = np.full((1 + ROWS * MAX_PAGES, 2, PAGE, HEAD_SIZE), np.nan, np.float32)
for row, slots in enumerate(length):
    for slot in range(slots):
        kv[page_table[row, slot // PAGE], :, slot % PAGE] = rng.standard_normal((2, HEAD_SIZE))

SLOT_BYTES = 2 * HEAD_SIZE * 4  # a key and a value in float32
pages_held = -(-length // PAGE)
results, moved = {}, {}


def check(name, out, num_bytes):
    """Compares a rung with the one before, and adds its bytes to the table."""
    for before in list(results.values())[-1:]:
        np.testing.assert_allclose(out, before, rtol=1e-4, atol=1e-5)
    assert np.isfinite(out).all()
    results[name], moved[name] = np.asarray(out), int(num_bytes)
    print(f"{name}: {num_bytes:,} bytes of keys and values")


# %% [markdown]
# ## Rung 1: a loop over slots
#
# The definition of attention. Each of the eight query heads reads all keys and values separately, so everything is fetched eight times.


# %%
def loop(query, kv, page_table, length):
    out = np.zeros_like(query)
    for row in range(ROWS):
        for head in range(GROUP):
            logits, values = [], []
            for slot in range(length[row]):
                key, value = kv[page_table[row, slot // PAGE], :, slot % PAGE]
                logits.append(query[row, head] @ key * HEAD_SIZE**-0.5)
                values.append(value)
            weight = np.exp(np.array(logits) - max(logits))
            out[row, head] = weight @ np.array(values) / weight.sum()
    return out


check("1 loop over slots", loop(query, kv, page_table, length), GROUP * length.sum() * SLOT_BYTES)

# %% [markdown]
# ## Rung 2: gather, then two matrix products
#
# All query heads of a group share one fetch. But the pages are first gathered into one array: they are read, written and read again.
# And *all* entries of the table are gathered, also those that a short row does not use.


# %%
@jax.jit
def gather(query, kv, page_table, length):
    key, value = (kv[page_table, i].reshape(ROWS, -1, HEAD_SIZE) for i in (0, 1))
    is_filled = jnp.arange(key.shape[1]) < length[:, None]
    logits = jnp.einsum("rgh,rsh->rgs", query, key, precision="highest") * HEAD_SIZE**-0.5
    weight = jax.nn.softmax(jnp.where(is_filled[:, None], logits, -jnp.inf), axis=-1)
    value = jnp.where(is_filled[..., None], value, 0.0)  # 0 * NaN is NaN
    return jnp.einsum("rgs,rsh->rgh", weight, value, precision="highest")


check("2 gather", gather(query, kv, page_table, length), 3 * ROWS * MAX_PAGES * PAGE * SLOT_BYTES)

# %% [markdown]
# ## Rung 3: page by page
#
# A softmax needs the largest logit and the sum, so it seems to need two passes. The *online softmax*
# ([1805.02867](https://arxiv.org/abs/1805.02867)) needs one: it carries the largest logit, the sum and the weighted values so far. If a
# larger logit appears, it scales both by $e^{\text{old} - \text{new}}$. It reads one page at a time, writes nothing back, and stops at
# the length of the longest row.


# %%
def absorb(carry, query, page, is_filled):
    """Adds one page `[2, page, H]` to the attention of a row's queries `[G, H]`."""
    peak, total, out = carry
    logits = jnp.dot(query, page[0].T, precision="highest") * HEAD_SIZE**-0.5
    logits = jnp.where(is_filled[None], logits, -jnp.inf)
    new_peak = jnp.maximum(peak, logits.max(axis=1, keepdims=True))
    weight, scale = jnp.exp(logits - new_peak), jnp.exp(peak - new_peak)
    value = jnp.where(is_filled[:, None], page[1], 0.0)
    added = jnp.dot(weight, value, precision="highest")
    return new_peak, total * scale + weight.sum(axis=1, keepdims=True), out * scale + added


def empty_carry():
    """The carry before the first page: a very low peak, no sum, no values."""
    return jnp.full((GROUP, 1), -1e30), jnp.zeros((GROUP, 1)), jnp.zeros((GROUP, HEAD_SIZE))


@jax.jit
def online(query, kv, page_table, length):
    def step(i, carry):
        is_filled = i * PAGE + jnp.arange(PAGE) < length[:, None]
        return jax.vmap(absorb)(carry, query, kv[page_table[:, i]], is_filled)

    start = jax.tree.map(lambda x: jnp.broadcast_to(x, (ROWS, *x.shape)), empty_carry())
    _, total, out = lax.fori_loop(0, (length.max() + PAGE - 1) // PAGE, step, start)
    return out / total


check("3 online softmax", online(query, kv, page_table, length), ROWS * pages_held.max() * PAGE * SLOT_BYTES)

# %% [markdown]
# ## Rung 4: a first kernel
#
# In XLA all rows run the same number of iterations, so short rows fetch pages that they do not have. In a Pallas kernel each row is a
# separate program, which stops at its own length. The pool stays in the large, slow memory (`pl.ANY`), and each page is copied into the
# small, fast memory (`VMEM`) before it is used.
#
# (Interpret mode is lenient: a TPU compiler also requires iotas with two dimensions, and copies of whole tiles.)
#
# The kernel starts a copy, waits for it and uses the page, one page after the other. Copies and computation never overlap.


# %%
def finish(out_ref, carry):
    """Divides the weighted values by the sum of weights."""
    _, total, out = carry
    out_ref[0] = out / total


def one_by_one(length_ref, table_ref, query_ref, kv_ref, out_ref, buffer_ref, semaphore):
    row = pl.program_id(0)

    def step(i, carry):
        copy = pltpu.make_async_copy(kv_ref.at[table_ref[row, i]], buffer_ref.at[0], semaphore.at[0])
        copy.start()
        copy.wait()
        is_filled = i * PAGE + lax.iota(jnp.int32, PAGE) < length_ref[row]
        return absorb(carry, query_ref[0], buffer_ref[0], is_filled)

    finish(out_ref, lax.fori_loop(0, pl.cdiv(length_ref[row], PAGE), step, empty_carry()))


@functools.partial(jax.jit, static_argnums=0)
def launch(kernel, query, kv, page_table, length):
    """Runs a kernel with one program per row; lengths and tables are prefetched into scalar memory."""
    a_row = pl.BlockSpec((1, GROUP, HEAD_SIZE), lambda row, *_: (row, 0, 0))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        grid=(ROWS,),
        in_specs=[a_row, pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=a_row,
        scratch_shapes=[pltpu.VMEM((2, 2, PAGE, HEAD_SIZE), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
    )
    out_shape = jax.ShapeDtypeStruct(query.shape, query.dtype)
    return pl.pallas_call(kernel, grid_spec=grid, out_shape=out_shape, interpret=True)(length, page_table, query, kv)


check("4 a first kernel", launch(one_by_one, query, kv, page_table, length), pages_held.sum() * PAGE * SLOT_BYTES)

# %% [markdown]
# ## Rung 5: fetch the next page while this one is used
#
# Two buffers: before the kernel waits for a page, it starts the copy of the next page into the other buffer. The same number of bytes
# moves, but most copies overlap with computation.


# %%
def two_buffers(length_ref, table_ref, query_ref, kv_ref, out_ref, buffer_ref, semaphore):
    row = pl.program_id(0)
    num_pages = pl.cdiv(length_ref[row], PAGE)

    def copy(i):
        which = lax.rem(i, 2)
        return pltpu.make_async_copy(kv_ref.at[table_ref[row, i]], buffer_ref.at[which], semaphore.at[which])

    def step(i, carry):
        pl.when(i + 1 < num_pages)(lambda: copy(i + 1).start())
        copy(i).wait()
        is_filled = i * PAGE + lax.iota(jnp.int32, PAGE) < length_ref[row]
        return absorb(carry, query_ref[0], buffer_ref[lax.rem(i, 2)], is_filled)

    copy(0).start()
    finish(out_ref, lax.fori_loop(0, num_pages, step, empty_carry()))


check("5 two buffers", launch(two_buffers, query, kv, page_table, length), pages_held.sum() * PAGE * SLOT_BYTES)

# %% [markdown]
# The number of copies that the computation waits for, if computing takes at least as long as a copy:

# %%
for name, pages in {"4 a first kernel": pages_held.sum(), "5 two buffers": ROWS}.items():
    print(f"{name}: {pages} of {pages_held.sum()} pages are waited for")

# %% [markdown]
# ## Rung 6: the kernels of the package
#
# Compressed rows are short, and a kernel that waits at the start of each row would mostly wait. The TPU kernel of the package overlaps
# rows too: with the last page of a row it already fetches the first page of the next, so only one wait remains. It also processes 256
# slots at a time, for the matrix unit. A GPU has more processors than there are rows. There each row is split into parts, whose
# softmaxes are combined at the end, and only the filled slots of the last page are fetched.

# %%
import pallas_kernels as kernels
from pallas_kernels.dispatch import own_platform, refusals
from pallas_kernels.paged_attention import IMPLEMENTATIONS, gpu, tpu

arguments = tuple(jnp.asarray(x) for x in (query, kv, page_table, length))
for name, module, slots in (("6 tpu", tpu, pages_held.sum() * PAGE), ("6 gpu", gpu, length.sum())):
    out, _, _ = module.paged_attention(*arguments, None, with_logits=False, interpret=True)
    check(name, out, slots * SLOT_BYTES)

# %% [markdown]
# `implementation=None` chooses the best implementation for the device. A name chooses that one, or raises an error with the reason why
# it cannot run. All implementations that run here agree.

# %%
refused = refusals(IMPLEMENTATIONS, own_platform(), *arguments, None, with_logits=False)
for name in IMPLEMENTATIONS:
    print(f"{name:>10}: {refused.get(name, 'runs here')}")
    if name not in refused:
        out, _, _ = kernels.paged_attention(*arguments, implementation=name)
        np.testing.assert_allclose(out, results["6 gpu"], rtol=1e-4, atol=1e-5)
out, _, _ = kernels.paged_attention(*arguments)
np.testing.assert_allclose(out, results["6 gpu"], rtol=1e-4, atol=1e-5)

# %% [markdown]
# ## The ladder

# %%
for name, num_bytes in moved.items():
    print(f"{name:>20} {num_bytes:>10,} {'#' * round(40 * num_bytes / max(moved.values()))}")
assert (
    moved["1 loop over slots"]
    > moved["2 gather"]
    > moved["3 online softmax"]
    > moved["4 a first kernel"]
    == moved["5 two buffers"]
)

# %% [markdown]
# The last rung is not in the kernel: a policy that keeps a tenth of the slots leaves a tenth of these bytes.
