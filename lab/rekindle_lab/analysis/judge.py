"""The judgement of an experiment: each response alone, then all responses corrected for their number."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rekindle_lab.analysis import assumptions, effects
from rekindle_lab.analysis.anova import Anova, Group, Welch, blocked, one_way, welch
from rekindle_lab.analysis.assumptions import Check
from rekindle_lab.analysis.correct import bonferroni, holm
from rekindle_lab.analysis.effects import Effects
from rekindle_lab.analysis.runs import Runs

ALPHA = 0.05


@dataclass(frozen=True)
class Versus:
    """Two levels of three or more, compared by Games and Howell's p: allows for all pairs and for unequal variances."""

    level: str
    other: str
    p: float


@dataclass(frozen=True)
class Response:
    """The result for one response, without correction for the number of responses."""

    name: str
    groups: dict[str, Group]
    equal_variances: tuple[Check, ...]
    normal: Check | None
    independent: tuple[Check, ...]
    anova: Anova | None
    welch: Welch | None
    test: str
    """The test that decides: `anova`, `welch`, or `permutation` where a level does not vary."""
    p: float
    permutation_p: float
    effects: Effects
    versus: tuple[Versus, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """A response with the corrections for the number of all responses."""

    response: Response
    p_bonferroni: float
    p_holm: float
    alpha: float

    @property
    def differs(self) -> bool:
        """Whether the levels differ, by Holm's correction."""
        return self.p_holm < self.alpha


def judge_response(
    name: str,
    values: Sequence[float],
    levels: Sequence[str],
    blocks: Sequence[int] | None = None,
    alpha: float = ALPHA,
) -> Response:
    """Judges one response; `values` in the order of the runs, at least two for each of at least two levels."""
    array = np.asarray(values, dtype=float)
    labels = np.asarray(levels)
    samples = {level: array[labels == level] for level in dict.fromkeys(levels)}
    groups = {level: Group.of(sample) for level, sample in samples.items()}
    if blocks is not None and len(set(blocks)) < 2:
        blocks = None
    notes = []
    constant = [level for level, sample in samples.items() if np.ptp(sample) == 0]
    permutation = effects.permutation_p(array, levels, blocks)
    if constant:
        fixed = ", ".join(f"'{level}' is {groups[level].mean:g} in all {groups[level].n} runs" for level in constant)
        notes.append(f"zero variance: {fixed}; F and Welch's test do not apply, the permutation test decides")
    checks: tuple[Check, ...] = ()
    table, unequal = None, None
    if not constant and blocks is not None:
        try:
            table = blocked(array, levels, blocks)
        except ValueError as error:
            notes.append(f"{error}: blocks are left out")
            blocks, permutation = None, effects.permutation_p(array, levels, None)
    test, p = "permutation", permutation
    residual = assumptions.residuals(array, levels, blocks)
    if not constant:
        varying = [residual[labels == level] for level in samples]
        checks = tuple(
            assumptions.equal_variances(varying if all(np.ptp(one) > 0 for one in varying) else [*samples.values()])
        )
        table = table or one_way(list(groups.values()))
        unequal = welch(list(groups.values()))
        rejecting = [check.name for check in checks if check.p < alpha]
        few = min(group.n for group in groups.values()) < assumptions.LEAST
        test, p = ("welch", unequal.p) if rejecting or few else ("anova", table.factor.p)
        if few:
            notes.append(
                f"a level has fewer than {assumptions.LEAST} runs, too few to compare variances: Welch's test decides"
            )
        elif rejecting:
            notes.append(f"variances differ ({', '.join(rejecting)}): Welch's test decides")
        if test == "welch" and blocks is not None:
            notes.append("Welch's test leaves blocks out; the permutation test keeps to them")
    varied = bool(np.ptp(residual) > 0)
    normal = assumptions.normal(residual) if varied and residual.size >= 3 else None
    if normal is not None and normal.p < alpha:
        notes.append(f"residuals are not normal ({normal.name}): see the permutation test")
    independent = tuple(assumptions.independent(residual)) if varied else ()
    if independent and independent[0].p < alpha:
        notes.append("residuals are correlated in the order of the runs: something drifted while they ran")
    sizes = effects.effects(samples)
    notes += [f"{name}: no interval, since some resamples do not vary" for name in sizes.without_interval]
    if (permutation < alpha) != (p < alpha):
        notes.append("the permutation test and the test that decides do not agree")
    return Response(
        name,
        groups,
        checks,
        normal,
        independent,
        table,
        unequal,
        test,
        p,
        permutation,
        sizes,
        _versus(samples) if len(samples) > 2 and not constant else (),
        tuple(notes),
    )


def _versus(samples: dict[str, np.ndarray]) -> tuple[Versus, ...]:
    found = stats.tukey_hsd(*samples.values(), equal_var=False)
    names = list(samples)
    return tuple(
        Versus(names[i], names[j], float(found.pvalue[i, j]))
        for i in range(len(names))
        for j in range(i + 1, len(names))
    )


def judge(runs: Runs, alpha: float = ALPHA) -> list[Verdict]:
    """Judges all responses of an experiment, corrected for their number by Bonferroni and by Holm."""
    levels = [run.level for run in runs.done]
    blocks = [run.block for run in runs.done]
    responses = [
        judge_response(name, [run.responses[name] for run in runs.done], levels, blocks, alpha)
        for name in runs.responses
    ]
    p = [response.p for response in responses]
    return [
        Verdict(response, one, other, alpha)
        for response, one, other in zip(responses, bonferroni(p), holm(p), strict=True)
    ]
