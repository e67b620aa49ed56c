"""The method in plain Python loops and float64, to be read beside the paper. The oracle of the tests.

Nothing here is fast, vectorised or clever; nothing here imports jax or the package under test.
"""

from __future__ import annotations

import math
from typing import Any


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def advantages_of_group(
    reward: list[float], passed: list[bool], quality: list[float], graded: bool, mode: str, lambda_max: float
) -> dict[str, Any]:
    """Steps 3 to 6 for the valid members of one group, externals already failed with reward 0."""
    n = len(reward)
    result: dict[str, Any] = {
        "advantage": [0.0] * n, "kept": False, "mean": mean(reward), "size": n,
        "deficit": 0.0, "scale": 1.0, "capped": False,
    }  # fmt: skip
    # Step 4, dynamic sampling: both outcomes among at least two.
    if not 0 < sum(passed) < n:
        return result
    result["kept"] = True
    # Step 3, statistics.
    advantage = [r - result["mean"] for r in reward]
    result["advantage"] = advantage
    positive = [max(a, 0.0) if p else 0.0 for a, p in zip(advantage, passed, strict=True)]
    # A coefficient outside (0, 1] voids the verdict.
    if any(p and not 0 < f <= 1 for f, p in zip(quality, passed, strict=True)):
        graded = False
    before = math.fsum(positive)
    after = math.fsum(f * a for f, a, p in zip(quality, positive, passed, strict=True) if p)
    if mode == "none" or not graded or after <= 1e-18:
        return result
    # Step 5, redistribution (Eq. 1, 2 and 8).
    result["deficit"] = before - after
    if mode == "sum_preserving":
        result["scale"] = min(before / after, lambda_max)
        result["capped"] = before / after > lambda_max
    scale = result["scale"]
    shared = [
        scale * f * a_plus if p else a
        for a, a_plus, f, p in zip(advantage, positive, quality, passed, strict=True)
    ]  # fmt: skip
    # Step 6, centring (Eq. 7).
    centre = mean(shared) if mode == "sum_preserving" else 0.0
    result["advantage"] = [b - centre for b in shared]
    return result


def group_advantages(
    reward: Any, passed: Any, quality: Any, group_id: Any, valid: Any, external: Any, graded: Any,
    *, num_groups: int, mode: str = "sum_preserving", lambda_max: float = 1.5,
) -> dict[str, list[Any]]:  # fmt: skip
    """The whole batch: rows are handed to their groups, invalid ones and padding to none."""
    rows = len(reward)
    out: dict[str, list[Any]] = {"advantage": [0.0] * rows, "trained": [False] * rows}
    for name in ("kept", "mean", "size", "deficit", "scale", "capped"):
        out[name] = []
    for g in range(num_groups):
        members = []
        for i in range(rows):
            if int(group_id[i]) != g or not valid[i]:  # step 1
                continue
            if math.isfinite(reward[i]) or external[i]:
                members.append(i)
        # Step 2: copied answers fail.
        r = [0.0 if external[i] else float(reward[i]) for i in members]
        p = [bool(passed[i]) and not external[i] for i in members]
        one = advantages_of_group(
            r, p, [float(quality[i]) for i in members], bool(graded[g]), mode, lambda_max
        )
        for i, a in zip(members, one["advantage"], strict=True):
            out["advantage"][i] = a
            out["trained"][i] = one["kept"]
        for name in ("kept", "mean", "size", "deficit", "scale", "capped"):
            out[name].append(one[name])
    return out


# The estimators the method is compared with: one group of valid members, externals already failed.


def grpo(reward: list[float], *, ddof: int = 0, epsilon: float = 1e-6) -> list[float]:
    n, m = len(reward), mean(reward)
    if n <= ddof:
        return [0.0] * n
    std = math.sqrt(math.fsum((r - m) ** 2 for r in reward) / (n - ddof))
    return [(r - m) / (std + epsilon) for r in reward]


def dr_grpo(reward: list[float]) -> list[float]:
    return [r - mean(reward) for r in reward]


def rloo(reward: list[float]) -> list[float]:
    if len(reward) < 2:
        return [0.0] * len(reward)
    return [r - (math.fsum(reward) - r) / (len(reward) - 1) for r in reward]


def trl(reward: list[float]) -> list[float]:
    return [0.0] if len(reward) == 1 else grpo(reward, ddof=1, epsilon=1e-4)


def verl(reward: list[float]) -> list[float]:
    return [reward[0] / (1 + 1e-6)] if len(reward) == 1 else grpo(reward, ddof=1, epsilon=1e-6)


def gopo(reward: list[float]) -> list[float]:
    n = len(reward)
    if n < 2:
        return [0.0] * n
    out = []
    for r in reward:
        below = sum(other < r for other in reward)
        ties = sum(other == r for other in reward)
        rank = below + (ties - 1) / 2  # ties share the middle of their places
        out.append(-2 + 4 * rank / (n - 1))
    return out


def papo(
    reward: list[float], passed: list[bool], process: list[float], *, epsilon: float = 1e-6
) -> list[float]:
    outcome = grpo(reward, epsilon=epsilon)
    correct = [p for p, ok in zip(process, passed, strict=True) if ok]
    if not correct:
        return outcome
    shaped = iter(grpo(correct, epsilon=epsilon))
    return [a + next(shaped) if ok else a for a, ok in zip(outcome, passed, strict=True)]


def edas(reward: list[float], passed: list[bool], diversity: list[float]) -> list[float]:
    advantage = dr_grpo(reward)
    failed = [i for i, ok in enumerate(passed) if not ok]
    before = math.fsum(advantage[i] for i in failed)
    weight = {i: 2 - diversity[i] for i in failed}
    after = math.fsum(weight[i] * advantage[i] for i in failed)
    if abs(after) > 1e-18:
        for i in failed:
            advantage[i] *= weight[i] * before / after
    return advantage


# Reward shaping and losses.


def quantile(values: list[float], q: float) -> float:
    """Linear interpolation between order statistics, as numpy's default."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def length_penalty(
    reward: list[float], passed: list[bool], length: list[float],
    *, strength: float, slack: float, span: float, power: float, q: float, min_pass_rate: float,
) -> list[float]:  # fmt: skip
    """R − 1[passed]·X·clip((ℓ/ℓ* − 1 − δ)/(s − δ), 0, 1)^γ in one group, where enough of it passed."""
    if not reward or sum(passed) / len(reward) <= min_pass_rate:
        return list(reward)
    target = quantile([x for x, p in zip(length, passed, strict=True) if p], q)
    out = []
    for r, p, x in zip(reward, passed, length, strict=True):
        excess = min(max((x / target - 1 - slack) / (span - slack), 0.0), 1.0)
        out.append(r - strength * excess**power if p else r)
    return out


def segment_penalty(
    advantage: list[float], malformed: list[bool], weight: list[float], *, kappa: float
) -> list[float]:
    """Malformed: positive → 0, negative × κ; then each sign is rescaled to the total it had."""
    out = [
        a if not bad else (0.0 if a > 0 else kappa * a) for a, bad in zip(advantage, malformed, strict=True)
    ]
    for sign in (1, -1):
        before = math.fsum(w * a for a, w in zip(advantage, weight, strict=True) if a * sign > 0)
        after = math.fsum(w * b for b, w in zip(out, weight, strict=True) if b * sign > 0)
        if abs(after) > 1e-18:
            out = [b * before / after if b * sign > 0 else b for b in out]
    return out


def token_mean(loss: list[list[float]], mask: list[list[bool]]) -> float:
    kept = [x for row, keep in zip(loss, mask, strict=True) for x, k in zip(row, keep, strict=True) if k]
    return mean(kept)


def prompt_mean(loss: list[list[float]], mask: list[list[bool]], group: list[list[int]]) -> float:
    by_group: dict[int, list[float]] = {}
    for row, keep, ids in zip(loss, mask, group, strict=True):
        for x, k, g in zip(row, keep, ids, strict=True):
            if k:
                by_group.setdefault(g, []).append(x)
    return mean([mean(values) for values in by_group.values()])
