//! A save by several ranks, here by one: see docs/rust.md.

use ringstow::{Dtype, Exchange, RanksSave, Region, StateDict, Store, TensorInfo};

/// How the ranks talk. This is a training of one rank; examples/ranks and examples/mpi have more.
struct Alone;

impl Exchange for Alone {
    fn rank(&self) -> u32 {
        0
    }
    fn ranks(&self) -> u32 {
        1
    }
    fn gather(&mut self, own: &[u8]) -> std::io::Result<Vec<Vec<u8>>> {
        Ok(vec![own.to_vec()]) // to rank 0, from all in their order
    }
    fn broadcast(&mut self, own: &[u8]) -> std::io::Result<Vec<u8>> {
        Ok(own.to_vec()) // rank 0's, to all
    }
}

fn main() -> ringstow::Result<()> {
    let (store, mut exchange) = (Store::found()?, Alone);
    let (rank, ranks) = (u64::from(exchange.rank()), u64::from(exchange.ranks()));
    let mut state = StateDict::new();
    let rows = TensorInfo { name: "weight".into(), dtype: Dtype::U8, shape: vec![16, 256] };
    let place = Region { shape: vec![16 * ranks, 256], offsets: vec![16 * rank, 0] };
    state.region(rows, place, Box::new(vec![7; 16 * 256])); // this rank's rows of the tensor
    state.step(1000).value("seed", 7); // rank 0's count
    let saving = RanksSave::begin(&store, state, "run/step-1000", &mut exchange)?;
    // Train on meanwhile. All ranks call `commit` between the same two steps:
    if let Some(committed) = saving.commit(&mut exchange)? {
        println!("{} tensors in {} files", committed.tensors, committed.files);
    }
    Ok(())
}
