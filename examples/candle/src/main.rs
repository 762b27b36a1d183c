//! A character model that trains on the CPU with candle, saves in the background as it goes, and
//! resumes where it was killed, with the very losses of a run that was not.
//!
//! ```text
//! cargo run --release -p ringstow-candle-example -- --dir run
//! ```

use candle_core::{D, DType, Device, Result as CandleResult, Tensor};
use candle_nn::{
    Embedding, Linear, Module, Optimizer, VarBuilder, VarMap, embedding, linear, loss,
};
use clap::Parser;
use ringstow::candle::{AdamW, VarMaps};
use ringstow::{CheckpointManager, OnDamage, Retention};
use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

/// What it learns.
const TEXT: &[u8] = include_bytes!("../../data/paradise-lost.txt");
/// Characters that the model sees before it guesses the next.
const CONTEXT: usize = 16;
/// Byte values: the text is taken as bytes.
const VOCABULARY: usize = 256;

/// Trains, saves every few steps, and goes on from the newest checkpoint in `--dir`.
#[derive(Parser)]
struct Args {
    /// Directory of the checkpoints.
    #[arg(long, default_value = "run")]
    dir: PathBuf,
    /// Steps to train in all.
    #[arg(long, default_value_t = 200)]
    steps: u64,
    /// Steps from one checkpoint to the next.
    #[arg(long, default_value_t = 20)]
    every: u64,
    /// Width of the hidden layers.
    #[arg(long, default_value_t = 512)]
    width: usize,
}

/// Numbers in an embedded character.
const EMBEDDED: usize = 32;

/// Embeds the last characters and guesses the next one.
struct Model {
    embedding: Embedding,
    layers: [Linear; 3],
}

impl Model {
    fn new(width: usize, vars: VarBuilder) -> CandleResult<Self> {
        Ok(Self {
            embedding: embedding(VOCABULARY, EMBEDDED, vars.pp("embedding"))?,
            layers: [
                linear(CONTEXT * EMBEDDED, width, vars.pp("layer.0"))?,
                linear(width, width, vars.pp("layer.1"))?,
                linear(width, VOCABULARY, vars.pp("layer.2"))?,
            ],
        })
    }

    fn loss(&self, (context, next): &(Tensor, Tensor)) -> CandleResult<Tensor> {
        let mut x = self.embedding.forward(context)?.flatten_from(1)?;
        for layer in &self.layers[..2] {
            x = layer.forward(&x)?.relu()?;
        }
        loss::cross_entropy(&self.layers[2].forward(&x)?, next)
    }
}

/// Numbers that are the same for the same seed, so that every run sees the same (xorshift).
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut x = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    move || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x
    }
}

/// Starts all parameters from a seed: candle's own numbers differ from run to run.
fn initialise(vars: &VarMap) -> CandleResult<()> {
    let vars = vars.data().lock().expect("no panic while it is held");
    let sorted: BTreeMap<_, _> = vars.iter().collect();
    for (seed, parameter) in (0..).zip(sorted.into_values()) {
        let mut random = random(seed);
        let bound = 1.0 / (parameter.dim(D::Minus1)? as f32).sqrt();
        let mut uniform = || ((random() >> 40) as f32 / (1 << 23) as f32 - 1.0) * bound;
        let values: Vec<f32> = (0..parameter.elem_count()).map(|_| uniform()).collect();
        parameter.set(&Tensor::from_vec(values, parameter.shape(), &Device::Cpu)?)?;
    }
    Ok(())
}

/// The batch of a step: contexts and the characters that follow them.
fn batch(step: u64) -> CandleResult<(Tensor, Tensor)> {
    const BATCH: usize = 64;
    let mut random = random(step);
    let (mut contexts, mut next) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        let at = (random() % (TEXT.len() - CONTEXT) as u64) as usize;
        contexts.extend(TEXT[at..at + CONTEXT].iter().map(|&byte| u32::from(byte)));
        next.push(u32::from(TEXT[at + CONTEXT]));
    }
    let contexts = Tensor::from_vec(contexts, (BATCH, CONTEXT), &Device::Cpu)?;
    Ok((contexts, Tensor::from_vec(next, BATCH, &Device::Cpu)?))
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let vars = VarMap::new();
    let model = Model::new(args.width, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
    let mut adam = AdamW::new_lr(&vars, 1e-3)?;
    let training = VarMaps::new([("model", &vars), ("optimizer", adam.vars())]);
    let mut manager =
        CheckpointManager::found(&args.dir, Retention { last: Some(2), ..Retention::default() })?;
    let done = match manager.restore(None, OnDamage::Raise)? {
        Some(restored) => {
            training.set(&restored.loaded)?;
            println!("resumed from {}", restored.path.display());
            restored.step
        }
        None => {
            initialise(&vars)?;
            0
        }
    };
    for step in done + 1..=args.steps {
        let loss = model.loss(&batch(step)?)?;
        adam.backward_step(&loss)?; // waits until a save in progress has copied all variables
        let loss = loss.to_scalar::<f32>()?;
        println!("step {step} loss {loss:.9}");
        if step.is_multiple_of(args.every) || step == args.steps {
            manager.save_async(step, training.state()?, [("loss", f64::from(loss))])?;
        }
    }
    if let Some(saved) = manager.wait()? {
        println!("saved {} at {:.2} GB/s", saved.path.display(), saved.report.gb_per_s());
    }
    Ok(())
}
