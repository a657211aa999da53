"""The lab, whole: `python recipes/rlhf_digits/pipeline.py --seed 1 --out runs/rlhf_digits`.

Every step is a command that you could type; each is printed before it runs, and skipped where its result is there.
At the end stands `results.json`: what `recipes/rlhf_digits/README.md` reports.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPES = HERE.parent
SAMPLES = 32
RUNS = {
    "ppo": [],
    "beta0": ["algorithm.kl.beta=0", "steps=140", "policy.optim.lr=1.0e-3"],
    "adaptive": [
        "algorithm.kl={place: reward, kind: k1, beta: 0.05, controller: adaptive, target: 0.7, horizon: 640}",
        "steps=140",
        "policy.optim.lr=4.0e-4",
    ],
    "ptx": ["algorithm.kl.beta=0", "steps=140", "ptx.batch_size=64", "policy.optim.lr=6.0e-4"],
}
"""The runs of PPO, and what each changes in the recipe."""


def do(*command: str | Path, makes: Path) -> None:
    """Run one command, unless what it makes is there."""
    words = [str(word) for word in command]
    print("$ " + shlex.join(words), flush=True)
    if not makes.exists():
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def spaniel(*command: str | Path, makes: Path) -> None:
    """Run one command of Spaniel."""
    do(Path(sys.executable).with_name("spaniel"), *command, makes=makes)


def trained(run: Path, part: str) -> Path:
    """A model in the newest checkpoint of a run."""
    latest = run / "checkpoints" / "latest"
    return run / "checkpoints" / (latest.read_text(encoding="utf-8").strip() if latest.is_file() else "none") / part


def lines(path: Path) -> list[dict]:
    """The rows of a jsonl file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def reward_model(out: Path, seed: int) -> list[str]:
    """Start, samples, rankings, reward model; what the PPO runs change in their recipe to use them."""
    data, sft, reward = out / "data", out / "sft", out / "reward"
    do(sys.executable, HERE / "make_data.py", data, "--seed", str(seed), makes=data)
    spaniel("sft", RECIPES / "rlhf_digits_sft.yaml", f"out={sft}", f"seed={seed}",
            f"data.train={data / 'demonstrations.jsonl'}", f"data.validation={data / 'held_out.jsonl'}",
            makes=trained(sft, "policy"))  # fmt: skip
    ours = [f"seed={seed}", f"model.path={trained(sft, 'policy')}", f"data.train={data / 'train.jsonl'}",
            f"data.validation={data / 'validation.jsonl'}"]  # fmt: skip
    samples, rankings = out / "samples.jsonl", out / "rankings.jsonl"
    spaniel("sample", RECIPES / "rlhf_digits.yaml", samples, *ours, f"--n={SAMPLES}", makes=samples)
    do(sys.executable, HERE / "label.py", samples, rankings, "--seed", str(seed), makes=rankings)
    spaniel("reward", RECIPES / "rlhf_digits_reward.yaml", f"out={reward}", f"seed={seed}",
            f"model.path={trained(sft, 'policy')}", f"data.train={rankings}",
            makes=reward / "checkpoints" / "latest")  # fmt: skip
    model = trained(reward, "reward_model")
    return [*ours, f"reward.path={model}", f"critic.path={model}"]


def main(out: Path, seed: int, names: list[str], jobs: int) -> dict:
    """Everything, `jobs` runs of PPO at a time; returns the results."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    ours = reward_model(out, seed)
    best = out / "best_of_n.json"
    spaniel("best-of-n", RECIPES / "rlhf_digits.yaml", *ours, "--n=64", f"--out={best}", makes=best)
    counts = out / "digit_counts.json"
    do(sys.executable, HERE / "interpretable.py", out / "reward", "--out", counts, makes=counts)
    results: dict = {"seed": seed, "reward_model": lines(out / "reward" / "metrics.jsonl")[-1],
                     "digit_counts": json.loads(counts.read_text(encoding="utf-8")),
                     "best_of_n": json.loads(best.read_text(encoding="utf-8"))}  # fmt: skip

    def one(name: str) -> dict:
        run = out / name
        ptx = [f"ptx.data={out / 'data' / 'true_sums.jsonl'}"] if name == "ptx" else []
        spaniel("train", RECIPES / "rlhf_digits.yaml", f"out={run}", *ours, *ptx, *RUNS[name],
                makes=run / "checkpoints" / "latest")  # fmt: skip
        spaniel("report", run, f"--best-of-n={best}", makes=run / "report" / "over_optimisation.md")
        return summary(run)

    with ThreadPoolExecutor(jobs) as pool:
        results |= dict(zip(names, pool.map(one, names), strict=True))
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def summary(run: Path) -> dict:
    """First and last tenth of a run: proxy, gold, right sums, sequence KL; and the report's verdict."""
    rows = [row for row in lines(run / "metrics.jsonl") if "reward/gold" in row]
    tenth = max(1, len(rows) // 10)
    names = {"proxy": "critic/score/mean", "gold": "reward/gold", "right": "reward/gold/correct", "kl": "critic/kl",
             "length": "response_length/mean"}  # fmt: skip
    found: dict = {
        short: [sum(row[name] for row in part) / tenth for part in (rows[:tenth], rows[-tenth:])]
        for short, name in names.items()
    }
    half = rows[len(rows) // 2 :]
    found["kl_of_second_half"] = sum(row["critic/kl"] for row in half) / len(half)
    found["verdict"] = json.loads((run / "report" / "over_optimisation.json").read_text(encoding="utf-8"))["verdict"]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/rlhf_digits"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--jobs", type=int, default=2, help="runs of PPO at a time, one core each")
    given = parser.parse_args()
    print(json.dumps(main(given.out, given.seed, given.runs, given.jobs), indent=1))
