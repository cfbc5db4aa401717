//! The groups of commands in `rekindle --help`.

use clap::builder::styling::Styles;
use clap::{Command, CommandFactory};
use std::fmt::Write;

/// A heading of `rekindle --help`, and the commands below it.
struct Group {
    heading: &'static str,
    commands: &'static [&'static str],
}

/// Each visible command is in exactly one group; a test checks that.
const GROUPS: &[Group] = &[
    Group {
        heading: "Everyday",
        commands: &[
            "run",
            "validate",
            "status",
            "show",
            "events",
            "console",
            "pause",
            "resume",
            "stop",
            "attach",
            "detach",
            "replace-qemu",
            "protect",
            "restore",
            "move",
            "recover",
            "doctor",
        ],
    },
    Group { heading: "Stores", commands: &["store"] },
    Group { heading: "Hosts and guests' systems", commands: &["reboot", "reboot-host", "host", "metrics"] },
    Group { heading: "Plumbing", commands: &["disk", "pager", "release", "ocf", "probe", "monitor"] },
];

/// Width of the longest name, and the space after it.
const NAME_WIDTH: usize = 14;

/// Returns the command line of Rekindle, whose help has the commands in groups.
pub fn command() -> Command {
    let command = super::Cli::command();
    let template = help_template(&command);
    command.help_template(template)
}

/// Returns the template of the help. clap has headings for options only, so the list of commands is part of the template.
fn help_template(command: &Command) -> String {
    let styles = Styles::styled();
    let (header, literal) = (styles.get_header(), styles.get_literal());
    let mut text = "{about-with-newline}\n{usage-heading} {usage}\n".to_owned();
    for Group { heading, commands } in GROUPS {
        let _ = writeln!(text, "\n{header}{heading}:{header:#}");
        for name in *commands {
            let summary = command.find_subcommand(name).and_then(Command::get_about);
            let summary = summary.map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {literal}{name:NAME_WIDTH$}{literal:#}{summary}");
        }
    }
    let _ = write!(text, "\n{header}Options:{header:#}\n{{options}}{{after-help}}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_visible_command_is_in_one_group_of_the_help() {
        let command = super::super::Cli::command();
        let mut visible: Vec<_> =
            command.get_subcommands().filter(|command| !command.is_hide_set()).map(Command::get_name).collect();
        let mut grouped: Vec<_> = GROUPS.iter().flat_map(|group| group.commands).copied().collect();
        visible.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, visible);
    }

    #[test]
    fn the_help_has_each_command_on_a_line_of_80_columns() {
        let help = command().render_help().to_string();
        for name in GROUPS.iter().flat_map(|group| group.commands) {
            assert!(name.len() < NAME_WIDTH, "{name}");
            let line = help.lines().find(|line| line.starts_with(&format!("  {name} "))).unwrap();
            let summary = line.get(2 + NAME_WIDTH..).unwrap();
            assert!(summary.starts_with(char::is_uppercase) && line.chars().count() <= 80, "{line}");
        }
        for words in ["Usage: rekindle", "Everyday:", "Options:", "--json", "Exit status: 0 done"] {
            assert_eq!(help.matches(words).count(), 1, "{words} in {help}");
        }
        assert!(!help.contains("Commands:") && !help.contains('{'), "{help}");
    }
}
