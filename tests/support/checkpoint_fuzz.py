"""Checkpoint folders with one hostile change each: `python -m tests.support.checkpoint_fuzz --count 5000`.

Every field of every JSON file and of the safetensors headers gets every hostile value, is removed, renamed or doubled, and
files are cut, overwritten and extended. The oracle: `jkv.load` raises a ValueError that names a file, or returns a model whose
logits are finite and, if only weights were touched, whose weights are those of the unchanged folder; never another exception, a
long time or much memory. A child process tries the mutants, so that a hang, an abort and a full memory are found too.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

GOLDEN = Path(__file__).parent / "golden"
CASES = ("qwen2", "llama_scaled", "phi3", "qwen3")
SECONDS = 20.0  # for one mutant, on a busy machine
MEMORY = 3 << 30  # bytes of address space beyond those after the first load
RAW = "@raw@"  # values that no JSON writer writes
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 4, 5, 96, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63, 10**30),
    *(
        0.5,
        1.0,
        1.5,
        -0.5,
        1e-300,
        1e-7,
        1e9,
        1e300,
        "",
        "x",
        "96",
        "true",
        "../config.json",
        "/dev/zero",
        "\ud800",
        "\0",
        "y" * 9999,
    ),
    *([], [1], [[]], [0] * 9999, ["x"], {}, {"a": 1}, {"type": "x"}, {"__type": "AddedToken", "content": 3}),
    *(RAW + text for text in ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 3000 + "]" * 3000, '{"a":1,"a":2}', "", "'")),
]
ADDED = {  # fields that a library may read, by file
    "config.json": (
        *(
            "num_labels",
            "id2label",
            "use_return_dict",
            "to_dict",
            "attn_implementation",
            "dtype",
            "torch_dtype",
            "per_layer_config",
        ),
        *(
            "rope_scaling",
            "rope_theta",
            "partial_rotary_factor",
            "original_max_position_embeddings",
            "head_dim",
            "tokenizer_class",
        ),
        *("quantization_config", "auto_map", "mlp_bias", "attention_bias", "text_config", "gguf_file", "_name_or_path"),
        *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
    ),
    "generation_config.json": ("eos_token_id",),
    "tokenizer_config.json": (
        *(
            "vocab_file",
            "merges_file",
            "tokenizer_file",
            "gguf_file",
            "spm_file",
            "fast_tokenizer_files",
            "init_inputs",
            "vocab",
        ),
        *("merges", "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "chat_template", "auto_map"),
        *("padding_side", "sp_model_kwargs", "bos_token", "backend", "from_slow", "model_input_names", "chat_control_tokens"),
    ),
    "tokenizer.json": ("normalizer", "padding", "truncation", "post_processor", "decoder", "added_tokens"),
}
STEPS = [  # parts of a tokenizer.json that are well-formed and bad
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA/////w=="}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}},
    {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 99}] * 99}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+"}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}},
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"decoder": {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}},
    {"post_processor": {"type": "BertProcessing", "sep": ["x", 2**31], "cls": ["x", 0]}},
]


class Mutant(NamedTuple):
    """A change of one file of one case."""

    case: str
    file: str
    change: str  # in words
    apply: Callable[[Path], None]  # to the file


# Mutants


def write_case(folder: Path, case: str) -> None:
    """A genuine checkpoint with a tokenizer."""
    from research.tasks import vocabulary

    shutil.copytree(GOLDEN / case, folder, dirs_exist_ok=True)
    vocabulary.make_tokenizer().save_pretrained(folder)
    (folder / "reference.npz").unlink()


def mutants(folder: Path, case: str) -> Iterator[Mutant]:
    """Every change of every field of a case's files, and damage to the files."""
    for file in sorted(folder.iterdir()):
        is_json = file.suffix == ".json"
        fields = json.loads(file.read_text()) if is_json else read_header(file)[0]
        paths = list(walk(fields, most=40 if is_json else 4))
        paths += [(name,) for name in ADDED.get(file.name, ()) if name not in fields]
        for path in paths:
            for value in VALUES:
                yield Mutant(case, file.name, f"{path} = {value!r:.60}", edit(is_json, set_value, path, value))
            for change in (remove, rename, double):
                yield Mutant(case, file.name, f"{path} {change.__name__}", edit(is_json, change, path))
        if file.name == "tokenizer.json":
            for step in STEPS:
                yield Mutant(case, file.name, f"{step!r:.60}", edit(is_json, replace, step))
        yield from (Mutant(case, file.name, f"damage {seed}", damage(seed)) for seed in range(60))


def walk(value: Any, path: tuple[Any, ...] = (), most: int = 40) -> Iterator[tuple[Any, ...]]:
    """The paths of all fields; of objects and lists with more than `most` those at the ends."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    for name, inner in items if len(items) <= most else items[:2] + items[-1:]:
        yield (*path, name)
        yield from walk(inner, (*path, name), most)


def edit(is_json: bool, change: Callable[..., None], *arguments: Any) -> Callable[[Path], None]:
    """A change of the fields of a JSON file or of the header of a safetensors file."""

    def apply(file: Path) -> None:
        fields, data = (json.loads(file.read_text()), b"") if is_json else read_header(file)
        change(fields, *arguments)
        text = json.dumps(fields)
        while RAW in text:
            begin = text.index(f'"{RAW}')
            raw = json.JSONDecoder().raw_decode(text, begin)
            text = text[:begin] + raw[0].removeprefix(RAW) + text[raw[1] :]
        header = text.encode("utf-8", "surrogatepass")
        file.write_bytes(header if is_json else struct.pack("<Q", len(header)) + header + data)

    return apply


def read_header(file: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def parent_of(fields: Any, path: tuple[Any, ...]) -> Any:
    """The object or list that has the last name of a path."""
    for name in path[:-1]:
        fields = fields[name]
    return fields


def set_value(fields: Any, path: tuple[Any, ...], value: Any) -> None:
    parent_of(fields, path)[path[-1]] = value


def remove(fields: Any, path: tuple[Any, ...]) -> None:
    parent = parent_of(fields, path)
    if isinstance(parent, list) or path[-1] in parent:
        del parent[path[-1]]


def rename(fields: Any, path: tuple[Any, ...]) -> None:
    parent = parent_of(fields, path)
    if isinstance(parent, dict) and path[-1] in parent:
        parent[path[-1] + "_"] = parent.pop(path[-1])


def double(fields: Any, path: tuple[Any, ...]) -> None:
    parent = parent_of(fields, path)
    if isinstance(parent, list):
        parent.append(parent[path[-1]])
    elif path[-1] in parent:  # the same name twice
        name, value = json.dumps(path[-1]), json.dumps(parent[path[-1]])
        parent[path[-1]] = f"{RAW}{value}, {name}: {value}"


def replace(fields: Any, step: dict[str, Any]) -> None:
    fields.update(step)


def damage(seed: int) -> Callable[[Path], None]:
    """Cuts, overwrites or extends a file at random, or puts something else in its place."""

    def apply(file: Path) -> None:
        rng = random.Random(seed)
        content = bytearray(file.read_bytes())
        end = 8 + struct.unpack("<Q", content[:8])[0] if file.suffix == ".safetensors" else len(content)
        place, kind = rng.randrange(end), seed % 8  # nothing checks the numbers after a header
        if kind < 2:
            content[place] = rng.randrange(256)
        elif kind == 2:
            del content[place:]
        elif kind == 3:
            content[place:place] = bytes(rng.choices(b'{}[]",:0\\\0\xff', k=rng.randrange(1, 9)))
        elif kind == 4:
            content[:8] = struct.pack("<Q", rng.choice([0, 1, 2**20, 2**31, 2**60, 2**64 - 1]))
        elif kind == 5:
            content.extend(rng.choices(range(256), k=rng.randrange(1, 99)))
        file.unlink()
        if kind == 6:
            place_special(file, rng.choice(["fifo", "folder", "/dev/zero", "/dev/full", "/etc/hostname", "loop", "nowhere"]))
        else:
            file.write_bytes(content)

    return apply


def place_special(file: Path, kind: str) -> None:
    """A path that is no regular file of its folder."""
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(file if kind == "loop" else file.with_name("missing") if kind == "nowhere" else kind)


def choose(root: Path, count: int, seed: int) -> list[Mutant]:
    """Mutants of the cases in a folder, in an order that depends on the seed alone."""
    every = [mutant for case in CASES for mutant in mutants(root / case, case)]
    random.Random(seed).shuffle(every)
    return every[:count]


# Trying them


def logits(params: Any) -> Any:
    """The logits of a short prompt, with plain attention."""
    import jax
    import jax.numpy as jnp

    from jkv.model.decoder import forward, unembed

    def attend(layer: int, query: Any, key: Any, value: Any, cache: Any) -> Any:
        group = query.shape[2] // key.shape[2]
        scores = jnp.einsum("btnh,bsnh->bnts", query, jnp.repeat(key, group, 2)) / query.shape[-1] ** 0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jnp.einsum(
            "bnts,bsnh->btnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), jnp.repeat(value, group, 2)
        ), cache

    tokens = jnp.arange(5)[None] % params.config.vocab_size
    hidden, _ = forward(params, tokens, jnp.arange(5)[None], attend, None)
    return unembed(params, hidden)


def judge(mutant: Mutant, root: Path, genuine: Any) -> str:
    """How a mutant ended: "loaded" or "refused"; raises if the oracle does not hold."""
    import jax
    import numpy as np

    import jkv

    folder = root / "mutant"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / mutant.case, folder)
    mutant.apply(folder / mutant.file)
    begin, refusal = time.monotonic(), ""
    try:
        model = jkv.load(folder)
    except ValueError as error:
        refusal = str(error)
    assert time.monotonic() - begin < SECONDS
    if refusal:
        assert str(folder) in refusal, f"no file is named: {refusal}"
        assert refusal.isprintable(), f"control characters: {refusal!r}"
        return "refused"
    if mutant.file.startswith("model"):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model.params), jax.tree.leaves(genuine[mutant.case]))
    if model.tokenizer is not None:
        ids = model.tokenizer.encode("a=3;?a")
        assert all(0 <= index < model.config.vocab_size for index in [*ids, *model.config.end_ids])
    assert np.isfinite(logits(model.params)).all(), "logits are not finite"
    return "loaded"


def try_all(count: int, seed: int, start: int) -> None:
    """Tries mutants from `start` on, and prints a line for each."""
    import jkv

    with tempfile.TemporaryDirectory() as folder:
        root, genuine = Path(folder), {}
        for case in CASES:
            write_case(root / case, case)
            genuine[case] = jkv.load(root / case).params
        assert len(logits(genuine[CASES[0]]))  # so that the libraries have what they need of memory
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
        for number, mutant in enumerate(choose(root, count, seed)[start:], start):
            about = {"number": number, "mutant": f"{mutant.case}/{mutant.file}: {mutant.change}"}
            print(json.dumps(about), flush=True)
            signal.alarm(int(2 * SECONDS))  # ends the process
            try:
                about |= {"end": judge(mutant, root, genuine)}
            except BaseException as error:
                about |= {"end": "wrong", "why": f"{type(error).__name__}: {error}"[:500]}
            signal.alarm(0)
            print(json.dumps(about), flush=True)


def fuzz(count: int, seed: int) -> tuple[dict[str, int], list[str]]:
    """How often each end occurred, and the mutants for which the oracle does not hold."""
    counts, wrong, start = {"loaded": 0, "refused": 0, "wrong": 0}, [], 0
    while start < count:
        command = [sys.executable, "-m", "tests.support.checkpoint_fuzz", "--count", str(count), "--seed", str(seed)]
        child = subprocess.run([*command, "--start", str(start)], capture_output=True, text=True)
        lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
        if child.returncode and not lines:
            raise RuntimeError(child.stderr)
        if child.returncode:  # in the midst of the last
            lines.append(lines[-1] | {"end": "wrong", "why": f"the process ended with status {child.returncode}"})
        for line in lines:
            if "end" in line:
                counts[line["end"]] += 1
            if line.get("end") == "wrong":
                wrong.append(f"{line['number']} {line['mutant']}: {line['why']}")
        start = lines[-1]["number"] + 1
    return counts, wrong


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="mutants")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--start", type=int, help="try those from here on in this process (what the command starts)")
    options = parser.parse_args()
    if options.start is not None:
        try_all(options.count, options.seed, options.start)
        return
    counts, wrong = fuzz(options.count, options.seed)
    print(counts, *wrong, sep="\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
