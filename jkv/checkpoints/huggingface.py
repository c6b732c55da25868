"""Imports transformers without its line about PyTorch, which nothing here needs."""

import importlib
import os
from types import ModuleType

SILENT = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def transformers() -> ModuleType:
    """The library; slow to import, so it is imported only when needed."""
    before = os.environ.get(SILENT)
    os.environ[SILENT] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        del os.environ[SILENT]
        if before is not None:
            os.environ[SILENT] = before
