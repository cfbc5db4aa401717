//! The text that a scrape gets: OpenMetrics, or Prometheus's older text format.

use crate::catalog::{CATALOG, Kind, Metric};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::{Registry, Unit};
use std::collections::HashMap;
use std::fmt;

/// The format of an exposition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    OpenMetrics,
    /// Version 0.0.4, for clients that do not accept OpenMetrics.
    PrometheusText,
}

impl Format {
    /// Chooses the format for a request with this `Accept` header.
    #[must_use]
    pub fn accepted_by(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::PrometheusText }
    }

    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::PrometheusText => prometheus_text::CONTENT_TYPE,
        }
    }
}

/// The value of a series.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Number(f64),
    Count(u64),
    Histogram {
        sum: f64,
        /// All values, also those above the last bucket.
        count: u64,
        /// Upper bound and count of each bucket, not cumulative, without the last one.
        buckets: Vec<(f64, u64)>,
    },
}

/// A series: the values of its metric's labels, in their order, and its value.
#[derive(Debug, Clone, PartialEq)]
struct Series {
    label_values: Vec<String>,
    value: Value,
}

/// All figures at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Snapshot {
    /// By [`Metric::base`] and [`Metric::unit`].
    series: HashMap<(&'static str, Option<&'static str>), Vec<Series>>,
}

impl Snapshot {
    /// Adds a series.
    pub fn add(&mut self, metric: &Metric, label_values: &[&str], value: Value) {
        debug_assert_eq!(label_values.len(), metric.labels.len(), "{}", metric.name());
        let label_values = label_values.iter().map(|&label| label.to_owned()).collect();
        self.series.entry((metric.base, metric.unit)).or_default().push(Series { label_values, value });
    }

    /// Adds a series whose value is 1 if `holds`, otherwise 0.
    pub fn add_flag(&mut self, metric: &Metric, label_values: &[&str], holds: bool) {
        self.add(metric, label_values, Value::Number(f64::from(u8::from(holds))));
    }

    /// Returns the value of a series that is not a histogram.
    #[must_use]
    pub fn number(&self, metric: &Metric, label_values: &[&str]) -> Option<f64> {
        let family = self.series.get(&(metric.base, metric.unit))?;
        match &family.iter().find(|series| series.label_values == label_values)?.value {
            Value::Number(number) => Some(*number),
            Value::Count(count) => Some(*count as f64),
            Value::Histogram { .. } => None,
        }
    }

    /// Returns the values of the labels and the value of each series of a metric.
    pub(crate) fn series(&self, metric: &Metric) -> impl Iterator<Item = (&[String], &Value)> {
        let family = self.series.get(&(metric.base, metric.unit)).into_iter().flatten();
        family.map(|series| (series.label_values.as_slice(), &series.value))
    }

    /// Writes the exposition.
    ///
    /// # Errors
    /// None in practice: writing to a string does not fail.
    pub fn encode(self, format: Format) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        match format {
            Format::OpenMetrics => text::encode(&mut text, &registry)?,
            Format::PrometheusText => prometheus_text::encode(&mut text, &registry)?,
        }
        Ok(text)
    }
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for metric in CATALOG {
            let Some(family) = self.series.get(&(metric.base, metric.unit)) else { continue };
            let unit = metric.unit.map(|unit| match unit {
                "seconds" => Unit::Seconds,
                "bytes" => Unit::Bytes,
                other => Unit::Other(other.to_owned()),
            });
            let kind = match metric.kind {
                Kind::Gauge => MetricType::Gauge,
                Kind::Counter => MetricType::Counter,
                Kind::Histogram => MetricType::Histogram,
                Kind::Info => MetricType::Info,
            };
            let mut encoder = encoder.encode_descriptor(metric.base, metric.help, unit.as_ref(), kind)?;
            for series in family {
                encode_series(&mut encoder, metric, series)?;
            }
        }
        Ok(())
    }
}

fn encode_series(encoder: &mut MetricEncoder<'_>, metric: &Metric, series: &Series) -> fmt::Result {
    let values = series.label_values.iter().map(String::as_str);
    let labels: Vec<(&str, &str)> = metric.labels.iter().copied().zip(values).collect();
    if metric.kind == Kind::Info {
        return encoder.encode_info(&labels);
    }
    if labels.is_empty() {
        encode_value(encoder, &series.value, metric.kind)
    } else {
        encode_value(&mut encoder.encode_family(&labels)?, &series.value, metric.kind)
    }
}

fn encode_value(encoder: &mut MetricEncoder<'_>, value: &Value, kind: Kind) -> fmt::Result {
    let no_exemplar = None::<&Exemplar<[(String, String); 0], f64>>;
    match value {
        Value::Number(number) if kind == Kind::Counter => encoder.encode_counter(number, no_exemplar),
        Value::Count(count) if kind == Kind::Counter => encoder.encode_counter(count, no_exemplar),
        Value::Number(number) => encoder.encode_gauge(number),
        Value::Count(count) => encoder.encode_gauge(count),
        Value::Histogram { sum, count, buckets } => {
            let below: u64 = buckets.iter().map(|(_, count)| count).sum();
            let mut buckets = buckets.clone();
            buckets.push((f64::INFINITY, count.saturating_sub(below)));
            encoder.encode_histogram::<NoLabelSet>(*sum, *count, &buckets, None)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::catalog;

    fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::default();
        snapshot.add(&catalog::BUILD, &["1.0"], Value::Number(1.0));
        snapshot.add(&catalog::CHECKPOINT_AGE, &["web"], Value::Number(0.5));
        snapshot.add(&catalog::WRITTEN, &["web"], Value::Count(1 << 60));
        let buckets = vec![(0.001, 2), (0.01, 1)];
        snapshot.add(&catalog::PAUSE, &["web"], Value::Histogram { sum: 1.5, count: 4, buckets });
        snapshot
    }

    #[test]
    fn open_metrics_have_units_suffixes_and_an_end() {
        let text = snapshot().encode(Format::OpenMetrics).unwrap();
        for line in [
            "rekindle_build_info{version=\"1.0\"} 1",
            "# TYPE rekindle_checkpoint_age_seconds gauge",
            "# UNIT rekindle_checkpoint_age_seconds seconds",
            "rekindle_checkpoint_age_seconds{vm=\"web\"} 0.5",
            "# TYPE rekindle_checkpoint_written_bytes counter",
            "rekindle_checkpoint_written_bytes_total{vm=\"web\"} 1152921504606846976",
            "rekindle_checkpoint_pause_seconds_count{vm=\"web\"} 4",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in:\n{text}");
        }
        assert!(text.ends_with("# EOF\n"), "{text}");
        let buckets: Vec<_> = text.lines().filter(|line| line.contains("_bucket{")).collect();
        let counts: Vec<_> = buckets.iter().filter_map(|line| line.rsplit(' ').next()).collect();
        assert_eq!(counts, ["2", "3", "4"], "cumulative: {buckets:?}");
    }

    #[test]
    fn the_older_format_has_types_of_whole_names() {
        let text = snapshot().encode(Format::PrometheusText).unwrap();
        assert!(text.contains("# TYPE rekindle_checkpoint_written_bytes_total counter\n"), "{text}");
        assert!(text.contains("rekindle_checkpoint_pause_seconds_bucket{vm=\"web\",le=\"+Inf\"} 4\n"), "{text}");
        assert!(!text.contains("# EOF") && !text.contains("# UNIT"), "{text}");
    }

    #[test]
    fn labels_are_escaped() {
        for format in [Format::OpenMetrics, Format::PrometheusText] {
            let mut snapshot = Snapshot::default();
            snapshot.add(&catalog::CHECKPOINT_AGE, &["a\"b\\c\nd} 9"], Value::Number(1.0));
            let text = snapshot.encode(format).unwrap();
            assert!(text.contains("{vm=\"a\\\"b\\\\c\\nd} 9\"} 1"), "{text}");
        }
    }

    #[test]
    fn each_metric_is_exposed_under_the_name_of_the_reference() {
        for metric in CATALOG {
            let mut snapshot = Snapshot::default();
            let value = match metric.kind {
                Kind::Histogram => Value::Histogram { sum: 0.0, count: 0, buckets: Vec::new() },
                _ => Value::Count(1),
            };
            snapshot.add(metric, &vec!["x"; metric.labels.len()], value);
            let text = snapshot.encode(Format::PrometheusText).unwrap();
            assert!(text.starts_with(&format!("# HELP {} {}\n", metric.name(), metric.help)), "{text}");
        }
    }

    #[test]
    fn the_format_depends_on_the_client() {
        let prometheus = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5,*/*;q=0.2";
        assert_eq!(Format::accepted_by(prometheus), Format::OpenMetrics);
        assert_eq!(Format::accepted_by("*/*"), Format::PrometheusText);
    }
}
