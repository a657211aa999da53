"""Every metric's name and what it means: the one place that documents them (docs/metrics.md is made from it)."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

MEANING = {
    "step": "finished training steps; 0 is before the first",
    "nonfinite": "names of this line's numbers that were NaN or inf (written as null)",
    "critic/score/*": "the reward's value of a rollout: mean, max, min over the judged rollouts of the step",
    "reward/gold": "the gold scorer's value: measured, never learned from",
    "reward/gold_failed": "share of rollouts that the gold scorer failed to score (they keep their reward)",
    "reward/model": "the reward model's combined, normalised score",
    "reward/*": "mean of a named part of the reward (exact_match, f1, answered, ...)",
    "critic/rewards/*": "score less the KL penalty where it is in the reward, summed over a rollout",
    "critic/advantages/*": "advantages at the policy's tokens",
    "critic/returns/*": "returns at the policy's tokens (what the critic learns)",
    "critic/values/*": "the critic's values at the policy's tokens, before the update",
    "critic/vf_explained_var": "1 - var(returns - values) / var(returns), over all tokens of the step",
    "critic/kl": "KL to the reference: mean over rollouts of the sum over the policy's tokens",
    "critic/kl_per_token": "the same sum divided by the number of the policy's tokens",
    "critic/kl_coeff": "the KL coefficient of this step",
    "critic/groups/*": "shares of groups: without signal (all scores equal), singletons",
    "critic/rows/*": "rows that could not be used, and why",
    "critic/overlong_penalty/*": "DAPO's penalty for long rollouts",
    "critic/vf_*": "the value loss, the share of clipped values, how far values moved",
    "critic/vpred": "mean of the critic's values during the update",
    "critic/*": "loss, gradient norm (before clipping), learning rate, skipped updates of the critic",
    "actor/pg_loss": "the policy loss without KL and entropy terms",
    "actor/pg_clipfrac": "share of the policy's tokens at which the clip is active (also _lower and _higher)",
    "actor/ppo_kl": "mean of old - current log-probability: how far this step's updates have moved the policy",
    "actor/ppo_kl/epoch_*": "the same in each epoch over the batch, where there are several",
    "actor/ratio": "mean probability ratio; exactly 1 at the first update on fresh rollouts",
    "actor/entropy": "mean exact entropy of the sampling distribution at the policy's tokens, in nats",
    "actor/kl_loss": "the KL term of the loss, before its coefficient",
    "actor/ptx_loss": "PPO-ptx: mean negative log-likelihood of the demonstrated tokens beside the updates",
    "actor/mismatch/*": "importance weights between the sampler's and the learner's probabilities",
    "actor/*": "loss, gradient norm (before clipping), learning rate, skipped updates of the policy",
    "response_length/clip_ratio": "share of turns that are as long as max_response_length",
    "response_length/*": "tokens that the policy wrote in a rollout",
    "prompt_length/*": "tokens of the prompt (clip_ratio: share at max_start_length)",
    "observation_length/*": "tokens that the environment wrote after the prompt",
    "state_tokens/total": "tokens that the policy wrote in the step: those that are learned from",
    "state_tokens/coverage": "their share of all tokens",
    "global_seqlen/*": "tokens of a whole rollout",
    "env/number_of_actions/*": "turns of a rollout",
    "env/finish_ratio": "share of rollouts that ended with an answer",
    "env/number_of_valid_action": "mean number of valid turns in a rollout",
    "env/ratio_of_valid_action": "share of turns that were a valid action",
    "env/number_of_valid_search": "mean number of answered searches in a rollout",
    "env/stop/*": "share of rollouts that ended in this way",
    "failures/share": "share of rollouts without learning signal",
    "failures/search_share": "share of searches that failed",
    "failures/*": "number of failures at this boundary in the step",
    "resampling/*": "dynamic sampling: groups replaced, and groups left without signal",
    "mismatch/*": "importance weights between the sampler's and the learner's probabilities",
    "timing_s/*": "seconds in this stage of the step",
    "timing_per_token_ms/*": "milliseconds in this stage per token of the step",
    "val/test_score/*": "validation: mean score of a data source",
    "val/ci95/*": "half the width of the 95 % interval of that mean",
    "val/count/*": "questions of a data source",
    "val/pass@*": "chance that at least one of k samples is right, unbiased",
    "val/mean@*": "mean score over the samples of a question",
    "val/*": "the same over all validation questions: score, interval, count, failed, parts of the reward, lengths",
    "sft/nll": "mean negative log-likelihood of a demonstrated token, in nats",
    "sft/*": "supervised learning: loss, gradient norm, learning rate, tokens, skipped updates",
    "rm/loss": "the reward model's loss on the step's rankings",
    "rm/accuracy": "share of the step's pairs that it orders as the ranking does, before the update",
    "rm/margin": "mean score of the winner less that of the loser",
    "rm/*": "reward model: mean raw score, gradient norm, learning rate, responses and tokens through the network",
    "val/accuracy": "share of held-out pairs ordered as the ranking does (equal scores count 1/2)",
    "val/accuracy_ci95": "half the width of its 95 % interval, rankings being the independent units",
    "val/ceiling": "the best possible expected accuracy, where the labeler is known",
    "val/accuracy/*": "accuracy on the rankings of a data source",
    "val/spearman": "mean rank correlation of scores and order within a ranking",
    "val/calibration_error": "expected calibration error of sigmoid(score difference) as the chance to be right",
    "val/length_accuracy": "accuracy of always taking the longer response",
    "val/length_correlation": "correlation of score and length over all responses",
    "val/accuracy_*_better": "accuracy where the longer (the shorter) response is the better one",
    "epoch": "passes over the demonstrations so far",
}


def meaning(name: str) -> str | None:
    """What a metric means: the entry of its own name, or the first pattern that fits."""
    if name in MEANING:
        return MEANING[name]
    return next((text for pattern, text in MEANING.items() if fnmatchcase(name, pattern)), None)


def unknown(names: Iterable[str]) -> list[str]:
    """Names that nothing documents."""
    return sorted(name for name in names if meaning(name) is None)


def page() -> str:
    """docs/metrics.md."""
    rows = "\n".join(f"| `{name}` | {text} |" for name, text in MEANING.items())
    head = (
        "# Metrics\n\nThe names are those of Search-R1 and verl where they have one.\n\n| name | meaning |\n|---|---|\n"
    )
    return f"{head}{rows}\n"
