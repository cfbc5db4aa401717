use super::broker::{Answer, Broker, Request};
use super::{Access, Calls, CapabilitySet, Confinement, ConfinementError, Grant, capabilities_for};
use nix::sched::CloneFlags;
use rekindle_testing::hostile::{Attempt, Outcome, run};
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

fn confinement(directory: &Path, calls: Calls) -> Confinement {
    Confinement { files: vec![Grant::new(directory, Access::Directory)], calls, user: None }
}

#[test]
fn a_confined_process_reaches_nothing_but_what_it_was_granted() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let [own, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let file = |name: &str| other.path().join(name);
    std::fs::write(file("image"), "content").unwrap();
    let _unix = UnixListener::bind(file("socket")).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut victim = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mapping = crate::maps::of(crate::process::Process::of(victim.id()).unwrap()).unwrap()[0].range.start;
    let calls = Calls::FILES | Calls::CONNECTIONS | Calls::RING | Calls::USERFAULTFD;
    for attempt in [
        Attempt::StartProgram("/bin/true".into()),
        Attempt::Fork,
        Attempt::Read(file("image")),
        Attempt::Write(file("image")),
        Attempt::Create(file("created")),
        Attempt::List(other.path().into()),
        Attempt::Read("/etc/shadow".into()),
        Attempt::Write("/proc/sys/vm/overcommit_memory".into()),
        Attempt::ConnectTcp(tcp.local_addr().unwrap()),
        Attempt::ConnectUnix(file("socket")),
        Attempt::Socket(libc::AF_PACKET),
        Attempt::Socket(libc::AF_NETLINK),
        Attempt::ReadMemory(victim.id(), mapping as usize),
        Attempt::Trace(victim.id()),
        Attempt::Signal(victim.id()),
        Attempt::Namespace(CloneFlags::CLONE_NEWUSER),
        Attempt::Mount(own.path().into()),
        Attempt::Ring,
        Attempt::Bpf,
        Attempt::Remove(file("image")),
    ] {
        let confined = run(&attempt, || confinement(own.path(), calls).enter().unwrap());
        assert_ne!(confined, Outcome::Done, "{attempt:?}, confined");
        assert_eq!(run(&attempt, || ()), Outcome::Done, "{attempt:?}, not confined");
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    let created = own.path().join("created");
    for attempt in [Attempt::Create(created.clone()), Attempt::Write(created.clone()), Attempt::Remove(created)] {
        assert_eq!(run(&attempt, || confinement(own.path(), calls).enter().unwrap()), Outcome::Done, "{attempt:?}");
    }
}

#[test]
fn without_the_system_call_filter_landlock_and_capabilities_still_deny() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let [own, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    std::fs::write(other.path().join("image"), "content").unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let parent = std::process::id();
    let restrict = || {
        super::files::restrict(&confinement(own.path(), Calls::empty())).unwrap();
        super::capabilities::reduce_to(CapabilitySet::empty(), None).unwrap();
    };
    for attempt in [
        Attempt::Read(other.path().join("image")),
        Attempt::ConnectTcp(tcp.local_addr().unwrap()),
        Attempt::Socket(libc::AF_PACKET),
        Attempt::Trace(parent),
        Attempt::Signal(parent),
        Attempt::Mount(own.path().into()),
        Attempt::StartProgram("/bin/true".into()),
    ] {
        let denied = run(&attempt, restrict);
        assert!(matches!(denied, Outcome::Failed(libc::EPERM | libc::EACCES)), "{attempt:?}: {denied:?}");
    }
}

#[test]
fn a_network_client_has_internet_sockets_only() {
    let own = tempfile::tempdir().unwrap();
    let unix = own.path().join("socket");
    let _unix = UnixListener::bind(&unix).unwrap();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let attempt = |attempt: &Attempt| run(attempt, || confinement(own.path(), Calls::NETWORK).enter().unwrap());
    assert_eq!(attempt(&Attempt::ConnectTcp(tcp.local_addr().unwrap())), Outcome::Done);
    assert_eq!(attempt(&Attempt::ConnectUnix(unix)), Outcome::Failed(libc::EAFNOSUPPORT));
    assert_eq!(attempt(&Attempt::Socket(libc::AF_NETLINK)), Outcome::Failed(libc::EAFNOSUPPORT));
}

#[test]
fn files_of_another_user_need_the_capability_that_is_kept_for_them() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    let own = tempfile::tempdir().unwrap();
    let grant = |access| [Grant::new(own.path(), access)];
    assert_eq!(capabilities_for(&grant(Access::Directory)), CapabilitySet::empty());
    std::os::unix::fs::chown(own.path(), Some(65534), None).unwrap();
    assert_eq!(capabilities_for(&grant(Access::Directory)), CapabilitySet::DAC_OVERRIDE);
    let attempt = Attempt::Create(own.path().join("created"));
    assert_eq!(run(&attempt, || confinement(own.path(), Calls::FILES).enter().unwrap()), Outcome::Done);
}

#[test]
fn a_process_with_other_threads_is_not_confined() {
    let (sender, receiver) = std::sync::mpsc::channel::<()>();
    let thread = std::thread::spawn(move || receiver.recv().is_err());
    let refused = confinement(Path::new("/"), Calls::empty()).enter();
    assert!(matches!(refused, Err(ConfinementError::Threads { count: 2.. })), "{refused:?}");
    drop(sender);
    assert!(thread.join().unwrap());
}

#[test]
fn a_broker_answers_a_confined_process_and_ends_with_it() {
    let own = tempfile::tempdir().unwrap();
    let asked = own.path().join("asked");
    std::fs::write(own.path().join("sent"), "sent").unwrap();
    let outcome = run(&Attempt::Read("/etc/hostname".into()), || {
        let directory = own.path().to_owned();
        let answer = move |Request { numbers, name, descriptor }: Request| match numbers {
            [0, ..] => Err(io::ErrorKind::ResourceBusy.into()),
            [1, ..] => panic!("a broken broker"),
            [number, ..] => {
                std::fs::write(directory.join(name), number.to_string())?;
                Ok(Answer { number: number * 2, descriptor })
            }
        };
        let broker = Broker::start(2, CapabilitySet::empty(), answer).unwrap();
        let sent = std::fs::File::open(own.path().join("sent")).unwrap();
        Confinement { files: Vec::new(), calls: Calls::FILES, user: None }.enter().unwrap();
        let answer = broker.ask([21, 0, 0, 0], "asked".as_ref(), Some(sent.as_fd())).unwrap();
        assert_eq!(answer.number, 42);
        let received = io::read_to_string(std::fs::File::from(answer.descriptor.unwrap())).unwrap();
        assert_eq!(received, "sent");
        assert_eq!(broker.ask_number([0; 4]).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        let too_long = "n".repeat(256);
        assert_eq!(broker.ask([9; 4], too_long.as_ref(), None).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(broker.ask_number([1, 0, 0, 0]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        broker.ask_number([9; 4]).unwrap_err();
    });
    assert_eq!(outcome, Outcome::Failed(libc::EACCES));
    assert_eq!(std::fs::read_to_string(&asked).unwrap(), "21");
}

#[test]
fn a_broker_runs_until_its_last_connection_is_closed() {
    let own = tempfile::tempdir().unwrap();
    let file = own.path().join("file");
    let outcome = run(&Attempt::Create(file), || {
        let mut broker =
            Broker::start(8, CapabilitySet::empty(), |_| Ok(u64::from(std::process::id()).into())).unwrap();
        let pid = broker.ask_number([0; 4]).unwrap();
        broker.close_all_but_first();
        // The main thread, and that of the open connection.
        while std::fs::read_dir(format!("/proc/{pid}/task")).expect("the broker runs").count() > 2 {
            std::thread::yield_now();
        }
        assert_eq!(broker.ask_number([0; 4]).unwrap(), pid);
    });
    assert_eq!(outcome, Outcome::Done);
}

#[test]
fn a_process_that_becomes_another_user_has_the_files_of_that_user_only() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    const USER: u32 = 2_147_000_001;
    let directory = tempfile::tempdir().unwrap();
    let [of_root, of_user] = ["root", "user"].map(|name| directory.path().join(name));
    for (path, owner) in [(&of_root, 0), (&of_user, USER)] {
        std::fs::create_dir(path).unwrap();
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(path, Some(owner), Some(owner)).unwrap();
    }
    std::fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
    let enter = || {
        let confinement = confinement(directory.path(), Calls::FILES);
        Confinement { user: Some(USER), ..confinement }.enter().unwrap();
    };
    assert_eq!(run(&Attempt::Create(of_user.join("file")), enter), Outcome::Done);
    assert_ne!(run(&Attempt::Create(of_root.join("file")), enter), Outcome::Done);
    let made = of_user.join("file").metadata().unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&made), USER);
}

#[test]
fn a_process_that_becomes_another_user_cannot_be_traced_by_that_user() {
    assert!(rustix::process::geteuid().is_root(), "this test needs root");
    const USER: u32 = 2_147_000_002;
    let as_user = || crate::users::become_user(USER, USER, &[]).unwrap();
    let traced = |become_target: &dyn Fn()| {
        let (ready, signal) = rustix::pipe::pipe().unwrap();
        // SAFETY: the child makes system calls only.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                let has_become = std::panic::catch_unwind(std::panic::AssertUnwindSafe(become_target));
                let _ = rustix::io::write(&signal, &[u8::from(has_become.is_ok())]);
                loop {
                    nix::unistd::pause();
                }
            }
            nix::unistd::ForkResult::Parent { child } => {
                drop(signal);
                let mut byte = [0];
                let is_ready = rustix::io::read(&ready, &mut byte) == Ok(1) && byte == [1];
                let outcome = run(&Attempt::Trace(child.as_raw() as u32), as_user);
                nix::sys::signal::kill(child, nix::sys::signal::Signal::SIGKILL).unwrap();
                nix::sys::wait::waitpid(child, None).unwrap();
                assert!(is_ready, "the target has not become the user");
                outcome
            }
        }
    };
    let confined = traced(&|| super::capabilities::reduce_to(CapabilitySet::empty(), Some(USER)).unwrap());
    assert_eq!(confined, Outcome::Failed(libc::EPERM));
    let ordinary = traced(&|| {
        as_user();
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::Dumpable).unwrap();
        // For kernels with kernel.yama.ptrace_scope = 1.
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::Any);
    });
    assert_eq!(ordinary, Outcome::Done);
}
