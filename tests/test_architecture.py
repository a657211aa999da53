"""The architecture, enforced: layers, confinement of third parties, sizes, names. Reads sources only."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "spaniel"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Imports point down only. Rooms of one layer do not know each other, but for what is listed below: (who, whose) -> why.
LAYERS = [
    {"errors"},
    {"types", "files"},
    {"algo", "models", "envs", "retrieval", "cluster", "track"},
    {"data"},
    {"rewards", "rollout", "workers"},
    {"train"},
    {"recipe"},
    {"recipe_reward"},
    {"config"},
    {"launch", "launch_sft", "launch_reward"},
    {"run", "examine", "samples"},
    {"cli"},
]
SAME_LAYER = {
    ("envs/search.py", "spaniel.retrieval.base"): "the search environment asks a retriever: any, so only the seam",
    ("launch.py", "spaniel.launch_reward"): "a reward model is a reward like any other",
    ("launch_sft.py", "spaniel.launch"): "both write a policy's folder in the same way",
}
CONFINED = {
    "ray": {"cluster/ray.py"},
    "vllm": {"rollout/vllm_sampler.py"},
    "transformers": {"models/hf.py", "data/template.py"},
    "tokenizers": {"data/tokenizer.py"},
    "tantivy": {"retrieval/bm25.py"},
    "matplotlib": {"track/plots.py"},
    "torch.distributed": {"workers/", "cluster/"},
}
FORBIDDEN_NAMES = re.compile(r"(utils?|helpers?|managers?|misc|common)(\.py)?$")
OUTSIDE = re.compile(
    r"pypi\.org|pythonhosted|huggingface\.co|hf\.co/|download\.pytorch|registry\.npmjs|--(extra-)?index-url"
    r"|\.\./shared|\bshared/|/work/",
    re.I,
)
"""Registries, hubs, and folders that are not in a clone."""


def imports(place: str, source: str) -> Iterator[str]:
    """Every module that a source imports, in functions too, relative ones resolved; `a.b` for `from a import b`."""
    folders = ["spaniel", *place.split("/")[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = folders[: len(folders) + 1 - node.level] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def layer_faults(place: str, source: str) -> list[str]:
    own = place.split("/")[0].removesuffix(".py")
    if own == "__init__":
        return []
    height = {room: i for i, rooms in enumerate(LAYERS) for room in rooms}
    faults = [] if own in height else [f"{place}: {own} is in no layer"]
    for name in imports(place, source):
        if not name.startswith("spaniel.") or own not in height:
            continue
        other = name.split(".")[1]
        if other == own or other not in height:
            continue
        allowed = any(place == who and _within(name, whose) for who, whose in SAME_LAYER)
        if height[other] > height[own] or (height[other] == height[own] and not allowed):
            faults.append(f"{place}: {own} may not import {other}")
    return faults


def confinement_faults(place: str, source: str) -> list[str]:
    return [
        f"{place}: imports {name}, which belongs in {', '.join(sorted(homes))}"
        for name in imports(place, source)
        for module, homes in CONFINED.items()
        if _within(name, module) and not any(place.startswith(home) for home in homes)
    ]


def _within(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def dynamic_faults(place: str, source: str) -> list[str]:
    """Modules named by strings would escape the two rules above, and no editor could follow them."""
    called = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (f.id if isinstance(f, ast.Name) else f.attr if isinstance(f, ast.Attribute) else "" for f in called)
    return [f"{place}: {name}(...)" for name in names if name in ("__import__", "import_module")]


def loop_faults(source: str, lines: int = 45) -> list[str]:
    """The training loop: its one `for`."""
    loops = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.For)]
    long = [n for n in loops if (n.end_lineno or 0) - n.lineno + 1 > lines]
    return ([] if loops else ["no loop"]) + [f"line {n.lineno}: a loop of more than {lines} lines" for n in long]


def name_faults(place: str) -> list[str]:
    return [f"{place}: {part}" for part in place.split("/") if FORBIDDEN_NAMES.search(part)]


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
        defined = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if defined and not node.name.startswith("_") and not ast.get_docstring(node):
            faults.append(f"{place}: {node.name} has no docstring")
    return faults


def place_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("check", [layer_faults, confinement_faults, dynamic_faults, size_faults, docstring_faults])
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
    assert layer_faults("algo/x.py", "from ..train import rl")
    assert layer_faults("algo/x.py", "from .. import train")
    assert not layer_faults("algo/x.py", "from . import masked\nfrom ..types import Batch")
    assert layer_faults("envs/search.py", "from spaniel.retrieval.bm25 import BM25")
    assert layer_faults("envs/single_turn.py", "from spaniel.retrieval.base import Retriever")
    assert layer_faults("types.py", "import spaniel.algo.masked")
    assert layer_faults("train/rl.py", "from spaniel.config import load_recipe")
    assert confinement_faults("train/rl.py", "def f():\n    import transformers")
    assert confinement_faults("cluster/local.py", "import ray")
    assert confinement_faults("rollout/torch_sampler.py", "from vllm import LLM")
    assert dynamic_faults("algo/x.py", "import importlib\nimportlib.import_module('spaniel.train')")
    assert dynamic_faults("algo/x.py", "__import__('ray')")
    assert confinement_faults("algo/x.py", "from torch import distributed")
    assert not confinement_faults("workers/fsdp.py", "import torch.distributed as dist")
    assert size_faults("x.py", "\n" * 301)
    assert size_faults("x.py", "def f():\n" + "    pass\n" * 61)
    for kind in ("def f():", "async def f():", "class F:"):
        assert docstring_faults("x.py", f'"""Doc."""\n{kind}\n    pass\n')
    assert not docstring_faults("x.py", '"""Doc."""\ndef _f():\n    pass\n')
    for place in ("utils.py", "algo/text_utils.py", "helpers/x.py", "train/manager.py"):
        assert name_faults(place), place
    assert not name_faults("algo/masked.py")
    assert loop_faults("for i in x:\n" + "    pass\n" * 45)
    assert not loop_faults("for i in x:\n" + "    pass\n" * 44)
    assert loop_faults("pass")
    for text in ("https://huggingface.co/a/b", "--index-url x", "open('shared/data')", "/work/main", "pypi.org/simple"):
        assert OUTSIDE.search(text), text
    assert not OUTSIDE.search("an object is shared by all episodes")


def test_names() -> None:
    assert not [f for path in SOURCES for f in name_faults(place_of(path))]


def test_the_loop_is_readable() -> None:
    assert not loop_faults((PACKAGE / "train/rl.py").read_text())


def texts() -> Iterator[Path]:
    """Text files of the project, without what is made here (runs, environments, caches)."""
    kinds = {".py", ".toml", ".md", ".yaml", ".yml", ".lock", ".txt", ".json", ".jinja", ""}
    for folder, inner, files in os.walk(ROOT):
        inner[:] = [f for f in inner if f not in ("runs", "build", "dist") and (f == ".ci" or not f.startswith("."))]
        yield from (Path(folder, f) for f in files if Path(f).suffix in kinds and not f.startswith("."))


def test_no_host_and_no_folder_outside_is_named() -> None:
    found = [path for path in texts() if OUTSIDE.search(path.read_text(encoding="utf-8", errors="replace"))]
    assert found == [Path(__file__).resolve()]


def test_the_map_names_every_room_and_file() -> None:
    """docs/architecture.md: a tree that leaves files out is not a map."""
    page = (ROOT / "docs/architecture.md").read_text()
    missing = [
        place_of(p) for p in SOURCES if p.name != "__init__.py" and not re.search(rf"\b{re.escape(p.name)}", page)
    ]
    assert not missing


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
