//! `rekindle store`: creates, lists, verifies, compacts, exports and imports stores of checkpoints.

use crate::cli::{NameOnly, StoreAt, StoreCredentials, StoreExport, StoreImport, StoreNewKey};
use crate::output::{Output, Usage, bytes, duration};
use crate::progress::start_progress_bar;
use anyhow::{Context, Result};
use comfy_table::{Table, presets};
use rekindle_protect::known_store::KnownStoreFile;
use rekindle_protect::save_image;
use rekindle_store::admin;
use rekindle_store::export as stream;
use rekindle_store::keys::{KeySource, NewKey};
use rekindle_store::listing::{ListedCheckpoint, Listing};
use rekindle_store::types::{Vm, utc};
use rekindle_store::{Credentials, EnvironmentFile, Image, Options, ReadOptions, StoreError, Writer};
use rekindle_vm::host::Host;
use rekindle_vm::rundir::sync_directory;
use serde_json::{Value, json};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, IsTerminal, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::ExitCode;
use uuid::Uuid;

const PAGE_BYTES: u64 = 4096;
const READ_BUFFER_BYTES: usize = 1 << 20;

/// Returns the credentials from the command line.
pub(super) fn credentials(arguments: &StoreCredentials) -> Option<Credentials> {
    let StoreCredentials { key_file, key_command, environment_file } = arguments.clone();
    let keys = key_file.map(KeySource::File).or(key_command.map(KeySource::Command));
    let environment_file = environment_file.as_deref().map(EnvironmentFile::new);
    let credentials = Credentials { keys, environment_file, ..Credentials::default() };
    Some(credentials).filter(|credentials| *credentials != Credentials::default())
}

pub fn init(output: &Output, arguments: &StoreAt) -> Result<ExitCode> {
    let credentials = credentials(&arguments.credentials);
    if credentials.as_ref().is_some_and(|credentials| credentials.keys.is_some()) {
        let text = "a new store has nothing to encrypt; leave out the key, and give it to the command that uses the store \
                    first: the store is encrypted from then on";
        return Err(Usage(text.into()).into());
    }
    admin::init(&arguments.store, credentials.as_ref())?;
    let text = format!("{}: new store created; to use it: rekindle protect NAME --store {0}", arguments.store);
    output.result(&json!({"store": arguments.store}), text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn new_key(output: &Output, arguments: &StoreNewKey) -> Result<ExitCode> {
    let key = NewKey::generate()?;
    let Some(path) = &arguments.file else {
        if io::stdout().is_terminal() {
            let text = "standard output is a terminal: name a file, or write the key to a pipe";
            return Err(Usage(text.into()).into());
        }
        if output.json() {
            return Err(Usage("--json uses standard output: name a file for the key".into()).into());
        }
        io::stdout().write_all(key.line.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    };
    let name = || path.display().to_string();
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).with_context(|| {
        format!("no key file {} was created; write the path of a new file in a directory that exists", path.display())
    })?;
    let written = file.write_all(key.line.as_bytes()).and_then(|()| file.sync_all());
    // The name must survive a crash, too: without the key, no checkpoint can be restored.
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Err(e) = written.and_then(|()| sync_directory(directory)) {
        let _ = fs::remove_file(path);
        return Err(e).with_context(name);
    }
    let text = format!(
        "{}: new key {}; keep a copy in a safe place: without it, no checkpoint can be restored; to use it: rekindle protect \
         NAME --store STORE --key-file {0}",
        path.display(),
        key.id
    );
    output.result(&json!({"file": path, "key": key.id.to_string()}), text)?;
    Ok(ExitCode::SUCCESS)
}

pub fn forget(output: &Output, arguments: &NameOnly) -> Result<ExitCode> {
    let name = arguments.name.as_str();
    let was_known = KnownStoreFile::of(&Host::open()?, name).forget()?;
    let text = match was_known {
        true => "this host has forgotten its store, and accepts any",
        false => "this host knows nothing of its store",
    };
    output.result(&json!({"name": name, "forgotten": was_known}), format!("{name}: {text}"))?;
    Ok(ExitCode::SUCCESS)
}

pub fn list(output: &Output, arguments: &StoreAt) -> Result<ExitCode> {
    let listing = admin::listing(&arguments.store, credentials(&arguments.credentials).as_ref())?;
    output.result(&listing, describe(&listing))?;
    let is_damaged = listing.checkpoints.iter().any(|listed| listed.error.is_some());
    Ok(if is_damaged { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn describe(listing: &Listing) -> String {
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
    let bar = start_progress_bar(output, "verifying");
    let result = admin::verified(&arguments.store, credentials(&arguments.credentials).as_ref(), &mut |done, total| {
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
    let freed = admin::compact(&arguments.store, credentials(&arguments.credentials).as_ref())?;
    output.result(&json!({"freed_bytes": freed}), format!("{} freed", bytes(freed)))?;
    Ok(ExitCode::SUCCESS)
}

pub fn export(output: &Output, arguments: &StoreExport) -> Result<ExitCode> {
    let StoreExport { from, at, output: file, machine, libvirt: for_libvirt } = arguments;
    let is_to_stdout = file == Path::new("-");
    let usage = |text: &str| Err(Usage(text.into()).into());
    if is_to_stdout && output.json() {
        return usage("--json uses standard output: write the stream to a file, --output FILE");
    }
    if is_to_stdout && io::stdout().is_terminal() {
        return usage("standard output is a terminal: write the stream to a file, --output FILE, or to a pipe");
    }
    let options = ReadOptions { at: *at, credentials: credentials(&from.credentials), ..ReadOptions::default() };
    let image = Image::open(&from.store, &options)?;
    let bar = start_progress_bar(output, "exporting");
    let mut show_progress = |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    };
    let mut export = |out: &mut dyn Write| -> Result<u64> {
        Ok(match for_libvirt {
            true => save_image::write(&image, out, &mut show_progress)?,
            false => stream::export(&image, out, machine.as_deref(), &mut show_progress)?,
        })
    };
    let exported = if is_to_stdout { export(&mut io::stdout().lock()) } else { write_file(file, export) };
    bar.finish_and_clear();
    let (exported_bytes, number) = (exported?, image.info().number);
    let text = format!("checkpoint {number} of VM {}: {}", image.vm().name, bytes(exported_bytes));
    if is_to_stdout {
        eprintln!("{text}");
    } else {
        output.result(&json!({"checkpoint": number, "bytes": exported_bytes, "file": file}), text)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes a file that only its owner can read. The file appears only when it is complete. A pipe or a device is written
/// to directly. Returns the result of `write`.
fn write_file<T>(path: &Path, write: impl FnOnce(&mut dyn Write) -> Result<T>) -> Result<T> {
    if fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()) {
        let mut pipe = OpenOptions::new().write(true).open(path).with_context(|| path.display().to_string())?;
        return write(&mut pipe);
    }
    let mut partial_path = path.as_os_str().to_owned();
    partial_path.push(".part");
    let partial_path = Path::new(&partial_path);
    let partial_name = || partial_path.display().to_string();
    let created = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(partial_path);
    let mut file = created.with_context(partial_name)?;
    let written = write(&mut file).and_then(|result| {
        file.sync_data().with_context(partial_name)?;
        fs::rename(partial_path, path).with_context(|| path.display().to_string())?;
        Ok(result)
    });
    if written.is_err() {
        let _ = fs::remove_file(partial_path);
    }
    written
}

pub fn import(output: &Output, arguments: &StoreImport) -> Result<ExitCode> {
    let StoreImport { to, file, create_store, keep, .. } = arguments;
    let credentials = credentials(&to.credentials);
    let vm = importing_vm(arguments, credentials.as_ref())?;
    let input: Box<dyn Read> = if file == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(File::open(file).with_context(|| file.display().to_string())?)
    };
    let input = BufReader::with_capacity(READ_BUFFER_BYTES, input);
    let options = Options { keep: *keep, credentials, create: *create_store, ..Options::new(vm, "store import") };
    let mut writer = Writer::open(&to.store, &options)?;
    let bar = start_progress_bar(output, "importing");
    let imported = stream::import(&mut writer, input, &Value::Null, &mut |pages| {
        bar.set_length(pages * PAGE_BYTES);
        bar.set_position(pages * PAGE_BYTES);
    });
    bar.finish_and_clear();
    let commit = imported?;
    // Settling only makes the next start faster, so its failure is no error.
    if let Err(e) = writer.settle() {
        tracing::warn!("{e}");
    }
    let text = format!(
        "checkpoint {}: {} pages, {}, in {}",
        commit.number,
        commit.pages.stored,
        bytes(commit.bytes),
        duration((commit.writing + commit.syncing).as_micros() as u64)
    );
    output.result(&commit, text)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the VM to which the imported checkpoint belongs: the store's, or the named one for a new store.
fn importing_vm(arguments: &StoreImport, credentials: Option<&Credentials>) -> Result<Vm> {
    let StoreImport { to, create_store, name, uuid, .. } = arguments;
    match (admin::listing(&to.store, credentials), name) {
        (Ok(listing), None) => Ok(listing.vm),
        // The writer checks that this VM is the store's.
        (Ok(listing), Some(name)) => Ok(Vm { uuid: uuid.unwrap_or(listing.vm.uuid), name: name.to_string() }),
        (Err(e), Some(name)) if *create_store && e.is_no_store() || matches!(e, StoreError::Unused { .. }) => {
            Ok(Vm { uuid: uuid.unwrap_or_else(Uuid::new_v4), name: name.to_string() })
        }
        (Err(StoreError::Unused { store }), None) => {
            Err(Usage(format!("{store}: a new store, without a VM yet; give the VM's name: --name NAME")).into())
        }
        (Err(e), _) => Err(e.into()),
    }
}
