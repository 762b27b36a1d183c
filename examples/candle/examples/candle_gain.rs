//! What a save costs a training loop, by candle's own `VarMap::save` and by ringstow, each in turn.
//!
//! ```text
//! cargo run --release -p ringstow-candle-example --example candle_gain -- DIR 1.5
//! ```

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const ROUNDS: usize = 7;

/// A model of this many GB in weights of 32 MB.
fn model(gb: f64) -> candle_core::Result<VarMap> {
    let vars = VarMap::new();
    for number in 0..(gb * 1e9 / (1 << 25) as f64) as usize {
        let values = Tensor::rand(0f32, 1.0, (2048, 4096), &Device::Cpu)?.to_dtype(DType::F32)?;
        vars.data().lock().expect("new").insert(number.to_string(), Var::from_tensor(&values)?);
    }
    Ok(vars)
}

/// Lowest, median and highest.
fn spread(mut seconds: Vec<f64>) -> String {
    seconds.sort_by(f64::total_cmp);
    let (low, median, high) = (seconds[0], seconds[seconds.len() / 2], seconds[seconds.len() - 1]);
    format!("{median:.3} s ({low:.3} to {high:.3})")
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("say where: candle_gain DIR GB")?;
    let (dir, gb) = (Path::new(&dir), args.next().map_or(Ok(1.5), |gb| gb.parse())?);
    let vars = model(gb)?;
    let mut seconds: [(&str, Vec<f64>); 4] = [
        ("VarMap::save, not durable", Vec::new()),
        ("VarMap::save and fsync", Vec::new()),
        ("ringstow::candle::save, durable", Vec::new()),
        ("ringstow::candle::save_async, until it returns", Vec::new()),
    ];
    for _ in 0..ROUNDS {
        let (stock, own) = (dir.join("stock.safetensors"), dir.join("own"));
        for (number, (_, seconds)) in seconds.iter_mut().enumerate() {
            let begun = Instant::now();
            let mut saving = None;
            match number {
                0 => vars.save(&stock)?,
                1 => {
                    vars.save(&stock)?;
                    fs::File::open(&stock)?.sync_all()?;
                }
                2 => drop(ringstow::candle::save(&vars, &own)?),
                _ => saving = Some(ringstow::candle::save_async(&vars, &own)?),
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
