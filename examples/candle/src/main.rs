//! A character model that trains on the CPU with candle, saves in the background as it goes, and
//! resumes where it was killed, with the very losses of a run that was not.
//!
//! ```text
//! cargo run --release -p ringstow-candle-example -- --dir run
//! ```

mod adam;

use adam::Adam;
use candle_core::{D, DType, Device, Result as CandleResult, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder, VarMap, embedding, linear, loss};
use clap::Parser;
use ringstow::SaveHandle;
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
}

/// Numbers in an embedded character, and width of the hidden layers.
const EMBEDDED: usize = 32;
const WIDTH: usize = 512;

/// Embeds the last characters and guesses the next one.
struct Model {
    embedding: Embedding,
    layers: [Linear; 3],
}

impl Model {
    fn new(vars: VarBuilder) -> CandleResult<Self> {
        Ok(Self {
            embedding: embedding(VOCABULARY, EMBEDDED, vars.pp("embedding"))?,
            layers: [
                linear(CONTEXT * EMBEDDED, WIDTH, vars.pp("layer.0"))?,
                linear(WIDTH, WIDTH, vars.pp("layer.1"))?,
                linear(WIDTH, VOCABULARY, vars.pp("layer.2"))?,
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
fn initialise(adam: &Adam) -> CandleResult<()> {
    for (seed, (_, parameter, ..)) in (0..).zip(&adam.slots) {
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
    let parameters = VarMap::new();
    let vars = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
    let model = Model::new(vars)?;
    let mut adam = Adam::new(&parameters)?;
    std::fs::create_dir_all(&args.dir)?;
    match ringstow::latest(&args.dir)? {
        Some(newest) => {
            adam.resume(&newest)?;
            println!("resumed from {}", newest.display());
        }
        None => initialise(&adam)?,
    }
    let mut saving: Option<SaveHandle> = None;
    while adam.step < args.steps {
        let loss = model.loss(&batch(adam.step)?)?;
        // The save in progress may still be reading what this step is about to change.
        saving.as_ref().inspect(|save| _ = save.wait_staged(None));
        adam.step(&loss)?;
        println!("step {} loss {:.9}", adam.step, loss.to_scalar::<f32>()?);
        if adam.step.is_multiple_of(args.every) || adam.step == args.steps {
            if let Some(save) = saving.take() {
                let report = save.result()?;
                println!("saved {} at {:.2} GB/s", report.path.display(), report.gb_per_s());
            }
            saving = Some(adam.save(&args.dir)?);
        }
    }
    saving.map(SaveHandle::result).transpose()?;
    Ok(())
}
