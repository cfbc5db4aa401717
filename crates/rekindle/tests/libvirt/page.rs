//! The commands of a page of the documents, run as they are written there.

use crate::{rekindle, text};
use rekindle_testing::libvirt::Domain;
use rekindle_testing::page::commands_of;
use std::path::Path;
use std::process::{Command, Output};

/// A page, and what its example names are in the test.
pub struct Page<'a> {
    /// Name of the file in `docs`.
    pub file: &'static str,
    /// The domain that the page calls `db`.
    pub domain: &'a Domain<'a>,
    /// The directory that the page calls `/srv/checkpoints`, if it has one.
    pub checkpoints: Option<&'a Path>,
}

impl Page<'_> {
    pub fn commands_of(&self, heading: &str) -> Vec<String> {
        commands_of(self.file, heading)
    }

    /// Returns a command with the names of the test.
    pub fn command(&self, command: &str) -> Command {
        let actual = |word: &str| match (word, self.checkpoints) {
            ("db", _) => self.domain.name.clone(),
            (word, Some(checkpoints)) => word.replace("/srv/checkpoints", checkpoints.to_str().unwrap()),
            (word, None) => word.to_owned(),
        };
        let words: Vec<_> = command.split(' ').map(actual).collect();
        match words.as_slice() {
            [program, arguments @ ..] if program == "rekindle" => {
                rekindle(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
            }
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments);
                command
            }
            [] => panic!("an empty command"),
        }
    }

    pub fn run(&self, command: &str) -> Output {
        self.command(command).output().unwrap()
    }

    /// Runs the commands of a section, which have to succeed, and returns everything that they print.
    #[track_caller]
    pub fn run_section(&self, heading: &str) -> String {
        let run_one = |command: String| {
            let output = self.run(&command);
            assert!(output.status.success(), "{command}: {}", text(&output));
            text(&output)
        };
        self.commands_of(heading).into_iter().map(run_one).collect()
    }
}
