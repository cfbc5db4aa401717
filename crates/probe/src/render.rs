//! Renders a report as text for users.

use std::fmt::Write;

use crate::report::{Failures, Interval, Report};

/// Limit of columns of the throughput line.
const MAX_COLUMNS: usize = 60;
/// Characters for the throughput of a column, from the lowest to the highest.
const THROUGHPUT_CHARACTERS: &[u8] = b".:-=+*#%@";
/// Characters for a column without answers: without failed requests, and with failed requests.
const NO_ANSWERS: char = '_';
const ONLY_FAILURES: char = '!';

/// Renders a report as a short table in ASCII.
///
/// The throughput has one character per interval. In a long run, a character shows the worst of several intervals, so
/// that even a short outage is visible. `_`: no answers; `!`: no answers, and failed requests; `.` to `@`: answers.
pub fn render(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_report(&mut out, report);
    out
}

fn write_report(out: &mut String, report: &Report) -> std::fmt::Result {
    let connections = match report.connections {
        1 => "1 connection".to_owned(),
        n => format!("{n} connections"),
    };
    let (elapsed, every) = (format_time(report.elapsed_us), format_time(report.every_us));
    writeln!(out, "{}  {elapsed}, {connections}, every {every}", report.url)?;
    write!(out, "  requests     {} sent, {} answered, {} failed", report.sent, report.answered, report.failed.total())?;
    write!(out, "{}", list_causes(&report.failed))?;
    writeln!(out, ", {} in flight, {} ticks skipped", report.in_flight, report.skipped)?;
    if let Some(failure) = &report.first_failure {
        writeln!(out, "  failure      {failure}")?;
    }
    writeln!(out, "  connections  {} opened, {} lost", report.connections_opened, report.connections_lost)?;
    let threshold = format_time(report.gap_threshold_us);
    writeln!(
        out,
        "  longest gap  {}{} ({} longer than {threshold})",
        format_time(report.longest_gap_us),
        gap_start(report),
        report.gaps_total
    )?;
    match report.latency {
        Some(latency) => {
            let [p50, p95, p99, max] =
                [latency.p50_us, latency.p95_us, latency.p99_us, latency.max_us].map(format_time);
            writeln!(out, "  latency      p50 {p50}, p95 {p95}, p99 {p99}, max {max}")?;
        }
        None => writeln!(out, "  latency      no answer")?,
    }
    let seconds = report.elapsed_us.max(1) as f64 / 1e6;
    writeln!(out, "  throughput   {:.1} answers/s, {}", report.answered as f64 / seconds, format_bytes(report.bytes))?;
    let columns = columns(report);
    if !columns.line.is_empty() {
        let (best, width) = (columns.best, format_time(columns.cell_ms.saturating_mul(1000)));
        writeln!(out, "  |{}|  @ = {best} answers per {width}", columns.line)?;
    }
    Ok(())
}

/// Lists the causes of failures in parentheses.
fn list_causes(failures: &Failures) -> String {
    let list_causes: Vec<_> = [
        ("timeout", failures.timeouts),
        ("reset", failures.resets),
        ("refused", failures.refused),
        ("unreachable", failures.unreachable),
        ("wrong content", failures.wrong_content),
    ]
    .into_iter()
    .filter(|(_, count)| *count > 0)
    .map(|(cause, count)| format!("{count} {cause}"))
    .collect();
    if list_causes.is_empty() { String::new() } else { format!(" ({})", list_causes.join(", ")) }
}

/// Returns when the longest gap began; nothing if it was below the threshold.
fn gap_start(report: &Report) -> String {
    let longest = report.gaps.iter().find(|gap| gap.length_us == report.longest_gap_us);
    longest.map_or_else(String::new, |gap| {
        let offset = gap.start_unix_ns.saturating_sub(report.started_unix_ns);
        format!(" at {}", format_time(offset / 1000))
    })
}

/// The throughput line.
struct Columns {
    /// One character per column.
    line: String,
    /// Answers of the cell with the most answers that is shown.
    best: u64,
    /// Width of a cell.
    cell_ms: u64,
}

/// Sums over the intervals of a cell.
#[derive(Clone, Copy)]
struct Cell {
    answered: u64,
    failed: u64,
}

impl Cell {
    fn sum_of(intervals: &[Interval]) -> Self {
        Self {
            answered: intervals.iter().map(|interval| interval.answered).sum(),
            failed: intervals.iter().map(|interval| interval.failed).sum(),
        }
    }

    /// Returns the character for a column that shows this cell. `best` is the highest number of answers of a column.
    fn character(self, best: u64) -> char {
        match (self.answered, self.failed) {
            (0, 0) => NO_ANSWERS,
            (0, _) => ONLY_FAILURES,
            _ => {
                let highest = THROUGHPUT_CHARACTERS.len() - 1;
                let rank = u128::from(self.answered) * highest as u128 / u128::from(best.max(1));
                char::from(THROUGHPUT_CHARACTERS[usize::try_from(rank).unwrap_or(0).min(highest)])
            }
        }
    }
}

/// Returns the throughput line. Intervals are first added up to cells in which even one connection should have two
/// answers: otherwise a slow probe would seem to have outages. Then as many cells share a column as necessary, and the
/// column shows the worst of them.
fn columns(report: &Report) -> Columns {
    let interval_us = report.interval_ms.saturating_mul(1000).max(1);
    let intervals_per_cell =
        usize::try_from(report.every_us.saturating_mul(2).div_ceil(interval_us)).unwrap_or(usize::MAX).max(1);
    // An interval that the stop has shortened would seem to be an outage.
    let whole_intervals =
        usize::try_from(report.elapsed_us / interval_us).unwrap_or(usize::MAX).min(report.intervals.len());
    let cells: Vec<Cell> =
        report.intervals[..whole_intervals].chunks_exact(intervals_per_cell).map(Cell::sum_of).collect();
    let cells_per_column = cells.len().div_ceil(MAX_COLUMNS).max(1);
    let worst_of = |cells: &[Cell]| cells.iter().copied().min_by_key(|cell| (cell.answered, u64::MAX - cell.failed));
    let worst_cells: Vec<Cell> = cells.chunks(cells_per_column).filter_map(worst_of).collect();
    let best = worst_cells.iter().map(|cell| cell.answered).max().unwrap_or(0);
    let line = worst_cells.iter().map(|cell| cell.character(best)).collect();
    Columns { line, best, cell_ms: report.interval_ms.saturating_mul(intervals_per_cell as u64) }
}

/// Formats a time in a suitable unit, with at most two digits after the point.
fn format_time(us: u64) -> String {
    let number = |value: f64| {
        let text = format!("{value:.*}", if value < 10.0 { 2 } else { 1 });
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match us {
        0..1_000 => format!("{us} us"),
        1_000..1_000_000 => format!("{} ms", number(us as f64 / 1e3)),
        _ => format!("{} s", number(us as f64 / 1e6)),
    }
}

fn format_bytes(bytes: u64) -> String {
    match bytes {
        0..10_240 => format!("{bytes} bytes"),
        10_240..10_485_760 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        _ => format!("{:.1} MiB", bytes as f64 / (1024.0 * 1024.0)),
    }
}

#[cfg(test)]
mod tests {
    use crate::report::{Gap, Latency};

    use super::*;

    fn report(intervals: &[(u64, u64)]) -> Report {
        let list = (0..).zip(intervals).map(|(index, (answered, failed))| Interval {
            start_ms: index * 100,
            answered: *answered,
            failed: *failed,
            bytes: 10,
        });
        Report {
            url: "http://10.0.0.2/".into(),
            started_unix_ns: 1_000_000_000,
            elapsed_us: intervals.len() as u64 * 100_000,
            every_us: 1_000,
            connections: 1,
            sent: 400,
            answered: 397,
            failed: Failures { refused: 2, resets: 1, ..Failures::default() },
            in_flight: 0,
            skipped: 93,
            bytes: 20_480,
            connections_opened: 2,
            connections_lost: 1,
            latency: Some(Latency { p50_us: 180, p95_us: 410, p99_us: 1_234, max_us: 4_000 }),
            gap_threshold_us: 10_000,
            longest_gap_us: 86_240,
            gaps_total: 1,
            gaps: vec![Gap { start_unix_ns: 1_205_000_000, length_us: 86_240 }],
            interval_ms: 100,
            intervals: list.collect(),
            first_failure: Some("connection refused".into()),
        }
    }

    #[test]
    fn the_table() {
        let report = report(&[(100, 0), (99, 0), (0, 3), (0, 0), (50, 0), (1, 1)]);
        assert_eq!(
            render(&report),
            "http://10.0.0.2/  600 ms, 1 connection, every 1 ms
  requests     400 sent, 397 answered, 3 failed (1 reset, 2 refused), 0 in flight, 93 ticks skipped
  failure      connection refused
  connections  2 opened, 1 lost
  longest gap  86.2 ms at 205 ms (1 longer than 10 ms)
  latency      p50 180 us, p95 410 us, p99 1.23 ms, max 4 ms
  throughput   661.7 answers/s, 20.0 KiB
  |@%!_+.|  @ = 100 answers per 100 ms
"
        );
    }

    #[test]
    fn an_outage_shows_in_a_long_run() {
        let mut intervals = vec![(100, 0); 1_000];
        intervals[500] = (0, 0);
        let line = columns(&report(&intervals)).line;
        assert!(line.len() <= MAX_COLUMNS);
        assert_eq!(line.matches(NO_ANSWERS).count(), 1, "{line}");
    }

    #[test]
    fn a_slow_probe_does_not_seem_to_stutter() {
        let intervals: Vec<_> = (0..60).map(|index| (u64::from(index % 10 == 0), 0)).collect();
        let slow = Report { every_us: 1_000_000, ..report(&intervals) };
        let columns = columns(&slow);
        assert_eq!((columns.line.as_str(), columns.best, columns.cell_ms), ("@@@", 2, 2_000));
    }

    #[test]
    fn an_empty_run_renders() {
        let empty = Report { elapsed_us: 0, latency: None, gaps: vec![], intervals: vec![], ..report(&[]) };
        assert!(render(&empty).contains("no answer"));
    }

    #[test]
    fn units() {
        let times = [0, 999, 1_000, 86_240, 999_999, 1_000_000, 83_400_000].map(format_time);
        assert_eq!(times, ["0 us", "999 us", "1 ms", "86.2 ms", "1000 ms", "1 s", "83.4 s"]);
        assert_eq!(
            [format_bytes(9), format_bytes(20_480), format_bytes(20 << 20)],
            ["9 bytes", "20.0 KiB", "20.0 MiB"]
        );
    }
}
