//! A character model that trains on the CPU with burn, saves in the background as it goes, and resumes where it was killed, with
//! the very losses of a run that was not.
//!
//! ```text
//! cargo run --release -p ringstow-burn-example -- run 200 20
//! ```

use burn_core as burn;
use burn_core::module::Module;
use burn_core::tensor::activation::relu;
use burn_core::tensor::{Device, Int, Tensor, TensorData};
use burn_nn::loss::CrossEntropyLossConfig;
use burn_nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams};
use ringstow::{CheckpointManager, OnDamage, Retention};
use std::error::Error;

/// What it learns.
const TEXT: &[u8] = include_bytes!("../../data/paradise-lost.txt");
/// Characters that the model sees before it guesses the next.
const CONTEXT: usize = 16;
/// Byte values: the text is taken as bytes.
const VOCABULARY: usize = 256;
/// Numbers in an embedded character, and width of the hidden layer.
const EMBEDDED: usize = 16;
const WIDTH: usize = 64;
/// Contexts in a batch.
const BATCH: usize = 32;

/// Embeds the last characters and guesses the next one.
#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    hidden: Linear,
    output: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, EMBEDDED).init(device),
            hidden: LinearConfig::new(CONTEXT * EMBEDDED, WIDTH).init(device),
            output: LinearConfig::new(WIDTH, VOCABULARY).init(device),
        }
    }

    fn loss(&self, contexts: Tensor<2, Int>, next: Tensor<1, Int>) -> Tensor<1> {
        let embedded: Tensor<2> = self.embedding.forward(contexts).flatten(1, 2);
        let guesses = self.output.forward(relu(self.hidden.forward(embedded)));
        CrossEntropyLossConfig::new().init(&guesses.device()).forward(guesses, next)
    }
}

/// The batch of a step: contexts and the characters that follow them. The same in every run (xorshift).
fn batch(step: u64, device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>) {
    let mut x = (step + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let (mut contexts, mut next) = (Vec::new(), Vec::new());
    for _ in 0..BATCH {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        let at = (x % (TEXT.len() - CONTEXT) as u64) as usize;
        contexts.extend(TEXT[at..at + CONTEXT].iter().map(|&byte| i64::from(byte)));
        next.push(i64::from(TEXT[at + CONTEXT]));
    }
    let contexts = Tensor::from_data(TensorData::new(contexts, [BATCH, CONTEXT]), device);
    (contexts, Tensor::from_data(TensorData::new(next, [BATCH]), device))
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().unwrap_or_else(|| "run".into());
    let mut number = |default: u64| args.next().map_or(Ok(default), |text| text.parse());
    let (steps, every) = (number(200)?, number(20)?);
    let device = Device::default().autodiff();
    device.seed(7);
    let mut model = Model::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let mut manager =
        CheckpointManager::found(&dir, Retention { last: Some(2), ..Retention::default() })?;
    let mut done = 0;
    if let Some(restored) = manager.restore(None, OnDamage::Raise)? {
        println!("resumed from {}", restored.path.display());
        done = restored.step;
        ringstow_burn::restore(restored.loaded, &mut model, &mut optimizer)?;
    }
    for step in done + 1..=steps {
        let (contexts, next) = batch(step, &device);
        let loss = model.loss(contexts, next);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-3, model, gradients);
        let loss: f32 = loss.into_scalar();
        println!("step {step} loss {loss:.9}");
        if step.is_multiple_of(every) || step == steps {
            let state = ringstow_burn::state(&model, &optimizer)?;
            manager.save_async(step, state, [("loss", f64::from(loss))])?;
        }
    }
    if let Some(saved) = manager.wait()? {
        println!("saved {} at {:.2} GB/s", saved.path.display(), saved.report.gb_per_s());
    }
    Ok(())
}
