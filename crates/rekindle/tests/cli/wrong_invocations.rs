//! Wrong invocations: each error states what is wrong, why, and what to do, in the words of the command line.

use crate::common::Lab;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

/// Arguments, exit status, and words of the error. `DIR` is a directory with the files that [`write_files`] makes.
type Row = (&'static str, i32, &'static [&'static str]);

const UNKNOWN_VM: &[&str] = &["there is no VM nope", "`rekindle status` lists them"];
const NOT_A_STORE: &[&str] = &["not a store of Rekindle", "check the path", "rekindle store init DIR/"];

const ROWS: &[Row] = &[
    // Unknown names.
    ("show nope", 1, UNKNOWN_VM),
    ("stop nope", 1, UNKNOWN_VM),
    ("reboot nope", 1, UNKNOWN_VM),
    ("replace-qemu nope", 1, UNKNOWN_VM),
    ("pause nope", 1, UNKNOWN_VM),
    ("resume nope", 1, UNKNOWN_VM),
    ("protect nope --store DIR/good", 1, UNKNOWN_VM),
    ("move nope --to host2 --store DIR/good", 1, UNKNOWN_VM),
    ("status nope", 1, &["no VM and no running libvirt domain nope", "`rekindle status` lists them"]),
    ("show Web", 2, &["'Web'", "`W` is not allowed in a name", "use only a-z"]),
    ("stroe ls DIR/good", 2, &["unrecognized subcommand 'stroe'", "'store'"]),
    ("start web", 2, &["unrecognized subcommand 'start'", "'run'"]),
    ("list", 2, &["unrecognized subcommand 'list'", "'status'"]),
    // Wrong stores.
    ("store ls DIR/none", 1, NOT_A_STORE),
    ("restore web --store DIR/directory", 1, NOT_A_STORE),
    ("store verify DIR/file", 1, &["DIR/file: not a directory", "a store is a directory, or s3://BUCKET/PREFIX"]),
    ("store ls tls://host/web", 2, &["tls://host/web", "not reached over a server of Rekindle", "mount the directory"]),
    ("store ls https://host/web", 2, &["`https://` is not known", "write a directory", "s3://BUCKET/PREFIX"]),
    ("store ls s3://", 2, &["s3://", "it has no bucket", "s3://BUCKET/PREFIX"]),
    ("store ls nas:/srv/web", 2, &["nas:/srv/web", "a directory of host nas", "mount it"]),
    ("restore web --store DIR/good", 1, &["without a VM yet", "fill it: rekindle protect NAME --store DIR/good"]),
    ("store init DIR/good", 1, &["there is a store already", "nothing was changed"]),
    // Keys and credentials.
    ("store ls DIR/good --key-file DIR/none", 1, &["there is no key file", "rekindle store new-key DIR/none"]),
    ("store ls DIR/good --key-file DIR/file", 1, &["can be read by other users", "chmod 600 DIR/file"]),
    ("store ls s3://b/w --environment-file DIR/none", 1, &["no environment file", "correct --environment-file"]),
    ("store ls s3://b/w --environment-file DIR/file", 1, &["other users can access", "chmod 600 DIR/file"]),
    ("store new-key DIR/file", 1, &["no key file DIR/file was created", "File exists", "the path of a new file"]),
    // Definitions and the host's configuration.
    ("run DIR/none.toml", 2, &["DIR/none.toml", "No such file", "the path of the VM's TOML file"]),
    ("run DIR/directory", 2, &["DIR/directory", "Is a directory", "the path of the VM's TOML file"]),
    ("run /bin/true", 2, &["/bin/true: cannot read the definition", "the path of the VM's TOML file"]),
    ("validate DIR/nothing.toml", 2, &["nothing.toml:1:1", "nothing to boot", "write [boot] with kernel"]),
    ("validate DIR/typo.toml", 2, &["typo.toml:2:1", "unknown key `memmory`", "did you mean `memory`"]),
    ("run DIR/reserved.toml", 2, &["the name os", "`rekindle reboot os` is a command", "choose another name"]),
    ("attach os --qmp DIR/none", 2, &["the name os", "`rekindle reboot os` is a command", "choose another name"]),
    ("validate DIR/host.toml", 2, &["DIR/host.toml", "unknown field `log_limt`", "expected one of", "`log_limit`"]),
    ("validate DIR/typed/host.toml", 2, &["log_limit = 1", "invalid type: integer", "in quotes, a size with its unit"]),
    // Wrong values and missing arguments.
    ("stop web --timeout 5", 2, &["'5' for '--timeout <TIME>'", "5 has no unit", "write \"5s\""]),
    ("protect web --store DIR/good --policy fast", 2, &["there is no policy `fast`", "basic, cow, precopy"]),
    ("replace-qemu web --how lukewarm", 2, &["'lukewarm' for '--how <HOW>'", "possible values: warm, saved, cold"]),
    ("host init --reserve lots", 2, &["'lots' for '--reserve <SIZE>'", "not a size", "\"512M\""]),
    ("disk limit web --bps 1X", 2, &["'1X' for '--bps <BYTES>'", "unknown unit `X`", "B, K, M, G, T"]),
    ("probe 10.0.0.2", 2, &["`10.0.0.2`: no scheme", "http://HOST[:PORT]/PATH"]),
    ("monitor --service web", 2, &["--service web", "it must be NAME=URL"]),
    ("attach x", 2, &["required arguments were not provided", "--qmp <SOCKET>|--libvirt <DOMAIN>"]),
    (
        "attach x --qmp DIR/none",
        1,
        &["no QEMU can be reached at DIR/none", "No such file", "-qmp unix:DIR/none,server=on"],
    ),
    ("move web --store DIR/good", 2, &["required arguments were not provided", "--to <HOST>"]),
    ("host suspend", 2, &["name the VMs to suspend", "--all"]),
];

/// Makes the files of the rows.
fn write_files(lab: &Lab, directory: &Path) {
    let disk = "[[disk]]\npath = \"disk.raw\"\n";
    fs::create_dir_all(directory.join("directory")).unwrap();
    fs::create_dir_all(directory.join("typed")).unwrap();
    fs::write(directory.join("disk.raw"), vec![0; 1 << 20]).unwrap();
    fs::write(directory.join("file"), "x").unwrap();
    fs::set_permissions(directory.join("file"), fs::Permissions::from_mode(0o644)).unwrap();
    fs::write(directory.join("nothing.toml"), "name = \"web\"\n").unwrap();
    fs::write(directory.join("typo.toml"), format!("name = \"web\"\nmemmory = \"1G\"\n{disk}")).unwrap();
    fs::write(directory.join("reserved.toml"), format!("name = \"os\"\n{disk}")).unwrap();
    fs::write(directory.join("host.toml"), "log_limt = \"1M\"\n").unwrap();
    fs::write(directory.join("typed/host.toml"), "log_limit = 1\n").unwrap();
    fs::write(directory.join("good.toml"), format!("name = \"web\"\n{disk}")).unwrap();
    lab.rekindle(["store", "init", directory.join("good").to_str().unwrap()]).ok();
}

#[test]
fn forty_wrong_invocations_state_what_is_wrong_why_and_what_to_do() {
    let lab = Lab::without_root();
    let directory = lab.path("wrong");
    write_files(&lab, &directory);
    let filled_in = |text: &str| text.replace("DIR", directory.to_str().unwrap());
    let mut failures = Vec::new();
    for (arguments, status, words) in ROWS {
        let result = lab.rekindle(filled_in(arguments).split_whitespace());
        let output = format!("{}{}", result.stdout, result.stderr);
        let missing: Vec<_> = words.iter().map(|word| filled_in(word)).filter(|word| !output.contains(word)).collect();
        let leaked: Vec<_> =
            ["panicked", "rekindle-store", "Some(", "Err("].into_iter().filter(|word| output.contains(word)).collect();
        if result.code != Some(*status) || !missing.is_empty() || !leaked.is_empty() {
            failures.push(format!("{arguments}: without {missing:?}, with {leaked:?}: {result}"));
        }
    }
    assert!(ROWS.len() >= 40 && failures.is_empty(), "{}", failures.join("\n"));
    lab.assert_empty();
}

#[test]
fn a_file_without_mistakes_is_valid_and_starts_nothing() {
    let lab = Lab::without_root();
    let directory = lab.path("right");
    write_files(&lab, &directory);
    let path = directory.join("good.toml");
    let path = path.to_str().unwrap();
    lab.rekindle(["validate", path]).ok().prints(&["no mistakes", "VM web", "1 disk,"]);
    let report = lab.rekindle(["--json", "validate", path]).ok().json();
    assert_eq!((&report["kind"], &report["definition"]["name"]), (&"definition".into(), &"web".into()));
    fs::write(directory.join("host.toml"), "log_limit = \"1M\"\n").unwrap();
    lab.rekindle(["validate", directory.join("host.toml").to_str().unwrap()]).ok().prints(&["host.toml: no mistakes"]);
    lab.assert_empty();
}

#[test]
fn a_run_directory_that_cannot_be_used_is_named_with_a_remedy() {
    let lab = Lab::without_root();
    let (file, theirs) = (lab.path("file"), lab.path("theirs"));
    fs::write(&file, "x").unwrap();
    fs::create_dir(&theirs).unwrap();
    // The user `nobody`.
    chown(&theirs, Some(65534), None).unwrap();
    for (directory, words) in [
        (&file, ["a file is in its place", "set REKINDLE_RUN_DIR"]),
        (&theirs, ["it belongs to user 65534", "run this command as user 65534"]),
    ] {
        let mut command = lab.command(["status"]);
        command.env("REKINDLE_RUN_DIR", directory);
        lab.finish(command).status(1).prints(&[directory.to_str().unwrap()]).prints(&words);
    }
}
