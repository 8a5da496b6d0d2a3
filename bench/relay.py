"""A relayed call, from the agent's pipe to the caller's tool and back: ours beside a raw floor, in one run.

    ./run bench relay [--rounds N] [--without-sdk] [FLAG…]      flags go to `oubliette up`

In every round each contestant is measured once, one call at a time and with fifty in flight, so that what else the
machine does falls on all of them alike. Shown are medians over the rounds; a ratio is the median of the rounds'
ratios to the floor. Rows survive a killed process; `--durability power` makes them survive a power cut.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import contestants
from bench.work import Contestant, Measured

IN_FLIGHT = 50
ALONE = 500
CROWDED = {"floor": 20_000, "ours": 5_000, "mcp SDK": 1_000}

# What ours aims at, as ratios to the floor; the last is of its own median with fifty in flight.
GOALS = (
    ("median, one at a time", 2.5, "at most"),
    ("calls/s, 50 in flight", 0.2, "at least"),
    ("p99 / median, 50 in flight", 6.0, "at most"),
)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--without-sdk", action="store_true")
    asked, flags = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, ExitStack() as open_:
        field = [
            open_.enter_context(contestants.floor(Path(folder))),
            open_.enter_context(contestants.ours(Path(folder), *flags)),
        ]
        if not asked.without_sdk:
            field.append(open_.enter_context(contestants.sdk(Path(folder))))
        for one in field:
            one.warm_up(IN_FLIGHT)
        for number in range(asked.rounds):
            print(f"round {number + 1} of {asked.rounds}", end="\r", file=sys.stderr, flush=True)
            for one in field:
                one.round(ALONE, CROWDED[one.name], IN_FLIGHT)
        print(" " * 40, end="\r", file=sys.stderr)
        show(field)
        return 0 if judge(field[0], field[1]) else 1


def show(field: Sequence[Contestant]) -> None:
    first = field[0]
    print(f"{'':22}{'one at a time, ms':>24}{f'{IN_FLIGHT} in flight, ms':>24}{'':>12}{'ratio to the floor':>28}")
    heads = ("median", "p99", "median", "p99", "calls/s", "median", "p99", "calls/s")
    print(f"{'':22}" + "".join(f"{head:>12}" if place < 5 else f"{head:>10}" for place, head in enumerate(heads)))
    for one in field:
        cells = [
            f"{middle(one.alone, lambda m: m.median_ms):.3f}",
            f"{middle(one.alone, lambda m: m.p99_ms):.3f}",
            f"{middle(one.crowded, lambda m: m.median_ms):.2f}",
            f"{middle(one.crowded, lambda m: m.p99_ms):.2f}",
            f"{middle(one.crowded, lambda m: m.per_s):,.0f}",
        ]
        ratios = [
            f"{ratio(one.alone, first.alone, lambda m: m.median_ms):.2f}",
            f"{ratio(one.alone, first.alone, lambda m: m.p99_ms):.2f}",
            f"{ratio(one.crowded, first.crowded, lambda m: m.per_s):.3f}",
        ]
        print(f"{one.name:22}" + "".join(f"{cell:>12}" for cell in cells) + "".join(f"{cell:>10}" for cell in ratios))
    print(f"\n{'CPU per call, µs':22}{'one at a time':>36}{f'{IN_FLIGHT} in flight':>36}")
    roles = ("client", "server", "caller")
    print(f"{'':22}" + "".join(f"{role:>12}" for role in roles * 2))
    for one in field:
        cells = [statistics.median(cpu[role] for cpu in rounds) for rounds in one.cpu for role in roles]
        print(f"{one.name:22}" + "".join(f"{cell:>12.1f}" for cell in cells))
    for one in field:
        if one.lost:
            print(
                f"\n{one.name}: connections were lost in {one.lost} rounds of {len(one.alone)} (one: an idle one ended)"
            )


def judge(first: Contestant, mine: Contestant) -> bool:
    got = (
        ratio(mine.alone, first.alone, lambda m: m.median_ms),
        ratio(mine.crowded, first.crowded, lambda m: m.per_s),
        middle(mine.crowded, lambda m: m.p99_ms / m.median_ms),
    )
    print()
    reached = True
    for (name, goal, how), value in zip(GOALS, got, strict=True):
        good = value <= goal if how == "at most" else value >= goal
        reached = reached and good
        print(f"{'reached' if good else 'MISSED':9}{name}: {value:.2f}, the goal is {how} {goal:g}")
    return reached


def middle(results: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    return statistics.median(map(of, results))


def ratio(mine: Sequence[Measured], floors: Sequence[Measured], of: Callable[[Measured], float]) -> float:
    """The median over the rounds of the ratio within each round."""
    return statistics.median(of(one) / of(other) for one, other in zip(mine, floors, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
