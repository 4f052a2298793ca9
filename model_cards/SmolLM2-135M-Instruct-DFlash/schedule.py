"""How many drafts to check, and whether to draft at all, so that tokens come fastest on this machine.

A cycle that checks k drafts commits E_k = 1 + sum over j <= k of the chance that the first j are all right, and takes
a measured time. The rate of a policy is its tokens over its time, and the policy with the best rate is the one that in
every cycle takes the k with the largest E_k - rate * time_k (fractional programming, Dinkelbach 1967). The chances
come from the drafter's own confidence, corrected by how often drafts of that confidence were right.
"""

import weakref
from collections import deque
from statistics import median

_BINS = 16  # of the drafter's confidence
_REMEMBERED = 8  # of them, when drafting starts again after a pause
_WINDOW = 32  # drafted cycles that the comparison with plain decoding looks back on
_FIRST_TRIAL, _TRIAL = 4, 2  # drafted cycles before a judgement: of a new pair, and after a pause
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # plain steps
_GUESS = 0.05  # by how much a draft lengthens a target pass, until longer ones have been timed

# drafter -> target -> number of rows -> what was learnt, for all calls of this process
_learnt: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class _Learnt:
    """What calls of one drafter, target and batch size have measured."""

    def __init__(self, num_drafts: int, confidence: "_Confidence"):
        self.confidence = confidence
        self.verify_s = [deque(maxlen=9) for _ in range(num_drafts + 1)]  # of a target pass over k drafts
        self.draft_s = deque(maxlen=9)
        self.cycles = deque(maxlen=_WINDOW)  # of drafted ones: tokens expected, seconds
        self.pause, self.waits = _FIRST_PAUSE, 0  # plain steps of the next pause, and left of this one
        self.on_trial = _TRIAL - _FIRST_TRIAL  # drafted cycles since the last pause


class _Confidence:
    """How often drafts of a confidence were right, given that all before them were."""

    def __init__(self):
        self.right, self.seen = [0.0] * _BINS, [0.0] * _BINS
        # Over all bins: right drafts, and how many the confidences promised. A new drafter is believed by a third.
        self.all_right, self.promised = 1.0, 3.0

    def chance(self, confidence: float) -> float:
        i = min(int(confidence * _BINS), _BINS - 1)
        prior = min(confidence * self.all_right / self.promised, 1.0)  # worth four drafts
        return (self.right[i] + 4 * prior) / (self.seen[i] + 4)

    def note(self, confidence: float, right: bool) -> None:
        i = min(int(confidence * _BINS), _BINS - 1)
        self.seen[i] += 1
        self.right[i] += right
        self.promised += confidence
        self.all_right += right
        if self.seen[i] > 400:  # old drafts count less and less
            self.seen[i] /= 2
            self.right[i] /= 2
        if self.promised > 200:
            self.promised /= 2
            self.all_right /= 2


class Schedule:
    """The lengths of one `generate()` call of `num_rows` sequences.

    Args:
        drafter, target: the pair; what is measured is kept beside them for later calls.
        num_rows: sequences in the batch.
        num_drafts: most drafts a cycle.

    Example:
        >>> schedule = Schedule(drafter, target, num_rows=1, num_drafts=7)      # doctest: +SKIP
        >>> schedule.wants_draft()                                              # doctest: +SKIP
        True
        >>> schedule.length([[0.9, 0.8, 0.3, 0.1, 0.1, 0.1, 0.1]])              # doctest: +SKIP
        2
    """

    def __init__(self, drafter, target, num_rows: int, num_drafts: int):
        of_target = _learnt.setdefault(drafter, weakref.WeakKeyDictionary()).setdefault(target, {})
        self._all, self._num_drafts = of_target, num_drafts
        self._first = True
        self.rows(num_rows)

    def rows(self, num_rows: int) -> None:
        """Go on with so many rows."""
        self.num_rows = num_rows
        key = (num_rows, self._num_drafts)
        if key not in self._all:
            # How often a confidence is right has nothing to do with the batch.
            known = next((learnt.confidence for learnt in self._all.values()), None)
            self._all[key] = _Learnt(self._num_drafts, known or _Confidence())
        self.learnt = self._all[key]

    def verify_seconds(self, k: int) -> float:
        """Of a target pass over k drafts: measured, or on a line between the nearest lengths that were."""
        times = self.learnt.verify_s
        if times[k]:
            return median(times[k])
        low = max(i for i in range(k) if times[i])  # a plain step at least has been timed
        high = next((i for i in range(k + 1, len(times)) if times[i]), None)
        if high is None:
            return median(times[low]) * (1 + _GUESS * (k - low))
        share = (k - low) / (high - low)
        return (1 - share) * median(times[low]) + share * median(times[high])

    def plain_rate(self) -> float:
        """Tokens a second without drafts."""
        return self.num_rows / self.verify_seconds(0)

    def drafting_rate(self) -> float:
        """Tokens a second in the last cycles with drafts, as expected of them: steadier than what came."""
        cycles = list(self.learnt.cycles)  # another thread may be at it, too
        return sum(tokens for tokens, _ in cycles) / max(sum(seconds for _, seconds in cycles), 1e-9)

    def wants_draft(self) -> bool:
        """Whether the drafter is to run in this cycle."""
        learnt = self.learnt
        self._expected = float(self.num_rows)  # of the cycle, unless `length` is asked
        if not learnt.verify_s[0]:
            return False  # a plain step comes first: everything is measured against it
        if learnt.waits > 0:
            learnt.waits -= 1
            return False
        return True

    def length(self, confidences: list[list[float]]) -> int:
        """How many of the drafts to check, given each row's confidence slot by slot."""
        longest, learnt = len(confidences[0]), self.learnt
        rate = self.plain_rate()
        if len(learnt.cycles) >= _FIRST_TRIAL:
            rate = max(rate, self.drafting_rate())
        expected, chances = float(self.num_rows), [1.0] * self.num_rows
        best, best_value, self._expected = 0, expected - rate * self.verify_seconds(0), expected
        for k in range(1, longest + 1):
            for row, confidence in enumerate(confidences):
                chances[row] *= learnt.confidence.chance(confidence[k - 1])
            expected += sum(chances)
            value = expected - rate * self.verify_seconds(k)
            if value > best_value:
                best, best_value, self._expected = k, value, expected
        return best

    def note_right(self, confidence: list[float], right: int) -> None:
        """Of one row's drafts with these confidences the first `right` were right, the next one (if any) was wrong."""
        for slot, value in enumerate(confidence[: right + 1]):
            self.learnt.confidence.note(value, slot < right)

    def note_cycle(self, k: int, drafted: bool, draft_s: float, verify_s: float) -> None:
        """A cycle is over. The first one of a call is not representative and is left out."""
        learnt, first, self._first = self.learnt, self._first, False
        if first:
            return
        learnt.verify_s[k].append(verify_s)
        if not drafted:
            return
        learnt.draft_s.append(draft_s)
        learnt.cycles.append((self._expected, median(learnt.draft_s) + self.verify_seconds(k)))
        learnt.on_trial += 1
        if learnt.on_trial < _TRIAL:
            return
        # Checking no drafts is what a cycle does about a passage that is hard to draft. A pause is for a drafter that
        # does not pay at all, and the fewer cycles speak against it the clearer they must.
        doubt = 0.3 / len(learnt.cycles) ** 0.5
        if self.drafting_rate() < (1 - doubt) * self.plain_rate():
            learnt.waits, learnt.pause = learnt.pause, min(2 * learnt.pause, _LONGEST_PAUSE)
            learnt.on_trial = 0
            while len(learnt.cycles) > _REMEMBERED:
                learnt.cycles.popleft()
        elif learnt.on_trial > _TRIAL:
            learnt.pause = _FIRST_PAUSE
