"""What metrics have counted: bounded in the number of functions and workers, and right from several threads."""

from __future__ import annotations

import threading

from aiorpc.protocol.states import CallOutcome
from aiorpc.runtime.engine.tally import BOUNDS, MOST_FUNCTIONS, MOST_PEERS, OTHER, Durations, PeerTraffic, Tally


def test_a_hundred_thousand_functions_are_as_many_rows_as_a_few() -> None:
    """The first have their names with each outcome; of all others there is one row for each outcome."""
    durations = Durations()
    for number in range(100_000):
        durations.add(f"module:f{number}", CallOutcome.VALUE, 1e-3)
    durations.add("module:f0", CallOutcome.ERROR, 1e-3)
    durations.add("module:f99999", CallOutcome.ERROR, 1e-3)
    durations.add("?", CallOutcome.REFUSED, 1e-3)
    counts = {(function, outcome): sum(row[:-1]) for function, outcome, row in durations.rows()}
    assert len(counts) == MOST_FUNCTIONS + 1 + 3
    assert counts[OTHER, CallOutcome.VALUE] == 100_000 - MOST_FUNCTIONS
    assert counts["module:f0", CallOutcome.ERROR] == counts[OTHER, CallOutcome.ERROR] == 1
    assert counts[OTHER, CallOutcome.REFUSED] == 1


def test_each_duration_is_in_the_bucket_below_whose_bound_it_lies() -> None:
    """From nothing to more than the last bound, and whatever its bits are."""
    for seconds in (0.0, 9e-6, 1.1e-5, 1e-3, 0.5, 83.0, 84.0, 1e6):
        durations = Durations()
        durations.add("f", CallOutcome.VALUE, seconds)
        ((_, _, row),) = durations.rows()
        *counts, total = row
        assert len(counts) == len(BOUNDS) + 1
        assert counts.index(1) == sum(bound < seconds for bound in BOUNDS)
        assert (sum(counts), total) == (1, seconds)


def test_calls_that_end_in_several_threads_are_all_counted() -> None:
    """None is lost between two threads that count the same function."""
    durations, each = Durations(), 50_000

    def count() -> None:
        for _ in range(each):
            durations.add("f", CallOutcome.VALUE, 1.0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ((_, _, row),) = durations.rows()
    assert (sum(row[:-1]), row[-1]) == (4 * each, 4 * each)


def test_a_thousand_workers_that_come_and_go_are_as_many_labels_as_a_few() -> None:
    """The first have their names; nothing that was counted is lost."""
    tally = Tally()
    for number in range(1000):
        tally.ended(f"actor{number}", PeerTraffic(bytes_sent=1))
    assert len(tally.peers) == MOST_PEERS + 1
    assert sum(traffic.bytes_sent for traffic in tally.peers.values()) == 1000
    assert tally.peer("actor0") == "actor0" and tally.peer("actor999") == OTHER
