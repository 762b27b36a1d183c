//! What a save costs a training loop, by burn's own store and by ringstow, each in turn.
//!
//! ```text
//! cargo run --release -p ringstow-burn-example --example burn_gain -- DIR 1.5
//! ```

#[path = "../../../tests/common/gain.rs"]
mod gain;

use burn_core as burn;
use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_nn::{Linear, LinearConfig};
use burn_store::{BurnpackStore, ModuleSnapshot, SafetensorsStore};
use gain::Way;
use ringstow_burn::RingstowStore;
use std::error::Error;
use std::path::Path;

/// Layers of 32 MB.
#[derive(Module, Debug)]
struct Model {
    layers: Vec<Linear>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("say where: burn_gain DIR GB")?;
    let (dir, gb) = (Path::new(&dir), args.next().map_or(Ok(1.5), |gb| gb.parse::<f64>())?);
    let device = Device::default();
    let layer = |_| LinearConfig::new(2048, 4096).with_bias(false).init(&device);
    let model = Model { layers: (0..(gb * 1e9 / (1 << 25) as f64) as usize).map(layer).collect() };
    model.collect(None, None, false).iter().for_each(|it| drop(it.to_bytes())); // made when first read
    let mut safetensors =
        SafetensorsStore::from_file(dir.join("stock.safetensors")).overwrite(true);
    let mut burnpack = BurnpackStore::from_file(dir.join("stock.bpk")).overwrite(true);
    let mut own = RingstowStore::new(dir.join("own"))?;
    let mut background = RingstowStore::new(dir.join("own"))?;
    let ways: Vec<Way<'_>> = vec![
        (
            "SafetensorsStore",
            Box::new(|| {
                model.save_into(&mut safetensors)?;
                Ok(None)
            }),
        ),
        (
            "BurnpackStore",
            Box::new(|| {
                model.save_into(&mut burnpack)?;
                Ok(None)
            }),
        ),
        (
            "RingstowStore",
            Box::new(|| {
                model.save_into(&mut own)?;
                Ok(None)
            }),
        ),
        (
            "RingstowStore::save_async, until it returns",
            Box::new(|| Ok(Some(background.save_async(&model)?))),
        ),
    ];
    gain::compare(ways)
}
