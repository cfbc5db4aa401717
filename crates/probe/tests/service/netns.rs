//! Probing from inside a network namespace. These tests need root.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;
use std::process::Command;
use std::thread;
use std::time::Duration;

use rekindle_probe::{Options, Probe, check};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::server::{Server, brisk, ok, stop_once};

/// A network namespace that has only the loopback interface.
struct Namespace(String);

impl Namespace {
    fn create() -> Self {
        let name = format!("rekindle-probe-{}", std::process::id());
        assert!(ip(&["netns", "add", &name]), "this test needs root and iproute2");
        let namespace = Self(name);
        assert!(ip(&["-n", &namespace.0, "link", "set", "lo", "up"]));
        namespace
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&["netns", "delete", &self.0]);
    }
}

fn ip(arguments: &[&str]) -> bool {
    Command::new("ip").args(arguments).status().is_ok_and(|status| status.success())
}

#[test]
fn a_service_inside_a_namespace_is_reached_from_inside_only() {
    let namespace = Namespace::create();
    let path = format!("/run/netns/{}", namespace.0);
    let listening = thread::spawn(move || {
        let file = File::open(path).unwrap();
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap()
    });
    let listener = listening.join().unwrap();
    // A listener outside of the namespace occupies the same port and does not answer.
    let outside = TcpListener::bind(listener.local_addr().unwrap());
    let inside = Server::http_on(listener, |_| Some(ok("hello")));
    let target = inside.target("http");

    check(&target, Duration::from_secs(60), Some(&namespace.0)).unwrap();
    if outside.is_ok() {
        check(&target, Duration::from_millis(50), None).unwrap_err();
    }
    let options = Options { connections: 2, netns: Some(namespace.0.clone()), ..brisk() };
    let report = stop_once(Probe::start(&target, options).unwrap(), |seen| seen.answered >= 50);
    assert_eq!((report.failed.total(), report.connections_opened, report.connections_lost), (0, 2, 0));
}
