//! Shell completions and man pages, generated from the declared commands and flags.

use super::man_pages;
use crate::cli::{self, Completions, Man};
use crate::output::Output;
use anyhow::{Context, Result};
use clap::Command;
use clap_complete::Shell;
use rekindle_libvirt::domains;
use rekindle_libvirt::status_file::SYSTEM_DIRECTORY;
use rekindle_vm::host::Host;
use rekindle_vm::rundir::RunDir;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// Commands whose argument is the name of a VM that does not exist yet, or not on this host.
const NEW_NAMES: [&str; 2] = ["attach", "restore"];

/// Completes names of VMs in bash, and all else by the generated function. `COMMANDS` is a pattern of the commands.
const BASH_NAMES: &str = r#"
_rekindle_with_names() {
    _rekindle "$@"
    local word command=
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        if [[ $word != -* ]]; then
            command=$word
            break
        fi
    done
    case $command in
        COMMANDS)
            if [[ $2 != -* && $3 != --* ]]; then
                COMPREPLY=($(compgen -W "$(rekindle names 2>/dev/null)" -- "$2"))
            fi
            ;;
    esac
}
complete -F _rekindle_with_names -o bashdefault -o default rekindle
"#;

/// Completes names of VMs in fish. `COMMANDS` is a list of the commands.
const FISH_NAMES: &str = r#"
complete -c rekindle -n "__fish_seen_subcommand_from COMMANDS" -f -a "(rekindle names 2>/dev/null)"
"#;

pub fn completions(arguments: &Completions) -> Result<ExitCode> {
    io::stdout().write_all(&completion_script(arguments.shell))?;
    Ok(ExitCode::SUCCESS)
}

fn completion_script(shell: Shell) -> Vec<u8> {
    let mut command = cli::command();
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "rekindle", &mut script);
    let commands = commands_with_names(&command);
    match shell {
        Shell::Bash => script.extend(BASH_NAMES.replace("COMMANDS", &commands.join("|")).bytes()),
        Shell::Fish => script.extend(FISH_NAMES.replace("COMMANDS", &commands.join(" ")).bytes()),
        _ => {}
    }
    script
}

/// Returns the visible commands whose arguments are names of VMs.
fn commands_with_names(command: &Command) -> Vec<&str> {
    let takes_names = |command: &&Command| {
        let mut arguments = command.get_positionals().map(|argument| argument.get_id().as_str());
        !command.is_hide_set()
            && !NEW_NAMES.contains(&command.get_name())
            && arguments.any(|id| id == "name" || id == "names")
    };
    command.get_subcommands().filter(takes_names).map(Command::get_name).collect()
}

/// Prints the names of VMs and of libvirt's domains, a line for each. What cannot be read is left out: this is called
/// while a user types.
pub fn names(output: &Output) -> Result<ExitCode> {
    let mut names = Host::open().ok().and_then(|host| RunDir::list(&host.root).ok()).unwrap_or_default();
    let domains = domains::all(Path::new(SYSTEM_DIRECTORY)).unwrap_or_default();
    names.extend(domains.into_iter().flatten().map(|domain| domain.name));
    output.result(&names, names.join("\n"))?;
    Ok(ExitCode::SUCCESS)
}

pub fn man(arguments: &Man) -> Result<ExitCode> {
    let directory = &arguments.directory;
    man_pages::write_pages(cli::command(), directory).with_context(|| directory.display().to_string())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::process;

    #[test]
    fn bash_completes_names_of_vms_where_a_command_expects_them() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("completions"), completion_script(Shell::Bash)).unwrap();
        fs::write(path("rekindle"), "#!/bin/sh\n[ $1 = names ] && printf 'web\\nworker\\ndb\\n'\n").unwrap();
        fs::set_permissions(path("rekindle"), fs::Permissions::from_mode(0o755)).unwrap();
        // The arguments are the words of a command line, of which the last is completed.
        let complete = "PATH=$0:$PATH; . $0/completions; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                        _rekindle_with_names rekindle \"${@: -1}\" \"${@: -2:1}\"; echo ${COMPREPLY[*]}";
        for (words, completions) in [
            (&["rekindle", "stop", "w"][..], "web worker"),
            (&["rekindle", "--json", "reboot", ""], "web worker db"),
            (&["rekindle", "stop", "web", "d"], "db"),
            (&["rekindle", "stop", "web", "--ti"], "--timeout"),
            (&["rekindle", "conso"], "console"),
        ] {
            let mut bash = process::Command::new("bash");
            bash.arg("-c").arg(complete).arg(directory.path()).args(words);
            let output = bash.output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), completions, "{words:?}: {output:?}");
        }
    }

    #[test]
    fn names_are_completed_for_commands_that_act_on_a_vm() {
        let command = cli::command();
        let commands = commands_with_names(&command);
        for name in
            ["status", "show", "stop", "reboot", "replace-qemu", "protect", "pause", "resume", "recover", "move"]
        {
            assert!(commands.contains(&name), "{name} in {commands:?}");
        }
        assert!(!commands.contains(&"run") && !commands.contains(&"attach"), "{commands:?}");
    }
}
