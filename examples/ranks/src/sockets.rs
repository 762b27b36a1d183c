//! Ranks that talk over Unix sockets: each has one to rank 0. If a rank dies, its socket closes, and the others end with an error.

use ringstow::Exchange;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long a rank waits for the others to start.
const START: Duration = Duration::from_secs(120);

/// One rank's sockets.
pub struct Sockets {
    rank: u32,
    ranks: u32,
    /// On rank 0 those to ranks 1, 2, ...; on another rank the one to rank 0.
    peers: Vec<UnixStream>,
}

impl Sockets {
    /// Connects all ranks by a socket at `path`, which rank 0 makes.
    ///
    /// # Errors
    /// The system's; that the others do not start.
    pub fn connect(path: &Path, rank: u32, ranks: u32) -> io::Result<Self> {
        let peers = match rank {
            0 => accept(path, ranks)?,
            _ => {
                let mut peer = retry(|| UnixStream::connect(path))?;
                peer.write_all(&rank.to_le_bytes())?;
                vec![peer]
            }
        };
        Ok(Self { rank, ranks, peers })
    }
}

/// Repeats a call until the others have started.
fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let begun = Instant::now();
    loop {
        match call() {
            Err(_) if begun.elapsed() < START => thread::sleep(Duration::from_millis(5)),
            done => return done,
        }
    }
}

fn accept(path: &Path, ranks: u32) -> io::Result<Vec<UnixStream>> {
    let _ = std::fs::remove_file(path); // of a run that died
    let listener = UnixListener::bind(path)?;
    listener.set_nonblocking(true)?;
    let mut peers: Vec<(u32, UnixStream)> = Vec::new();
    for _ in 1..ranks {
        let (mut peer, _) = retry(|| listener.accept())?;
        peer.set_nonblocking(false)?;
        let mut rank = [0; 4];
        peer.read_exact(&mut rank)?;
        peers.push((u32::from_le_bytes(rank), peer));
    }
    peers.sort_by_key(|(rank, _)| *rank);
    let is_complete = peers.iter().map(|(rank, _)| *rank).eq(1..ranks);
    match is_complete {
        true => Ok(peers.into_iter().map(|(_, peer)| peer).collect()),
        false => Err(io::Error::other("two processes have the number of one rank")),
    }
}

fn send(peer: &mut UnixStream, bytes: &[u8]) -> io::Result<()> {
    peer.write_all(&(bytes.len() as u64).to_le_bytes())?;
    peer.write_all(bytes)
}

fn receive(peer: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut len = [0; 8];
    peer.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    let mut bytes = Vec::new(); // grows with what arrives
    peer.take(len).read_to_end(&mut bytes)?;
    match bytes.len() as u64 == len {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

impl Exchange for Sockets {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn gather(&mut self, own: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        if self.rank != 0 {
            return send(&mut self.peers[0], own).map(|()| Vec::new());
        }
        let others = self.peers.iter_mut().map(receive);
        std::iter::once(Ok(own.to_vec())).chain(others).collect()
    }

    fn broadcast(&mut self, own: &[u8]) -> io::Result<Vec<u8>> {
        if self.rank != 0 {
            return receive(&mut self.peers[0]);
        }
        self.peers.iter_mut().try_for_each(|peer| send(peer, own))?;
        Ok(own.to_vec())
    }
}
