"""A reward model from rankings: K responses through the network, the flattened pairs, TRL's RewardTrainer; in one run.

python benchmarks/reward_model.py [--k 6] [--rankings 64] [--batch 8]

The three learn from the same rankings in the same order, with the same AdamW, from the same weights, on one thread. TRL
is not a dependency of Spaniel: without `trl`, `datasets` and `accelerate` its row is left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spaniel.data.collate import collate_rankings
from spaniel.data.preferences import Rendered
from spaniel.data.tokenizer import character_tokenizer
from spaniel.models.hf import TinyLlama, new_llama, save_model
from spaniel.models.reward import load_reward_model, new_reward_model, save_reward_model
from spaniel.train.reward_model import Preference, Training, weights_of
from spaniel.types import Ranking
from spaniel.workers.optim import Optim
from spaniel.workers.scoring import RewardLearner

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz "
SHAPE = TinyLlama(hidden_size=192, intermediate_size=512, layers=4, heads=4, kv_heads=4, context=256)
OPTIM = Optim(lr=1e-4)
PAD = 0


@dataclass(frozen=True)
class Found:
    """What one way of training took, and what it computed on the first batch."""

    losses: list[float]
    seconds: float
    tokens: int
    gradient: Tensor


def rankings(count: int, k: int, seed: int) -> list[Rendered]:
    """Random texts of 32 to 127 characters and an end token, in random order."""
    rng = random.Random(seed)
    out = []
    for number in range(count):
        tokens = tuple((*(rng.randrange(3, 3 + len(CHARACTERS)) for _ in range(rng.randint(32, 127))), 1)
                       for _ in range(k))  # fmt: skip
        out.append(Rendered(Ranking(str(number), (), ("",) * k, tuple(rng.sample(range(k), k))), tokens))
    return out


def flattened(items: list[Rendered]) -> list[Rendered]:
    """Each pair as a ranking of two."""
    return [
        Rendered(
            Ranking(f"{item.ranking.id}:{winner}:{loser}", (), ("", ""), (0, 1)),
            (item.tokens[winner], item.tokens[loser]),
        )
        for item in items
        for winner, loser in item.ranking.pairs
    ]


def gradient_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def ours(folder: Path, batches: list[list[Rendered]]) -> Found:
    """`RewardLearner`, on rankings of any K."""
    model = load_reward_model(folder)
    loss = Preference(average="pair")
    learner = RewardLearner(model, OPTIM, micro_tokens=16_384, total_updates=len(batches))
    parts: Any = Training(learner, stream=None, loss=loss, pad_id=PAD, seed=1)
    ready = [collate_rankings(items, weights_of(parts, items), PAD) for items in batches]
    loss(model(ready[0].tokens, ready[0].lengths), ready[0]).backward()
    gradient = gradient_of(model)
    model.zero_grad()
    start = time.perf_counter()
    losses = [learner.learn(collate_rankings(items, weights_of(parts, items), PAD), loss)["rm/loss"].mean
              for items in batches]  # fmt: skip
    return Found(losses, time.perf_counter() - start, sum(int(b.lengths.sum()) for b in ready), gradient)


def trl(folder: Path, batches: list[list[Rendered]]) -> Found:
    """TRL's trainer on the flattened pairs, all of a batch's pairs in one forward pass, fp32, no recomputation."""
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, PrinterCallback
    from trl import RewardConfig, RewardTrainer

    pairs = [{"chosen_ids": list(p.tokens[0]), "rejected_ids": list(p.tokens[1])} for b in batches for p in b]
    with tempfile.TemporaryDirectory() as out:
        config = RewardConfig(
            out, per_device_train_batch_size=len(batches[0]), num_train_epochs=1, learning_rate=OPTIM.lr,
            lr_scheduler_type="constant", adam_beta2=OPTIM.betas[1], max_grad_norm=OPTIM.max_grad_norm,
            train_sampling_strategy="sequential", logging_steps=1, report_to="none", save_strategy="no",
            disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=None,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        tokenizer = character_tokenizer(CHARACTERS).tokenizer
        trainer = RewardTrainer(model, config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
        trainer.remove_callback(PrinterCallback)
        trainer.compute_loss(model.train(), trainer.data_collator(pairs[: len(batches[0])])).backward()
        gradient = gradient_of(model)
        model.zero_grad()
        start = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - start
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return Found(losses, seconds, sum(len(p["chosen_ids"]) + len(p["rejected_ids"]) for p in pairs), gradient)


def main(k: int, count: int, batch: int) -> None:
    torch.set_num_threads(1)
    items = rankings(count, k, seed=1)
    batches = [items[i : i + batch] for i in range(0, count, batch)]
    pairs = [flattened(items) for items in batches]
    with tempfile.TemporaryDirectory() as folder:
        start, model = Path(folder) / "start", Path(folder) / "model"
        vocabulary = 3 + len(CHARACTERS)
        save_model(new_llama(SHAPE, vocab_size=vocabulary, eos_id=1, pad_id=PAD, seed=1), start)
        save_reward_model(new_reward_model(start, heads=1, seed=1), model, pad_id=PAD)
        found = {f"rankings of {k}": ours(model, batches), "flattened pairs": ours(model, pairs)}
        if all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate")):
            found["TRL RewardTrainer"] = trl(model, pairs)
        else:
            print("trl, datasets or accelerate is not installed: TRL is left out")
    first = found[f"rankings of {k}"]
    print(f"{count} rankings of {k}, {len(batches)} steps of {batch}; Bradley-Terry, the mean over all pairs")
    for name, one in found.items():
        apart = float((one.gradient - first.gradient).norm() / first.gradient.norm())
        worst = max(abs(a - b) for a, b in zip(one.losses, first.losses, strict=True))
        print(f"{name:20s} {one.tokens:9,d} tokens ({one.tokens / first.tokens:.2f} x)  {one.seconds:6.2f} s "
              f"({one.seconds / first.seconds:.2f} x)  first loss {one.losses[0]:.6f}  largest difference of a step's "
              f"loss {worst:.1e}  of the gradient {apart:.1e} (relative)")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--rankings", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    main(given.k, given.rankings, given.batch)
