//! `rekindle metrics`: serves figures of this host's guests to Prometheus, and a page that shows them live.

use crate::cli::Metrics;
use crate::output::Output;
use anyhow::{Context, Result};
use rekindle_libvirt::status_file::SYSTEM_DIRECTORY;
use rekindle_metrics::collect::Collector;
use rekindle_metrics::server::{PAGE_PATH, PATH, Server};
use rekindle_vm::host;
use std::process::ExitCode;

pub fn metrics(output: &Output, arguments: &Metrics) -> Result<ExitCode> {
    let root = host::run_root()?;
    let listen = arguments.listen;
    let server = Server::bind(listen)
        .with_context(|| format!("cannot listen at {listen}; is it in use? Another address: --listen ADDRESS:PORT"))?;
    let address = server.address()?;
    let (url, page) = (format!("http://{address}{PATH}"), format!("http://{address}{PAGE_PATH}"));
    let text = format!("serving the VMs in {}\n  page: {page}\n  metrics: {url}", root.display());
    output.result(&serde_json::json!({"url": url, "page": page}), text)?;
    // A signal ends the process: it has nothing to save.
    match server.run(Collector::new(root, SYSTEM_DIRECTORY.into(), env!("CARGO_PKG_VERSION")))? {}
}
