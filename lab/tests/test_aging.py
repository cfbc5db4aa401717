"""Trends: aging is detected with the time until exhaustion, and series without aging give no alarm.

- Aging: software that runs for long uses up a resource, such as memory by a leak, until it fails.
- Series: the samples of one metric of a host or guest since its last boot, with the limit at which it is exhausted.
- Inflation: how much the autocorrelation of the samples increases the variance of the trend test's count.
- Kinds (`quiet.KINDS`): kinds of simulated hosts without aging, by the noise of their samples.
"""

import json

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from rekindle_lab.aging import quiet
from rekindle_lab.aging.exhaustion import judge
from rekindle_lab.aging.samples import SamplesError, Series, read, thin
from rekindle_lab.aging.trend import fit_trend
from rekindle_lab.cli import app

DAY_S = 86_400


def series(values, metric="free_memory_kib", limit=0.0, step_s=3600.0):
    """Returns samples of one metric of a host, one every `step_s` seconds."""
    values = np.asarray(values, dtype=float)
    seconds = 1.8e9 + step_s * np.arange(values.size)  # since 1970; any start would do
    return Series(host="h", guest=None, metric=metric, boot="b", seconds=seconds, values=values, limit=limit)


def test_the_count_and_slope_are_the_textbooks():
    """The slope is scipy's (Sen); p follows from Kendall's tau by the textbook's formula, since nothing is correlated.

    z is the count of rising less falling pairs, moved by 1 towards 0, over its standard deviation for independent
    samples.
    """
    seconds = np.arange(12.0)
    values = np.array([1.0, 3, 2, 5, 4, 6, 8, 7, 9, 11, 10, 12])
    trend = fit_trend(seconds, values)
    assert trend.slope == pytest.approx(stats.theilslopes(values, seconds).slope)
    n = values.size
    count = stats.kendalltau(seconds, values).statistic * n * (n - 1) / 2  # rising less falling pairs
    z = (count - 1) / np.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    assert trend.inflation == 1.0
    assert trend.p == pytest.approx(2 * stats.t.sf(z, n - 2))
    assert trend.slope_low < trend.slope < trend.slope_high


def test_slope_interval_equals_scipys_without_autocorrelation():
    """scipy assumes independent samples, and so must give nearly the same interval for samples that are."""
    generator = np.random.default_rng(3)
    seconds = np.arange(40.0)
    values = 0.02 * seconds + generator.normal(size=40)
    trend = fit_trend(seconds, values)
    scipys = stats.theilslopes(values, seconds, 0.95)
    assert trend.inflation == pytest.approx(1.0, abs=0.4)
    assert (trend.slope_low, trend.slope_high) == (
        pytest.approx(scipys.low_slope, abs=0.01),
        pytest.approx(scipys.high_slope, abs=0.01),
    )


def test_the_slopes_interval_has_scipys_ranks():
    """Where scipy gets the widened half-width as its confidence, it chooses the same two slopes as the ends.

    Of 20 series, those are compared for which scipy rounds the rank in the same direction: about half.
    """
    n, compared = 30, 0  # samples of a series; series for which scipy rounds in the same way
    seconds = np.arange(float(n))
    variance = n * (n - 1) * (2 * n + 5) / 18
    pairs = n * (n - 1) / 2
    for seed in range(20):
        values = np.random.default_rng(seed).normal(size=n)
        trend = fit_trend(seconds, values)
        half_width = stats.t.ppf(0.975, n / trend.inflation - 2) * np.sqrt(variance * trend.inflation)
        if (pairs + half_width) / 2 % 1 < 0.5:
            continue  # scipy rounds such a rank down, and the tested code never does
        compared += 1
        scipys = stats.theilslopes(values, seconds, 2 * stats.norm.sf(half_width / np.sqrt(variance)))
        assert (trend.slope_low, trend.slope_high) == pytest.approx((scipys.low_slope, scipys.high_slope), rel=1e-12)
    assert compared >= 5


@pytest.mark.parametrize(
    ("kind", "largest_share"), [("white", 0.09), ("persistent-0.5", 0.09), ("persistent-0.9", 0.16)]
)
def test_false_trends_are_as_rare_as_stated_and_far_rarer_than_uncorrected(kind, largest_share):
    """At p < 0.05, 5 % of series without a trend should give one; the limits are those that lab/README.md states.

    They include three standard errors of a share of 150 series. scipy's test without correction gives more than 40 %.
    """
    generator = np.random.default_rng(6)
    rounds, n = 150, 150  # simulated series, and samples of each
    seconds = np.arange(float(n))
    corrected = uncorrected = 0
    for _ in range(rounds):
        values = quiet.KINDS[kind](generator, n)
        corrected += fit_trend(seconds, values).p < 0.05  # a false trend
        uncorrected += stats.kendalltau(seconds, values).pvalue < 0.05
    assert corrected / rounds <= largest_share
    if kind == "persistent-0.9":
        assert uncorrected / rounds > 0.4


def test_the_slopes_interval_covers_the_true_slope():
    """95 % of the intervals should contain the slope of 0.05 with which the series were made."""
    generator = np.random.default_rng(8)
    seconds = np.arange(120.0)
    covered = 0
    for _ in range(80):
        trend = fit_trend(seconds, 0.05 * seconds + quiet.persistent(0.5)(generator, 120))
        covered += trend.slope_low <= 0.05 <= trend.slope_high
    assert covered >= 70  # 95% of 80 are 76


@pytest.mark.parametrize("kind", list(quiet.KINDS))
def test_hosts_without_aging_give_few_false_alarms(kind):
    """An alarm needs p < 0.01 for all metrics of a host together: three host-weeks give at most one by chance."""
    false_alarms = quiet.false_alarms(kind, 3)
    assert false_alarms.alarms <= 1, false_alarms


def test_a_leak_is_detected_with_its_time():
    """After 14 of the 40 days in which memory is used up, 26 days are left; the interval contains them."""
    generator = np.random.default_rng(4)
    hours = np.arange(24 * 14)
    # 1 GiB lost evenly in 40 days; a daily load on it, and autocorrelated noise.
    values = 2**20 * (1 - hours / (24 * 40)) + 20_000 * quiet.daily(generator, hours.size)
    (finding,) = judge([series(values)])
    assert finding.alarm
    left_d = 40 - 14
    assert finding.left_low_s / DAY_S < left_d < finding.left_high_s / DAY_S
    assert finding.left_s / DAY_S == pytest.approx(left_d, rel=0.15)


def test_a_rise_is_an_alarm_only_towards_a_limit_that_is_near():
    """The same rise of 10 per hour is judged with a limit near, far, in the other direction, passed, and unknown."""
    noise = np.random.default_rng(5).normal(size=200)
    rising = 1000 + 10 * np.arange(200) + noise
    limit, last = 5000, 1000 + 10 * 199
    (finding,) = judge([series(rising, "open_files", limit)])
    assert finding.alarm and finding.left_s == pytest.approx((limit - last) / 10 * 3600, rel=0.02)
    (finding,) = judge([series(rising, "free_memory_kib")])  # of which more is better
    assert not finding.alarm and not finding.worsens and np.isinf(finding.left_s)
    (finding,) = judge([series(rising, "open_files", 10_000_000)])
    assert not finding.alarm and finding.why == "clear, but far off"
    (finding,) = judge([series(rising, "open_files", 900)])  # the limit has passed already
    assert finding.alarm and finding.left_s == 0
    (finding,) = judge([series(rising, "response_time_ms", None)])
    assert finding.alarm and finding.left_s is None and finding.why == "no limit is known"


def test_a_short_series_is_reported_as_short():
    (finding,) = judge([series(np.arange(20))])
    assert finding.trend is None and not finding.alarm
    assert finding.why == "too short: 19.0 h, 20 samples; a trend needs 24 h and 10"


def test_a_constant_series_has_no_trend():
    """No pair rises or falls, so that all formulas with ranks would divide by 0."""
    (finding,) = judge([series(np.full(100, 7.0))])
    assert (finding.p, finding.alarm, finding.trend.slope) == (1.0, False, 0.0)


def test_thinning_keeps_the_trend():
    """5000 samples, one per minute, rise by 1 per minute; at most 200 medians rise as fast."""
    thinned = thin(series(np.arange(5000.0), step_s=60))
    assert 150 < thinned.values.size <= 200
    assert fit_trend(thinned.seconds, thinned.values).slope == pytest.approx(1 / 60)


def sample(unix_s, **more):
    """Returns a sample of a host with 1000 KiB of free memory; `more` adds or replaces keys."""
    return {"format": 1, "host": "h", "guest": None, "boot": "b1", "unix_s": unix_s, "free_memory_kib": 1000.0} | more


def write(path, samples):
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def test_series_begin_at_the_last_boot(tmp_path):
    """5 samples of the host's previous boot are counted and omitted; the user's limit overrides a recorded one."""
    rows = [sample(n) for n in range(5)] + [sample(10 + n, boot="b2", free_memory_kib=n) for n in range(3)]
    rows += [sample(n, guest="web", open_files=n, open_files_limit=99) for n in range(4)]
    series_by_name = {metric_series.name: metric_series for metric_series in read(write(tmp_path / "s", rows))}
    assert list(series_by_name) == ["h free_memory_kib", "h/web free_memory_kib", "h/web open_files"]
    assert list(series_by_name["h free_memory_kib"].values) == [0, 1, 2]
    assert [metric_series.before for metric_series in series_by_name.values()] == [5, 0, 0]
    assert series_by_name["h free_memory_kib"].limit == 0
    assert series_by_name["h/web open_files"].limit == 99
    (with_limit,) = [
        metric_series
        for metric_series in read(tmp_path / "s", {"open_files": 50})
        if metric_series.metric == "open_files"
    ]
    assert with_limit.limit == 50


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"free_memory_kib": float("nan")}, "row 2, column free_memory_kib: nan is not a finite number"),
        ({"free_memory_kib": "1"}, "row 2, column free_memory_kib: '1' is not a finite number"),
        ({"unix_s": None}, "row 2, column unix_s: None is not what it must be"),
        ({"unix_s": float("nan")}, "row 2, column unix_s: nan is not a finite number"),
        ({"guest": ["a"]}, "row 2, column guest: ['a'] is not what it must be"),
        ({"free_memory_kib": 10**310}, "is not a finite number"),
        ({"format": 2}, "row 2, column format: 2; this program reads 1"),
        ({"free_memory_kb": 5}, "row 2, column free_memory_kb: unknown; did you mean free_memory_kib?"),
        ({"open_file_limit": None}, "row 2, column open_file_limit: unknown; did you mean open_files_limit?"),
        ({"temperature": 5}, "row 2, column temperature: unknown; metrics are: free_memory_kib, slab_kib"),
        ({"unix_s": 1}, "h  has two samples of free_memory_kib at 1"),
    ],
)
def test_an_error_names_row_and_column_of_a_bad_sample(tmp_path, bad, message):
    with pytest.raises(SamplesError) as caught:
        read(write(tmp_path / "s", [sample(1), sample(2) | bad]))
    assert message in str(caught.value)


def test_invalid_lines_and_an_empty_file_are_rejected(tmp_path):
    (tmp_path / "s").write_text("{\n")
    with pytest.raises(SamplesError, match="row 1, column -: not JSON"):
        read(tmp_path / "s")
    (tmp_path / "s").write_text("")
    with pytest.raises(SamplesError, match="the file has no samples"):
        read(tmp_path / "s")


def test_the_inside_of_a_guest_is_a_series_of_its_own_boot(tmp_path):
    # Values as `rekindle monitor` writes them: the QEMU changes after the second sample, the guest's boot does not.
    rows = []
    for n in range(4):
        rows += [
            sample(n, guest="web", boot=f"b/{n // 2}", resident_kib=1000 + n),
            sample(
                n, guest="web", boot="inner", guest_free_memory_kib=500 - n, guest_slab_kib=n, guest_slab_kib_limit=9
            ),
        ]
    series_by_metric = {metric_series.metric: metric_series for metric_series in read(write(tmp_path / "s", rows))}
    assert series_by_metric["resident_kib"].values.tolist() == [1002, 1003]
    assert series_by_metric["guest_free_memory_kib"].values.tolist() == [500, 499, 498, 497]
    assert (series_by_metric["guest_free_memory_kib"].limit, series_by_metric["guest_slab_kib"].limit) == (0.0, 9)


def test_the_command_line_reports_an_alarm_and_its_horizon(tmp_path):
    """Memory that loses 1000 of 1,000,000 KiB per hour is used up in 28 days: an alarm, unless only one day counts."""
    values = 1e6 - 1000 * np.arange(14 * 24) + np.random.default_rng(1).normal(0, 5000, 14 * 24)
    rows = [sample(3600.0 * n, free_memory_kib=float(value)) for n, value in enumerate(values)]
    path = write(tmp_path / "s", rows)
    result = CliRunner().invoke(app, ["aging", "trend", str(path)])
    assert result.exit_code == 1
    assert "ALARM" in result.output and "h free_memory_kib" in result.output
    document = json.loads(CliRunner().invoke(app, ["aging", "trend", str(path), "--json"]).output)
    (finding,) = document["findings"]
    assert finding["alarm"] and finding["left_ci95_s"][0] < finding["left_s"] < finding["left_ci95_s"][1]
    result = CliRunner().invoke(app, ["aging", "trend", str(path), "--horizon-d", "1"])
    assert result.exit_code == 0 and "clear, but far off" in result.output
    result = CliRunner().invoke(app, ["aging", "trend", str(path), "--limit", "memory=1"])
    assert result.exit_code == 2 and "no metric 'memory'" in result.output


def test_an_unknown_key_is_reported_once(tmp_path):
    with pytest.raises(SamplesError) as caught:
        read(write(tmp_path / "s", [sample(n, slab_kb=n) for n in range(50)]))
    assert str(caught.value).endswith("1 problem\n  row 1, column slab_kb: unknown; did you mean slab_kib?")


def test_samples_before_the_last_boot_are_counted(tmp_path):
    """The table has hours, samples and samples of earlier boots in its columns 2 to 4."""
    rows = [sample(n) for n in range(7)] + [sample(10 + n, boot="b2") for n in range(3)]
    path = write(tmp_path / "s", rows)
    result = CliRunner().invoke(app, ["aging", "trend", str(path), "--json"])
    (finding,) = json.loads(result.output)["findings"]
    assert (finding["samples"], finding["samples_of_earlier_boots"]) == (3, 7)
    output = CliRunner().invoke(app, ["aging", "trend", str(path)]).output
    assert "of earlier boots" in output and output.splitlines()[-1].split()[2:5] == ["0", "3", "7"]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--alpha", "5"), ("--alpha", "0"), ("--alpha", "nan"), ("--horizon-d", "0"), ("--horizon-d", "inf")],
)
def test_impossible_alarm_settings_are_rejected(tmp_path, option, value):
    result = CliRunner().invoke(app, ["aging", "trend", str(write(tmp_path / "s", [sample(1)])), option, value])
    assert result.exit_code == 2 and f"{option} {value}: it must be" in result.output


def test_the_command_line_states_false_alarms():
    result = CliRunner().invoke(app, ["aging", "quiet", "--host-weeks", "1", "--json"])
    assert result.exit_code == 0, result.output
    assert [row["kind"] for row in json.loads(result.output)] == list(quiet.KINDS)
