//! Watching a service, looking at the host, and what comes from the declarations here.

use clap::Args;
use rekindle_vm::definition::{Name, Span};
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Probe {
    /// http://HOST[:PORT]/PATH (keep-alive), tcp://HOST:PORT (connects) or echo://HOST:PORT (one open connection).
    pub url: String,
    /// Time between requests.
    #[arg(long, default_value = "10ms", value_name = "TIME")]
    pub every: Span,
    /// How long to watch [default: until interrupted].
    #[arg(long, value_name = "TIME")]
    pub duration: Option<Span>,
    /// A request with no answer for this long has failed.
    #[arg(long, default_value = "10s", value_name = "TIME")]
    pub timeout: Span,
    /// Connections side by side.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub connections: usize,
    /// Width of the intervals in which throughput is counted.
    #[arg(long, default_value = "100ms", value_name = "TIME")]
    pub interval: Span,
    /// Probe from inside this network namespace.
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
    /// With --json: also one line per interval and gap as they come.
    #[arg(long)]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub struct Monitor {
    /// The VMs [default: all that there are at each time].
    pub names: Vec<Name>,
    /// Append to this file [default: standard output].
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Time between looks.
    #[arg(long, default_value = "60s", value_name = "TIME")]
    pub every: Span,
    /// How many looks [default: until interrupted].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// A service of a VM, whose response time is taken: http://, tcp:// or echo://, as for `probe`.
    #[arg(long = "service", value_name = "NAME=URL")]
    pub services: Vec<String>,
    /// A service that gives no answer for this long has none.
    #[arg(long, default_value = "10s", value_name = "TIME")]
    pub timeout: Span,
    /// Ask services from inside this network namespace.
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// The QEMU to look at.
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "PATH")]
    pub qemu: PathBuf,
}

#[derive(Debug, Args)]
pub struct Completions {
    /// The shell.
    pub shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub struct Man {
    /// The directory.
    pub directory: PathBuf,
}
