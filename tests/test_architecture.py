"""The architecture, enforced: layers, confinement of third parties, sizes, names. Reads sources only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spaniel"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Imports point down only. Rooms of one layer do not know each other, but for the pairs listed below.
LAYERS = [
    {"errors"},
    {"types", "files"},
    {"algo", "models", "envs", "retrieval", "cluster", "track"},
    {"data"},
    {"rewards", "rollout", "workers"},
    {"train"},
    {"recipe"},
    {"config"},
    {"launch", "launch_sft"},
    {"run", "examine"},
    {"cli"},
]
SAME_LAYER = {
    ("envs", "retrieval"): "the search environment asks a retriever",
    ("launch_sft", "launch"): "both write a policy's folder in the same way",
}
CONFINED = {
    "ray": {"cluster/ray.py"},
    "vllm": {"rollout/vllm_sampler.py"},
    "transformers": {"models/hf.py", "data/template.py"},
    "tokenizers": {"data/tokenizer.py"},
    "tantivy": {"retrieval/bm25.py"},
    "torch.distributed": {"workers/", "cluster/"},
}
FORBIDDEN_NAMES = re.compile(r"(utils?|helpers?|managers?|misc|common)(\.py)?$")
HOSTS = re.compile(r"pypi\.org|pythonhosted|huggingface\.co|download\.pytorch|registry\.npmjs", re.I)


def imports(source: str) -> Iterator[str]:
    """Every module that a source imports, also inside functions; `a.b` for `from a import b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_faults(place: str, source: str) -> list[str]:
    own = place.split("/")[0].removesuffix(".py")
    if own == "__init__":
        return []
    height = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
    faults = [] if own in height else [f"{place}: {own} is in no layer"]
    for name in imports(source):
        if not name.startswith("spaniel.") or own not in height:
            continue
        other = name.split(".")[1]
        if other == own or other not in height:
            continue
        sideways = height[other] == height[own] and (own, other) not in SAME_LAYER
        if height[other] > height[own] or sideways:
            faults.append(f"{place}: {own} may not import {other}")
    return faults


def confinement_faults(place: str, source: str) -> list[str]:
    return [
        f"{place}: imports {name}, which belongs in {', '.join(sorted(homes))}"
        for name in imports(source)
        for module, homes in CONFINED.items()
        if (name == module or name.startswith(f"{module}.")) and not any(place.startswith(home) for home in homes)
    ]


def size_faults(place: str, source: str, lines: int = 300, function: int = 60) -> list[str]:
    faults = [] if source.count("\n") <= lines else [f"{place}: {source.count(chr(10))} lines"]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            long = (node.end_lineno or 0) - node.lineno + 1
            if long > function:
                faults.append(f"{place}: {node.name} has {long} lines")
    return faults


def docstring_faults(place: str, source: str) -> list[str]:
    tree = ast.parse(source)
    faults = [] if ast.get_docstring(tree) or not source.strip() else [f"{place}: no docstring"]
    for node in tree.body:
        public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        if public and not ast.get_docstring(node):
            faults.append(f"{place}: {node.name} has no docstring")
    return faults


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("check", [layer_faults, confinement_faults, size_faults, docstring_faults])
def test_the_package_keeps_the_rules(check: object) -> None:
    faults = [f for path in SOURCES for f in check(place_of(path), path.read_text())]  # type: ignore[operator]
    assert not faults, "\n".join(faults)


def test_other_sources_keep_their_size() -> None:
    for folder in ("tests", "recipes", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not size_faults(str(path.relative_to(ROOT)), path.read_text(), 400, 100)


def test_each_rule_catches_what_it_forbids() -> None:
    assert layer_faults("algo/x.py", "from spaniel.train import rl")
    assert layer_faults("algo/x.py", "def f():\n    import spaniel.models.hf")
    assert layer_faults("attic/x.py", "")
    assert not layer_faults("envs/search.py", "from spaniel.retrieval.base import Passage")
    assert layer_faults("retrieval/x.py", "from spaniel.envs.base import Env")
    assert confinement_faults("train/rl.py", "def f():\n    import transformers")
    assert confinement_faults("algo/x.py", "from torch import distributed")
    assert not confinement_faults("workers/fsdp.py", "import torch.distributed as dist")
    assert size_faults("x.py", "\n" * 301)
    assert size_faults("x.py", "def f():\n" + "    pass\n" * 61)
    assert docstring_faults("x.py", '"""Doc."""\ndef f():\n    pass\n')


def test_names() -> None:
    for path in SOURCES:
        assert not FORBIDDEN_NAMES.search(path.name), path
        assert not FORBIDDEN_NAMES.search(path.parent.name), path


def test_the_loop_is_readable() -> None:
    tree = ast.parse((PACKAGE / "train/rl.py").read_text())
    loop = next(n for n in ast.walk(tree) if isinstance(n, ast.For))
    assert (loop.end_lineno or 0) - loop.lineno + 1 <= 45


def test_no_host_and_no_folder_outside_is_named() -> None:
    kinds = {".py", ".toml", ".md", ".yaml", ".yml", ".lock", ".txt", ".json", ""}
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        made_here = any(p == "runs" or (p.startswith(".") and p != ".ci") for p in parts)
        if path == Path(__file__) or not path.is_file() or path.suffix not in kinds or made_here:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        assert not HOSTS.search(text), path
        assert "../shared" not in text, path
        assert "/work/" not in text, path


def test_a_cold_import_is_light() -> None:
    code = (
        "import sys, spaniel; "
        "heavy = {'ray', 'vllm', 'transformers', 'torch', 'tantivy', 'pyarrow'} & set(sys.modules); "
        "assert not heavy, heavy; "
        "import spaniel.cli; "
        "heavy = {'ray', 'vllm', 'transformers', 'torch'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_the_mathematics_needs_no_transformers() -> None:
    code = "import sys; from spaniel import algo; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)


def test_every_setting_is_read_by_someone() -> None:
    """A key that nobody reads would be accepted and do nothing."""
    code = "".join(path.read_text() for path in SOURCES)
    recipe = ast.parse((PACKAGE / "recipe.py").read_text())
    for node in recipe.body:
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    assert re.search(rf"\.{field.target.id}\b", code), f"{node.name}.{field.target.id}"
