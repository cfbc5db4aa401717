//! Traffic between a test and a guest, which shows whether bytes are lost.

use crate::DEADLINE;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

/// Port of a guest's echo service.
pub const ECHO_PORT: u16 = 7;

/// A thread that works until it is finished.
pub struct Worker<T> {
    is_finished: Arc<AtomicBool>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts the thread. `work` ends when its flag is set.
    pub fn begin(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Self {
        let is_finished = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&is_finished);
        Self { is_finished, thread: thread::spawn(move || work(&flag)) }
    }

    /// Ends the thread and returns its result.
    pub fn finish(self) -> T {
        self.is_finished.store(true, Ordering::SeqCst);
        self.thread.join().expect("the traffic")
    }
}

/// Numbers that the guest sends back, over one connection.
pub struct Stream(Worker<u64>);

impl Stream {
    /// `connection`: to the guest's echo service.
    pub fn begin(mut connection: TcpStream) -> Self {
        connection.set_read_timeout(Some(DEADLINE)).unwrap();
        Self(Worker::begin(move |is_finished| {
            let mut round = 0;
            while !is_finished.load(Ordering::SeqCst) {
                let numbers: Vec<u8> = (round * 100..(round + 1) * 100).flat_map(u64::to_le_bytes).collect();
                let mut echo = vec![0; numbers.len()];
                connection.write_all(&numbers).unwrap();
                connection.read_exact(&mut echo).unwrap();
                assert_eq!(echo, numbers, "round {round}");
                round += 1;
            }
            round
        }))
    }

    /// Checks that every number came back.
    pub fn assert_complete(self) {
        assert!(self.0.finish() > 0);
    }
}
