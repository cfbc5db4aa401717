"""Lines of a report on what a plan omits from the full plan."""

from collections.abc import Iterable, Mapping


def fewer(what: str, own: int, full: int, unit: str = "") -> list[str]:
    """Returns a line if a plan has fewer repetitions (`own`) than the full plan.

    >>> fewer("kills", 2, 20), fewer("kills", 20, 20), fewer("memory", 1, 4, unit=" pairs")
    (['kills: 2 of 20'], [], ['memory: 1 pairs of 4'])
    """
    return [f"{what}: {own}{unit} of {full}"] if own < full else []


def missing(what: str, own: Iterable[str], full: Iterable[str]) -> list[str]:
    """Returns a line with the values of the full plan that a plan does not have.

    >>> missing("stores", ["disk"], ["disk", "slow", "s3"])
    ['stores: slow, s3']
    """
    own = set(own)
    omitted = [value for value in full if value not in own]
    return [f"{what}: {', '.join(omitted)}"] if omitted else []


def fewer_of_ways(what: str, own: Mapping[str, int], full: Mapping[str, int], everything: str) -> list[str]:
    """Returns a line with the ways that a plan omits, and one with those that it repeats less often.

    `own`, `full`: repetitions by way. `everything`: printed if the plan omits all ways.

    >>> fewer_of_ways("db", {"warm": 1}, {"warm": 5, "cold": 2}, "all"), fewer_of_ways("db", {}, {"cold": 2}, "all")
    (['db: cold', 'db: repetitions (warm 1 of 5)'], ['db: all'])
    """
    omitted = [way for way, count in full.items() if count and not own.get(way)]
    reduced = [f"{way} {own[way]} of {count}" for way, count in full.items() if 0 < own.get(way, 0) < count]
    lines = []
    if omitted:
        lines.append(f"{what}: {everything if len(omitted) == len(full) else ', '.join(omitted)}")
    if reduced:
        lines.append(f"{what}: repetitions ({', '.join(reduced)})")
    return lines
