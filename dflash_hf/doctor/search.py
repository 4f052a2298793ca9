"""Which of the mistakes explain a low acceptance: try each, keep the best, try again on top of it."""

import math
from dataclasses import dataclass, field

import torch

from ..drafter.modeling_dflash import DFlashDraftModel
from .evidence import Evidence, Score, score
from .mistakes import Probe, probes, value_of, variant

MOST_FAULTS = 3
# All readings are looked at with few anchors, those that may be better with more, the best with all.
STAGES = ((16, 8), (48, 3))  # anchors, and how many readings are kept at most
RULED_OUT = -0.5  # nats: a reading this much worse is not tried again on top of another correction
LEAST_GAIN = 0.25  # of the accepted drafts, relative
LEAST_DRAFTS = 0.05  # accepted drafts a block, absolute
LEAST_NATS = 0.03  # likelihood of the right tokens; shows a mistake that acceptance alone is too coarse for
LEAST_FIRST = 0.2  # of first drafts right when all is corrected; a drafter below it is right by chance, see counts()
STANDARD_ERRORS = 2.5
LIKELIER_ERRORS = 4.0  # the same for likelihood, as anchors side by side judge the same tokens
ENOUGH_FIRST = 0.6  # of first drafts right; with fewer, every layer is tried in the place of each feature layer
LAYERS_TRIED = 8  # in one place, spread over the target
MOST_SWEEPS = 3  # over the places


@dataclass
class Fault:
    """A mistake whose correction raises the acceptance.

    Attributes:
        kind: what it is about, as in docs/troubleshooting.md.
        says: what is there, and what to put in its place.
        tau_without: tokens a cycle with every other fault corrected, and this one not.
        tau_with: tokens a cycle with all faults corrected.
        changes: entries of config.json and the values that they should have; empty where config.json is right.
    """

    kind: str
    says: str
    tau_without: float
    tau_with: float
    changes: dict = field(default_factory=dict)


@dataclass
class Findings:
    """What a search found: the `before` and `after` scores, the `faults`, and the drafter with them corrected."""

    before: Score
    after: Score
    faults: list[Fault]
    corrected: DFlashDraftModel = field(repr=False)


def find_faults(drafter, evidence: Evidence, *, tokenizer=None) -> Findings:
    """Look for entries of a drafter's config whose correction makes its drafts right more often.

    Readings are ranked by the log-likelihood of the right tokens, which shows a correction even where a second
    mistake still keeps all drafts wrong; up to three are put on top of each other. Where first drafts are often wrong
    after that, other feature layers are looked for, one place at a time. A correction is reported where it brings 25%
    more accepted drafts by more than 2.5 standard errors over the anchors, or is likelier by 0.03 nats a token and 4
    standard errors.

    Args:
        drafter: one that fits the evidence's target.
        evidence: of `gather`.
        tokenizer: the target's.

    Returns:
        Faults in the order of what they cost, none for a drafter whose config is right.

    Example:
        >>> find_faults(drafter, gather(target, prompts, num_drafts=7)).faults                 # doctest: +SKIP
        []
    """
    stages = [(evidence.thinned(anchors), kept) for anchors, kept in STAGES]
    current = variant(drafter, {})
    before = now = score(current, evidence)
    taken: list[Probe] = []
    ruled_out: list[Probe] = []
    layers_fitted = False
    while len(taken) < MOST_FAULTS:
        settled = [probe.kind for probe in taken]
        left = probes(current, evidence.target, longest=evidence.longest, tokenizer=tokenizer)
        left = [probe for probe in left if probe.kind not in settled and probe not in ruled_out]
        for few, kept in stages:
            left = _best(current, left, few, kept, ruled_out)
        found = _closest(current, left, evidence, now)
        if found is None and now.first < ENOUGH_FIRST and not layers_fitted:
            layers_fitted = True
            found = _closest(current, [_fitted_layers(current, stages[0][0])], evidence, now)
        if found is None:
            break
        now, best = found
        taken = [probe for probe in taken if probe.kind != best.kind] + [best]
        current = variant(current, best.changes)
    return _keep_what_counts(drafter, evidence, before, now, taken)


def _best(drafter, tried: list[Probe], few: Evidence, kept: int, ruled_out: list[Probe]) -> list[Probe]:
    """The readings that may be better by what few anchors say, at most `kept`; adds hopeless ones to `ruled_out`."""
    there, gains = score(drafter, few).likelihood, []
    for probe in tried:
        gain = score(variant(drafter, probe.changes), few).likelihood - there
        mean = gain.mean().item()
        if mean < RULED_OUT:
            ruled_out.append(probe)
        if mean + STANDARD_ERRORS * _standard_error(gain) >= 0:
            gains.append((mean, probe))
    gains.sort(key=lambda pair: -pair[0])
    return [probe for _, probe in gains[:kept]]


def _closest(drafter, tried: list[Probe], evidence: Evidence, now: Score) -> tuple[Score, Probe] | None:
    """The reading with which the right tokens are likeliest, and its score; None where none is clearly better."""
    scores = [(score(variant(drafter, probe.changes), evidence), probe) for probe in tried]
    better = [pair for pair in scores if _is_clear(pair[0].likelihood - now.likelihood)]
    return max(better, key=lambda pair: pair[0].likelihood.mean().item(), default=None)


def _fitted_layers(drafter, few: Evidence) -> Probe:
    """The feature layers that make the right tokens likeliest, one place after the other until no change helps."""
    count = few.target.config.get_text_config().num_hidden_layers
    ids = list(drafter.config.target_layer_ids)
    known = {}

    def likelihood(layers: list[int]) -> float:
        key = tuple(layers)
        if key not in known:
            known[key] = score(variant(drafter, {"target_layer_ids": layers}), few).likelihood.mean().item()
        return known[key]

    for sweep in range(MOST_SWEEPS):
        before = list(ids)
        for place in range(len(ids)):
            tried = set(range(0, count, -(-count // LAYERS_TRIED)))
            if sweep > 0:
                tried |= set(range(max(ids[place] - 2, 0), min(ids[place] + 3, count)))
            best = max(([*ids[:place], i, *ids[place + 1 :]] for i in sorted(tried)), key=likelihood)
            if likelihood(best) > likelihood(ids) + LEAST_NATS:
                ids = best
        if ids == before:
            break
    return Probe("feature layers", {"target_layer_ids": ids})


def _is_clear(differences: torch.Tensor, errors: float = STANDARD_ERRORS) -> bool:
    """Whether paired differences `[N]` are above 0 by more than some standard errors."""
    return differences.mean().item() > errors * _standard_error(differences)


def _standard_error(values: torch.Tensor) -> float:
    """Of the mean of `[N]`; one value alone tells nothing about it, so anything is possible then."""
    return math.inf if len(values) < 2 else (values.std() / len(values) ** 0.5).item()


def counts(more: Score, less: Score) -> bool:
    """Whether drafts at the same anchors are so much better that less is a fault: by acceptance or by likelihood.

    Nothing counts while fewer than one in five first drafts is right: of many readings of an untrained drafter one is
    always luckier than the others, and likelier merely by being less sure.
    """
    if more.first < LEAST_FIRST:
        return False
    gain = (more.accepted.mean() - less.accepted.mean()).item()
    enough = gain >= max(LEAST_GAIN * less.accepted.mean().item(), LEAST_DRAFTS)
    if enough and _is_clear(more.accepted - less.accepted):
        return True
    likelier = more.likelihood - less.likelihood
    return gain >= 0 and likelier.mean().item() >= LEAST_NATS and _is_clear(likelier, LIKELIER_ERRORS)


def is_more(more: torch.Tensor, less: torch.Tensor) -> bool:
    """The same for accepted drafts of different texts, `[N]` and `[M]`."""
    gain = (more.mean() - less.mean()).item()
    error = math.hypot(_standard_error(more), _standard_error(less))
    return gain >= max(LEAST_GAIN * less.mean().item(), LEAST_DRAFTS) and gain > STANDARD_ERRORS * error


def _keep_what_counts(drafter, evidence: Evidence, before: Score, after: Score, taken: list[Probe]) -> Findings:
    """Drop corrections that the others do not need, and say what each of the rest is worth."""

    def corrected(by: list[Probe]):
        return variant(drafter, {name: value for probe in by for name, value in probe.changes.items()})

    kept = list(taken)
    while True:
        without = {}
        for probe in kept:
            others = [other for other in kept if other is not probe]
            without[id(probe)] = score(corrected(others), evidence) if others else before
        weak = [probe for probe in kept if not counts(after, without[id(probe)])]
        if not weak:
            break
        kept.remove(min(weak, key=lambda p: (after.likelihood - without[id(p)].likelihood).mean().item()))
        after = score(corrected(kept), evidence) if kept else before
    kept.sort(key=lambda probe: without[id(probe)].likelihood.mean().item())
    faults = [
        Fault(probe.kind, says(drafter.config, probe.changes), without[id(probe)].tau, after.tau, probe.changes)
        for probe in kept
    ]
    return Findings(before, after, faults, corrected(kept))


def says(config, changes: dict) -> str:
    """Changes as text, those left out that change nothing.

    >>> from dflash_hf import DFlashConfig
    >>> says(DFlashConfig(mask_token_id=4, target_layer_ids=[1]), {"mask_token_id": 7})
    'mask_token_id is 4, try 7'
    """
    found = []
    for name, value in changes.items():
        there = value_of(config, name)
        if there != value and not (there is None and value is False):
            found.append(f"{name} is {'unset' if there is None else there}, try {'unset' if value is None else value}")
    return "; ".join(found)
