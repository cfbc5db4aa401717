//! Arguments of `rekindle probe`, `monitor`, `metrics`, `doctor`, `completions` and `man`.

use clap::Args;
use rekindle_vm::definition::{Name, Span};
use std::net::SocketAddr;
use std::path::PathBuf;

#[derive(Debug, Args)]
pub struct Probe {
    /// http://HOST[:PORT]/PATH (keep-alive), tcp://HOST:PORT (connects) or echo://HOST:PORT (one open connection).
    pub url: String,
    /// Time between requests.
    #[arg(long, default_value = "10ms", value_name = "TIME")]
    pub every: Span,
    /// How long to probe [default: until interrupted].
    #[arg(long, value_name = "TIME")]
    pub duration: Option<Span>,
    /// A request that is not answered within this time has failed.
    #[arg(long, default_value = "10s", value_name = "TIME")]
    pub timeout: Span,
    /// Concurrent connections.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub connections: usize,
    /// Length of the intervals for which throughput is reported.
    #[arg(long, default_value = "100ms", value_name = "TIME")]
    pub interval: Span,
    /// Probe from inside this network namespace.
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
    /// With --json: also print one line for each interval and gap as it happens.
    #[arg(long)]
    pub follow: bool,
}

#[derive(Debug, Args)]
pub struct Monitor {
    /// The VMs [default: all that exist at the time of each sample].
    pub names: Vec<Name>,
    /// Append to this file [default: standard output].
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Time between samples.
    #[arg(long, default_value = "60s", value_name = "TIME")]
    pub every: Span,
    /// The number of samples [default: until interrupted].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// A service of a VM whose response time is measured: http://, tcp:// or echo://, as for `rekindle probe`.
    #[arg(long = "service", value_name = "NAME=URL")]
    pub services: Vec<String>,
    /// A service that does not answer within this time has no response time.
    #[arg(long, default_value = "10s", value_name = "TIME")]
    pub timeout: Span,
    /// Connect to services from inside this network namespace.
    #[arg(long, value_name = "NAME")]
    pub netns: Option<String>,
}

#[derive(Debug, Args)]
pub struct Metrics {
    /// The address and port at which to answer scrapes. There is no authentication: use a loopback address, or a network
    /// that only your monitoring can reach.
    #[arg(long, env = "REKINDLE_METRICS_LISTEN", default_value = "127.0.0.1:19750", value_name = "ADDRESS:PORT")]
    pub listen: SocketAddr,
}

#[derive(Debug, Args)]
pub struct Doctor {
    /// Also check this VM or libvirt domain: what each technique would do to it.
    pub name: Option<Name>,
    /// The QEMU to check.
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
