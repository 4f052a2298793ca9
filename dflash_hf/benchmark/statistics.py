"""Ratios of medians with bootstrap intervals, and the acceptance that gives a wished tau."""

import numpy as np


def ratio_of_medians(
    ours: list[list[float]], plain: list[list[float]], *, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float, float] | None:
    """`median(ours) / median(plain)` and its 95% percentile-bootstrap interval: `(ratio, low, high)`.

    The two are paired: `ours[i][r]` and `plain[i][r]` are tokens/s of repeat r on prompt i, measured next to each
    other. Prompts are drawn with replacement, then repeats within each, the same draw for both. None without data;
    with a single prompt measured once the interval is the ratio itself and says nothing.

    Raises:
        ValueError: the two are not of the same shape.

    Example:
        >>> ratio_of_medians([[2.0], [4.0], [6.0]], [[1.0], [2.0], [3.0]])
        (2.0, 2.0, 2.0)
    """
    if [len(row) for row in ours] != [len(row) for row in plain]:
        raise ValueError(
            f"Expected as many repeats for both, got {[len(r) for r in ours]} and {[len(r) for r in plain]}."
        )
    counts = np.array([len(row) for row in ours])
    if len(counts) == 0 or counts.min() == 0:
        return None
    x, y = np.zeros((2, len(ours), counts.max()))
    for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
        x[i, : len(a)], y[i, : len(b)] = a, b
    measured = np.arange(counts.max()) < counts[:, None]
    ratio = np.median(x[measured]) / np.median(y[measured])
    generator = np.random.default_rng(seed)
    ratios = []
    for start in range(0, resamples, 1000):  # in parts: the draws of all resamples may be large
        size = (min(1000, resamples - start), len(counts))
        prompt = generator.integers(0, len(counts), size)[..., None]
        # A prompt that was interrupted has fewer repeats to draw from.
        repeat = (generator.random((*size, counts.max())) * counts[prompt]).astype(int)
        medians = [np.median(values[prompt, repeat].reshape(size[0], -1), axis=1) for values in (x, y)]
        ratios.append(medians[0] / medians[1])
    low, high = np.quantile(np.concatenate(ratios), [0.025, 0.975])
    return float(ratio), float(low), float(high)


def expected_tau(acceptance: float, num_drafts: int) -> float:
    """Mean tokens committed a cycle where each of `num_drafts` slots is right with probability `acceptance`.

    1 + a + a^2 + ... + a^g: slot k is accepted where it and all slots before it are right (paper, section 2).

    >>> expected_tau(0.5, 2)
    1.75
    """
    return sum(acceptance**k for k in range(num_drafts + 1))


def acceptance_for_tau(tau: float, num_drafts: int) -> float:
    """The slot probability of `expected_tau` that gives `tau`.

    Raises:
        ValueError: `tau` is outside [1, num_drafts + 1].

    >>> round(acceptance_for_tau(1.75, 2), 6)
    0.5
    """
    if not 1 <= tau <= num_drafts + 1:
        raise ValueError(
            f"A simulated tau must lie between 1 and {num_drafts + 1} with {num_drafts} drafts a block, got {tau}."
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if expected_tau(middle, num_drafts) < tau:
            low = middle
        else:
            high = middle
    return high
