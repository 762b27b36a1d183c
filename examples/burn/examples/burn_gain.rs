//! What a save costs a training loop, by burn's own store and by ringstow, each in turn.
//!
//! ```text
//! cargo run --release -p ringstow-burn-example --example burn_gain -- DIR 1.5
//! ```

use burn_core as burn;
use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_nn::{Linear, LinearConfig};
use burn_store::{BurnpackStore, ModuleSnapshot, SafetensorsStore};
use ringstow_burn::RingstowStore;
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const ROUNDS: usize = 7;

/// Layers of 32 MB.
#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
}

/// Lowest, median and highest.
fn spread(mut seconds: Vec<f64>) -> String {
    seconds.sort_by(f64::total_cmp);
    let (low, median, high) = (seconds[0], seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
    format!("{median:.3} s ({low:.3} to {high:.3})")
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("say where: burn_gain DIR GB")?;
    let (dir, gb) = (Path::new(&dir), args.next().map_or(Ok(1.5), |gb| gb.parse::<f64>())?);
    let device = Device::default();
    let layer = |_| LinearConfig::new(2048, 4096).with_bias(false).init(&device);
    let model = Model { layers: (0..(gb * 1e9 / (1 << 25) as f64) as usize).map(layer).collect() };
    model.collect(None, None, false).iter().for_each(|it| drop(it.to_bytes())); // made when first read
    let mut seconds: [(&str, Vec<f64>); 4] = [
        ("SafetensorsStore", Vec::new()),
        ("BurnpackStore", Vec::new()),
        ("RingstowStore", Vec::new()),
        ("RingstowStore::save_async, until it returns", Vec::new()),
    ];
    let mut safetensors =
        SafetensorsStore::from_file(dir.join("stock.safetensors")).overwrite(true);
    let mut burnpack = BurnpackStore::from_file(dir.join("stock.bpk")).overwrite(true);
    let mut own = RingstowStore::new(dir.join("own"))?;
    for _ in 0..ROUNDS {
        for (number, (_, seconds)) in seconds.iter_mut().enumerate() {
            let begun = Instant::now();
            let mut saving = None;
            match number {
                0 => model.save_into(&mut safetensors)?,
                1 => model.save_into(&mut burnpack)?,
                2 => model.save_into(&mut own)?,
                _ => saving = Some(own.save_async(&model)?),
            }
            seconds.push(begun.elapsed().as_secs_f64());
            saving.map(|saving| saving.result()).transpose()?;
            Command::new("sync").status()?; // what was not synced must not slow the next one down
        }
    }
    for (name, seconds) in seconds {
        println!("{name}: {}", spread(seconds));
    }
    Ok(())
}
