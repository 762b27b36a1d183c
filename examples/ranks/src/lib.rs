//! A training of several processes, each of which has some rows of the weights and of their momentum. They save one checkpoint, and
//! resume from it on any number of processes. How they talk is the caller's: see `main.rs` for sockets, and `../mpi`.

pub mod sockets;

use ringstow::{
    Checkpoint, Disposal, Dtype, Exchange, RanksSave, Region, StateDict, Store, TensorInfo, Value,
    retain,
};
use std::error::Error;
use std::ops::Range;
use std::path::Path;

/// Rows and columns of the weights.
const ROWS: u64 = 64;
const COLUMNS: u64 = 512;

/// What this rank has: some rows of the weights and of their momentum.
struct Share {
    rows: Range<u64>,
    weights: Vec<f32>,
    momentum: Vec<f32>,
}

/// Numbers that are the same in every run.
fn number(seed: u64) -> f32 {
    let mut x = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (x >> 40) as f32 / (1 << 23) as f32 - 1.0
}

impl Share {
    fn new(rank: u32, ranks: u32) -> Self {
        let at = |rank: u32| ROWS * u64::from(rank) / u64::from(ranks);
        let rows = at(rank)..at(rank + 1);
        let weights: Vec<f32> = (rows.start * COLUMNS..rows.end * COLUMNS).map(number).collect();
        Self { rows, momentum: vec![0.0; weights.len()], weights }
    }

    /// Takes this rank's rows of a checkpoint, however many ranks saved it.
    fn load(&mut self, path: &Path) -> ringstow::Result<u64> {
        let checkpoint = Checkpoint::open(path)?;
        for (name, into) in [("weights", &mut self.weights), ("momentum", &mut self.momentum)] {
            let part = checkpoint.load_part(name, &[self.rows.clone(), 0..COLUMNS])?;
            *into = part.as_slice()?.to_vec();
        }
        let step = checkpoint.state()?.get("step").and_then(Value::as_int);
        Ok(step.unwrap_or(0) as u64)
    }

    /// This rank's rows, copied: the training changes them at once.
    fn state(&self, step: u64) -> StateDict<'static> {
        let mut state = StateDict::new();
        for (name, values) in [("weights", &self.weights), ("momentum", &self.momentum)] {
            let shape = vec![self.rows.end - self.rows.start, COLUMNS];
            let info = TensorInfo { name: name.into(), dtype: Dtype::F32, shape };
            let region = Region { shape: vec![ROWS, COLUMNS], offsets: vec![self.rows.start, 0] };
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            state.region(info, region, Box::new(bytes));
        }
        state.step(step).value("step", step);
        state
    }

    /// Moves the weights towards what they are to give on an input of this step. Returns the squared error of these rows.
    fn train(&mut self, step: u64) -> f32 {
        let columns = COLUMNS as usize;
        let input: Vec<f32> = (0..COLUMNS).map(|at| number(step * COLUMNS + at)).collect();
        let mut error = 0.0;
        let rows = self.weights.chunks_mut(columns).zip(self.momentum.chunks_mut(columns));
        for (row, (weights, momentum)) in self.rows.clone().zip(rows) {
            let guess: f32 = weights.iter().zip(&input).map(|(weight, x)| weight * x).sum();
            let wrong = guess - input[row as usize];
            error += wrong * wrong;
            for ((weight, momentum), x) in weights.iter_mut().zip(momentum).zip(&input) {
                *momentum = 0.9 * *momentum + wrong * x;
                *weight -= 1e-4 * *momentum;
            }
        }
        error
    }
}

/// Trains until a step, saves every few steps below `root`, and goes on from the newest checkpoint there.
///
/// # Errors
/// What a save or the exchange fails with.
pub fn train(
    root: &Path,
    (steps, every): (u64, u64),
    exchange: &mut impl Exchange,
) -> Result<(), Box<dyn Error>> {
    let (rank, ranks) = (exchange.rank(), exchange.ranks());
    let store = Store::found()?;
    let mut share = Share::new(rank, ranks);
    // Rank 0 looks, and all load the same.
    let newest = if rank == 0 { newest(root)? } else { String::new() };
    let newest = String::from_utf8(exchange.broadcast(newest.as_bytes())?)?;
    let done = if newest.is_empty() { 0 } else { share.load(Path::new(&newest))? };
    if rank == 0 && done > 0 {
        println!("resumed from {newest}");
    }
    let mut saving: Option<RanksSave> = None;
    for step in done + 1..=steps {
        let errors = exchange.gather(&share.train(step).to_le_bytes())?;
        if rank == 0 {
            let errors = errors
                .iter()
                .filter_map(|it| Some(f32::from_le_bytes(it.as_slice().try_into().ok()?)));
            println!("step {step} error {:.6}", errors.sum::<f32>());
        }
        if step % every == 0 || step == steps {
            commit(saving.take(), root, exchange)?;
            let path = root.join(format!("step-{step:08}"));
            saving = Some(RanksSave::begin(&store, share.state(step), path, exchange)?);
        }
    }
    commit(saving, root, exchange)
}

/// The newest checkpoint, or nothing.
fn newest(root: &Path) -> ringstow::Result<String> {
    match root.is_dir() {
        true => Ok(ringstow::latest(root)?.map_or_else(String::new, |it| it.display().to_string())),
        false => Ok(String::new()),
    }
}

/// Commits what all ranks have written meanwhile. Then rank 0 removes older steps.
fn commit(
    saving: Option<RanksSave>,
    root: &Path,
    exchange: &mut impl Exchange,
) -> Result<(), Box<dyn Error>> {
    let Some(saving) = saving else { return Ok(()) };
    if saving.commit(exchange)?.is_some() {
        retain(root, 2, Disposal::Remove)?;
    }
    Ok(())
}
