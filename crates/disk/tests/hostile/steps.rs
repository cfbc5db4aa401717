//! The steps of a program.

use super::Input;
use super::peer::{DATA, FRONT_END_ADDRESS, HEADER, MEMORY, Peer, QUEUES, STATUS, ask, message, rings, state, table};
use rekindle_disk::control::{Control, ControlCommand};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use serde_json::Value;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::yield_now;

/// Most steps of a program. A program finds a defect soon or never.
const MAX_STEPS: usize = 150;
/// Most changes in a storm.
const MAX_STORM_CHANGES: u16 = 600;

/// Runs a program, with at most two front ends at a time.
pub fn run(input: &mut Input<'_>, socket: &Path, control: &mut Control) {
    let mut peers = [None, None];
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let place = &mut peers[usize::from(input.one_in(5))];
        let kind = input.u8();
        let Some(peer) = place else {
            *place = Some(connect_peer(input, socket));
            continue;
        };
        match kind % 20 {
            0 => *place = None,
            1..=3 => send_any(peer, input),
            4..=6 => add_request(peer, input),
            7 => set_index(peer, input),
            8 | 9 => change_descriptor(peer, input),
            10 => offer_chain(peer, input),
            11 => change_memory(peer, input),
            12 => offer_indirect_chain(peer, input),
            13 | 14 => peer.kick(input.u16() % QUEUES),
            15 => change_rings_fast(peer, input),
            16 => change_inflight(peer, input),
            17 => send_command(control, input),
            18 => restart_queue(peer, input),
            _ => yield_now(),
        }
    }
    // The front ends can stop their queues after any program.
    for peer in peers.iter_mut().flatten() {
        let _ = (0..QUEUES).try_for_each(|queue| peer.stop_queue(queue).map(drop));
    }
}

/// Connects a front end, correctly or nearly so, and starts its queues.
fn connect_peer(input: &mut Input<'_>, socket: &Path) -> Peer {
    let mut peer = Peer::connect(socket);
    let mode = input.u8();
    if mode & 15 == 15 {
        return peer;
    }
    let features = if mode & 1 == 0 { u64::MAX } else { !(1 << 29) };
    peer.introduce(features, mode & 2 == 0);
    for queue in 0..if mode & 4 == 0 { 1 } else { QUEUES } {
        let size = if mode & 8 == 0 { 64 } else { input.pick(&[1, 2, 4, 16, 256, 1024, 3, 0, 2048]) };
        peer.set_up_queue(queue, size, 0);
    }
    peer
}

fn any_number(input: &mut Input<'_>) -> u64 {
    match input.u8() % 8 {
        0 => 0,
        1 => 1 << (input.u8() % 64),
        2 => u64::MAX - u64::from(input.u8()),
        3 => input.u64(),
        4 => FRONT_END_ADDRESS + u64::from(input.u16()) * 16,
        5 => u64::from(input.u16()) << 12,
        _ => u64::from(input.u8() % 4),
    }
}

fn any_file(input: &mut Input<'_>, peer: &Peer) -> OwnedFd {
    match input.u8() % 8 {
        0 => File::open("/dev/zero").unwrap().into(),
        1 => std::io::pipe().unwrap().1.into(),
        2 => UnixStream::pair().unwrap().0.into(),
        // The eventfd is full: a write would wait.
        3 => {
            let full = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
            rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            full
        }
        4 => {
            let memory = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&memory, any_number(input) & 0xff_ffff).unwrap();
            memory
        }
        5 => peer.memory.try_clone().unwrap().into(),
        _ => eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
    }
}

/// Sends any message at any moment.
fn send_any(peer: &mut Peer, input: &mut Input<'_>) {
    let request = u32::from(input.u8()) % ask::END;
    let queue = u32::from(input.u8() % 4);
    let mut body = match request {
        ask::SET_FEATURES | ask::SET_PROTOCOL_FEATURES => message([any_number(input)]),
        ask::SET_MEM_TABLE => match input.u8() % 4 {
            0 => table(0, MEMORY, FRONT_END_ADDRESS, 0),
            1 => table(any_number(input), MEMORY, FRONT_END_ADDRESS, 0),
            2 => table(0, any_number(input), any_number(input), any_number(input)),
            _ => {
                let count = u64::from(input.u8() % 40);
                let regions =
                    (0..count).flat_map(|n| message([n << 20, 1 << 20, FRONT_END_ADDRESS + (n << 20), n << 20]));
                state(count as u32, 0).into_iter().chain(regions).collect()
            }
        },
        ask::SET_LOG_BASE => message([any_number(input), any_number(input)]),
        ask::SET_VRING_NUM | ask::SET_VRING_BASE | ask::GET_VRING_BASE | ask::SET_VRING_ENABLE => {
            let small = u32::from(input.u8() % 3);
            let any = any_number(input) as u32;
            state(queue, if input.one_in(2) { any } else { small })
        }
        ask::SET_VRING_ADDR => {
            let (descriptors, available, used) = rings(queue as u16 % QUEUES);
            let mut addresses = [descriptors, used, available, 0].map(|at| FRONT_END_ADDRESS + at);
            addresses[usize::from(input.u8() % 4)] = any_number(input);
            [state(queue, 0), message(addresses)].concat()
        }
        ask::SET_VRING_KICK | ask::SET_VRING_CALL | ask::SET_VRING_ERR => {
            message([u64::from(queue) | u64::from(input.one_in(4)) << 8])
        }
        ask::GET_CONFIG | ask::SET_CONFIG => {
            let size = input.u8();
            let head = [any_number(input) as u32, size.into(), 0].map(u32::to_ne_bytes).concat();
            [head, vec![0; size.into()]].concat()
        }
        ask::GET_INFLIGHT_FD | ask::SET_INFLIGHT_FD => {
            let (queues, size) = (any_number(input) as u16, any_number(input) as u16);
            let sizes = [queues, size].map(u16::to_ne_bytes).concat();
            [message([any_number(input), any_number(input)]), sizes, vec![0; 4]].concat()
        }
        _ if input.one_in(4) => message([any_number(input), any_number(input)]),
        _ => Vec::new(),
    };
    if input.one_in(8) && !body.is_empty() {
        let place = usize::from(input.u8()) % body.len();
        body[place] = input.u8();
    }
    let wanted = match request {
        ask::SET_MEM_TABLE => body.first().copied().unwrap_or(0),
        ask::SET_VRING_KICK | ask::SET_VRING_CALL | ask::SET_VRING_ERR => 1,
        ask::SET_LOG_BASE | ask::SET_INFLIGHT_FD | ask::SET_BACKEND_REQ_FD => 1,
        _ => 0,
    };
    let count = if input.one_in(6) { input.u8() % 34 } else { wanted.min(33) };
    let of_memory = request == ask::SET_MEM_TABLE && !input.one_in(4);
    let one = |input: &mut Input<'_>| match (request, &peer.inflight) {
        (ask::SET_INFLIGHT_FD, Some((_, file))) if input.one_in(2) => file.try_clone().unwrap(),
        _ if of_memory => peer.memory.try_clone().unwrap().into(),
        _ => any_file(input, peer),
    };
    let descriptors: Vec<OwnedFd> = (0..count).map(|_| one(input)).collect();
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let flags = if input.one_in(8) { input.u8().into() } else { input.pick(&[1, 9]) };
    let len = if input.one_in(24) { any_number(input) as u32 } else { body.len() as u32 };
    peer.send(request, flags, len, &body, &borrowed);
}

/// Adds a valid request.
fn add_request(peer: &mut Peer, input: &mut Input<'_>) {
    let queue = input.u16() % QUEUES;
    let kind = input.pick(&[0, 1, 4, 8, 11, 13, 1, 0, 99]);
    let sector = match input.u8() % 4 {
        0 => any_number(input),
        _ => u64::from(input.u16()),
    };
    let len = match input.u8() % 6 {
        0 => any_number(input) as u32,
        1 => u32::from(input.u16()),
        2 => 1 << 20,
        _ => 512 << (input.u8() % 8),
    };
    if matches!(kind, 11 | 13) {
        for n in 0..u64::from(input.u8() % 8) {
            let range = [any_number(input), any_number(input) & 0xf_ffff_ffff];
            peer.write(DATA + n * 16, &message(range));
        }
        peer.add_request(queue, kind, 0, DATA, u32::from(input.u8() % 9) * 16);
    } else {
        peer.add_request(queue, kind, sector, DATA + u64::from(input.u8()) * 512, len);
    }
    if !input.one_in(3) {
        peer.kick(queue);
    }
}

/// Changes an index of a ring, or its flags.
fn set_index(peer: &mut Peer, input: &mut Input<'_>) {
    let queue = input.u16() % QUEUES;
    let (_, available, used) = rings(queue);
    let size = u64::from(peer.sizes[usize::from(queue)]);
    let at = [available + 2, used + 2, available, used, available + 4 + size * 2, used + 4 + size * 8];
    let at = at[usize::from(input.u8()) % at.len()];
    let value = match input.u8() % 3 {
        0 => input.u16(),
        1 => peer.available[usize::from(queue)].wrapping_add(input.u8().into()),
        _ => peer.available[usize::from(queue)].wrapping_sub(input.u8().into()),
    };
    peer.write(at, &value.to_le_bytes());
}

fn any_descriptor(input: &mut Input<'_>) -> (u64, u32, u16, u16) {
    let address = match input.u8() % 6 {
        0 => any_number(input),
        1 => HEADER,
        2 => STATUS,
        3 => MEMORY - u64::from(input.u8()),
        4 => rings(input.u16() % QUEUES).0 + u64::from(input.u8()) * 16,
        _ => DATA + u64::from(input.u16()),
    };
    let len = match input.u8() % 4 {
        0 => any_number(input) as u32,
        1 => 16 * u32::from(input.u8()),
        _ => u32::from(input.u16()),
    };
    (address, len, (input.u8() % 8).into(), (input.u8() % 70).into())
}

fn change_descriptor(peer: &mut Peer, input: &mut Input<'_>) {
    let (descriptors, _, _) = rings(input.u16() % QUEUES);
    let number = (input.u8() % 8).into();
    peer.write_descriptor(descriptors, number, any_descriptor(input));
}

fn offer_chain(peer: &mut Peer, input: &mut Input<'_>) {
    let queue = input.u16() % QUEUES;
    let head = if input.one_in(6) { input.u16() } else { (input.u8() % 8).into() };
    peer.offer(queue, head);
    peer.kick(queue);
}

fn change_memory(peer: &mut Peer, input: &mut Input<'_>) {
    let at = any_number(input) ^ u64::from(input.u16());
    peer.write(at, &input.bytes::<8>());
}

/// Adds a chain with an indirect table.
fn offer_indirect_chain(peer: &mut Peer, input: &mut Input<'_>) {
    let queue = input.u16() % QUEUES;
    let (table, count) = (DATA + 0x8000, u16::from(input.u8() % 12));
    for number in 0..count {
        let (address, len, flags, next) = any_descriptor(input);
        let next = if input.one_in(3) { next } else { number + 1 };
        peer.write_descriptor(table, number, (address, len, flags, next));
    }
    let len = if input.one_in(4) { any_number(input) as u32 } else { u32::from(count) * 16 };
    peer.write_descriptor(rings(queue).0, 4, (table, len, 4, 0));
    peer.offer(queue, 4);
    peer.kick(queue);
}

/// Changes rings and descriptors as fast as possible, while the engine reads them.
fn change_rings_fast(peer: &mut Peer, input: &mut Input<'_>) {
    let queue = input.u16() % QUEUES;
    let (descriptors, available, used) = rings(queue);
    let mut state = input.u64() | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let stays_valid = input.one_in(2);
    for _ in 0..input.u16() % MAX_STORM_CHANGES {
        let value = next();
        match value % 8 {
            0 | 1 if stays_valid => peer.offer(queue, (value >> 8) as u16 % 8),
            0 => peer.write(available + 2, &((value >> 8) as u16 % 130).to_le_bytes()),
            1 => peer.write(available + 4 + (value >> 8) % 128, &[(value >> 16) as u8 % 66]),
            2 => peer.write(used + 2, &((value >> 8) as u16 % 70).to_le_bytes()),
            3..=5 => peer.write(descriptors + (value >> 8) % 128, &[(value >> 16) as u8]),
            6 => peer.write(HEADER + (value >> 8) % 16, &[(value >> 16) as u8 % 16]),
            _ => peer.kick(queue),
        }
    }
}

fn change_inflight(peer: &mut Peer, input: &mut Input<'_>) {
    let Some((_, file)) = &peer.inflight else { return };
    let file = File::from(file.try_clone().unwrap());
    let queue = input.u16() % QUEUES;
    // A queue's part of the record has 16 bytes, and 16 bytes for each descriptor.
    let begin = u64::from(queue) * (16 + 1024 * 16_u64).next_multiple_of(64);
    let at = begin + if input.one_in(2) { u64::from(input.u8() % 16) } else { 16 + u64::from(input.u16() % 4096) };
    let _ = file.write_all_at(&[input.pick(&[0, 1, 2, 0xff])], at);
}

/// Sends commands of a VM manager.
fn send_command(control: &mut Control, input: &mut Input<'_>) {
    let command = match input.u8() % 12 {
        0 => ControlCommand::Status {},
        1 => ControlCommand::SetLimits { bps: Some(200 << 20), iops: None },
        2 => ControlCommand::SetLimits { bps: None, iops: Some(2000) },
        3 => ControlCommand::UpdateLength {},
        4 => ControlCommand::KeepCache { claim: None },
        5 => ControlCommand::ReuseCache {},
        6 => ControlCommand::DropCache {},
        7 => ControlCommand::RecordPages { pid: Some(std::process::id()) },
        8 => ControlCommand::CollectPages {},
        9 => ControlCommand::PhaseBegin {},
        10 => ControlCommand::PhaseMark {},
        _ => ControlCommand::RecordPages { pid: None },
    };
    // The server may reject the command, but must answer: a control connection has a timeout.
    match control.ask::<Value>(&command) {
        Ok(_) | Err(rekindle_disk::control::ControlError::Refused { .. }) => {}
        Err(e) => panic!("{command:?}: {e}"),
    }
}

/// Stops a queue and starts it again, as QEMU does for a pause, sometimes at another position.
fn restart_queue(peer: &mut Peer, input: &mut Input<'_>) {
    let queue = input.u16() % QUEUES;
    let Some(base) = peer.stop_queue(queue) else { return };
    if input.one_in(2) {
        peer.track();
    }
    let base = if input.one_in(3) { input.u16() } else { base };
    let size = peer.sizes[usize::from(queue)];
    peer.set_up_queue(queue, size, base);
}
