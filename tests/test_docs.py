"""Every command in README and docs works, every make target named exists, every Python block runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import PPO_SMALL, SMALL, spaniel  # noqa: F401 - a fixture

RLHF = Path("docs/rlhf.md")
PAGES = sorted(
    [Path("README.md"), Path("CONTRIBUTING.md"), *Path("docs").glob("*.md"), *Path("recipes").glob("*/README.md")]
)
ROOT = Path(__file__).resolve().parent.parent
RLHF_TEXT = (ROOT / RLHF).read_text()


def blocks(language: str, pages: Sequence[Path]) -> list[str]:
    text = "\n".join(page.read_text() for page in pages if page.exists())
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(pages: Sequence[Path]) -> list[list[str]]:
    lines = [line for block in blocks("sh", pages) for line in block.splitlines() if line.strip()]
    return [shlex.split(line, comments=True) for line in lines]


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for page in PAGES if page.exists() for t in re.findall(r"\bmake ([a-z0-9]+)\b", page.read_text())}
    named -= {"it", "sure", "a"}
    assert named
    assert named <= targets


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_every_python_block_runs() -> None:
    assert blocks("python", PAGES)
    for block in blocks("python", PAGES):
        subprocess.run([sys.executable, "-c", block], check=True, timeout=120, capture_output=True)


def smaller(arguments: list[str], folder: Path, url: str) -> list[str]:
    """The same command on a run that takes seconds."""
    out = [a.replace("runs/", f"{folder}/").replace("http://127.0.0.1:8000", url) for a in arguments]
    if out[0] == "train":
        out += PPO_SMALL if "search_tiny_ppo" in out else SMALL
        if not any(a.startswith("out=") for a in out):
            out.append(f"out={folder}/{out[1]}")
    if out[0] == "eval" and "--retriever-only" not in out:
        out.append("data.val_data_num=5")
    return out


def test_every_command_works(spaniel: Callable[..., Any], tmp_path: Path) -> None:  # noqa: F811
    from spaniel.retrieval.bm25 import BM25
    from spaniel.retrieval.corpus import read_corpus
    from spaniel.retrieval.server import running

    assert spaniel("train", "search_tiny_grpo", *SMALL, f"out={tmp_path}/demo")[0] == 0  # what `make demo` leaves
    done = set()
    with running(BM25.from_passages(read_corpus("recipes/search_tiny/corpus.jsonl"))) as url:
        for program, *arguments in commands([page for page in PAGES if page != RLHF]):
            assert program == "spaniel", f"{program} is not tested here"
            done.add(arguments[0])
            if arguments[0] == "serve-retriever":
                serve(smaller(arguments, tmp_path, url)[1])
                continue
            code, _, err = spaniel(*smaller(arguments, tmp_path, url))
            assert code == 0, f"{arguments}: {err}"
    assert done >= {"train", "chat", "eval", "check", "index", "serve-retriever", "algorithms"}


def serve(index: str) -> None:
    code = "from spaniel.cli import main; main()"
    server = subprocess.Popen([sys.executable, "-c", code, "serve-retriever", index, "--port", "18321"])
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                assert httpx.get("http://127.0.0.1:18321/health", trust_env=False).json()["status"] == "ok"
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
    finally:
        server.terminate()
        server.wait(20)


def test_every_command_of_the_rlhf_page_works_in_its_order(
    spaniel: Callable[..., Any],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they stand, those of Python as well, beside recipes with few steps."""
    recipes = tmp_path / "recipes"
    shutil.copytree("recipes/rlhf_digits", recipes / "rlhf_digits")
    few = {"2500": "20", "1200": "6", "300": "3", "100": "4", "50": "2"}
    for path in Path("recipes").glob("rlhf_digits*.yaml"):
        text = re.sub(r"(?<=steps: |every: )\d+", lambda m: few.get(m[0], m[0]), path.read_text())
        (recipes / path.name).write_text(text.replace("step-002500", "step-000020").replace("001200", "000006"))
    monkeypatch.chdir(tmp_path)
    lines = [line for line in RLHF_TEXT.splitlines() if re.match(r"(    \.venv/bin/python|spaniel) ", line)]
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        if program != "spaniel":
            if not re.search(r"pipeline|lab\.py", line):  # those take minutes; they have tests of their own
                subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            continue
        arguments = ["steps=4" if word.startswith("steps=") else word for word in arguments]
        arguments = [word.replace("--n=32", "--n=4").replace("--n=64", "--n=4") for word in arguments]
        more = {"sample": ["--limit=120"], "best-of-n": ["--limit=20"]}.get(arguments[0], [])
        code, _, err = spaniel(*arguments, *more)
        assert code == 0, f"{line}: {err}"
    assert {line.split()[1] for line in lines} >= {"sft", "sample", "reward", "train", "check", "best-of-n", "report"}
    assert (tmp_path / "runs/rlhf_digits/beta0/report/over_optimisation.svg").is_file()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_speak_of_recipes_that_exist(page: Path) -> None:
    names = {p.stem for p in Path("recipes").glob("*.yaml")}
    for name in re.findall(r"`(search_tiny_\w+|open_domain|rlhf_digits\w*|summary_reward_model)`", page.read_text()):
        assert name in names, f"{page}: {name}"
