"""The bits of 200 random mixes of requests, to be compared before and after code is moved.

    python -m tests.support.recorded_mixes record before.json            # in the old tree, about 15 minutes
    python -m tests.support.recorded_mixes record after.json             # in the new one
    python -m tests.support.recorded_mixes compare before.json after.json

A record has a digest of everything that a caller receives: tokens, log-probabilities, events, texts, evictions, traces,
experts, transcripts, counts (`tests.support.played_mixes`). It is written after every mix, and the same command goes on with
one that was broken off. Bits depend on the CPU and on JAX, so both records are made on one machine, with the same versions.

`record` prints what the mixes covered, and fails if all of them together lack anything of `PROMISED`.
"""

import argparse
import collections
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # the number of devices is settled when JAX starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2".strip()
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")  # so that a second record compiles little

import jax
import numpy as np

import jkv
import pallas_kernels
from tests.support import played_mixes
from tests.support.played_mixes import KINDS, play

NUM_MIXES = 200
PLAYER = Path(played_mixes.__file__)
UNCHANGED = ("full",)  # policies that drop, share, steer and choose nothing
PROMISED = (  # what all mixes together must have done
    *(
        "tokens",
        "compactions",
        "evicted",
        "shared",
        "forks",
        "preemptions",
        "prompt tokens from the prefix cache",
        "turns of kept rows",
    ),
    *("forced tokens", "penalised tokens", "cut tokens", "greedy tokens", "steered tokens", "queries of moved sinks"),
    *("chosen columns", "traces", "routes", "scored tokens", "updates", "samples restarted after an update", "sleeps"),
    *("streams", "events of callbacks", "cancellations", "releases", "refusals", "engines that swapped rows"),
    *("tokens in int8", "tokens in fp8", "tokens in int4", "tokens in kvarn", "sealed pages that were read"),
    *("tokens on a mesh", "tokens of replicas", "prompts in pieces"),
    *(f"ended by {reason}" for reason in ("stop", "length", "cancelled", "error")),
    *(f"tokens of {name}" for name in jkv.POLICIES),
    *(f"changed by {name}" for name in jkv.POLICIES if name not in UNCHANGED),
    *(f"mixes of {name}" for name in KINDS),
)


# Records.


def plan(num_mixes: int) -> list[tuple[str, int]]:
    """Kind and seed of each mix, all of one kind together, for they have the same programs."""
    names = list(KINDS)
    counts = [num_mixes // len(names) + (index < num_mixes % len(names)) for index in range(len(names))]
    return [(name, seed) for name, count in zip(names, counts, strict=True) for seed in range(count)]


def record(path: Path, num_mixes: int = NUM_MIXES) -> dict[str, Any]:
    """Writes the digests of mixes, or those that a file of the same tree lacks; prints what they covered.

    Raises:
      SystemExit: the file is of another tree or machine, or all mixes together lack something that is promised.
    """
    head = {"machine": machine(), "source": source()}
    written = json.loads(path.read_text()) if path.exists() else head | {"mixes": []}
    for name, now in head.items():
        if written[name] != now:
            raise SystemExit(f"A record goes on with its own {name}; {path} has {written[name]}, got {now}. Write a new file.")
    done, began = {(mix["kind"], mix["seed"]) for mix in written["mixes"]}, time.perf_counter()
    for number, (name, seed) in enumerate(plan(num_mixes), 1):
        if (name, seed) in done:
            continue
        mix = play(name, seed)
        counts = {what: int(count) for what, count in sorted(mix.counts.items()) if count}
        written["mixes"].append({"kind": name, "seed": seed, "digests": mix.digests, "counts": counts})
        write(path, written)
        print(f"{number} of {num_mixes}, {time.perf_counter() - began:.0f} s: {name}, {counts['tokens']} tokens", flush=True)
    written["mixes"].sort(key=lambda mix: (list(KINDS).index(mix["kind"]), mix["seed"]))
    write(path, written)
    print(summary(written["mixes"]))
    lacking = [what for what in PROMISED if not covered(written["mixes"])[what]]
    if lacking:
        print(f"Not covered: {', '.join(lacking)}.")
    if lacking and num_mixes >= NUM_MIXES:
        raise SystemExit("The mixes lack what a record promises.")
    return written


def write(path: Path, written: Mapping[str, Any]) -> None:
    """Replaces a record whole, so that it can be read at any moment."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(written, indent=1))
    beside.replace(path)


def machine() -> dict[str, str]:
    """What bits depend on, besides the source."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    versions = {"jax": jax.__version__, "jaxlib": jax.lib.__version__, "numpy": np.__version__}
    flags = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "JKV_KERNELS")}
    return {"cpu": models[0] if models else platform.processor()} | versions | flags


def source() -> dict[str, str]:
    """Digests of the library, and of what plays the mixes."""
    folders = [Path(package.__file__ or "").parent for package in (jkv, pallas_kernels)]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return {"library": digest_of(files), "player": digest_of([PLAYER])}


def digest_of(files: Sequence[Path]) -> str:
    """Of the content of files."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


# What they cover.


def covered(mixes: Sequence[Mapping[str, Any]]) -> collections.Counter[str]:
    """What happened in all mixes together."""
    total = collections.Counter[str](f"mixes of {mix['kind']}" for mix in mixes)
    for mix in mixes:
        total.update(mix["counts"])
    return total


def summary(mixes: Sequence[Mapping[str, Any]]) -> str:
    """A table of that."""
    total = covered(mixes)
    lines = [f"{total[what]:>9,}  {what}" for what in (*PROMISED, *sorted(total.keys() - set(PROMISED)))]
    return "\n".join([f"{len(mixes)} mixes of {len({mix['kind'] for mix in mixes})} kinds:", *lines])


# Comparison.


def compare(before: Path, after: Path) -> int:
    """Prints what differs, and returns how many mixes do.

    Raises:
      SystemExit: records that are not of one machine with the same versions.
    """
    one, other = (json.loads(path.read_text()) for path in (before, after))
    differing = [name for name in one["machine"] if one["machine"][name] != other["machine"].get(name)]
    if differing:
        found = "; ".join(f"{name} {one['machine'][name]!r} and {other['machine'].get(name)!r}" for name in differing)
        raise SystemExit(f"Bits can be compared on one machine with the same versions; got {found}. Record both anew.")
    if one["source"]["player"] != other["source"]["player"]:
        print(f"The records were made by two versions of {PLAYER.name}: its changes may be all that differs.")
    if one["source"]["library"] == other["source"]["library"]:
        print("Both records are of the same source.")
    mixes = [{(mix["kind"], mix["seed"]): mix["digests"] for mix in written["mixes"]} for written in (one, other)]
    count, names = 0, list(dict.fromkeys([*mixes[0], *mixes[1]]))
    for kind, seed in names:
        lines = differences(*(found.get((kind, seed)) for found in mixes))
        if lines:
            print("\n  ".join([f"{kind}, seed {seed}:", *lines]))
        count += bool(lines)
    print(f"{count} of {len(names)} mixes differ.")
    return count


def differences(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> list[str]:
    """What differs in a mix: the parts of its results, by their names."""
    if one is None or other is None:
        return [f"only in the {'second' if one is None else 'first'} record"]
    lines = []
    for name in dict.fromkeys([*one, *other]):
        a, b = one.get(name, {}), other.get(name, {})
        parts = [part for part in dict.fromkeys([*a, *b]) if a.get(part) != b.get(part)]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writes, compares = commands.add_parser("record"), commands.add_parser("compare")
    writes.add_argument("path", type=Path)
    writes.add_argument("--mixes", type=int, default=NUM_MIXES)
    compares.add_argument("before", type=Path)
    compares.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "record":
        record(options.path, options.mixes)
    else:
        sys.exit(compare(options.before, options.after) > 0)


if __name__ == "__main__":
    main()
