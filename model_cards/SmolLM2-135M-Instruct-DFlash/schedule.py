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
_WINDOW, _KEPT = 32, 8  # drafted cycles that give the drafting rate, and how many of them outlast a pause
_PLAIN_STEPS, _PLAIN_EVERY = 3, 64  # how many are timed before the first draft; cycles until another one is
_ENOUGH = 5  # passes, for their median to say that a plain one cannot take longer
_GUESS = 0.05  # by how much a draft lengthens a target pass, until longer ones have been timed

# Drafting stops when it has lost so much time against plain decoding, counted in plain steps from where it last stood
# best, as a CUSUM test does (Page 1954). A text that drafts suit does not build up credit for one that they do not.
_PATIENCE = 3.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # plain steps; each pause is twice the last one until drafting has paid
# Patience for a new pair, and for another call; after a pause, and for calls that come then, less, with the root of
# its length.
_FIRST_GRANT, _GRANT = 1.6, 1.0

# drafter -> target -> what was learnt, for all calls of this process
_learnt: "weakref.WeakKeyDictionary" = weakref.WeakKeyDictionary()


class _Pair:
    """What calls of one drafter and target have learnt."""

    def __init__(self):
        self.confidence = _Confidence()
        self.costs: dict[tuple[int, int], _Costs] = {}  # by rows and drafts
        self.lost = 0.0  # plain steps
        self.pause, self.waits = _FIRST_PAUSE, 0  # plain steps of the next pause, and left of this one

    def grant(self) -> float:
        """The patience that drafting starts with."""
        if not self.costs:
            return _FIRST_GRANT
        return _GRANT * (_FIRST_PAUSE / self.pause) ** 0.5


class _Costs:
    """What calls of one batch size have measured."""

    def __init__(self, num_drafts: int, similar: "_Costs | None" = None):
        # Of a target pass over k drafts.
        self.verify_s: list[deque[float]] = [deque(maxlen=9) for _ in range(num_drafts + 1)]
        self.draft_s: deque[float] = deque(maxlen=9)
        if similar is not None:  # one with a row more: what it has measured stands in until there is something newer
            self.draft_s.extend(list(similar.draft_s)[-_PLAIN_STEPS:])
            for mine, theirs in zip(self.verify_s, similar.verify_s, strict=True):
                mine.extend(list(theirs)[-_PLAIN_STEPS:])
        # Of drafted ones: tokens expected, seconds.
        self.cycles: deque[tuple[float, float]] = deque(maxlen=_WINDOW)
        self.since_plain = 0  # cycles


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
        of_target = _learnt.setdefault(drafter, weakref.WeakKeyDictionary())
        self.pair = pair = of_target.setdefault(target, _Pair())
        # Another call is another text, which deserves a look at its drafts.
        pair.lost = max(pair.lost, _PATIENCE - pair.grant())
        pair.waits = 0
        self._num_drafts, self._first = num_drafts, True
        self.costs: _Costs | None = None
        self.rows(num_rows)

    def rows(self, num_rows: int) -> None:
        """Go on with so many rows."""
        before, self.num_rows = self.costs, num_rows
        key = (num_rows, self._num_drafts)
        if key not in self.pair.costs:
            self.pair.costs[key] = _Costs(self._num_drafts, before)
        self.costs = self.pair.costs[key]

    def verify_seconds(self, k: int) -> float:
        """Of a target pass over k drafts: measured, or on a line between the nearest lengths that were."""
        times = self.costs.verify_s
        if k == 0:  # no pass is shorter: a longer one that took less tells that the machine was busier before
            return min(median(of) for i, of in enumerate(times) if of and (i == 0 or len(of) >= _ENOUGH))
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
        cycles = list(self.costs.cycles)  # another thread may be at it, too
        return sum(tokens for tokens, _ in cycles) / max(sum(seconds for _, seconds in cycles), 1e-9)

    def wants_draft(self) -> bool:
        """Whether the drafter is to run in this cycle."""
        self._expected = float(self.num_rows)  # of the cycle, unless `length` is asked
        if len(self.costs.verify_s[0]) < _PLAIN_STEPS or self.costs.since_plain >= _PLAIN_EVERY:
            return False  # everything is measured against plain steps: they come first, and again now and then
        if self.pair.waits > 0:
            self.pair.waits -= 1
            return False
        return True

    def length(self, confidences: list[list[float]]) -> int:
        """How many of the drafts to check, given each row's confidence slot by slot."""
        longest = len(confidences[0])
        rate = max(self.plain_rate(), self.drafting_rate()) if self.costs.cycles else self.plain_rate()
        expected, chances = float(self.num_rows), [1.0] * self.num_rows
        best, best_value, self._expected = 0, expected - rate * self.verify_seconds(0), expected
        for k in range(1, longest + 1):
            for row, confidence in enumerate(confidences):
                chances[row] *= self.pair.confidence.chance(confidence[k - 1])
            expected += sum(chances)
            value = expected - rate * self.verify_seconds(k)
            if value > best_value:
                best, best_value, self._expected = k, value, expected
        return best

    def note_right(self, confidence: list[float], right: int) -> None:
        """Of one row's drafts with these confidences the first `right` were right, the next one (if any) was wrong."""
        for slot, value in enumerate(confidence[: right + 1]):
            self.pair.confidence.note(value, slot < right)

    def note_cycle(self, k: int, drafted: bool, draft_s: float, verify_s: float, tokens: int) -> None:
        """A cycle that checked k drafts is over, with `tokens` for all rows.

        The first one of a call is not representative and is left out.
        """
        costs, pair, first, self._first = self.costs, self.pair, self._first, False
        if first:
            return
        costs.verify_s[k].append(verify_s)
        costs.since_plain = 0 if k == 0 else costs.since_plain + 1
        if not drafted:
            return
        costs.draft_s.append(draft_s)
        seconds = median(costs.draft_s) + self.verify_seconds(k)
        costs.cycles.append((self._expected, seconds))
        # What was expected varies less than what came, but what came knows more of a new drafter or text.
        gained = (self._expected + tokens) / 2 / self.num_rows
        pair.lost = max(0.0, pair.lost + seconds / self.verify_seconds(0) - gained)
        if pair.lost == 0.0:
            pair.pause = _FIRST_PAUSE
        elif pair.lost > _PATIENCE:
            pair.waits, pair.pause = pair.pause, min(2 * pair.pause, _LONGEST_PAUSE)
            pair.lost = _PATIENCE - pair.grant()
            while len(costs.cycles) > _KEPT:
                costs.cycles.popleft()
