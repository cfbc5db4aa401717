//! The commands of `docs/tutorial-first-vm.md`, run by a shell as they are written there.

use crate::common::{DEADLINE, Lab, observe, wait_for};
use rekindle_kernel::spawn::die_with_starter;
use rekindle_testing::page::{blocks_of, commands_of};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

const PAGE: &str = "tutorial-first-vm.md";

struct Tutorial<'a> {
    lab: &'a Lab,
    /// What the page calls `/srv/tutorial`.
    directory: PathBuf,
    /// The process that the page calls 4790.
    qemu: Option<u32>,
}

impl Tutorial<'_> {
    /// Returns a command of the page, with the paths of the lab and the kernel of the test image.
    fn command(&self, text: &str) -> Command {
        let kernel = self.lab.image().0;
        let text = text
            .replace("/boot/vmlinuz-$(uname -r)", kernel.to_str().unwrap())
            .replace("/srv/tutorial", self.directory.to_str().unwrap())
            .replace("/run/rekindle", self.lab.run_root().to_str().unwrap())
            .replace("4790", &self.qemu.unwrap_or_default().to_string());
        let mut command = self.lab.command_of(Path::new("sh"), ["-c", &text]);
        let program = Path::new(env!("CARGO_BIN_EXE_rekindle")).parent().unwrap();
        command.env("PATH", format!("{}:{}", program.display(), std::env::var("PATH").unwrap()));
        command
    }

    /// Runs the commands of a section, which have to succeed. Returns what they print.
    #[track_caller]
    fn run(&self, heading: &str) -> String {
        let run_one = |text: String| {
            let result = self.lab.finish(self.command(&text)).ok();
            result.stdout + &result.stderr
        };
        commands_of(PAGE, heading).into_iter().map(run_one).collect()
    }

    fn write_file(&self, name: &str, heading: &str, language: &str) {
        let [content] = &*blocks_of(PAGE, heading, language) else { panic!("{heading}") };
        fs::write(self.directory.join(name), content).unwrap();
    }

    /// Returns what the guest has counted, in the order of its console.
    fn counts(&self) -> Vec<u64> {
        let console = fs::read_to_string(self.lab.run_root().join("demo/console.log")).unwrap_or_default();
        console.lines().filter_map(|line| line.trim_end().strip_prefix("count ")?.parse().ok()).collect()
    }

    /// Waits until the guest has counted two further numbers.
    #[track_caller]
    fn wait_counting(&self) {
        let before = self.counts().len();
        wait_for("the guest to count", DEADLINE, || (self.counts().len() >= before + 2).then_some(()));
    }
}

/// Ends a child and waits for it.
fn end(mut child: Child) {
    let _ = child.kill();
    child.wait().unwrap();
}

#[test]
fn the_commands_of_the_first_tutorial_do_what_it_states() {
    let lab = Lab::new();
    let mut tutorial = Tutorial { lab: &lab, directory: lab.path("tutorial"), qemu: None };
    let mut make = commands_of(PAGE, "2. Make a guest").into_iter();
    let mut run_next = |count: usize| {
        make.by_ref().take(count).for_each(|text| {
            lab.finish(tutorial.command(&text)).ok();
        })
    };
    run_next(3);
    tutorial.write_file("root/init", "2. Make a guest", "sh");
    run_next(2);
    tutorial.write_file("demo.toml", "2. Make a guest", "toml");
    let validate = make.next().unwrap();
    assert!(make.next().is_none());
    lab.finish(tutorial.command(&validate)).ok().prints(&["no mistakes"]);

    let started = commands_of(PAGE, "3. Start it");
    lab.finish(tutorial.command(&started[0])).ok();
    lab.finish(tutorial.command(&started[1])).ok().prints(&["demo", "running"]);
    tutorial.wait_counting();
    lab.finish(tutorial.command(&started[2])).ok().prints(&["count "]);

    let replaced = tutorial.run("4. Replace its QEMU");
    assert!(replaced.contains("stopped for") && replaced.contains("count "), "{replaced}");
    tutorial.wait_counting();

    let [init, protect, list] = &*commands_of(PAGE, "5. Protect it") else { panic!() };
    lab.finish(tutorial.command(init)).ok();
    let mut protector = tutorial.command(&format!("exec {protect}"));
    let mut protector = die_with_starter(&mut protector).spawn().unwrap();
    // Until the first checkpoint, the command fails.
    let is_listed = |number: &str| {
        let listed = lab.finish(tutorial.command(list)).stdout;
        listed.lines().any(|line| line.split_whitespace().next() == Some(number)).then_some(())
    };
    wait_for("two checkpoints", DEADLINE, || is_listed("2"));
    tutorial.wait_counting();

    let qemus = observe::qemus(&lab.run_root());
    let [qemu] = qemus.as_slice() else { panic!("{} QEMUs", qemus.len()) };
    let before = tutorial.counts();
    tutorial.qemu = Some(qemu.process.pid);
    let killed = commands_of(PAGE, "6. Kill its QEMU");
    lab.finish(tutorial.command(&killed[0])).ok();
    wait_for("the protector to end", DEADLINE, || protector.try_wait().unwrap());
    lab.finish(tutorial.command(&killed[1])).prints(&["ended"]);
    end(protector);

    tutorial.run("7. Restore it");
    tutorial.wait_counting();
    // The restored VM has a new log.
    let counts = tutorial.counts();
    let newest = *before.last().unwrap();
    assert!(!counts.contains(&1) && counts[0] <= newest + 1, "before: {before:?}, then: {counts:?}");

    tutorial.run("8. Clean up");
    assert!(!tutorial.directory.exists());
    lab.assert_empty();
}
