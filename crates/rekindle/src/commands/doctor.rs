//! `rekindle doctor`: prints the findings of the checks of the host, and of one guest, with colours on a terminal.

use super::guest_findings::guest_findings;
use crate::cli::Doctor;
use crate::output::Output;
use anyhow::Result;
use rekindle_vm::doctor::{Level, examine};
use rekindle_vm::host::Host;
use std::io::IsTerminal;
use std::process::ExitCode;

pub fn doctor(output: &Output, arguments: &Doctor) -> Result<ExitCode> {
    let mut findings = examine(&arguments.qemu);
    findings.extend(rekindle_reboot::host::setup::findings());
    if let Some(name) = &arguments.name {
        findings.extend(guest_findings(output, &Host::open()?, name.as_str())?);
    }
    let colour = std::io::stdout().is_terminal();
    let mut text = String::new();
    for finding in &findings {
        let (mark, code) = match finding.level {
            Level::Good => ("ok", 32),
            Level::Limited => ("limited", 33),
            Level::Bad => ("bad", 31),
        };
        let mark = if colour { format!("\x1b[{code}m{mark:8}\x1b[0m") } else { format!("{mark:8}") };
        let observation = finding.observation.replace('\n', &format!("\n{:27}", ""));
        text += &format!("{mark}{:19}{observation}\n", finding.check);
        if !finding.hint.is_empty() {
            text += &format!("{:27}-> {}\n", "", finding.hint);
        }
    }
    output.result(&findings, text)?;
    let bad = findings.iter().any(|finding| finding.level == Level::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
