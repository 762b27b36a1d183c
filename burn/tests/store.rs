//! Modules and optimizers of burn, saved and loaded, on the CPU.

use burn_core as burn;
use burn_core::module::{Module, Param};
use burn_core::tensor::{Bool, DType, Device, Int, Tensor, TensorData};
use burn_nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn_optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn_store::{HalfPrecisionAdapter, ModuleSnapshot, ModuleStore, SafetensorsStore};
use ringstow::{Checkpoint, Error, StateDict};
use ringstow_burn::{RingstowStore, add_module, restore, set_module, state};
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;

/// A module with parameters of all kinds, in a list and under an enum variant.
#[derive(Module, Debug)]
struct Net {
    layers: Vec<Linear>,
    norm: BatchNorm,
    head: Head,
    counts: Param<Tensor<1, Int>>,
    mask: Param<Tensor<1, Bool>>,
}

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
enum Head {
    Plain(Linear),
}

impl Net {
    fn new(seed: u64, device: &Device) -> Self {
        device.seed(seed);
        let linear = || LinearConfig::new(4, 4).init(device);
        let number = seed as i64;
        Self {
            layers: vec![linear(), linear()],
            norm: BatchNormConfig::new(4).init(device),
            head: Head::Plain(linear()),
            counts: Param::initialized(
                burn_core::module::ParamId::new(),
                Tensor::from_data([number, 2, 3], device),
            ),
            mask: Param::initialized(
                burn_core::module::ParamId::new(),
                Tensor::from_data([seed.is_multiple_of(2), true], device),
            ),
        }
    }

    fn loss(&self, batch: Tensor<2>) -> Tensor<1> {
        let hidden = self.layers.iter().fold(batch, |x, layer| layer.forward(x).tanh());
        let Head::Plain(head) = &self.head;
        head.forward(self.norm.forward(hidden)).powi_scalar(2).mean()
    }
}

fn device() -> Device {
    Device::default().autodiff()
}

fn batch(device: &Device) -> Tensor<2> {
    let values: Vec<f32> = (0..32).map(|x| (x as f32 * 0.37).sin()).collect();
    Tensor::from_data(TensorData::new(values, [8, 4]), device)
}

fn train(net: Net, optimizer: &mut ModuleOptimizer) -> Net {
    let loss = net.loss(batch(&device()));
    let gradients = GradientsParams::from_grads(loss.backward(), &net);
    optimizer.step(0.01, net, gradients)
}

/// Names, types and bytes.
fn contents(module: &impl ModuleSnapshot) -> Vec<(String, DType, Vec<u8>)> {
    let all = module.collect(None, None, false).into_iter();
    let mut all: Vec<_> =
        all.map(|it| (it.name.clone(), it.dtype, it.to_bytes().unwrap().to_vec())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

fn scratch() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn store(path: &Path) -> RingstowStore {
    RingstowStore::new(path).unwrap()
}

#[test]
fn a_module_comes_back_with_all_its_tensors() {
    let dir = scratch();
    let path = dir.path().join("model");
    let (saved, mut other) = (Net::new(1, &device()), Net::new(2, &device()));
    assert_ne!(contents(&saved), contents(&other));
    saved.save_into(&mut store(&path)).unwrap();
    let result = other.load_from(&mut store(&path)).unwrap();
    assert_eq!(contents(&other), contents(&saved));
    assert_eq!((result.missing.len(), result.unused.len()), (0, 0), "{result}");
    assert!(ringstow::verify(&path).unwrap().damage.is_empty());

    let mut store = store(&path);
    assert!(store.keys().unwrap().contains(&"head.Plain.weight".to_owned()));
    let weight = store.get_tensor("layers.1.weight").unwrap().unwrap();
    assert_eq!(weight.shape.to_vec(), [4, 4]);
    assert_eq!(weight.to_bytes().unwrap().to_vec(), contents_of(&saved, "layers.1.weight"));
    assert!(store.get_tensor("layers.7.weight").unwrap().is_none());
}

fn assert_same(one: &Net, other: &Net) {
    for (one, other) in contents(one).into_iter().zip(contents(other)) {
        assert_eq!(one, other);
    }
}

fn contents_of(module: &Net, name: &str) -> Vec<u8> {
    contents(module).into_iter().find(|it| it.0 == name).unwrap().2
}

#[test]
fn a_training_resumes_with_the_bits_of_one_that_went_on() {
    let dir = scratch();
    let new_optimizer = || AdamWConfig::new().with_weight_decay(0.1).init();
    let (mut net, mut optimizer) = (Net::new(1, &device()), new_optimizer());
    for _ in 0..3 {
        net = train(net, &mut optimizer);
    }
    let saving = ringstow::save_async(state(&net, &optimizer).unwrap(), dir.path().join("step"));
    for _ in 0..3 {
        net = train(net, &mut optimizer); // does not change what is being saved
    }
    saving.unwrap().result().unwrap();

    let (mut again, mut resumed) = (Net::new(9, &device()), new_optimizer());
    let loaded = ringstow::load(dir.path().join("step")).unwrap();
    restore(loaded, &mut again, &mut resumed).unwrap();
    for _ in 0..3 {
        again = train(again, &mut resumed);
    }
    assert_same(&again, &net);

    // Another module, no optimizer, another kind of optimizer: errors, and nothing has changed.
    let load = || ringstow::load(dir.path().join("step")).unwrap();
    let mut untouched = LinearConfig::new(4, 4).init(&device());
    let before = contents(&untouched);
    let error = restore(load(), &mut untouched, &mut new_optimizer()).unwrap_err().to_string();
    assert!(error.contains("the module has no parameter"), "{error}");
    assert_eq!(contents(&untouched), before);
    let mut sgd = SgdConfig::new().init();
    let error = restore(load(), &mut again, &mut sgd).unwrap_err().to_string();
    assert!(error.contains("of another kind"), "{error}");
    let mut alone = StateDict::new();
    add_module(&mut alone, "model", &again).unwrap();
    ringstow::save(&alone, dir.path().join("alone")).unwrap();
    let loaded = ringstow::load(dir.path().join("alone")).unwrap();
    let error = restore(loaded, &mut again, &mut resumed).unwrap_err().to_string();
    assert!(error.contains("no optimizer was saved as \"optimizer\""), "{error}");
}

#[test]
fn what_does_not_fit_is_named_and_the_module_is_as_before() {
    let dir = scratch();
    let path = dir.path().join("model");
    LinearConfig::new(4, 8).init(&device()).save_into(&mut store(&path).part("model")).unwrap();
    let mut other = LinearConfig::new(4, 4).with_bias(false).init(&device());
    let before = contents(&other);
    let loaded = Arc::new(ringstow::load(&path).unwrap());
    let error = set_module(&loaded, "model", &mut other).unwrap_err();
    let Error::Keys { unexpected, mismatched, .. } = &error else { panic!("{error}") };
    assert_eq!(unexpected.as_slice(), ["model.bias"]);
    assert_eq!(
        mismatched.as_slice(),
        ["\"model.weight\" is F32 [4, 8] in the checkpoint, F32 [4, 4] in the module"]
    );
    assert_eq!(contents(&other), before);

    let error = other.load_from(&mut store(&path).part("model")).unwrap_err().to_string();
    assert!(error.contains("Shape mismatch for 'weight'"), "{error}");
    let mut net = Net::new(1, &device());
    let before = contents(&net);
    let error = net.load_from(&mut store(&path).part("model")).unwrap_err();
    assert!(matches!(&error, Error::Keys { missing, .. } if missing.len() > 5), "{error}");
    assert_eq!(contents(&net), before);
    let result = net.load_from(&mut store(&path).part("model").allow_partial(true)).unwrap();
    assert_eq!(result.unused.len(), 2, "{result}");
    let none = net.load_from(&mut store(&dir.path().join("none"))).unwrap_err().to_string();
    assert!(none.contains("none"), "{none}");
}

/// burn changes a statistic where all clones of a module share it.
#[test]
fn a_load_that_fails_leaves_the_statistics_of_norms() {
    let dir = scratch();
    let path = dir.path().join("model");
    let mut optimizer = AdamWConfig::new().init();
    let mut net = train(Net::new(1, &device()), &mut optimizer);
    net.save_into(&mut store(&path).with_regex("^(layers|norm|head|mask)")).unwrap();
    net = train(net, &mut optimizer);
    let before = contents(&net.valid());
    let error = net.load_from(&mut store(&path)).unwrap_err();
    assert!(matches!(&error, Error::Keys { missing, .. } if missing == &["counts"]), "{error}");
    assert_eq!(contents(&net), before);
    net.load_from(&mut store(&path).allow_partial(true)).unwrap();
    assert_ne!(contents_of(&net, "norm.running_mean"), before_of(&before));
}

fn before_of(before: &[(String, DType, Vec<u8>)]) -> &[u8] {
    &before.iter().find(|it| it.0 == "norm.running_mean").unwrap().2
}

#[test]
fn damage_is_an_error_that_names_the_tensor_and_changes_nothing() {
    let dir = scratch();
    let path = dir.path().join("model");
    let mut net = Net::new(1, &device());
    net.save_into(&mut store(&path)).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let chunk = &checkpoint.tensor("layers.0.weight").unwrap().chunks[0];
    let file = path.join(&checkpoint.manifest().files[chunk.file as usize].name);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[chunk.begin as usize + 3] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let before = contents(&net);
    let error = net.load_from(&mut store(&path)).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("layers.0.weight"), "{error}");
    assert_eq!(contents(&net), before);
}

#[test]
fn filters_renamings_and_adapters_work_as_in_burns_own_store() {
    let dir = scratch();
    let net = Net::new(1, &device());
    let (own, stock) = (dir.path().join("own"), dir.path().join("stock"));
    std::fs::create_dir(&stock).unwrap();
    let mut theirs = SafetensorsStore::from_file(stock.join("model.safetensors"))
        .with_regex(r"^layers\.")
        .with_key_remapping(r"^layers\.", "blocks.")
        .with_to_adapter(HalfPrecisionAdapter::new())
        .skip_enum_variants(true);
    net.save_into(&mut theirs).unwrap();
    let mut ours = store(&own)
        .with_regex(r"^layers\.")
        .with_key_remapping(r"^layers\.", "blocks.")
        .with_to_adapter(HalfPrecisionAdapter::new())
        .skip_enum_variants(true);
    net.save_into(&mut ours).unwrap();
    // ringstow compares the bytes of both.
    let diff = ringstow::Store::found().unwrap().diff(&own, &stock, false).unwrap();
    assert!(diff.is_equal() && diff.equal_tensors == 4, "{diff:?}");

    for from in [&own, &stock] {
        let mut other = Net::new(2, &device());
        let mut back = store(from)
            .with_key_remapping(r"^blocks\.", "layers.")
            .with_regex(r"^layers\.0\.")
            .allow_partial(true);
        let result = other.load_from(&mut back).unwrap();
        assert_eq!(result.applied, ["layers.0.weight", "layers.0.bias"], "{result}");
        let half: Vec<DType> = contents(&other).into_iter().map(|it| it.1).collect();
        assert_eq!(half.iter().filter(|it| **it == DType::F16).count(), 2);
    }
    let error = net.save_into(&mut store(&own).overwrite(false)).unwrap_err();
    assert_eq!(error.io_error().map(std::io::Error::kind), Some(std::io::ErrorKind::AlreadyExists));
}
