"""Which of the mistakes explain a low acceptance: try each, keep the best, try again on top of it."""

from dataclasses import dataclass, field

import torch

from .evidence import Evidence, Score, score
from .mistakes import Probe, probes, value_of, variant

MOST_FAULTS = 3
SCREENED_BY = 3  # of the anchors, one in this many is enough to see which readings are worth a closer look
CLOSER_LOOKS = 4
LEAST_GAIN = 0.25  # of the accepted drafts, relative
LEAST_DRAFTS = 0.05  # accepted drafts a block, absolute
STANDARD_ERRORS = 3.0


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
    corrected: torch.nn.Module = field(repr=False)


def find_faults(drafter, evidence: Evidence, *, tokenizer=None) -> Findings:
    """Look for entries of a drafter's config whose correction makes its drafts right more often.

    Readings are ranked by the log-likelihood of the right tokens, which shows a correction even where a second
    mistake still keeps all drafts wrong; up to three are put on top of each other. What is reported is what counts
    for acceptance: a fault must cost a fifth of the accepted drafts (the correction brings 25% more), and the
    difference must be three standard errors over the anchors.

    Args:
        drafter: one that fits the evidence's target.
        evidence: of `gather`.
        tokenizer: the target's.

    Returns:
        Faults in the order of what they cost, none for a drafter whose config is right.

    Example:
        >>> find_faults(drafter, gather(target, prompts, drafter)).faults                      # doctest: +SKIP
        []
    """
    few = evidence.thinned(SCREENED_BY)
    current = variant(drafter, {})
    before = now = score(current, evidence)
    taken: list[Probe] = []
    while len(taken) < MOST_FAULTS:
        quick = score(current, few)
        tried = []
        for probe in probes(current, evidence.target, longest=evidence.longest, tokenizer=tokenizer):
            if probe.kind not in [other.kind for other in taken]:
                there = score(variant(current, probe.changes), few)
                tried.append(((there.likelihood - quick.likelihood).mean().item(), probe))
        tried = sorted((pair for pair in tried if pair[0] > 0), key=lambda pair: -pair[0])[:CLOSER_LOOKS]
        closer = [(score(variant(current, probe.changes), evidence), probe) for _, probe in tried]
        closer = [(there, probe) for there, probe in closer if _is_clear(there.likelihood - now.likelihood)]
        if not closer:
            break
        now, best = max(closer, key=lambda pair: pair[0].likelihood.mean().item())
        taken.append(best)
        current = variant(current, best.changes)
    return _keep_what_counts(drafter, evidence, before, taken)


def _is_clear(differences: torch.Tensor) -> bool:
    """Whether paired differences `[N]` are above 0 for more than chance."""
    if len(differences) < 2:
        return False
    error = differences.std() / len(differences) ** 0.5
    return bool(differences.mean() > STANDARD_ERRORS * error)


def counts(more: torch.Tensor, less: torch.Tensor) -> bool:
    """Whether accepted drafts `[N]` of the same anchors are enough more to speak of a fault."""
    gain = (more.mean() - less.mean()).item()
    return gain >= max(LEAST_GAIN * less.mean().item(), LEAST_DRAFTS) and _is_clear(more - less)


def is_more(more: torch.Tensor, less: torch.Tensor) -> bool:
    """The same for accepted drafts of different texts, `[N]` and `[M]`."""
    gain = (more.mean() - less.mean()).item()
    error = (more.var() / len(more) + less.var() / len(less)).sqrt().item()
    return gain >= max(LEAST_GAIN * less.mean().item(), LEAST_DRAFTS) and gain > STANDARD_ERRORS * error


def _keep_what_counts(drafter, evidence: Evidence, before: Score, taken: list[Probe]) -> Findings:
    """Drop corrections that the others do not need, and say what each of the rest is worth."""

    def corrected(by: list[Probe]):
        return variant(drafter, {name: value for probe in by for name, value in probe.changes.items()})

    kept = list(taken)
    while True:
        after = score(corrected(kept), evidence) if kept else before
        without = {id(probe): score(corrected([p for p in kept if p is not probe]), evidence) for probe in kept}
        weak = [probe for probe in kept if not counts(after.accepted, without[id(probe)].accepted)]
        if not weak:
            break
        kept.remove(min(weak, key=lambda p: (after.accepted - without[id(p)].accepted).mean().item()))
    kept.sort(key=lambda probe: without[id(probe)].tau)
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
