//! `rekindle doctor`: prints the findings of the host's checks, with colours on a terminal.

use crate::cli::Doctor;
use crate::output::Output;
use anyhow::Result;
use rekindle_vm::doctor::{Level, examine};
use std::io::IsTerminal;
use std::process::ExitCode;

pub fn doctor(output: &Output, arguments: &Doctor) -> Result<ExitCode> {
    let mut findings = examine(&arguments.qemu);
    findings.extend(rekindle_reboot::host::setup::findings());
    let colour = std::io::stdout().is_terminal();
    let mut text = String::new();
    for finding in &findings {
        let (mark, code) = match finding.level {
            Level::Good => ("ok", 32),
            Level::Limited => ("limited", 33),
            Level::Bad => ("bad", 31),
        };
        let mark = if colour { format!("\x1b[{code}m{mark:8}\x1b[0m") } else { format!("{mark:8}") };
        text += &format!("{mark}{:14}{}\n", finding.check, finding.observation);
        if !finding.hint.is_empty() {
            text += &format!("{:22}-> {}\n", "", finding.hint);
        }
    }
    output.result(&findings, text)?;
    let bad = findings.iter().any(|finding| finding.level == Level::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
