//! A proxy for requests and answers over TCP, such as HTTP, with the latency of a server far away.

use crate::{DEADLINE, wait_for};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

#[derive(Debug, Default)]
struct Shared {
    latency_ms: AtomicU64,
    is_held: Mutex<bool>,
    released: Condvar,
    /// Answers that wait because they are held.
    held: AtomicUsize,
    /// Answers that were delayed.
    delayed: AtomicUsize,
}

/// A proxy in threads of this process, which end with it. It delays the begin of each answer, without limiting the rate.
#[derive(Debug)]
pub struct SlowProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl SlowProxy {
    /// Starts a proxy to `port` of this machine, without latency.
    #[must_use]
    pub fn start(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let state = shared.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if let Ok(server) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                    forward(client, server, &state);
                }
            }
        });
        Self { address, shared }
    }

    /// Returns the port at which clients connect.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Delays each later answer by `latency`.
    pub fn set_latency(&self, latency: Duration) {
        self.shared.latency_ms.store(latency.as_millis() as u64, Ordering::SeqCst);
    }

    /// Returns how many answers were delayed by a latency.
    #[must_use]
    pub fn delayed(&self) -> usize {
        self.shared.delayed.load(Ordering::SeqCst)
    }

    /// Holds all answers until [`Self::release`].
    pub fn hold(&self) {
        *self.shared.is_held.lock().unwrap() = true;
    }

    /// Waits until an answer is held.
    pub fn wait_held(&self) {
        wait_for("an answer that is held", DEADLINE, || self.has_held().then_some(()));
    }

    /// Returns whether an answer is held.
    #[must_use]
    pub fn has_held(&self) -> bool {
        self.shared.held.load(Ordering::SeqCst) > 0
    }

    /// Ends [`Self::hold`].
    pub fn release(&self) {
        *self.shared.is_held.lock().unwrap() = false;
        self.shared.released.notify_all();
    }
}

impl Shared {
    /// Waits before the begin of an answer.
    fn delay(&self) {
        let latency_ms = self.latency_ms.load(Ordering::SeqCst);
        if latency_ms > 0 {
            self.delayed.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(latency_ms));
        }
        let is_held = self.is_held.lock().unwrap();
        if *is_held {
            self.held.fetch_add(1, Ordering::SeqCst);
            drop(self.released.wait_while(is_held, |is_held| *is_held).unwrap());
            self.held.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Starts two threads that forward what both send.
fn forward(client: TcpStream, server: TcpStream, shared: &Arc<Shared>) {
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let is_asked = Arc::new(AtomicBool::new(false));
    let (Ok(from), Ok(into)) = (client.try_clone(), server.try_clone()) else { return };
    let asked = is_asked.clone();
    thread::spawn(move || copy(from, into, || asked.store(true, Ordering::SeqCst)));
    let shared = shared.clone();
    thread::spawn(move || {
        copy(server, client, || {
            if is_asked.swap(false, Ordering::SeqCst) {
                shared.delay();
            }
        });
    });
}

/// Copies until one of them is closed. Calls `before` for each part that was read.
fn copy(mut from: TcpStream, mut into: TcpStream, before: impl Fn()) {
    let mut buffer = [0; 65536];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        before();
        if into.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), into.shutdown(Shutdown::Both));
}
