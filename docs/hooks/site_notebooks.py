"""Pages made of the notebooks: their text, code and the pictures that they keep."""

import base64
import json
import re
from pathlib import Path

from site_links import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BADGE = re.compile(r"\[!\[([^\]]*)\]\(https?://[^)]+\)\]")  # a link that is a picture of another site


def page_of(notebook: Path, repository: str) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook's page, and its pictures by file name.

    The first code cell installs jkv, as in every notebook, and is folded.

    Raises:
      ValueError: an output that is no picture.
    """
    parts, pictures, has_code = [], {}, False
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(BADGE.sub(r"[\1]", source))
            continue
        code = f"```python\n{source}\n```"
        parts.append(code if has_code else folded("Installation", code))
        has_code = True
        for output in cell["outputs"]:
            if set(output["data"]) != {"image/png"}:
                raise ValueError(f"A notebook keeps pictures alone; {notebook.name} has {sorted(output['data'])}.")
            name = f"{notebook.stem}-{len(pictures) + 1}.png"
            pictures[name] = base64.b64decode(output["data"]["image/png"])
            parts.append(f"![Output of the cell above]({name})")
    parts.append(f"[This notebook]({repository}/blob/main/notebooks/{notebook.name}) in the repository.")
    return "\n\n".join(parts) + "\n", pictures


def folded(title: str, text: str) -> str:
    """Text in a block that a reader opens."""
    indented = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title}"\n\n{indented}'
