"""How many drafts to check, and whether to draft at all, so that tokens come fastest on this machine.

A cycle that checks k drafts commits E_k = 1 + sum over j <= k of the chance that the first j are all right, and takes
a measured time. The rate of a policy is its tokens over its time, and the policy with the best rate is the one that in
every cycle takes the k with the largest E_k - rate * time_k (fractional programming, Dinkelbach 1967). The chances
come from the drafter's own confidence, corrected by how often drafts of that confidence were right.
"""

import math
import weakref
from collections import deque

_BINS = 16  # of the drafter's confidence
_MOST_OF_BIN, _MOST_PROMISED = 400, 200  # drafts of a bin, promised ones of all bins, beyond which counts are halved
_WINDOW, _KEPT = 32, 8  # drafted cycles that give the drafting rate, and how many of them outlast a pause
_PLAIN_STEPS, _PLAIN_EVERY = 3, 64  # how many are timed before the first draft; cycles until another one is
# Drafts are asked for up to so many beyond the longest of so many last lengths: for a batch, the LM head over drafts
# that nobody will check takes a tenth of a cycle.
_BEYOND, _LENGTHS = 2, 8

# Drafting stops when it has lost so much time against plain decoding, counted in plain steps from where it last stood
# best, as a CUSUM test does (Page 1954). A text that drafts suit does not build up credit for one that they do not.
_PATIENCE = 3.0
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 512  # plain steps; each pause is twice the last one until drafting has paid
# Patience for a new pair, and for another call; after a pause, and for calls that come then, less, with the root of
# its length.
_FIRST_GRANT, _GRANT = 1.3, 1.0

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
        if not any(costs.cycles for costs in list(self.costs.values())):  # other threads add to it
            return _FIRST_GRANT
        return _GRANT * (_FIRST_PAUSE / self.pause) ** 0.5


class _Costs:
    """What a target pass over k drafts and a draft cost, in plain steps, for one batch size: a Kalman filter.

    Its state are logarithms: the time of a plain step at this moment, how much longer passes with 1, 2, ... drafts
    take, and a draft. A machine that is busy for a while slows all of them down, so only passes that are near in time
    are compared, and a single one that took very long moves little.
    """

    # Standard deviations, as shares. Of one pass and one draft; of the machine's speed from one cycle or call to the
    # next; of the costs: what each draft adds, alone and together; a draft.
    _PASS, _DRAFT, _SPEED, _NEW_CALL, _ALONE, _TOGETHER, _DRAFT_COST = 0.08, 0.15, 0.06, 0.3, 0.12, 0.04, 0.6
    _GUESS, _DRAFT_GUESS = 0.05, 0.25  # what each draft adds to a pass and what a draft takes, until measured

    def __init__(self, num_drafts: int, similar: "_Costs | None" = None):
        size = num_drafts + 2  # 0: the machine, k: a pass over k drafts, last: a draft
        self.mean = [0.0] + [self._GUESS * k for k in range(1, size - 1)] + [math.log(self._DRAFT_GUESS)]
        self.cov = [[0.0] * size for _ in range(size)]
        for i in range(1, size - 1):
            for j in range(1, size - 1):
                self.cov[i][j] = self._ALONE**2 * min(i, j) + self._TOGETHER**2 * i * j
        self.cov[-1][-1] = self._DRAFT_COST**2
        self.plain_s: list[float] = []  # of the first plain steps
        self.num_drafted, self.since_plain = 0, 0
        if similar is not None:  # of one row more, which is believed in part
            self.mean, self.plain_s, self.num_drafted = list(similar.mean), list(similar.plain_s), similar.num_drafted
            for i, row in enumerate(similar.cov):
                for j, value in enumerate(row):
                    self.cov[i][j] = value + self.cov[i][j] / 4
            self.new_call()
        # Of drafted cycles: tokens expected, plain steps.
        self.cycles: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def new_call(self) -> None:
        """What the machine does now is open."""
        self.cov[0][0] += self._NEW_CALL**2

    def verify(self, k: int, doubt: float = 0.0) -> float:
        """A target pass over k drafts, in plain steps; less by so many standard deviations of what is known."""
        return math.exp(self.mean[k] - doubt * math.sqrt(max(self.cov[k][k], 0.0))) if k else 1.0

    def draft(self) -> float:
        return math.exp(self.mean[-1])

    def note(self, k: int, drafted: bool, draft_s: float, verify_s: float) -> None:
        """A cycle that checked k drafts has taken so many seconds."""
        if len(self.plain_s) < _PLAIN_STEPS:
            self.plain_s.append(verify_s)
            # Whatever comes between makes a step longer, never shorter.
            self.mean[0], self.cov[0][0] = math.log(max(min(self.plain_s), 1e-9)), self._PASS**2
            return
        self.cov[0][0] += self._SPEED**2
        self._update((0, k) if k else (0,), math.log(max(verify_s, 1e-9)), self._PASS)
        if drafted:
            if self.num_drafted:  # the first one sets up more than later ones
                self._update((0, len(self.mean) - 1), math.log(max(draft_s, 1e-9)), self._DRAFT)
            self.num_drafted += 1
        self.since_plain = 0 if k == 0 else self.since_plain + 1

    def _update(self, parts: tuple[int, ...], seen: float, deviation: float) -> None:
        """Take in that the sum of these parts of the state was seen, give or take `deviation`."""
        along = [sum(row[i] for i in parts) for row in self.cov]
        variance = sum(along[i] for i in parts) + deviation**2
        most = 2 * math.sqrt(variance)
        error = min(max(seen - sum(self.mean[i] for i in parts), -most), most)
        for i, gain in enumerate(along):
            self.mean[i] += gain * error / variance
            row = self.cov[i]
            for j, other in enumerate(along):
                row[j] -= gain * other / variance


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
        if self.seen[i] > _MOST_OF_BIN:  # old drafts count less and less
            self.seen[i] /= 2
            self.right[i] /= 2
        if self.promised > _MOST_PROMISED:
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
        self._lengths: deque[int] = deque([num_drafts], maxlen=_LENGTHS)
        self.costs = self._costs_of(num_rows)
        self.costs.new_call()

    def rows(self, num_rows: int) -> None:
        """Go on with so many rows."""
        self.costs = self._costs_of(num_rows, self.costs)

    def _costs_of(self, num_rows: int, similar: _Costs | None = None) -> _Costs:
        self.num_rows, key = num_rows, (num_rows, self._num_drafts)
        if key not in self.pair.costs:
            self.pair.costs[key] = _Costs(self._num_drafts, similar)
        return self.pair.costs[key]

    def rate(self) -> float:
        """Tokens in the time of a plain step: without drafts, or in the last cycles with them, whichever is more."""
        cycles = list(self.costs.cycles)  # another thread may be at it, too
        drafting = sum(tokens for tokens, _ in cycles) / max(sum(steps for _, steps in cycles), 1e-9)
        return max(float(self.num_rows), drafting)

    def wants_draft(self) -> bool:
        """Whether the drafter is to run in this cycle."""
        self._expected = float(self.num_rows)  # of the cycle, unless `length` is asked
        if len(self.costs.plain_s) < _PLAIN_STEPS or self.costs.since_plain >= _PLAIN_EVERY:
            return False  # everything is measured against plain steps: they come first, and again now and then
        if self.pair.waits > 0:
            self.pair.waits -= 1
            return False
        return True

    def most(self) -> int:
        """How many drafts of the block to ask for."""
        return min(self._num_drafts, max(self._lengths) + _BEYOND)

    def length(self, confidences: list[list[float]]) -> int:
        """How many of the drafts to check, given each row's confidence slot by slot."""
        rate, expected, chances = self.rate(), float(self.num_rows), [1.0] * self.num_rows
        best, best_value, self._expected = 0, expected - rate, expected
        for k in range(1, len(confidences[0]) + 1):
            for row, confidence in enumerate(confidences):
                chances[row] *= self.pair.confidence.chance(confidence[k - 1])
            expected += sum(chances)
            # Half a deviation in favour of lengths that were little tried, so that they are.
            value = expected - rate * self.costs.verify(k, doubt=0.5)
            if value > best_value:
                best, best_value, self._expected = k, value, expected
        self._lengths.append(best)
        return best

    def note_right(self, confidence: list[float], right: int) -> None:
        """Of one row's drafts with these confidences the first `right` were right, the next one (if any) was wrong."""
        for slot, value in enumerate(confidence[: right + 1]):
            self.pair.confidence.note(value, slot < right)

    def note_cycle(self, k: int, drafted: bool, draft_s: float, verify_s: float, tokens: int) -> None:
        """A cycle that checked k drafts is over, with `tokens` for all rows.

        The first one of a call is not representative and is left out, but for a pair whose plain steps are being
        timed, of which the shortest counts.
        """
        costs, pair, first, self._first = self.costs, self.pair, self._first, False
        if first and len(costs.plain_s) == _PLAIN_STEPS:
            return
        costs.note(k, drafted, draft_s, verify_s)
        if not drafted:
            return
        steps = costs.draft() + costs.verify(k)
        costs.cycles.append((self._expected, steps))
        # What was expected varies less than what came, but what came knows more of a new drafter or text.
        gained = (self._expected + tokens) / 2 / self.num_rows
        pair.lost = max(0.0, pair.lost + steps - gained)
        if pair.lost == 0.0:
            pair.pause = _FIRST_PAUSE
        elif pair.lost > _PATIENCE:
            pair.waits, pair.pause = pair.pause, min(2 * pair.pause, _LONGEST_PAUSE)
            pair.lost = _PATIENCE - pair.grant()
            while len(costs.cycles) > _KEPT:
                costs.cycles.popleft()
