"""The pages of the repository and what they name: examples, commands, files, links, dotted names."""

import ast
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import re
import shlex
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

from jkv.evaluation.chains import read_answer
from jkv.policies import POLICIES
from research.bench.__main__ import make_parser

ROOT = Path(__file__).parent.parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "research" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
OWN = ("jkv", "pallas_kernels", "research", "tests")
SUFFIXES = "cc|css|csv|html|ipynb|js|json|jsonl|md|png|py|safetensors|toml|txt"
DOTTED = re.compile(rf"(?<![\w./@-])(?:jkv|pallas_kernels|research)(?!\.(?:{SUFFIXES})\b)(?:\.[A-Za-z_]\w*)+")
MODULE = re.compile(r"python3? -m ([A-Za-z_][\w.]*\w)")
PLACEHOLDER = re.compile(r"[{}<>|]|\.\.\.|^[A-Z]+$")


def name_of(path: Path) -> str:
    """A file's path from the root, for messages and test ids."""
    return str(path.relative_to(ROOT))


def run(*command, **options):
    """A command's output; the test fails with it when the command does."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=options.pop("cwd", ROOT), **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What a text holds.


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a Markdown text."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """The inline code of a Markdown text."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def commands(text: str) -> list[list[str]]:
    """The words of each command in shell blocks and in inline code that starts like one."""
    lines = "\n".join(blocks(text, "sh")).replace("\\\n", " ").splitlines()
    starts = ("jkv ", "python -m ", ".venv/bin/")
    lines += [span for span in spans(text) if span.startswith(starts)]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def links(text: str) -> list[str]:
    """The targets of links and pictures in a Markdown text."""
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(text: str) -> set[str]:
    """What `#...` may name in a Markdown text: its headings, as GitHub writes them.

    >>> sorted(anchors("# What fits a device\\n## R-KV, once"))
    ['r-kv-once', 'what-fits-a-device']
    """
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def prose_of(path: Path) -> str:
    """What a reader sees of a file: a page, a notebook's Markdown, or the strings and comments of a Python file."""
    text = path.read_text()
    if path.suffix == ".ipynb":
        return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown")
    if path.suffix != ".py":
        return text
    comments = [
        token.string for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT
    ]
    return "\n\n".join([*strings_of(ast.parse(text)), *comments])


def strings_of(tree: ast.AST) -> Iterator[str]:
    """The strings of a program; an f-string has {} in place of its expressions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        else:
            yield from strings_of(node)


# Whether an answer is right.


def right_answer(prompt: object) -> str | None:
    """What a chain of arithmetic modulo 10 asks for; None for any other prompt.

    >>> right_answer("b=3;c=7;d=b*c;?d"), right_answer("Why is the sky blue?")
    ('d=1', None)
    """
    if not isinstance(prompt, str) or not re.fullmatch(r"([a-z]=(\d|[a-z][*+-][a-z]);)+\?[a-z]", prompt):
        return None
    *steps, asked = prompt.split(";")
    values: dict[str, int] = {}
    for name, _, body in (step.partition("=") for step in steps):
        values[name] = eval(body, {}, values) % 10
    return f"{asked[1:]}={values[asked[1:]]}"


def wrong_answers(printed: str, prompts: list[object], texts: list[str]) -> list[str]:
    """The answers to chains that were printed and are wrong, each with its prompt."""
    found = [(prompt, right_answer(prompt), read_answer(text)) for prompt, text in zip(prompts, texts, strict=False)]
    return [
        f"{prompt}: {answer}"
        for prompt, right, answer in found
        if right and answer and answer in printed and answer not in (right, right.partition("=")[2])  # d=1, or 1 alone
    ]


# Whether a name exists.


def has_name(dotted: str) -> bool:
    """Whether a dotted name is a module, or an attribute or a field below one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        spec = find_module(".".join(parts[:count]))
        if spec is None:
            continue
        try:
            owner = importlib.import_module(spec.name)
        except ModuleNotFoundError as error:  # of a library that only an extra installs
            if str(error.name).split(".")[0] in OWN:
                raise
            return has_name_in_source(Path(spec.origin), parts[count:])
        for part in parts[count:]:
            if not hasattr(owner, part):
                return part in fields_of(owner) and part == parts[-1]
            owner = getattr(owner, part)
        return True
    return False


def find_module(name: str):
    """A module's spec; None where there is none, and for a module of ours that only another checkout has."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    is_foreign = spec is not None and name.split(".")[0] in OWN and not str(spec.origin).startswith(f"{ROOT}/")
    return None if is_foreign else spec


def fields_of(owner: object) -> set[str]:
    """The annotated fields of a class, and what its methods assign to `self`."""
    if not inspect.isclass(owner):
        return set()
    assigned = re.findall(r"\bself\.(\w+)(?:: [^=\n]+)? =", inspect.getsource(owner))
    return {name for base in owner.__mro__ for name in getattr(base, "__annotations__", {})} | set(assigned)


def has_name_in_source(file: Path, parts: list[str]) -> bool:
    """Whether a file that cannot be imported here defines or imports the first of these names."""
    if not parts:
        return True
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return parts[0] in names


def is_runnable(module: str) -> bool:
    """Whether `python -m` takes a module: a package with a `__main__`, or a file that runs as one."""
    spec = find_module(module)
    if spec is None:
        return False
    if spec.submodule_search_locations is not None:
        return find_module(f"{module}.__main__") is not None
    return module.split(".")[0] not in OWN or "__main__" in Path(spec.origin).read_text()


def unknown_words(words: list[str], parser) -> list[str]:
    """The subcommands and options of a `jkv` command that its parser does not have."""
    unknown = []
    for word in words:
        choices = next((action.choices for action in parser._actions if hasattr(action.choices, "keys")), None)
        if PLACEHOLDER.search(word):
            if choices:  # any subcommand: nothing is known of what follows
                break
        elif word.startswith("-") and not re.fullmatch(r"-\d.*|-", word):
            known = {*parser._option_string_actions, *settings_of(words)}
            if word.partition("=")[0] not in known:
                unknown.append(word)
        elif choices:
            if word not in choices:
                return [*unknown, word]
            parser = choices[word]
    return unknown


def settings_of(words: list[str]) -> set[str]:
    """The flags of the settings of the policy that a command names."""
    name = dict(itertools.pairwise(words)).get("--policy", "")
    fields = inspect.signature(POLICIES[name]).parameters if name in POLICIES else {}
    return {f"--{field.replace('_', '-')}" for field in fields}


def unknown_options(module: str, words: list[str]) -> list[str]:
    """The options after `python -m MODULE` that the module's own parser does not have."""
    if module == "research.bench":
        return unknown_words(words, make_parser())
    spec = find_module(module) if module.split(".")[0] in OWN else None
    if spec is None:
        return []
    folders = spec.submodule_search_locations
    files = [file for folder in folders for file in Path(folder).glob("*.py")] if folders else [Path(spec.origin)]
    source = "\n".join(file.read_text() for file in files)
    if "add_argument(" not in source:  # another library's parser
        return []
    return [word for word in words if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
