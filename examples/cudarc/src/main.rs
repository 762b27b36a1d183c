//! A training loop on a GPU that saves its tensors from there in the background, and resumes where
//! it was killed, bit for bit.
//!
//! ```text
//! cargo run --release -p ringstow-cudarc-example -- --dir run
//! ```

mod model;

use clap::Parser;
use cudarc::driver::CudaContext;
use model::Model;
use ringstow::SaveHandle;
use std::error::Error;
use std::path::PathBuf;

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
    /// Number of the GPU.
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Layers, of a mebibyte of weights each.
    #[arg(long, default_value_t = 16)]
    layers: usize,
    /// Dies right after this step, as by a power cut.
    #[arg(long)]
    die_at: Option<u64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let stream = CudaContext::new(args.gpu)?.new_stream()?;
    let mut model = Model::new(stream, args.layers)?;
    std::fs::create_dir_all(&args.dir)?;
    if let Some(newest) = ringstow::latest(&args.dir)? {
        model.resume(&newest)?;
        println!("resumed from {} at step {}", newest.display(), model.step);
    }
    let mut saving: Option<SaveHandle> = None;
    while model.step < args.steps {
        // The save in progress may still be reading what this step is about to change.
        saving.as_ref().inspect(|save| _ = save.wait_staged(None));
        model.train()?;
        if args.die_at == Some(model.step) {
            std::process::abort();
        }
        if model.step.is_multiple_of(args.every) || model.step == args.steps {
            finish(saving.take())?;
            saving = Some(model.save(&args.dir)?);
        }
    }
    finish(saving)?;
    println!("step {}: crc32 of all tensors {:08x}", model.step, model.crc32()?);
    Ok(())
}

/// Waits until a save is durable, and reports on it.
fn finish(saving: Option<SaveHandle>) -> ringstow::Result<()> {
    let Some(saving) = saving else { return Ok(()) };
    let report = saving.result()?;
    let copied = report.moved.device_bytes as f64 / 1e9 / report.seconds.device_copy.max(1e-9);
    println!(
        "saved {} at {:.2} GB/s, copied by the GPU at {copied:.2} GB/s",
        report.path.display(),
        report.gb_per_s()
    );
    Ok(())
}
