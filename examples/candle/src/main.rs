//! A character model that trains on the CPU with candle, saves in the background as it goes, and
//! resumes where it was killed, with the very losses of a run that was not.
//!
//! ```text
//! cargo run --release -p ringstow-candle-example -- --dir run
//! ```

use candle_core::{D, DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::{Embedding, Linear, Module, VarBuilder, VarMap, embedding, linear, loss};
use clap::Parser;
use ringstow::{Checkpoint, Config, LoadOptions, Runtime, SaveHandle, StateDict, Value};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;

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

/// Adam, with moments that can be saved.
struct Adam {
    /// Name, parameter, first and second moment, sorted by name.
    slots: Vec<(String, Var, Var, Var)>,
    step: u64,
}

impl Adam {
    fn new(parameters: &VarMap) -> CandleResult<Self> {
        let parameters = parameters.data().lock().expect("no panic while it is held");
        let mut slots = Vec::new();
        for (name, var) in parameters.iter() {
            let zeros = || Var::from_tensor(&var.zeros_like()?);
            slots.push((name.clone(), var.clone(), zeros()?, zeros()?));
        }
        slots.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(Self { slots, step: 0 })
    }

    fn step(&mut self, loss: &Tensor) -> CandleResult<()> {
        const RATE: f64 = 1e-3;
        const DECAY_1: f64 = 0.9;
        const DECAY_2: f64 = 0.999;
        const EPSILON: f64 = 1e-8;
        let gradients = loss.backward()?;
        self.step += 1;
        let correct = |decay: f64| 1.0 - decay.powi(self.step as i32);
        for (_, parameter, first, second) in &self.slots {
            let Some(gradient) = gradients.get(parameter) else { continue };
            first.set(&((first.as_tensor() * DECAY_1)? + (gradient * (1.0 - DECAY_1))?)?)?;
            second
                .set(&((second.as_tensor() * DECAY_2)? + (gradient.sqr()? * (1.0 - DECAY_2))?)?)?;
            let size = ((second.as_tensor() / correct(DECAY_2))?.sqrt()? + EPSILON)?;
            let change = ((first.as_tensor() * (RATE / correct(DECAY_1)))? / size)?;
            parameter.set(&(parameter.as_tensor() - change)?)?;
        }
        Ok(())
    }

    /// Every tensor of the training state by its name in the checkpoint.
    fn tensors(&self) -> impl Iterator<Item = (String, &Var)> {
        self.slots.iter().flat_map(|(name, parameter, first, second)| {
            [
                (format!("model.{name}"), parameter),
                (format!("adam.first.{name}"), first),
                (format!("adam.second.{name}"), second),
            ]
        })
    }

    /// Starts to save. The tensors are shared, not copied: they must stay as they are until
    /// [`SaveHandle::wait_staged`] returns.
    fn save(&self, dir: &Path) -> ringstow::Result<SaveHandle> {
        let mut state = StateDict::new();
        for (name, var) in self.tensors() {
            state.tensor(name, var.as_tensor().clone())?;
        }
        state.value("step", self.step);
        ringstow::save_async(state, dir.join(format!("step-{:08}", self.step)), &Config::default())
    }

    /// Takes the state of a checkpoint.
    fn resume(&mut self, path: &Path) -> Result<(), Box<dyn Error>> {
        let checkpoint = Checkpoint::open(path)?;
        let names: Vec<String> = self.tensors().map(|(name, _)| name).collect();
        let runtime = Runtime::shared(&Config::default())?;
        let options = LoadOptions::default();
        let loaded = checkpoint.load_names(&names, options, &runtime, &Arc::default())?;
        for (name, var) in self.tensors() {
            let values: &[f32] = loaded.tensor(&name).ok_or("asked for")?.as_slice()?;
            var.set(&Tensor::from_slice(values, var.shape(), &Device::Cpu)?)?;
        }
        let step =
            checkpoint.state()?.get("step").and_then(Value::as_int).ok_or("it has no step")?;
        self.step = step as u64;
        Ok(())
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
        // The save under way may still be reading what this step is about to change.
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
