//! Shell completions and man pages, generated from the declared commands and flags.

use super::man_pages;
use crate::cli::{self, Completions, Man};
use anyhow::{Context, Result};
use std::io;
use std::process::ExitCode;

pub fn completions(arguments: &Completions) -> Result<ExitCode> {
    clap_complete::generate(arguments.shell, &mut cli::command(), "rekindle", &mut io::stdout());
    Ok(ExitCode::SUCCESS)
}

pub fn man(arguments: &Man) -> Result<ExitCode> {
    let directory = &arguments.directory;
    man_pages::write_pages(cli::command(), directory).with_context(|| directory.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}
