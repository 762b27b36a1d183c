//! What a save costs a training loop, by candle's own `VarMap::save` and by ringstow, each in turn.
//!
//! ```text
//! cargo run --release -p ringstow-candle-example --example candle_gain -- DIR 1.5
//! ```

#[path = "../../../tests/common/gain.rs"]
mod gain;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::VarMap;
use gain::Way;
use std::error::Error;
use std::fs;
use std::path::Path;

/// A model of this many GB in weights of 32 MB.
fn model(gb: f64) -> candle_core::Result<VarMap> {
    let vars = VarMap::new();
    for number in 0..(gb * 1e9 / (1 << 25) as f64) as usize {
        let values = Tensor::rand(0f32, 1.0, (2048, 4096), &Device::Cpu)?.to_dtype(DType::F32)?;
        vars.data().lock().expect("new").insert(number.to_string(), Var::from_tensor(&values)?);
    }
    Ok(vars)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("say where: candle_gain DIR GB")?;
    let (dir, gb) = (Path::new(&dir), args.next().map_or(Ok(1.5), |gb| gb.parse())?);
    let vars = model(gb)?;
    let (stock, own) = (dir.join("stock.safetensors"), dir.join("own"));
    let save = || -> Result<_, Box<dyn Error>> {
        vars.save(&stock)?;
        Ok(None)
    };
    let ways: Vec<Way<'_>> = vec![
        ("VarMap::save, not durable", Box::new(save)),
        (
            "VarMap::save and fsync",
            Box::new(|| {
                save()?;
                fs::File::open(&stock)?.sync_all()?;
                Ok(None)
            }),
        ),
        (
            "ringstow::candle::save, durable",
            Box::new(|| {
                ringstow::candle::save(&vars, &own)?;
                Ok(None)
            }),
        ),
        (
            "ringstow::candle::save_async, until it returns",
            Box::new(|| Ok(Some(ringstow::candle::save_async(&vars, &own)?))),
        ),
    ];
    gain::compare(ways)
}
