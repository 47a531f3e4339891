"""How long the next draft should be: the rule of `auto` mode, on numbers alone.

A cycle of self-speculation with block length k over B rows costs two forwards of k tokens; block length 1 is AR, one
forward of one token. If token i of the draft holds with probability a_i, given that all before it did, the cycle brings
a row on average

    E(a, k) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_(k-1)

tokens, (1 - a^k) / (1 - a) where all a_i are a. The next cycle takes the k that maximises sum over rows of
E(a_row, k) / cost(B, k): tokens per second. Costs are measured (calibration.py), a is estimated from what cycles
brought: of all rows one value for all i of an octave (1, 2-3, 4-7, 8-15, ...), of a row itself one value that draws all
of these its way. Whatever k is chosen, the text is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# What a row's earlier cycles count for after one more: the exponential average looks back about five cycles.
ROW_DECAY = 0.8
# While AR tells a row nothing new, what it knows fades by FADE every FADE_CYCLES: a hard passage may have ended.
# At LEAST_TOKENS it is forgotten.
FADE, FADE_CYCLES, LEAST_TOKENS = 0.7, 16, 0.01
# The averages of all rows look back some fifty cycles. In a row they count as SHARED_WEIGHT tokens of its own, and so
# does an octave in the next one: what no draft has reached yet is believed to be like what comes before it.
SHARED_DECAY = 0.98
SHARED_WEIGHT = 8.0
# Answers that end at once say nothing of the drafts of long ones: rows with fewer tokens have averages of their own.
YOUNG_TOKENS = 8
# What is believed before anything was drafted, and as how many tokens: enough to draft at first where drafts can pay at
# all, and for some failures.
FIRST_RATE, FIRST_TOKENS = 0.85, 24.0
# Of the time spent in AR cycles, what may be lost on drafts that ask whether drafts have become good.
PROBE_SHARE = 0.01

# a_i by octave; the last one goes on.
Rates = Sequence[float]


def expected_tokens(rates: Rates, block_lengths: Sequence[int]) -> list[float]:
    """E(a, k) of each block length k, given in ascending order: tokens that a cycle brings on average."""
    total = chance = 1.0
    place, found = 1, []
    for block_length in block_lengths:
        while place < block_length:
            octave = place.bit_length() - 1
            rate, size = rates[min(octave, len(rates) - 1)], min(2 * 2**octave, block_length) - place
            all_hold = rate**size
            total += chance * (size if rate >= 1 else rate * (1 - all_hold) / (1 - rate))
            chance *= all_hold
            place += size
        found.append(total)
    return found


@dataclass
class Acceptance:
    """Draft tokens that held, and cycles that one ended which did not, both as exponential averages.

    held / (held + failed) is the most likely rate. A block that held to its end has not failed: all that it says is "at
    least so many", so it adds to `held` alone.
    """

    held: float = 0.0
    failed: float = 0.0
    tokens: int = 0
    idle_cycles: int = 0

    def observe(self, tokens: int, block_length: int, decay: float) -> None:
        """A cycle of `block_length` brought `tokens`; the end of an answer is a failure too, nothing follows it."""
        self.held = decay * self.held + tokens - 1
        self.failed = decay * self.failed + (tokens < block_length)
        self.tokens += tokens

    def idle(self) -> bool:
        """A cycle without a draft brought a token. Whether that changes what is expected of the row's drafts."""
        self.tokens += 1
        self.idle_cycles += 1
        fades = self.idle_cycles % FADE_CYCLES == 0 and self.held + self.failed > 0
        if fades:
            is_left = self.held + self.failed > LEAST_TOKENS
            self.held, self.failed = (FADE * self.held, FADE * self.failed) if is_left else (0.0, 0.0)
        return fades or self.tokens == YOUNG_TOKENS


class SharedRates:
    """What the drafts of many rows brought, by octave."""

    def __init__(self) -> None:
        self._octaves = [Acceptance(FIRST_RATE * FIRST_TOKENS, (1 - FIRST_RATE) * FIRST_TOKENS)]
        self.rates = [FIRST_RATE]

    def observe(self, tokens: int, block_length: int) -> None:
        """A cycle brought a row `tokens`: each octave that had a part in that sees its own part."""
        for octave in range(min(tokens, block_length - 1).bit_length()):
            if octave == len(self._octaves):
                self._octaves.append(Acceptance())
            first = 2**octave
            # As if the block began before this octave and ended with it.
            length = min(2 * first, block_length) - first + 1
            self._octaves[octave].observe(min(tokens - first + 1, length), length, SHARED_DECAY)
        rates: list[float] = []
        for seen in self._octaves:
            weight = SHARED_WEIGHT if rates else 0.0
            before = weight * rates[-1] if rates else 0.0
            rates.append((seen.held + before) / (seen.held + seen.failed + weight))
        self.rates = rates


class Policy:
    """Chooses block lengths for one model on one machine; every request that it decodes teaches it.

    Args:
        cost: (rows, block length) -> seconds of one cycle.
    """

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        self.cost = cost
        self.young, self.old = SharedRates(), SharedRates()
        self.probe_sec = 0.0
        # Goes up with every change of what is expected of a row.
        self._version = 0
        # Requests of several threads may share a policy: this, as all rates, is read once and written whole.
        self._last: tuple[object, int, int | None] = (None, 1, None)

    def rates(self, row: Acceptance) -> list[float]:
        """A row's a_i: its own cycles, and all rows' as SHARED_WEIGHT tokens more."""
        total = row.held + row.failed + SHARED_WEIGHT
        return [(row.held + SHARED_WEIGHT * rate) / total for rate in self.shared(row).rates]

    def shared(self, row: Acceptance) -> SharedRates:
        """What all rows of this row's age have brought."""
        return self.young if row.tokens < YOUNG_TOKENS else self.old

    def observe(self, row: Acceptance, tokens: int, block_length: int) -> None:
        """A cycle brought the row `tokens`, of at most `block_length`; AR cycles say nothing about drafts."""
        if block_length == 1:
            self._version += row.idle()
        elif tokens > 0:
            self.shared(row).observe(tokens, block_length)
            row.observe(tokens, block_length, ROW_DECAY)
            self._version += 1

    def tokens_per_sec(
        self, rates: Sequence[Rates], limits: Sequence[int], block_lengths: Sequence[int]
    ) -> list[float]:
        """Expected tokens of all rows per second of a cycle of each block length; a row takes at most its limit."""
        by_row = [
            expected_tokens(row, [min(k, limit) for k in block_lengths])
            for row, limit in zip(rates, limits, strict=True)
        ]
        tokens = map(sum, zip(*by_row, strict=True))
        return [n / self.cost(len(rates), k) for n, k in zip(tokens, block_lengths, strict=True)]

    def choose(self, rates: Sequence[Rates], limits: Sequence[int], longest: int, shortest: int = 1) -> int:
        """The block length between `shortest` and `longest` that brings most tokens per second, of equals the least."""
        allowed = candidates(longest, shortest)
        per_sec = self.tokens_per_sec(rates, limits, allowed)
        return allowed[per_sec.index(max(per_sec))]

    def next_block_length(
        self, rows: Sequence[Acceptance], limits: Sequence[int], longest: int, shortest: int = 1
    ) -> int:
        """`choose` for the rows of a batch, and now and then a probe.

        AR cycles learn nothing about drafts. Each pays PROBE_SHARE of its cost into `probe_sec`; once that covers what
        a probe can lose, the probe is made. So probes lose at most PROBE_SHARE of the time that AR takes.
        """
        limits = [min(limit, longest) for limit in limits]
        # Most AR cycles change none of these: the choice is then the last one, and costs next to nothing.
        key = self._version, list(rows), limits, longest, shortest, self.cost
        last = self._last
        if last[0] != key:
            best = self.choose([self.rates(row) for row in rows], limits, longest, shortest)
            self._last = last = key, best, self.probe(limits, longest) if best == 1 else None
        _, best, probe = last
        if probe is None:
            return best
        ar_sec = self.cost(len(rows), 1)
        loss_sec = self.cost(len(rows), probe) - ar_sec
        self.probe_sec += PROBE_SHARE * ar_sec
        if self.probe_sec < loss_sec:
            return 1
        self.probe_sec = 0.0
        return probe

    def probe(self, limits: Sequence[int], longest: int) -> int | None:
        """The shortest draft that would beat AR if all of it held; None where drafting cannot pay."""
        allowed = candidates(longest)
        ar, *others = self.tokens_per_sec([[1.0]] * len(limits), limits, allowed)
        return next((k for k, per_sec in zip(allowed[1:], others, strict=True) if per_sec > ar), None)


def candidates(longest: int, shortest: int = 1) -> list[int]:
    """The block lengths to choose among: powers of two, and the longest allowed itself."""
    powers = [2**i for i in range(longest.bit_length()) if shortest <= 2**i <= longest]
    return powers if powers and powers[-1] == longest else [*powers, longest]
