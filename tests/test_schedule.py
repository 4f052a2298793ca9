"""The adaptive schedule on made-up machines and drafters, where the best policy can be computed."""

import math
import random

import pytest

from dflash_hf.drafter.schedule import Schedule

DRAFTS = 7


class Thing:
    """Stands for a drafter or a target, which the schedule only uses as keys."""


# name -> seconds of a target pass over k drafts, seconds of a draft
MACHINES = {
    "cpu, batch 1": ([0.045, 0.050, 0.052, 0.077, 0.078, 0.082, 0.085, 0.088], 0.017),
    "gpu": ([0.025] * 8, 0.004),
    "every draft costs": ([0.030 + 0.010 * k for k in range(DRAFTS + 1)], 0.004),
    "cpu, batch 8": ([0.080, 0.110, 0.130, 0.155, 0.175, 0.195, 0.215, 0.240], 0.030),
}


def run(machine, right, num_tokens, schedule=None, always=None, seed=0, told=None, noise=0.03, busy=0.0):
    """Tokens a second of `num_tokens` tokens; drafts are right with chance `right`, and say so as `told` does.

    `busy`: how much the machine's speed drifts, and one cycle in 20 takes 2.5 times as long; the rate is that of the
    same cycles on the machine left alone.
    """
    verify_s, draft_s = MACHINES[machine]
    told = told or (lambda chance: chance)
    rng = random.Random(seed)
    tokens, seconds, drafted_cycles, drift = 0, 0.0, 0, 0.0
    while tokens < num_tokens:
        k, drafted, guesses, spent = 0, False, [], 0.0
        chances = [right(rng) for _ in range(DRAFTS)]
        if always is not None:
            drafted, k = always > 0, always
        elif schedule.wants_draft():
            drafted = True
        if drafted:
            drafted_cycles += 1
            guesses = [rng.random() < chance for chance in chances]
            spent += draft_s
            confidence = [told(chance) for chance in chances]
            if always is None:
                k = schedule.length([confidence])
        verified_s = verify_s[k] * rng.lognormvariate(0, noise)
        spent += verified_s
        slow = 1.0
        if busy:
            drift = 0.95 * drift + 0.3 * rng.gauss(0, busy)
            slow = math.exp(drift) * (2.5 if rng.random() < 0.05 else 1.0)
        good = next((i for i, guess in enumerate(guesses[:k]) if not guess), k)
        if always is None:
            schedule.note_cycle(k, drafted, slow * draft_s, slow * verified_s, good + 1)
            if guesses:
                shown = min(good + 1, DRAFTS)
                known = next((i for i in range(shown) if not guesses[i]), shown)
                schedule.note_right(confidence[:shown], known)
        tokens, seconds = tokens + good + 1, seconds + spent
    return tokens / seconds, drafted_cycles


def flat(chance):
    return lambda rng: chance


def mixed(rng):
    """Half the slots are sure, half are guesses: what knowing the confidence is worth."""
    return rng.choice([0.95, 0.2])


TOLD = {"true": lambda chance: chance, "bold": lambda chance: min(1.0, chance + 0.3), "shy": lambda chance: chance / 2}


@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
@pytest.mark.parametrize("machine", MACHINES)
def test_as_fast_as_the_best_constant_length(machine, told):
    for right in (flat(0.3), flat(0.6), flat(0.8), flat(0.95), mixed):
        constants = [run(machine, right, 6000, always=k)[0] for k in range(DRAFTS + 1)]
        schedule = Schedule(Thing(), Thing(), 1, DRAFTS)
        rate, _ = run(machine, right, 6000, schedule, told=told)
        assert rate > 0.95 * max(constants)
    if machine == "every draft costs":  # the last drafter's sure blocks are worth finding
        assert rate > 1.1 * max(constants)


@pytest.mark.parametrize("told", [lambda c: 0.02, lambda c: 0.5, lambda c: 0.97], ids=["knows it", "guesses", "brags"])
@pytest.mark.parametrize("machine", MACHINES)
def test_a_useless_drafter_costs_little(machine, told):
    """At most 3% over the first 128 tokens of a new pair, on average, and next to nothing later."""
    drafter, target, plain = Thing(), Thing(), 1 / MACHINES[machine][0][0]
    first = []
    for seed in range(20):
        rate, _ = run(machine, flat(0.0), 128, Schedule(Thing(), Thing(), 1, DRAFTS), told=told, seed=seed, noise=0.0)
        first.append(rate / plain)
    assert sum(first) / len(first) > 0.97
    for _ in range(4):
        rate, drafted = run(machine, flat(0.0), 128, Schedule(drafter, target, 1, DRAFTS), told=told, noise=0.0)
    assert rate > 0.99 * plain and drafted <= 4


@pytest.mark.parametrize("machine", MACHINES)
def test_a_busy_machine_misleads_nobody(machine):
    """Passes are compared with others near in time: a slow minute is no reason to stop drafting."""
    for chance in (0.05, 0.7, 0.9):
        best = max(run(machine, flat(chance), 6000, always=k)[0] for k in range(DRAFTS + 1))
        rates = []
        for pair in range(10):
            drafter, target = Thing(), Thing()
            for call in range(5):
                schedule = Schedule(drafter, target, 1, DRAFTS)
                rate, _ = run(machine, flat(chance), 128, schedule, seed=10 * pair + call, busy=0.3)
                rates.append(rate / best)
        assert sum(rates) / len(rates) > 0.94


def test_it_takes_up_drafting_again():
    """A text that drafts do not suit, then one that they do."""
    drafter, target = Thing(), Thing()
    run("gpu", flat(0.0), 300, Schedule(drafter, target, 1, DRAFTS))
    rate, _ = run("gpu", flat(0.9), 3000, Schedule(drafter, target, 1, DRAFTS))
    assert rate > 0.8 * run("gpu", flat(0.9), 3000, always=DRAFTS)[0]


@pytest.mark.parametrize("machine", MACHINES)
def test_each_call_is_judged_by_its_own_text(machine):
    """Texts that drafts suit and texts that they do not, in turns: neither spoils the other."""
    drafter, target, plain = Thing(), Thing(), 1 / MACHINES[machine][0][0]
    suits, does_not = flat(0.85), flat(0.1)
    best = max(run(machine, suits, 6000, always=k)[0] for k in range(DRAFTS + 1))
    rates = {suits: [], does_not: []}
    for seed in range(40):
        for right in rates:
            rate, _ = run(machine, right, 128, Schedule(drafter, target, 1, DRAFTS), seed=seed, noise=0.0)
            rates[right].append(rate)
    assert sum(rates[suits]) / 40 > 0.95 * best
    assert sum(rates[does_not]) / 40 > 0.97 * plain
