"""Chapter 14, exercises: the best efficiency, the rounds of a ring, how often to save."""

from helpers.collectives import holdings, ring_schedule
from helpers.exercises.harness import Exercise

# ---- 1: what can be hidden


def best_efficiency(forward: float, backward: float, communication: float) -> float:
    """Return the efficiency of weak scaling if all communication runs beside backward; seconds."""
    return (forward + backward) / (forward + max(backward, communication))


# ---- 2: a round of the ring


def ring_round(chunks: list[list[int]], k: int) -> list[list[int]]:
    """Return the chunks of each rank after round k of a ring all-reduce."""
    ranks = len(chunks)
    after = [list(own) for own in chunks]
    for rank in range(ranks):
        index = (rank - 1 - k) % ranks  # what the previous rank sends
        arrives = chunks[(rank - 1) % ranks][index]
        after[rank][index] = arrives + (chunks[rank][index] if k < ranks - 1 else 0)
    return after


def _rounds() -> list[tuple]:
    found = []
    for ranks in (2, 3, 4):
        chunks = [[10**rank + 7 * index for index in range(ranks)] for rank in range(ranks)]
        for k in range(2 * (ranks - 1)):
            found.append((chunks, k))
            chunks = ring_round(chunks, k)
    return found


# ---- 3: when a chunk is complete


def rounds_until(rank: int, chunk: int, ranks: int) -> int:
    """Return after how many rounds of a ring all-reduce `rank` has the whole sum of `chunk`."""
    held = holdings(ring_schedule(ranks), ranks, ranks)
    return next(k for k, now in enumerate(held) if len(now[rank][chunk]) == ranks)


def _chunks() -> list[tuple]:
    return [
        (rank, chunk, ranks)
        for ranks in (2, 4, 5)
        for rank in range(ranks)
        for chunk in range(ranks)
    ]


# ---- 4: how often to save


def lost_share(interval: float, save: float, between: float) -> float:
    """Return the share of time lost by saving and, after failures, by repeating half an interval.

    Young, 1974: https://doi.org/10.1145/361147.361115
    """
    return save / interval + interval / (2 * between)


EXERCISES = {
    "best_efficiency": Exercise(
        reference=best_efficiency,
        cases=lambda: [(0.2, 0.4, 0.1), (0.2, 0.4, 0.4), (0.2, 0.4, 1.0), (1.0, 2.0, 0.0)],
    ),
    "ring_round": Exercise(reference=ring_round, cases=_rounds),
    "rounds_until": Exercise(reference=rounds_until, cases=_chunks),
    "lost_share": Exercise(
        reference=lost_share,
        cases=lambda: [(60 * m, s, 3600 * h) for m in (10, 60) for s in (0, 30) for h in (9, 24)],
    ),
}
