//! The command line of Rekindle. Each command is a file under `commands`, which calls the crate that does the work.
//!
//! Exit status: 0 done; 1 failed and the guest is unchanged; 2 wrong usage; 3 failed and the guest needs `recover`.

mod cli;
mod commands;
mod output;
mod progress;

use anyhow::Result;
use cli::{Command, Disk, PreviousName, Reboot, Store};
use output::Output;
use rekindle_kernel::descriptor_limit;
use std::process::ExitCode;

fn main() -> ExitCode {
    let parsed = cli::parse();
    let level = tracing_subscriber::EnvFilter::try_from_env("REKINDLE_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(level).with_writer(std::io::stderr).without_time().init();
    let is_json = |word: std::ffi::OsString| word == "--json";
    let output = Output::new(parsed.as_ref().map_or_else(|_| std::env::args_os().any(is_json), |cli| cli.json));
    let result = parsed.map_err(anyhow::Error::from);
    let result = result.and_then(|cli| check_descriptor_limit(&cli.command).and_then(|()| run(&output, cli.command)));
    match result {
        Ok(status) => status,
        Err(error) => {
            output.error(&error);
            ExitCode::from(output::exit_status_of(&error))
        }
    }
}

/// Rejects a command that could run out of descriptors, before it has changed anything. Commands that end guests or print
/// something are not rejected.
fn check_descriptor_limit(command: &Command) -> Result<()> {
    use Command as C;
    let runs_guests = matches!(
        command,
        C::Run(_)
            | C::Attach(_)
            | C::Detach(_)
            | C::ReplaceQemu(_)
            | C::Reboot(_)
            | C::RebootHost(_)
            | C::Host(_)
            | C::Watch(_)
            | C::Phases(_)
            | C::Recover(_)
            | C::Protect(_)
            | C::Restore(_)
            | C::Move(_)
            | C::Receive
            | C::Pager(_)
            | C::Disk(Disk::Serve(_))
    );
    if runs_guests {
        descriptor_limit::require(commands::DESCRIPTORS_TO_RUN_GUESTS)?;
    }
    Ok(())
}

fn run(output: &Output, command: Command) -> Result<ExitCode> {
    match command {
        Command::Run(arguments) => commands::run::run(output, arguments),
        Command::Ls => commands::show::list(output),
        Command::Status(arguments) => commands::status::status(output, &arguments),
        Command::Validate(arguments) => commands::validate::validate(output, &arguments),
        Command::Pause(arguments) => commands::pause::pause(output, &arguments),
        Command::Resume(arguments) => commands::pause::resume(output, &arguments),
        Command::Show(arguments) => commands::show::show(output, &arguments),
        Command::Events(arguments) => commands::events::events(output, &arguments),
        Command::Console(arguments) => commands::console::console(&arguments),
        Command::Stop(arguments) => commands::stop::stop(output, &arguments),
        Command::Attach(arguments) => commands::attach::attach(output, arguments),
        Command::Detach(arguments) => commands::attach::detach(output, &arguments),
        Command::ReplaceQemu(arguments) => commands::reboot_vmm::reboot_vmm(output, &arguments),
        Command::Reboot(arguments) => reboot(output, arguments),
        Command::RebootHost(arguments) => commands::host::reboot(output, &arguments),
        Command::Host(command) => commands::host::run(output, &command),
        Command::Watch(arguments) => commands::helpers::watch(&arguments),
        Command::Phases(arguments) => commands::helpers::phases(&arguments),
        Command::Recover(arguments) => commands::recover::recover(output, &arguments),
        Command::Protect(arguments) => commands::protect::protect(output, &arguments),
        Command::Release(arguments) => commands::protect::release(output, &arguments),
        Command::Restore(arguments) => commands::restore::restore(output, &arguments),
        Command::Move(arguments) => commands::moving::start_move(output, &arguments),
        Command::Receive => commands::moving::receive(),
        Command::Pager(arguments) => commands::restore::pager(output, &arguments),
        Command::Disk(disk) => commands::disk::run(output, disk),
        Command::Store(Store::Init(arguments)) => commands::store::init(output, &arguments),
        Command::Store(Store::Forget(arguments)) => commands::store::forget(output, &arguments),
        Command::Store(Store::NewKey(arguments)) => commands::store::new_key(output, &arguments),
        Command::Store(Store::Ls(arguments)) => commands::store::list(output, &arguments),
        Command::Store(Store::Verify(arguments)) => commands::store::verify(output, &arguments),
        Command::Store(Store::Compact(arguments)) => commands::store::compact(output, &arguments),
        Command::Store(Store::Export(arguments)) => commands::store::export(output, &arguments),
        Command::Store(Store::Import(arguments)) => commands::store::import(output, &arguments),
        Command::Ocf(command) => commands::ocf::run(output, &command),
        Command::Probe(arguments) => commands::probe::probe(output, &arguments),
        Command::Monitor(arguments) => commands::monitor::monitor(output, &arguments),
        Command::Metrics(arguments) => commands::metrics::metrics(output, &arguments),
        Command::Doctor(arguments) => commands::doctor::doctor(output, &arguments),
        Command::Names => commands::generate::names(output),
        Command::Completions(arguments) => commands::generate::completions(&arguments),
        Command::Man(arguments) => commands::generate::man(&arguments),
    }
}

fn reboot(output: &Output, arguments: Reboot) -> Result<ExitCode> {
    match (arguments.previous_name, arguments.guest) {
        (Some(PreviousName::Vmm(arguments)), _) => commands::reboot_vmm::reboot_vmm(output, &arguments),
        (Some(PreviousName::Host(arguments)), _) => commands::host::reboot(output, &arguments),
        (Some(PreviousName::Os(arguments)), _) | (None, Some(arguments)) => {
            commands::reboot_os::reboot_os(output, &arguments)
        }
        (None, None) => Err(output::Usage("reboot: name the VM: rekindle reboot NAME".into()).into()),
    }
}
