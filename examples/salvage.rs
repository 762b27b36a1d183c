//! Loads what is intact of a damaged checkpoint.

use ringstow::{LoadOptions, OnCorrupt, OpenOptions, StateDict};

fn main() -> ringstow::Result<()> {
    let weights = vec![0.5f32; 1 << 20];
    let mut state = StateDict::new();
    state.slice("layer.0", &[1 << 20], &weights)?.slice("layer.1", &[1 << 20], &weights)?;
    ringstow::save(&state, "run/step-1000")?;

    let checkpoint = OpenOptions::new().damaged(true).open("run/step-1000")?; // also if files are missing or cut
    let names = checkpoint.tensors().iter().map(|tensor| &tensor.name);
    let options = LoadOptions { on_corrupt: OnCorrupt::Skip, ..LoadOptions::default() };
    let loaded = checkpoint.load_names(names, options)?;
    for lost in &loaded.report.damaged {
        eprintln!("{}: {}", lost.name, lost.why);
    }
    Ok(())
}
