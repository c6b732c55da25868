"""A plugin for `pytest -p tests.support.collected --collect-only`: writes the marks of each case to the file in $COLLECTED."""

import json
import os
from pathlib import Path


def pytest_collection_finish(session):
    """Once everything is collected."""
    marks = {item.nodeid: sorted({mark.name for mark in item.iter_markers()}) for item in session.items}
    Path(os.environ["COLLECTED"]).write_text(json.dumps(marks))
