//! Manual pages: what clap_mangen makes of the declared commands, and sections on examples, exit status, files and environment.

use clap::Command;
use clap_mangen::Man;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

/// Exit status and its meaning.
const EXIT_STATUS: &[(&str, &str)] = &[
    ("0", "Done."),
    ("1", "Failed; the guest is unchanged."),
    ("2", "Wrong usage."),
    ("3", "Failed; the guest needs rekindle recover."),
];
/// The additional exit status of `rekindle ocf monitor`, as OCF defines it.
const MONITOR_STATUS: &[(&str, &str)] = &[("7", "The VM does not run."), ("190", "The VM is degraded.")];

/// A file or variable, and commands that use it: the first words of their names. No words: all commands but [`ALONE`].
struct Entry {
    name: &'static str,
    text: &'static str,
    commands: &'static [&'static str],
}

const fn entry(name: &'static str, text: &'static str, commands: &'static [&'static str]) -> Entry {
    Entry { name, text, commands }
}

/// Commands that use nothing of the host.
const ALONE: &[&str] = &["probe"];
/// Commands whose VMs may have checkpoints in a store.
const STORE_USERS: &[&str] = &["protect", "restore", "move", "store", "pager", "ocf", "run"];
/// Commands that suspend and resume guests, or write their RAM.
const SUSPENDERS: &[&str] = &["host", "reboot", "recover", "replace-qemu", "run", "stop"];

/// What an administrator of root's VMs finds where. Another user's files are in `$XDG_RUNTIME_DIR` and `$XDG_STATE_HOME`.
const FILES: &[Entry] = &[
    entry("/etc/rekindle/host.toml", "Configuration of the host.", &[]),
    entry("/etc/rekindle/NAME.toml", "Definitions of VMs that the resource agent starts.", &["ocf", "run"]),
    entry(
        "/etc/rekindle/protect/NAME.toml",
        "Options of rekindle protect, also in rekindle-protect@NAME.service. Another user's is in \
         $XDG_CONFIG_HOME/rekindle/protect.",
        &["protect"],
    ),
    entry("/run/rekindle/NAME", "Run directory of a VM. Another user's is in $XDG_RUNTIME_DIR/rekindle.", &[]),
    entry("/var/log/rekindle/NAME", "Logs of a VM. Another user's are in $XDG_STATE_HOME/rekindle/log.", &[]),
    entry("/var/lib/rekindle/saved", "RAM of guests that a reboot saves, and boot snapshots.", SUSPENDERS),
    entry("/var/lib/rekindle/suspended", "Records of guests that are suspended for a reboot of the host.", SUSPENDERS),
    entry("/var/lib/rekindle/ram", "Mount point of the RAM that rekindle host init reserves.", &["host", "reboot"]),
    entry("/var/lib/rekindle/stores", "What this host knows of the stores of its VMs.", STORE_USERS),
];
const ENVIRONMENT: &[Entry] = &[
    entry("REKINDLE_METRICS_LISTEN", "Address and port, if --listen does not give them.", &["metrics"]),
    entry("REKINDLE_RUN_DIR", "Directory of the run directories.", &[]),
    entry("REKINDLE_LOG_DIR", "Directory of the logs.", &[]),
    entry("REKINDLE_HOST_CONFIG", "File to use in place of /etc/rekindle/host.toml.", &[]),
    entry(
        "AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY",
        "Server and credentials of an object store, if --environment-file does not name a file with them.",
        STORE_USERS,
    ),
];
/// The variable that all commands use.
const LOG_LEVEL: (&str, &str) =
    ("REKINDLE_LOG", "What is logged to standard error: error, warn, info, debug or trace. Default: warn.");

/// Writes a page for each command that is not hidden.
///
/// # Errors
/// Errors of making the directory and writing to it.
pub(super) fn write_pages(command: Command, directory: &Path) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write_with_subcommands(&command, directory)
}

fn write_with_subcommands(command: &Command, directory: &Path) -> io::Result<()> {
    for subcommand in command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()) {
        write_with_subcommands(subcommand, directory)?;
    }
    let page = Man::new(command.clone()).manual("Rekindle").source(concat!("rekindle ", env!("CARGO_PKG_VERSION")));
    let mut text = Vec::new();
    render(command, &page, &mut text)?;
    fs::write(directory.join(page.get_filename()), text)
}

fn render(command: &Command, page: &Man, out: &mut Vec<u8>) -> io::Result<()> {
    page.render_title(out)?;
    page.render_name_section(out)?;
    page.render_synopsis_section(out)?;
    page.render_description_section(out)?;
    page.render_options_section(out)?;
    let name = command.get_display_name().unwrap_or_else(|| command.get_name());
    // `rekindle-store-ls`: store ls.
    let words: Vec<_> = name.split('-').skip(1).collect();
    let path = words.join("-");
    if command.get_subcommands().any(|subcommand| !subcommand.is_hide_set()) {
        page.render_subcommands_section(out)?;
    }
    exit_status(&path, out)?;
    section("FILES", entries(FILES, &path).into_iter(), out)?;
    let variables = entries(ENVIRONMENT, &path).into_iter().chain([LOG_LEVEL]);
    section(
        "ENVIRONMENT",
        variables.chain(option_variables(command).iter().map(|(a, b)| (a.as_str(), b.as_str()))),
        out,
    )?;
    examples(command, out)?;
    if !path.is_empty() {
        writeln!(out, ".SH \"SEE ALSO\"\n.BR rekindle (1)")?;
    }
    Ok(())
}

/// Returns the entries that concern the command `path`, such as `store-ls`. All of them for the program itself.
fn entries(table: &'static [Entry], path: &str) -> Vec<(&'static str, &'static str)> {
    let starts_with_one_of =
        |commands: &[&str]| commands.iter().any(|command| path == *command || path.starts_with(&format!("{command}-")));
    let concerns = |entry: &&Entry| match entry.commands {
        _ if path.is_empty() => true,
        [] => !starts_with_one_of(ALONE),
        commands => starts_with_one_of(commands),
    };
    table.iter().filter(concerns).map(|entry| (entry.name, entry.text)).collect()
}

/// Returns the variables that give a value to an option.
fn option_variables(command: &Command) -> Vec<(String, String)> {
    let variable = |argument: &clap::Arg| {
        let (name, option) = (argument.get_env()?.to_str()?.to_owned(), argument.get_long()?);
        Some((name, format!("Value of --{option}, if that is not given.")))
    };
    command.get_arguments().filter_map(variable).collect()
}

fn exit_status(path: &str, out: &mut Vec<u8>) -> io::Result<()> {
    let more = if path == "ocf-monitor" { MONITOR_STATUS } else { &[] };
    section("EXIT STATUS", EXIT_STATUS.iter().chain(more).copied(), out)?;
    if path.is_empty() {
        writeln!(out, ".PP\n{}", escaped("For several guests, it is the highest status of any of them."))?;
    }
    Ok(())
}

/// Writes a section of tagged paragraphs, unless it is empty.
fn section<'a>(title: &str, entries: impl Iterator<Item = (&'a str, &'a str)>, out: &mut Vec<u8>) -> io::Result<()> {
    let mut entries = entries.peekable();
    if entries.peek().is_some() {
        writeln!(out, ".SH \"{title}\"")?;
    }
    for (name, text) in entries {
        writeln!(out, ".TP\n\\fB{}\\fR\n{}", escaped(name), escaped(text))?;
    }
    Ok(())
}

/// Writes the examples of the help as they are.
fn examples(command: &Command, out: &mut Vec<u8>) -> io::Result<()> {
    let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let Some((_, lines)) = help.split_once('\n').filter(|(first, _)| first.starts_with("Example")) else {
        return Ok(());
    };
    writeln!(out, ".SH EXAMPLES\n.nf")?;
    for line in lines.lines() {
        writeln!(out, "{}", escaped(line.strip_prefix("  ").unwrap_or(line)))?;
    }
    writeln!(out, ".fi")
}

/// Returns a line in which roff finds no requests or escapes.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;

    #[test]
    fn each_page_has_the_sections_that_concern_its_command() {
        let directory = tempfile::tempdir().unwrap();
        write_pages(Cli::command(), directory.path()).unwrap();
        let page = |name: &str| fs::read_to_string(directory.path().join(format!("{name}.1"))).unwrap();
        let count = fs::read_dir(directory.path()).unwrap().count();
        assert!(count > 40, "{count} pages");
        for entry in fs::read_dir(directory.path()).unwrap() {
            let text = fs::read_to_string(entry.unwrap().path()).unwrap();
            for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "\"EXIT STATUS\"", "\"ENVIRONMENT\""] {
                assert_eq!(text.matches(&format!(".SH {section}\n")).count(), 1, "{section} in {text}");
            }
            assert!(text.contains(".SH EXAMPLES\n") || text.contains(".SH SUBCOMMANDS\n"), "{text}");
        }
        assert!(
            page("rekindle-run").contains(".nf\nrekindle run web.toml\nrekindle run web.toml \\-\\-newest\\-disk\n.fi")
        );
        assert!(page("rekindle-ocf-monitor").contains("\\fB190\\fR") && !page("rekindle-run").contains("\\fB190\\fR"));
        assert!(page("rekindle-store-ls").contains("REKINDLE_ENVIRONMENT_FILE"));
        assert!(!page("rekindle-probe").contains("host.toml") && page("rekindle-doctor").contains("host.toml"));
        assert!(page("rekindle-protect").contains("/etc/rekindle/protect/NAME.toml"));
        assert!(!page("rekindle-restore").contains("/etc/rekindle/protect"));
        // The units name these pages.
        for name in ["rekindle-host-resume", "rekindle-host-mount", "rekindle-reboot-host"] {
            assert!(page(name).contains("/var/lib/rekindle/suspended"), "{name}");
        }
    }

    #[test]
    fn roff_finds_no_requests_or_escapes_in_a_line() {
        assert_eq!(escaped(".SH \\fB -x"), "\\&.SH \\efB \\-x");
    }
}
