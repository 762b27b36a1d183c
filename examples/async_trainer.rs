//! A trainer whose steps are async: it saves in the background, and awaits a save's staging before it
//! changes the weights. Run again, it resumes from the newest checkpoint.
//!
//! ```text
//! cargo run --release --example async_trainer -- run/
//! ```
//!
//! tokio is this program's choice. Under `tokio_uring::start`, or any other executor, the same
//! functions do.

use ringstow::Source;
use ringstow::{Checkpoint, Dtype, SaveHandle, StateDict, TensorInfo, Value};
use std::path::Path;
use std::sync::{Arc, RwLock};

const WEIGHTS: usize = 1 << 22;
const STEPS: i64 = 30;
const STEPS_A_SAVE: i64 = 10;

/// The model: shared by the trainer, which changes it between saves, and the saves, which read it.
#[derive(Clone)]
struct Weights(Arc<RwLock<Vec<f32>>>);

impl Source for Weights {
    fn nbytes(&self) -> u64 {
        (WEIGHTS * size_of::<f32>()) as u64
    }

    fn read(&self, offset: usize, to: &mut [u8]) -> ringstow::Result<()> {
        let weights = self.0.read().expect("no step panics");
        to.copy_from_slice(&bytemuck::cast_slice(&weights)[offset..offset + to.len()]);
        Ok(())
    }
}

impl Weights {
    /// Stands for what a step learns. Long enough to overlap with a save.
    async fn gradient(&self) -> f32 {
        tokio::task::yield_now().await;
        let weights = self.0.read().expect("no step panics");
        1.0 + weights.iter().sum::<f32>() / WEIGHTS as f32 / 1e6
    }

    fn update(&self, gradient: f32) {
        self.0.write().expect("no step panics").iter_mut().for_each(|weight| *weight += gradient);
    }
}

/// Starts to save, and returns at once.
fn save(weights: &Weights, step: i64, run: &Path) -> ringstow::Result<SaveHandle> {
    let info =
        TensorInfo { name: "weights".into(), dtype: Dtype::F32, shape: vec![WEIGHTS as u64] };
    let mut state = StateDict::new();
    state.source(info, Box::new(weights.clone())).value("step", step);
    ringstow::save_async(state, run.join(format!("step-{step:08}")))
}

/// The weights and the step of the newest checkpoint, or those to begin with.
async fn resume(run: &Path) -> ringstow::Result<(Weights, i64)> {
    let Some(newest) = ringstow::latest(run)? else {
        return Ok((Weights(Arc::new(RwLock::new(vec![0.0; WEIGHTS]))), 0));
    };
    let step = Checkpoint::open(&newest)?.state()?.get("step").and_then(Value::as_int).unwrap_or(0);
    let loaded = ringstow::load_async(&newest)?.await?;
    let weights = loaded.tensor("weights").expect("every save has it").as_slice()?.to_vec();
    println!("resumed from step {step}, read at {:.1} GB/s", loaded.report.gb_per_s());
    Ok((Weights(Arc::new(RwLock::new(weights))), step))
}

async fn train(run: &Path) -> ringstow::Result<()> {
    let (weights, done) = resume(run).await?;
    let mut saving: Option<SaveHandle> = None;
    for step in done + 1..=done + STEPS {
        let gradient = weights.gradient().await;
        // A save that is in progress still reads the weights: they change when it has read them all.
        if let Some(saving) = &saving {
            saving.until_staged().await;
        }
        weights.update(gradient);
        if step % STEPS_A_SAVE == 0 {
            // One save at a time; one that failed ends the training here, with its reason.
            if let Some(saving) = saving.take() {
                saving.await?;
            }
            saving = Some(save(&weights, step, run)?);
        }
    }
    if let Some(saving) = saving {
        let report = saving.await?;
        println!("saved {}, durable at {:.1} GB/s", report.path.display(), report.gb_per_s());
    }
    Ok(())
}

fn main() -> ringstow::Result<()> {
    let run = std::env::args().nth(1).unwrap_or_else(|| "run".into());
    std::fs::create_dir_all(&run).expect("the directory can be made");
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("it has no needs");
    runtime.block_on(train(Path::new(&run)))
}
