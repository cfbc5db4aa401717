//! A store that another program has written to: its newest checkpoint is a real one, with another recipe.

use super::lab::{Lab, left_in};
use super::{CommandResult, observe};
use rekindle_store::{Image, Options, ReadOptions, StoreUrl, Writer};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A store with a recipe to change, and a host that has never had the VM.
pub struct HostileStore<'a> {
    lab: &'a Lab,
    store: PathBuf,
    recipe: Value,
    metadata: Value,
}

impl<'a> HostileStore<'a> {
    /// Opens the store of a VM that has ended.
    pub fn of(lab: &'a Lab, store: &Path) -> Self {
        let image = Image::open(&StoreUrl::Directory(store.to_owned()), &ReadOptions::default()).unwrap();
        let (recipe, metadata) = (image.definition().unwrap(), image.metadata().unwrap());
        Self { lab, store: store.to_owned(), recipe, metadata }
    }

    /// Writes a checkpoint with the same memory and a changed recipe and metadata.
    pub fn write(&self, change: impl FnOnce(&mut Value, &mut Value)) {
        let url = StoreUrl::Directory(self.store.clone());
        let image = Image::open(&url, &ReadOptions::default()).unwrap();
        let (mut recipe, mut metadata) = (self.recipe.clone(), self.metadata.clone());
        change(&mut recipe, &mut metadata);
        let mut writer = Writer::open(&url, &Options::new(image.vm().clone(), "change")).unwrap();
        let checkpoint = writer.begin(&image.info().blocks).unwrap();
        checkpoint.commit(&recipe, &metadata, &image.devices().unwrap()).unwrap();
        writer.settle().unwrap();
    }

    /// Returns a program that leaves a file if it is started, and the path of this file.
    pub fn trap(&self) -> (PathBuf, PathBuf) {
        let (program, mark) = (self.lab.path("qemu-system-trap"), self.lab.path("trap-was-started"));
        fs::write(&program, format!("#!/bin/sh\necho started >> {}\n", mark.display())).unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        (program, mark)
    }

    fn elsewhere(&self) -> PathBuf {
        self.lab.path("never-had-it")
    }

    /// Runs a command on the other host. `config`: name of its configuration.
    pub fn run(&self, config: &str, name: &str, command: &[&str]) -> CommandResult {
        let mut restore = self.lab.command(["--json"].iter().chain(command).chain(&[name, "--store"]));
        restore.arg(&self.store).env("REKINDLE_RUN_DIR", self.elsewhere());
        restore.env("REKINDLE_HOST_CONFIG", self.lab.path(config));
        self.lab.finish(restore)
    }

    /// Asserts that both a restore and its preparation are refused with these words, and that nothing was started or left.
    #[track_caller]
    pub fn assert_refused(&self, name: &str, words: &[&str]) {
        for command in [&["restore"][..], &["restore", "--prepare"]] {
            let refused = self.run(".host.toml", name, command).status(1);
            for word in words.iter().chain(&["nothing was started"]) {
                assert!(refused.stderr.contains(word), "{word:?} was expected of {refused}");
            }
            let root = self.elsewhere();
            assert!(observe::qemus(&root).is_empty(), "a QEMU was started by {refused}");
            assert!(left_in(&root).is_empty(), "{:?} is left by {refused}", left_in(&root));
        }
    }
}
