"""The scripts beside the recipes, loaded as they lie: several are called `make_data`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RECIPES = Path("recipes").resolve()


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """`script("rlhf_digits/label.py")` -> the module; its neighbours are importable while it loads."""

    def load(name: str) -> ModuleType:
        path = RECIPES / name
        own = f"{path.parent.name}_{path.stem}"
        if own in sys.modules:
            return sys.modules[own]
        found = importlib.util.spec_from_file_location(own, path)
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.path.insert(0, str(path.parent))
        try:
            found.loader.exec_module(module)
        finally:
            sys.path.remove(str(path.parent))
        sys.modules[own] = module
        return module

    return load
