//! The training of `examples/ranks` over MPI.
//!
//! ```text
//! cargo build --release --manifest-path examples/mpi/Cargo.toml --target-dir target
//! mpirun -n 2 target/release/ringstow-mpi-example run 200 20
//! ```

use mpi::datatype::PartitionMut;
use mpi::topology::SimpleCommunicator;
use mpi::traits::{Communicator, Root};
use ringstow::Exchange;
use ringstow_ranks_example::train;
use std::error::Error;
use std::io;
use std::path::Path;

/// The ranks of MPI's world. If one dies, `mpirun` ends the others.
struct World(SimpleCommunicator);

/// MPI counts bytes in 31 bits.
fn count(len: usize) -> io::Result<i32> {
    i32::try_from(len)
        .map_err(|_| io::Error::other(format!("{len} bytes are too many for one message of MPI")))
}

impl Exchange for World {
    fn rank(&self) -> u32 {
        self.0.rank() as u32
    }

    fn ranks(&self) -> u32 {
        self.0.size() as u32
    }

    fn gather(&mut self, own: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let root = self.0.process_at_rank(0);
        let own = &[&[0], own].concat()[..]; // MPI refuses an empty buffer
        let own_len = count(own.len())?;
        if self.0.rank() != 0 {
            root.gather_into(&own_len);
            root.gather_varcount_into(own);
            return Ok(Vec::new());
        }
        let mut lens = vec![0; self.0.size() as usize];
        root.gather_into_root(&own_len, &mut lens);
        let starts: Vec<i32> = lens
            .iter()
            .scan(0i32, |end, len| Some(std::mem::replace(end, end.checked_add(*len)?)))
            .collect();
        let total: usize = lens.iter().map(|len| *len as usize).sum();
        let mut all = vec![0; count(total)? as usize];
        root.gather_varcount_into_root(
            own,
            &mut PartitionMut::new(&mut all[..], &lens[..], &starts[..]),
        );
        let of = |(start, len): (&i32, &i32)| all[*start as usize..][1..*len as usize].to_vec();
        Ok(starts.iter().zip(&lens).map(of).collect())
    }

    fn broadcast(&mut self, own: &[u8]) -> io::Result<Vec<u8>> {
        let root = self.0.process_at_rank(0);
        let mut len = count(own.len())?;
        root.broadcast_into(&mut len);
        let mut bytes = match self.0.rank() {
            0 => own.to_vec(),
            _ => vec![0; len as usize],
        };
        if !bytes.is_empty() {
            root.broadcast_into(&mut bytes[..]); // MPI refuses an empty buffer
        }
        Ok(bytes)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [root, steps, every] = args.as_slice() else {
        return Err("arguments: DIR STEPS EVERY".into());
    };
    let universe = mpi::initialize().ok_or("MPI does not start")?;
    let mut world = World(universe.world());
    let trained = train(Path::new(root), (steps.parse()?, every.parse()?), &mut world);
    if let Err(error) = &trained {
        eprintln!("rank {}: {error}", world.rank());
        world.0.abort(1); // the others may be waiting for this rank
    }
    trained
}
