//! `rekindle store`.

use crate::cli::{StoreAt, StoreExport, StoreImport, StoreServe, Tls};
use crate::output::{Output, Usage, bytes, duration};
use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use rekindle_store::admin;
use rekindle_store::export as streams;
use rekindle_store::listing::{ListedCheckpoint, Listing};
use rekindle_store::remote::Identity;
use rekindle_store::remote::server::{Server, Timeouts};
use rekindle_store::types::{Vm, utc};
use rekindle_store::{Image, Options, ReadOptions, StoreError, Writer};
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;
use uuid::Uuid;

/// Returns the TLS identity from the command line.
pub(super) fn identity(tls: &Tls) -> Option<Identity> {
    let Tls { cert: Some(cert), key: Some(key), ca: Some(ca) } = tls else { return None };
    Some(Identity { cert: cert.clone(), key: key.clone(), ca: ca.clone() })
}

pub fn init(output: &Output, arguments: &StoreAt) -> Result<ExitCode> {
    admin::init(&arguments.store, identity(&arguments.tls).as_ref())?;
    let text = format!("{}: new store created; to use it: rekindle protect NAME --store {0}", arguments.store);
    output.result(&json!({"store": arguments.store}), text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn list(output: &Output, arguments: &StoreAt) -> Result<ExitCode> {
    let listing = admin::listing(&arguments.store, identity(&arguments.tls).as_ref())?;
    output.result(&listing, draw(&listing))?;
    let damaged = listing.checkpoints.iter().any(|listed| listed.error.is_some());
    Ok(if damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn draw(listing: &Listing) -> String {
    let Vm { uuid, name } = &listing.vm;
    let mut text = format!("VM {name} ({uuid})\n");
    match &listing.owner {
        Some(owner) => text += &format!("owner epoch {}: {owner}\n", listing.epoch),
        None => text += "no owner yet\n",
    }
    let times = if listing.ram == 0 { 0.0 } else { listing.disk as f64 / listing.ram as f64 };
    text += &format!("{} on the disk, {times:.2} times the RAM of {}\n", bytes(listing.disk), bytes(listing.ram));
    if listing.checkpoints.is_empty() {
        return text + "no checkpoint yet\n";
    }
    let mut table = Table::new();
    let header = ["NUMBER", "TIME", "PAGES", "ZERO", "UNCHANGED", "BYTES", "DEVICES", "EPOCH"];
    table.load_preset(presets::NOTHING).set_header(header);
    for ListedCheckpoint { number, info, error } in &listing.checkpoints {
        match info {
            Some(info) => table.add_row([
                number.to_string(),
                utc(info.time_us),
                info.pages.stored.to_string(),
                info.pages.zero.to_string(),
                info.pages.unchanged.to_string(),
                bytes(info.bytes),
                bytes(info.devices),
                info.epoch.to_string(),
            ]),
            None => table.add_row([number.to_string(), error.clone().unwrap_or_default()]),
        };
    }
    text + &table.trim_fmt()
}

pub fn verify(output: &Output, arguments: &StoreAt) -> Result<ExitCode> {
    let bar = progress(output, "verifying");
    let result = admin::verified(&arguments.store, identity(&arguments.tls).as_ref(), &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let verified = result?;
    let mut text = String::new();
    for bad in &verified.bad {
        text += &format!("bad: {bad}\n");
    }
    for warning in &verified.warnings {
        text += &format!("can be recreated: {warning}\n");
    }
    text += &format!(
        "{} checkpoints, {} pages ({}): {}",
        verified.checkpoints,
        verified.pages,
        bytes(verified.bytes),
        if verified.is_good() { "all good".to_owned() } else { format!("{} bad", verified.bad.len()) }
    );
    output.result(&verified, text)?;
    Ok(if verified.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

pub fn compact(output: &Output, arguments: &StoreAt) -> Result<ExitCode> {
    let freed = admin::compact(&arguments.store, identity(&arguments.tls).as_ref())?;
    output.result(&json!({"freed_bytes": freed}), format!("{} freed", bytes(freed)))?;
    Ok(ExitCode::SUCCESS)
}

pub fn export(output: &Output, arguments: &StoreExport) -> Result<ExitCode> {
    let StoreExport { from, at, output: file, machine } = arguments;
    let to_stdout = file == Path::new("-");
    if to_stdout && output.json() {
        return Err(Usage("--json uses standard output: write the stream to a file, --output FILE".into()).into());
    }
    if to_stdout && io::stdout().is_terminal() {
        return Err(Usage(
            "standard output is a terminal: write the stream to a file, --output FILE, or to a pipe".into(),
        )
        .into());
    }
    let which = ReadOptions { at: *at, identity: identity(&from.tls), ..ReadOptions::default() };
    let image = Image::open(&from.store, &which)?;
    let bar = progress(output, "exporting");
    let mut step = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let machine = machine.as_deref();
    let written = if to_stdout {
        streams::export(&image, &mut io::stdout().lock(), machine, &mut step).map_err(anyhow::Error::from)
    } else {
        whole_file(file, |out| Ok(streams::export(&image, out, machine, &mut step)?))
    };
    bar.finish_and_clear();
    let (written, number) = (written?, image.info().number);
    let text = format!("checkpoint {number} of VM {}: {}", image.vm().name, bytes(written));
    if to_stdout {
        eprintln!("{text}");
    } else {
        output.result(&json!({"checkpoint": number, "bytes": written, "file": file}), text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a file that only its owner can read. The file appears only when it is complete. A pipe or a device is written
/// to directly.
fn whole_file<T>(file: &Path, write: impl FnOnce(&mut dyn Write) -> Result<T>) -> Result<T> {
    if fs::metadata(file).is_ok_and(|there| !there.is_file()) {
        let mut out = OpenOptions::new().write(true).open(file).with_context(|| format!("{}", file.display()))?;
        return write(&mut out);
    }
    let mut partial = file.as_os_str().to_owned();
    partial.push(".part");
    let partial = Path::new(&partial);
    let named = || format!("{}", partial.display());
    let made = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(partial);
    let mut out = made.with_context(named)?;
    let written = write(&mut out).and_then(|done| {
        out.sync_data().with_context(named)?;
        fs::rename(partial, file).with_context(|| format!("{}", file.display()))?;
        Ok(done)
    });
    if written.is_err() {
        let _ = fs::remove_file(partial);
    }
    written
}

pub fn import(output: &Output, arguments: &StoreImport) -> Result<ExitCode> {
    let StoreImport { to, file, create_store, name, uuid, keep } = arguments;
    let identity = identity(&to.tls);
    let vm = match (admin::listing(&to.store, identity.as_ref()), name) {
        (Ok(found), None) => found.vm,
        (Ok(found), Some(name)) => {
            // The writer checks that this VM is the store's.
            Vm { uuid: uuid.unwrap_or(found.vm.uuid), name: name.to_string() }
        }
        (Err(e), Some(name)) if *create_store && e.is_no_store() || matches!(e, StoreError::Unused { .. }) => {
            Vm { uuid: uuid.unwrap_or_else(Uuid::new_v4), name: name.to_string() }
        }
        (Err(StoreError::Unused { store }), None) => {
            return Err(
                Usage(format!("{store}: a new store, without a VM yet; give the VM's name: --name NAME")).into()
            );
        }
        (Err(e), _) => return Err(e.into()),
    };
    let from: Box<dyn Read> = if file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(file).with_context(|| format!("{}", file.display()))?)
    };
    let options = Options { keep: *keep, identity, create: *create_store, ..Options::new(vm, "store import") };
    let mut writer = Writer::open(&to.store, &options)?;
    let bar = progress(output, "importing");
    let done = streams::import(&mut writer, BufReader::with_capacity(1 << 20, from), &Value::Null, &mut |pages| {
        bar.set_length(pages * 4096);
        bar.set_position(pages * 4096);
    });
    bar.finish_and_clear();
    let done = done?;
    // Settling only makes the next start faster, so its failure is no error.
    if let Err(e) = writer.settle() {
        tracing::warn!("{e}");
    }
    let text = format!(
        "checkpoint {}: {} pages, {}, in {}",
        done.number,
        done.pages.stored,
        bytes(done.bytes),
        duration((done.writing + done.syncing).as_micros() as u64)
    );
    output.result(&done, text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn serve(output: &Output, arguments: &StoreServe) -> Result<ExitCode> {
    let StoreServe { listen, dir, cert, key, client_ca, idle } = arguments;
    let identity = Identity { cert: cert.clone(), key: key.clone(), ca: client_ca.clone() };
    let patience = Timeouts { idle: idle.as_duration(), ..Timeouts::default() };
    let server = Server::bind(listen, dir, &identity)?.with_timeouts(patience);
    let address = server.address().map_err(|source| StoreError::Io {
        store: dir.display().to_string(),
        file: String::new(),
        doing: "reading its address",
        source,
    })?;
    let stop = server.stopper();
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let handle = signals.handle();
    let waiting = thread::spawn(move || {
        if signals.forever().next().is_some() {
            stop.stop();
        }
    });
    output.result(&json!({"listening": address, "directory": dir}), format!("listening on {address}"))?;
    let served = server.run();
    handle.close();
    let _ = waiting.join();
    served?;
    Ok(ExitCode::SUCCESS)
}

/// Shows a progress bar with rate and remaining time, if standard error is a terminal.
fn progress(output: &Output, what: &'static str) -> ProgressBar {
    if output.json() || !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(5)).with_message(what);
    let template = "{msg} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}";
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_secs(1));
    bar
}
