//! A store can be written by others: a restoring host uses of its own only what its configuration allows.

use crate::common::Lab;
use crate::common::hostile::HostileStore;
use crate::common::protector::{Protector, crash, restore, store};
use serde_json::{Value, json};
use std::fs;

/// Boots a VM, protects it, and ends it. Returns its store.
fn stored_vm(lab: &Lab, name: &str) -> std::path::PathBuf {
    let guest = lab.vm(name).boot(&[]);
    let store = store(lab, name);
    let mut protector = Protector::start(&guest, lab, &store, &["--count", "1"]);
    protector.wait("checkpoint");
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    store
}

/// A change of a recipe, and words of the error.
type HostileRecipe<'a> = (&'a str, Box<dyn Fn(&mut Value) + 'a>, Vec<String>);

#[test]
fn a_changed_recipe_starts_nothing_on_any_host() {
    let lab = Lab::new();
    let store = stored_vm(&lab, "victim");
    let hostile = HostileStore::of(&lab, &store);
    let (trap, mark) = hostile.trap();
    let in_tmp = lab.path("").join("..").join("x");
    let config = lab.path(".host.toml").display().to_string();
    let arguments = |arguments: &'static [&'static str]| {
        move |recipe: &mut Value| {
            recipe["definition"]["qemu_args"] = json!(arguments);
            recipe["hardware"]["extra"] = json!(arguments);
        }
    };
    let disk = |path: &'static str| {
        move |recipe: &mut Value| {
            let disk = json!({"id": "disk0", "path": path, "format": "raw", "readonly": false, "cache": "writeback"});
            recipe["definition"]["disk"] = json!([disk]);
            recipe["hardware"]["disks"] = json!([disk]);
        }
    };
    let net = |id: &'static str| {
        move |recipe: &mut Value| {
            let mac = "52:54:00:00:00:01";
            recipe["definition"]["net"] = json!([{"id": id, "mac": mac, "kind": "user", "forward": []}]);
            recipe["hardware"]["nets"] = json!([{"id": id, "mac": mac, "backend": {"User": []}}]);
        }
    };
    let trap_text = trap.display().to_string();
    let qemu = |path: String| move |recipe: &mut Value| recipe["definition"]["qemu"] = json!(path);
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let recipes: Vec<HostileRecipe<'_>> = vec![
        ("a shell", Box::new(qemu("/bin/sh".into())), words(&["/bin/sh", &config, "qemu = [\"/bin/sh\"]"])),
        ("a planted program", Box::new(qemu(trap_text.clone())), words(&[&trap_text, "qemu = ["])),
        (
            "a script of a tap",
            Box::new(arguments(&["-netdev", "tap,id=t,script=/tmp/x"])),
            words(&["arguments = [\"-netdev tap,id=t,script=/tmp/x\"]", &config]),
        ),
        (
            "a file to write",
            Box::new(arguments(&["-chardev", "file,id=c,path=/etc/cron.d/x"])),
            words(&["-chardev file,id=c,path=/etc/cron.d/x"]),
        ),
        (
            "a ROM",
            Box::new(arguments(&["-device", "virtio-net-pci,romfile=/etc/shadow"])),
            words(&["-device virtio-net-pci,romfile=/etc/shadow"]),
        ),
        ("a plugin", Box::new(arguments(&["-plugin", "/tmp/x.so"])), words(&["-plugin /tmp/x.so"])),
        (
            "an object",
            Box::new(arguments(&["-object", "memory-backend-file,id=m,mem-path=/etc/shadow,size=1M"])),
            words(&["-object memory-backend-file"]),
        ),
        ("a file as a disk", Box::new(disk("/etc/shadow")), words(&["disk disk0", "paths = [\"/etc/shadow\"]"])),
        ("a disk of the host", Box::new(disk("/dev/sda")), words(&["paths = [\"/dev/sda\"]"])),
        (
            "a file as a RAM disk",
            Box::new(|recipe| recipe["definition"]["boot"]["initrd"] = json!("/etc/shadow")),
            words(&["boot.initrd", "paths = [\"/etc/shadow\"]"]),
        ),
        (
            "a directory for RAM",
            Box::new(|recipe| recipe["definition"]["ram"]["dir"] = json!("/etc")),
            words(&["ram.dir", "paths = [\"/etc\"]"]),
        ),
        (
            "a directory for states",
            Box::new(|recipe| recipe["definition"]["save_dir"] = json!("/etc")),
            words(&["save_dir", "paths = [\"/etc\"]"]),
        ),
        (
            "a path that leads out",
            Box::new(|recipe| recipe["definition"]["boot"]["kernel"] = json!(in_tmp)),
            words(&["boot.kernel", "paths = ["]),
        ),
        (
            "an option in an id",
            Box::new(net("n,guestfwd=tcp:10.0.2.9:1-cmd:id")),
            words(&["the definition in the checkpoint", "guestfwd"]),
        ),
        (
            "networks that the definition does not have",
            Box::new(|recipe| drop(recipe["definition"].as_object_mut().unwrap().remove("net"))),
            words(&["networks"]),
        ),
    ];
    for (what, change, words) in &recipes {
        eprintln!("{what}");
        hostile.write(|recipe, _| change(recipe));
        hostile.assert_refused("victim", &words.iter().map(String::as_str).collect::<Vec<_>>());
    }
    // On the host that has run the VM, too: what it has run before is allowed, and not what the store has now.
    hostile.write(|recipe, _| recipe["definition"]["qemu"] = json!(trap_text));
    let refused = lab.rekindle(["restore", "victim", "--store", store.to_str().unwrap()]).status(1);
    assert!(refused.stderr.contains(&trap_text), "{refused}");
    assert!(!mark.exists(), "a program of the store was started");
    hostile.write(|_, _| ());
    hostile.run(".host.toml", "victim", &["restore"]).ok();
}

#[test]
fn the_first_restore_on_a_host_names_the_lines_that_allow_it() {
    let lab = Lab::new();
    let store = stored_vm(&lab, "first");
    let hostile = HostileStore::of(&lab, &store);
    // A host without configuration does not have the VM's kernel in the usual directories.
    let config = lab.path("plain.toml");
    let refused = hostile.run("plain.toml", "first", &["restore"]).status(1);
    let remedy =
        refused.stderr.lines().filter_map(|line| line.split_once("under [restore]: paths = [")?.1.split_once(']'));
    let paths: Vec<_> = remedy.map(|(path, _)| path).collect();
    assert_eq!(paths.len(), 3, "kernel, RAM disk and directory of saved guests: {refused}");
    let qemu =
        refused.stderr.lines().find_map(|line| line.split_once("under [restore]: qemu = ")).map(|(_, line)| line);
    let qemu =
        qemu.and_then(|line| line.split_once(']')).map_or(String::new(), |(list, _)| format!("qemu = {list}]\n"));
    fs::write(&config, format!("[restore]\n{qemu}paths = [{}]\n", paths.join(", "))).unwrap();
    hostile.run("plain.toml", "first", &["restore"]).ok();
}

#[test]
fn free_arguments_are_restored_where_they_are_allowed() {
    let lab = Lab::new();
    let guest = lab.vm("extra").key("qemu_args = [\"-device\", \"edu\"]").boot(&[]);
    let store = store(&lab, "extra");
    let mut protector = Protector::start(&guest, &lab, &store, &["--count", "1"]);
    protector.wait("checkpoint");
    assert!(protector.child.wait().unwrap().success());
    crash(&guest);
    let hostile = HostileStore::of(&lab, &store);
    hostile.assert_refused("extra", &["-device edu", "arguments = [\"-device edu\"]"]);
    // The host that has run the VM needs no configuration.
    let boot = restore(&guest, &store, &[]);
    assert_eq!(boot["name"], "extra");
    crash(&guest);
    lab.write_host_config("allowing.toml", "");
    let text = fs::read_to_string(lab.path("allowing.toml")).unwrap();
    fs::write(lab.path("allowing.toml"), format!("{text}arguments = [\"-device edu\"]\n")).unwrap();
    hostile.run("allowing.toml", "extra", &["restore"]).ok();
}
