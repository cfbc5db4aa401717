//! `rekindle store`: what an administrator does with fail-over images.

use crate::cli::{Export, Store, StoreOnly};
use crate::output::Output;
use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use rekindle_protect::recipe::Recipe;
use rekindle_store::listing::Listing;
use rekindle_store::types::utc;
use rekindle_store::{Image, Which, admin, export};
use serde_json::json;
use std::fs::OpenOptions;
use std::io::{IsTerminal, Write, stdout};
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

pub fn store(output: &Output, command: &Store) -> Result<ExitCode> {
    match command {
        Store::Ls(arguments) => list(output, arguments),
        Store::Verify(arguments) => verify(output, arguments),
        Store::Compact(arguments) => compact(output, arguments),
        Store::Export(arguments) => write_stream(output, arguments),
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// A bar with rate and time left, where somebody sees it.
fn bar(output: &Output) -> ProgressBar {
    if output.json() || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
    let bar = ProgressBar::new(0);
    if let Ok(style) = style {
        bar.set_style(style);
    }
    bar
}

fn list(output: &Output, arguments: &StoreOnly) -> Result<ExitCode> {
    let listing = admin::listing(&arguments.store, None)?;
    output.result(&listing, text(&listing))?;
    Ok(ExitCode::SUCCESS)
}

fn text(listing: &Listing) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(["CHECKPOINT", "TIME", "PAGES", "WRITTEN", "DEVICES", ""]);
    for listed in &listing.checkpoints {
        let number = listed.number.to_string();
        let row = match &listed.info {
            Some(info) => [
                number,
                utc(info.time_us),
                info.pages.stored.to_string(),
                mib(info.bytes),
                format!("{} KiB", info.devices >> 10),
                String::new(),
            ],
            None => {
                let why = listed.error.clone().unwrap_or_default();
                [number, String::new(), String::new(), String::new(), String::new(), why]
            }
        };
        table.add_row(row);
    }
    let owner = listing.owner.as_ref().map_or("nobody yet".to_owned(), ToString::to_string);
    format!(
        "{} ({}), owner epoch {}: {owner}\n{} on disk, {} of RAM\n{}",
        listing.vm.name,
        listing.vm.uuid,
        listing.epoch,
        mib(listing.disk),
        mib(listing.ram),
        table.trim_fmt()
    )
}

fn verify(output: &Output, arguments: &StoreOnly) -> Result<ExitCode> {
    let bar = bar(output);
    let mut progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let verified = admin::verified(&arguments.store, None, &mut progress)?;
    bar.finish_and_clear();
    let mut text = format!("{} checkpoints, {} pages, {}: ", verified.checkpoints, verified.pages, mib(verified.bytes));
    text += if verified.is_good() { "all as it was written" } else { "damaged" };
    for bad in &verified.bad {
        text += &format!("\n  bad: {bad}");
    }
    for warning in &verified.warnings {
        text += &format!("\n  can be made anew: {warning}");
    }
    output.result(&verified, text)?;
    Ok(if verified.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn compact(output: &Output, arguments: &StoreOnly) -> Result<ExitCode> {
    let freed = admin::compact(&arguments.store, None)?;
    output.result(&json!({ "freed_bytes": freed }), format!("{} freed", mib(freed)))?;
    Ok(ExitCode::SUCCESS)
}

fn write_stream(output: &Output, arguments: &Export) -> Result<ExitCode> {
    let image = Image::open(&arguments.store, &Which { at: arguments.at, ..Which::default() })?;
    let machine =
        if arguments.configuration { Some(Recipe::read(&image.definition()?)?.hardware.machine) } else { None };
    let bar = bar(output);
    let mut progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let number = image.info().number;
    let bytes = match &arguments.file {
        None => export::export(&image, &mut stdout().lock(), machine.as_deref(), &mut progress)?,
        Some(path) => {
            let named = || format!("{}", path.display());
            let mut options = OpenOptions::new();
            let mut file = options.write(true).create_new(true).mode(0o600).open(path).with_context(named)?;
            let written = export::export(&image, &mut file, machine.as_deref(), &mut progress);
            let synced = written.and_then(|bytes| file.sync_all().map(|()| bytes).map_err(export::ExportError::Write));
            if synced.is_err() {
                let _ = std::fs::remove_file(path);
            }
            synced.with_context(named)?
        }
    };
    bar.finish_and_clear();
    if arguments.file.is_some() {
        let text = format!("checkpoint {number}: {} written", mib(bytes));
        output.result(&json!({ "checkpoint": number, "bytes": bytes }), text)?;
    } else {
        stdout().flush()?;
    }
    Ok(ExitCode::SUCCESS)
}
