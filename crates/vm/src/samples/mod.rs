//! Samples of the free resources of a host and its guests, over time: `docs/aging-samples.md`.

mod file;

pub use file::{SampleFile, SampleFileError};

use crate::lock;
use crate::rundir::RunDir;
use crate::state::State;
use rekindle_qemu::agent;
use rekindle_qemu::vmm::Vmm;
use serde::Serialize;
use serde_json::Number;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Version of the samples' format.
pub const FORMAT: u32 = 1;
/// Limit for a guest's agent to answer.
const AGENT_TIMEOUT: Duration = Duration::from_secs(3);
// Files in `/proc`.
const BOOT_ID: &str = "sys/kernel/random/boot_id";
const OPEN_FILES: &str = "sys/fs/file-nr";
const MEMINFO: &str = "meminfo";
/// Prefix of the names of values from inside a guest.
const GUEST_PREFIX: &str = "guest_";

/// Values by name; a name includes the unit.
pub type Metrics = BTreeMap<String, Number>;

/// One sample of a host, of a guest's QEMU, or from inside a guest.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Sample {
    format: u32,
    host: String,
    guest: Option<String>,
    unix_s: Number,
    /// Identifies the start of the sampled system: it changes with each boot or new process.
    pub boot: String,
    /// The sampled values.
    #[serde(flatten)]
    pub metrics: Metrics,
}

/// Takes samples of one host.
#[derive(Debug)]
pub struct Sampler {
    host: String,
    /// Boot ID of the host.
    boot: String,
}

impl Sampler {
    /// Makes a sampler for this host.
    ///
    /// # Errors
    /// Errors of reading `/proc`.
    pub fn new() -> io::Result<Self> {
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        Ok(Self { host, boot: read_proc(BOOT_ID)?.trim().into() })
    }

    /// Takes a sample of the host.
    ///
    /// # Errors
    /// Errors of reading `/proc`; [`io::ErrorKind::InvalidData`] if a value is missing.
    pub fn host(&self) -> io::Result<Sample> {
        let mut metrics = parse_meminfo(&read_proc(MEMINFO)?)?;
        metrics.extend(parse_file_nr(&read_proc(OPEN_FILES)?)?);
        Ok(self.sample(None, self.boot.clone(), metrics))
    }

    /// Takes samples of a VM: of its QEMU, and from inside the guest if an agent answers and no operation runs on the
    /// VM. Returns no samples if the QEMU does not run.
    ///
    /// # Errors
    /// When the VM's state cannot be read.
    pub fn vm(&self, rundir: &RunDir) -> io::Result<Vec<Sample>> {
        let state = State::read(rundir).map_err(io::Error::other)?;
        let Some((state, vmm)) = state.and_then(|state| state.vmm.clone().map(|vmm| (state, vmm))) else {
            return Ok(Vec::new());
        };
        // The QEMU may end at any moment.
        let Ok(metrics) = sample_qemu(&vmm) else { return Ok(Vec::new()) };
        let name = rundir.name();
        let mut samples = vec![self.sample(Some(name), format!("{}/{}", self.boot, vmm.pid), metrics)];
        if state.hardware.agent && state.attached.is_none() && lock::running_operation(rundir).is_none() {
            match sample_inside(&vmm.directory().agent()) {
                Ok((boot, metrics)) => samples.push(self.sample(Some(name), boot, metrics)),
                Err(e) => tracing::debug!("{name}: its agent gives no values: {e}"),
            }
        }
        Ok(samples)
    }

    fn sample(&self, guest: Option<&str>, boot: String, metrics: Metrics) -> Sample {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let unix_s = Number::from_f64((now.as_secs_f64() * 1e3).round() / 1e3).unwrap_or_else(|| 0.into());
        Sample { format: FORMAT, host: self.host.clone(), guest: guest.map(Into::into), unix_s, boot, metrics }
    }
}

fn read_proc(name: &str) -> io::Result<String> {
    fs::read_to_string(Path::new("/proc").join(name))
}

fn sample_qemu(vmm: &Vmm) -> io::Result<Metrics> {
    if !vmm.is_alive() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let own = |name: &str| read_proc(&format!("{}/{name}", vmm.pid));
    let resident = parse_kib(&own("status")?, "VmRSS").ok_or_else(|| missing_value("VmRSS"))?;
    let opened = fs::read_dir(format!("/proc/{}/fd", vmm.pid))?.count();
    let mut metrics = Metrics::new();
    insert(&mut metrics, "resident_kib", resident);
    insert(&mut metrics, "open_files", opened as u64);
    let limits = own("limits")?;
    let max_open_files = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next());
    if let Some(limit) = max_open_files.and_then(|number| number.parse().ok()) {
        insert(&mut metrics, "open_files_limit", limit);
    }
    Ok(metrics)
}

/// Returns the guest's boot ID and the same values as of a host, read inside the guest through the agent's `socket`.
fn sample_inside(socket: &Path) -> io::Result<(String, Metrics)> {
    let paths = [BOOT_ID, OPEN_FILES, MEMINFO].map(|name| format!("/proc/{name}"));
    let ran = agent::run(socket, "/bin/cat", &paths.each_ref().map(String::as_str), AGENT_TIMEOUT)
        .map_err(io::Error::other)?;
    parse_guest_values(&ran.stdout)
}

fn parse_guest_values(text: &str) -> io::Result<(String, Metrics)> {
    let mut lines = text.splitn(3, '\n');
    let mut next_part = |name| lines.next().filter(|line| !line.trim().is_empty()).ok_or_else(|| missing_value(name));
    let (boot_id, file_nr, meminfo) = (next_part(BOOT_ID)?, next_part(OPEN_FILES)?, next_part(MEMINFO)?);
    let mut metrics = parse_file_nr(file_nr)?;
    metrics.extend(parse_meminfo(meminfo)?);
    let named = |(name, value): (String, Number)| (format!("{GUEST_PREFIX}{name}"), value);
    Ok((boot_id.trim().into(), metrics.into_iter().map(named).collect()))
}

/// Parses `/proc/meminfo`. Free memory includes the caches.
fn parse_meminfo(text: &str) -> io::Result<Metrics> {
    let kib = |name| parse_kib(text, name).ok_or_else(|| missing_value(name));
    let mut metrics = Metrics::new();
    insert(&mut metrics, "free_memory_kib", kib("MemAvailable")?);
    insert(&mut metrics, "slab_kib", kib("Slab")?);
    insert(&mut metrics, "slab_kib_limit", kib("MemTotal")?);
    let swap = kib("SwapTotal")?;
    if swap > 0 {
        insert(&mut metrics, "swap_used_kib", swap.saturating_sub(kib("SwapFree")?));
        insert(&mut metrics, "swap_used_kib_limit", swap);
    }
    Ok(metrics)
}

/// Parses `/proc/sys/fs/file-nr`.
fn parse_file_nr(text: &str) -> io::Result<Metrics> {
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let &[opened, free, limit] = numbers.as_slice() else { return Err(missing_value(OPEN_FILES)) };
    let mut metrics = Metrics::new();
    insert(&mut metrics, "open_files", opened.saturating_sub(free));
    insert(&mut metrics, "open_files_limit", limit);
    Ok(metrics)
}

fn parse_kib(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn insert(metrics: &mut Metrics, name: &str, value: u64) {
    metrics.insert(name.into(), value.into());
}

fn missing_value(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("there is no {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO_TEXT: &str =
        "MemTotal:        2000 kB\nMemFree:          100 kB\nMemAvailable:    900 kB\nSlab:  70 kB\n";

    #[test]
    fn a_host_without_swap_has_none_used() {
        let text = format!("{MEMINFO_TEXT}SwapTotal: 0 kB\nSwapFree: 0 kB\n");
        let metrics = parse_meminfo(&text).unwrap();
        let names: Vec<_> = metrics.keys().map(String::as_str).collect();
        assert_eq!(names, ["free_memory_kib", "slab_kib", "slab_kib_limit"]);
        assert_eq!(metrics["free_memory_kib"], 900.into());
        let text = format!("{MEMINFO_TEXT}SwapTotal: 50 kB\nSwapFree: 20 kB\n");
        assert_eq!(parse_meminfo(&text).unwrap()["swap_used_kib"], 30.into());
        assert_eq!(parse_meminfo("MemTotal: 1 kB\n").unwrap_err().to_string(), "there is no MemAvailable");
    }

    #[test]
    fn the_values_from_inside_a_guest_are_parsed() {
        let text = format!("5ad1\n300\t12\t9000\n{MEMINFO_TEXT}SwapTotal: 0 kB\nSwapFree: 0 kB\n");
        let (boot, metrics) = parse_guest_values(&text).unwrap();
        assert_eq!(boot, "5ad1");
        assert_eq!(metrics["guest_open_files"], 288.into());
        assert_eq!(metrics["guest_slab_kib"], 70.into());
        assert!(parse_guest_values("5ad1\n300\t12\t9000\n").is_err(), "incomplete");
        assert!(parse_guest_values("").is_err());
    }

    #[test]
    fn this_host_has_memory_and_files() {
        let sampler = Sampler::new().unwrap();
        let sample = sampler.host().unwrap();
        assert!(sample.metrics["free_memory_kib"].as_u64().unwrap() > 0);
        let text = serde_json::to_value(&sample).unwrap();
        assert_eq!((&text["format"], &text["guest"]), (&1.into(), &serde_json::Value::Null));
        assert!(text["open_files"].as_u64().unwrap() > 0 && text["unix_s"].as_f64().unwrap() > 1.7e9);
    }
}
