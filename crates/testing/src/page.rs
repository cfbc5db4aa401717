//! The commands and files of a page of the documents.

use std::fs;
use std::path::Path;

/// Returns the section of a page whose heading starts with `heading`.
fn section_of(file: &str, heading: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(file);
    let page = fs::read_to_string(path).unwrap();
    let sections = page.split("\n## ");
    let section = sections.filter(|section| section.starts_with(heading)).collect::<Vec<_>>();
    let [section] = section.as_slice() else { panic!("{file} has {} sections `{heading}`", section.len()) };
    (*section).to_owned()
}

/// Returns the blocks of a language in a heading's section of a page.
pub fn blocks_of(file: &str, heading: &str, language: &str) -> Vec<String> {
    let section = section_of(file, heading);
    let begin = format!("```{language}\n");
    let blocks = section.split(&begin).skip(1).map(|rest| rest.split("```").next().unwrap_or_default().to_owned());
    blocks.collect()
}

/// Returns the commands of a heading's blocks in a page: the lines that start with root's prompt.
pub fn commands_of(file: &str, heading: &str) -> Vec<String> {
    let blocks = blocks_of(file, heading, "console").concat();
    let commands: Vec<_> = blocks.lines().filter_map(|line| line.strip_prefix("# ")).map(str::to_owned).collect();
    assert!(!commands.is_empty(), "{heading}");
    commands
}
