"""An experiment is judged: verdicts, notes, tables, and the command `rekindle-lab analyse`.

Levels are the ways that an experiment compares, responses the numbers that it measures. A judgement decides for one
response whether the levels differ, and with which test.
"""

import json
import time

import numpy as np
import pytest
from invented_runs import campaign, line, three_groups, write
from typer.testing import CliRunner

from rekindle_lab.analysis import tables
from rekindle_lab.analysis.judge import judge, judge_response
from rekindle_lab.analysis.runs import read
from rekindle_lab.cli import app


def runs_of(tmp_path, lines):
    return read(write(tmp_path / "runs.jsonl", lines))


def test_a_campaign_is_judged(tmp_path):
    """kexec's downtime is a quarter of cold's (`invented_runs`), with another variance; throughput does not differ.

    The permutation p is the smallest possible: 1 of 10,000.
    """
    downtime, throughput = judge(runs_of(tmp_path, campaign()))
    assert downtime.response.test == "welch"
    assert downtime.differs
    assert downtime.p_holm <= downtime.p_bonferroni
    assert downtime.response.permutation_p == pytest.approx(1e-4)
    (pair,) = downtime.response.effects.pairs
    relative = pair.relative.value  # of the level that ran first to the other
    kexec_to_cold = relative if pair.level == "kexec" else 1 / (1 + relative) - 1
    assert kexec_to_cold == pytest.approx(-0.75, abs=0.02)
    assert not throughput.differs
    assert throughput.response.test == "anova"
    assert "omega²" in tables.verdicts_table([downtime, throughput])[0]


def test_one_file_gives_one_judgement(tmp_path):
    runs = runs_of(tmp_path, campaign())
    assert repr(judge(runs)) == repr(judge(runs))


def test_zero_variance_is_named_and_left_to_the_permutation_test():
    """kexec recovers all memory in every run: without variance, F and t are not defined."""
    values = [100.0] * 16 + [100.0] * 15 + [99.0]
    result = judge_response("recovered_pct", values, ["kexec"] * 16 + ["cold"] * 16)
    assert result.test == "permutation" and result.anova is None and result.welch is None
    assert result.p == 1.0  # each run may be the only one with 99
    assert "zero variance: 'kexec' is 100 in all 16 runs" in result.notes[0]
    clear = judge_response("recovered_pct", [100.0] * 8 + [50.0] * 8, ["kexec"] * 8 + ["phase"] * 8)
    assert clear.p < 0.001
    assert clear.effects.pairs[0].hedges_g is None


def test_two_runs_a_level_are_too_few_to_compare_variances():
    result = judge_response("x_s", [1.0, 9.0, 1.2, 9.7], list("abab"))
    assert [check.name for check in result.equal_variances] == ["Bartlett", "F of variances"]
    assert result.test == "welch" and "fewer than 3 runs" in result.notes[0]
    assert tables.welch(result, 0.05)


def test_three_levels_have_pairs():
    """More than two levels are compared in pairs by Games and Howell, and Welch's table has F instead of t."""
    samples = three_groups()
    values = np.concatenate(samples)
    levels = [name for name, sample in zip("abc", samples, strict=True) for _ in sample]
    result = judge_response("x_s", values, levels)
    assert [(pair.level, pair.other) for pair in result.versus] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert "Games-Howell P" in tables.pairs(result)[0]
    assert "Den. df" in tables.welch(result, 0.05)[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("downtime_s", "downtime (s)"),
        ("throughput_per_s", "throughput (1/s)"),
        ("cpu_pct", "cpu (%)"),
        ("free_memory_kib", "free memory (KiB)"),
        ("load", "load"),
    ],
)
def test_headings_have_units(name, expected):
    assert tables.heading(name) == expected


def test_a_thousand_runs_are_judged_within_ten_seconds(tmp_path):
    """Four levels, six responses: a performance bug of the resampling would take minutes."""
    generator = np.random.default_rng(4)
    lines = [
        line(
            number,
            "abcd"[number % 4],
            {f"r{response}_s": float(generator.normal(10, 1)) for response in range(6)},
            total=1000,
        )
        for number in range(1, 1001)
    ]
    started_s = time.process_time()
    judge(runs_of(tmp_path, lines))
    # Measures processor time, so that other work on the machine does not count. It takes about a third of the limit.
    assert time.process_time() - started_s < 10


def test_the_command_line_prints_tables_or_json(tmp_path):
    path = write(tmp_path / "runs.jsonl", campaign())
    result = CliRunner().invoke(app, ["analyse", str(path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["done"] == 32
    assert [response["differs"] for response in document["responses"]] == [True, False]
    text = CliRunner().invoke(app, ["analyse", str(path)]).output
    for word in ("One-way ANOVA", "F crit", "T crit", "95%CI-", "Brown-Forsythe", "Avg. downtime (s)", "Diff."):
        assert word in text, word
