"""Topic `os`: the full and the quick plan."""

from rekindle_bench.os.plan import FULL, GUESTS, QUICK, left_out, quick
from rekindle_bench.os.rows import PEERS, WAYS


def test_plans():
    """The full plan has at least 10 rounds of each guest."""
    assert not left_out(FULL)
    assert any("debian: reboots of each way: 0 of" in line for line in left_out(QUICK))
    assert all(number >= 10 for number in FULL.rounds.values())
    assert set(GUESTS["immutable"]) == set(WAYS) and not set(WAYS) & set(PEERS)


def test_a_case_that_is_named_is_in_the_quick_plan():
    """Counts of 0 become 1; larger ones stay."""
    assert quick([]) == QUICK
    named = quick(["debian", "leak"])
    assert named.rounds == {"micro": 2, "debian": 1, "immutable": 1}
    assert named.leaks == {"micro": 1, "immutable": 1} and named.peers == QUICK.peers
    assert quick(["peers"]).peers == {"micro": 2, "immutable": 1}
