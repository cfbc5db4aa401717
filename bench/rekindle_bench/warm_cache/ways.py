"""The ways to reboot a guest, and the order in which they are taken."""

WARM, COLD = "warm-cache", "cold"


def turns(round_number: int, ways: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the ways in alternating order: A B, B A, A B."""
    return ways if round_number % 2 == 0 else ways[::-1]
