//! candle's variables, saved while they change, and set from checkpoints.

use crate::common::held::{self, Filled, Held};
use crate::common::scratch;
use candle_core::{DType, Device, Result as CandleResult, Tensor, Var};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, linear};
use ringstow::candle::{AdamW, VarMaps, load, save, save_async, var_builder};
use ringstow::{Checkpoint, CheckpointManager, Error, OnDamage, Retention, Store, Value};
use safetensors::View;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

const CPU: Device = Device::Cpu;

fn map_of(vars: impl IntoIterator<Item = (&'static str, Var)>) -> VarMap {
    let map = VarMap::new();
    let named = vars.into_iter().map(|(name, var)| (name.to_owned(), var));
    map.data().lock().unwrap().extend(named);
    map
}

fn filled(value: f32, count: usize) -> Tensor {
    Tensor::full(value, count, &CPU).unwrap()
}

fn var(value: f32, count: usize) -> Var {
    Var::from_tensor(&filled(value, count)).unwrap()
}

/// The only value of all elements.
fn only_value(var: &Var) -> f32 {
    let all: Vec<f32> = var.to_vec1().unwrap();
    assert!(all.iter().all(|value| *value == all[0]), "old and new values are mixed");
    all[0]
}

#[test]
fn a_change_waits_until_the_save_has_copied_everything() {
    let dir = scratch();
    let weight = var(1.0, 1000);
    let maps = VarMaps::new([("", &map_of([("weight", weight.clone())]))]);
    let mut state = maps.state().unwrap();
    let (reaches, reached) = channel();
    let (held, opener) = Held::new(Filled { byte: 1, bytes: 1 }, move || reaches.send(()).unwrap());
    held::add(&mut state, "gate", held);
    let saving = ringstow::save_async(state, dir.path().join("saved")).unwrap();
    reached.recv().unwrap();

    let ((begins, has_begun), (ends, has_ended)) = (channel(), channel());
    let setter = thread::spawn(move || {
        begins.send(()).unwrap();
        weight.set(&filled(2.0, 1000)).unwrap();
        ends.send(()).unwrap();
    });
    has_begun.recv().unwrap();
    // A slow machine passes as well; a change that does not wait has ended by then on any.
    let early = has_ended.recv_timeout(Duration::from_millis(300));
    assert_eq!(early, Err(RecvTimeoutError::Timeout));
    drop(opener);
    setter.join().unwrap();
    saving.result().unwrap();
    let loaded = ringstow::load(dir.path().join("saved")).unwrap();
    assert_eq!(loaded.tensor("weight").unwrap().as_slice::<f32>().unwrap(), [1.0; 1000]);
}

/// One thread changes variables without end, of which two are one, and two others have two names.
#[test]
fn saves_while_another_thread_trains_are_of_one_moment() {
    const COUNT: usize = 200_000;
    let dir = scratch();
    let (first, second) = (var(0.0, COUNT), var(0.0, COUNT));
    let maps = VarMaps::new([(
        "",
        &map_of([("first", first.clone()), ("tied", first.clone()), ("second", second.clone())]),
    )]);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let trainer = thread::spawn(move || {
        for step in 1.. {
            first.set(&filled(step as f32, COUNT)).unwrap();
            second.set(&filled(step as f32, COUNT)).unwrap();
            if stopped.load(SeqCst) {
                return;
            }
        }
    });
    let read = [var(0.0, COUNT), var(0.0, COUNT), var(0.0, COUNT)];
    let [first, tied, second] = read.clone();
    let into =
        VarMaps::new([("", &map_of([("first", first), ("tied", tied), ("second", second)]))]);
    for number in 0..20 {
        let path = dir.path().join(number.to_string());
        match number % 2 {
            0 => {
                drop(ringstow::save_async(maps.state().unwrap(), &path).unwrap().result().unwrap())
            }
            _ => drop(ringstow::save(&maps.state().unwrap(), &path).unwrap()),
        }
        into.load(&path).unwrap();
        let [first, tied, second] = read.each_ref().map(only_value);
        assert_eq!(first, tied);
        assert!(first == second || first == second + 1.0, "{first} and {second}");
    }
    stop.store(true, SeqCst);
    trainer.join().unwrap();
}

#[test]
fn a_state_locks_nothing_before_a_save_and_after_a_failed_one() {
    let dir = scratch();
    let weight = var(1.0, 10);
    let map = map_of([("weight", weight.clone())]);
    let state = VarMaps::new([("", &map)]).state().unwrap();
    weight.set(&filled(2.0, 10)).unwrap(); // would wait for ever
    std::fs::write(dir.path().join("file"), "").unwrap();
    ringstow::save(&state, dir.path().join("file")).unwrap_err();
    weight.set(&filled(3.0, 10)).unwrap();
    let failed = save_async(&map, dir.path().join("file")).unwrap().result();
    failed.unwrap_err();
    weight.set(&filled(4.0, 10)).unwrap();
    for value in [4.0, 5.0] {
        weight.set(&filled(value, 10)).unwrap();
        ringstow::save(&state, dir.path().join("step")).unwrap(); // the values of the call, each time
        load(&map, dir.path().join("step")).unwrap();
        assert_eq!(only_value(&weight), value);
    }
}

/// A variable of each type that candle computes with, in two dimensions.
fn of_all_types(scale: f64) -> CandleResult<VarMap> {
    let map = VarMap::new();
    let base = (Tensor::arange(0f32, 12.0, &CPU)? * scale)?.reshape((3, 4))?;
    for dtype in ["u8", "u32", "i16", "i32", "i64", "bf16", "f16", "f32", "f64", "f8e4m3"] {
        let tensor = base.to_dtype(dtype.parse::<DType>().expect("a type of candle's"))?;
        map.data().lock().unwrap().insert(dtype.into(), Var::from_tensor(&tensor)?);
    }
    let scalar = Var::from_tensor(&Tensor::new(scale, &CPU)?)?;
    map.data().lock().unwrap().insert("scalar".into(), scalar);
    map.data().lock().unwrap().insert("empty".into(), Var::zeros((0, 4), DType::F32, &CPU)?);
    Ok(map)
}

/// The bytes of all variables.
fn values(map: &VarMap) -> BTreeMap<String, Vec<u8>> {
    let vars = map.data().lock().unwrap();
    vars.iter().map(|(name, var)| (name.clone(), var.as_tensor().data().into())).collect()
}

#[test]
fn all_types_come_back() {
    let dir = scratch();
    let (saved, stock) = (of_all_types(2.0).unwrap(), dir.path().join("stock"));
    save(&saved, dir.path().join("own")).unwrap();
    std::fs::create_dir(&stock).unwrap();
    saved.save(stock.join("model.safetensors")).unwrap();
    for from in ["own", "stock"] {
        let map = of_all_types(0.0).unwrap();
        load(&map, dir.path().join(from)).unwrap();
        assert_eq!(values(&map), values(&saved), "{from}");
    }
}

#[test]
fn what_does_not_fit_is_named_and_nothing_changes() {
    let dir = scratch();
    let path = dir.path().join("step");
    let other = Var::zeros(10, DType::F64, &CPU).unwrap();
    save(
        &map_of([
            ("a", var(1.0, 10)),
            ("shape", var(1.0, 9)),
            ("dtype", other),
            ("more", var(1.0, 1)),
        ]),
        &path,
    )
    .unwrap();
    let a = var(5.0, 10);
    let map = map_of([
        ("a", a.clone()),
        ("shape", var(5.0, 10)),
        ("dtype", var(5.0, 10)),
        ("lost", var(5.0, 1)),
    ]);
    let error = load(&map, &path).unwrap_err();
    let Error::Keys { missing, unexpected, mismatched, .. } = &error else { panic!("{error}") };
    assert_eq!(
        (missing.as_slice(), unexpected.as_slice()),
        (&["lost".into()][..], &["more".into()][..])
    );
    assert_eq!(
        mismatched.as_slice(),
        [
            "\"dtype\" is F64 [10] in the checkpoint, F32 [10] in the map",
            "\"shape\" is F32 [9] in the checkpoint, F32 [10] in the map"
        ]
    );
    assert_eq!(only_value(&a), 5.0);

    let twice =
        VarMaps::new([("", &map_of([("x.y", var(0.0, 1))])), ("x", &map_of([("y", var(0.0, 1))]))]);
    let error = twice.state().map(drop).unwrap_err().to_string();
    assert!(error.contains("two variables are named \"x.y\""), "{error}");
}

/// A model, its loss on one batch, and its variables at fixed values.
fn model() -> (impl Fn() -> Tensor, VarMap) {
    let vars = VarMap::new();
    let model = linear(8, 4, VarBuilder::from_varmap(&vars, DType::F32, &CPU)).unwrap();
    for (number, (_, var)) in
        (1..).zip(vars.data().lock().unwrap().iter().collect::<BTreeMap<_, _>>())
    {
        let values = Tensor::arange(0f32, var.elem_count() as f32, &CPU).unwrap();
        let values = (values * (0.01 * f64::from(number))).unwrap();
        var.set(&values.reshape(var.shape()).unwrap()).unwrap();
    }
    let batch = Tensor::arange(0f32, 16.0, &CPU).unwrap().reshape((2, 8)).unwrap();
    (move || model.forward(&batch).unwrap().sqr().unwrap().mean_all().unwrap(), vars)
}

#[test]
fn adam_w_has_the_bits_of_candles_own_and_resumes_in_the_middle() {
    let dir = scratch();
    let params = ParamsAdamW { lr: 0.02, weight_decay: 0.1, ..ParamsAdamW::default() };
    let (loss, expected) = model();
    let mut theirs = candle_nn::AdamW::new(expected.all_vars(), params.clone()).unwrap();
    (0..10).for_each(|_| theirs.backward_step(&loss()).unwrap());

    let keep = Retention { last: Some(1), ..Retention::default() };
    let (mut made, mut trained) = (Vec::new(), BTreeMap::new());
    for steps in [0..4, 4..10] {
        let (loss, vars) = model();
        let mut ours = AdamW::new(&vars, params.clone()).unwrap();
        let training = VarMaps::new([("model", &vars), ("optimizer", ours.vars())]);
        let mut manager = CheckpointManager::found(dir.path().join("run"), keep.clone()).unwrap();
        let restored = manager.restore(None, OnDamage::Raise).unwrap();
        assert_eq!(restored.as_ref().map(|it| it.step), (steps.start > 0).then_some(3));
        restored.iter().for_each(|it| training.set(&it.loaded).unwrap());
        for step in steps {
            ours.backward_step(&loss()).unwrap();
            manager.save_async(step, training.state().unwrap(), [("loss", 0.5)]).unwrap();
        }
        manager.wait().unwrap();
        made = values(ours.vars())["step"].clone();
        trained = values(&vars);
    }
    assert_eq!((made, trained), (10i64.to_le_bytes().into(), values(&expected)));
    let model_alone = VarMap::clone(&expected);
    let step = dir.path().join("run/step-00000009");
    VarMaps::new([("model", &model_alone)]).load(&step).unwrap(); // ignores the optimizer
    let error = <AdamW as Optimizer>::new(expected.all_vars(), params).unwrap_err().to_string();
    assert!(error.contains("AdamW::new(&var_map, params)"), "{error}");
}

#[test]
fn a_model_is_built_from_a_checkpoint_or_from_other_programs_files() {
    let dir = scratch();
    let (_, vars) = model();
    let own = dir.path().join("own");
    ringstow::save(&VarMaps::new([("model", &vars)]).state().unwrap(), &own).unwrap();
    let stock = dir.path().join("stock");
    std::fs::create_dir(&stock).unwrap();
    vars.save(stock.join("model.safetensors")).unwrap();
    let batch = Tensor::ones((1, 8), DType::F32, &CPU).unwrap();
    let expected = linear(8, 4, VarBuilder::from_varmap(&vars, DType::F32, &CPU)).unwrap();
    let expected: Vec<Vec<f32>> = expected.forward(&batch).unwrap().to_vec2().unwrap();
    let builders = [
        var_builder(&own, DType::F32, &CPU).unwrap().pp("model"),
        var_builder(&stock, DType::F32, &CPU).unwrap(),
    ];
    for builder in builders {
        let built = linear(8, 4, builder.clone()).unwrap();
        assert_eq!(built.forward(&batch).unwrap().to_vec2::<f32>().unwrap(), expected);
        assert!(builder.contains_tensor("bias") && !builder.contains_tensor("scale"));
        let error = linear(8, 5, builder.clone()).unwrap_err().to_string();
        assert!(error.contains("weight") && error.contains("[4, 8]"), "{error}");
        let error = builder.get(3, "scale").unwrap_err().to_string();
        assert!(error.contains("scale in "), "{error}");
    }
    let half = var_builder(&own, DType::F16, &CPU).unwrap();
    assert_eq!(half.get(4, "model.bias").unwrap().dtype(), DType::F16);
    let error = var_builder(dir.path().join("none"), DType::F32, &CPU).map(drop).unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
}

/// A damaged weight is an error when the model asks for it; the others load.
#[test]
fn a_builder_checks_what_it_reads() {
    let dir = scratch();
    let path = dir.path().join("step");
    save(&map_of([("a", var(1.0, 1 << 20)), ("b", var(2.0, 1 << 20))]), &path).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let chunk = &checkpoint.tensor("b").unwrap().chunks[0];
    let file = path.join(&checkpoint.manifest().files[chunk.file as usize].name);
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[chunk.begin as usize + (3 << 20)] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let builder = var_builder(&path, DType::F32, &CPU).unwrap();
    builder.get(1 << 20, "a").unwrap();
    let error = builder.get(1 << 20, "b").unwrap_err().to_string();
    assert!(error.contains("is damaged") && error.contains("\"b\""), "{error}");
}

#[test]
fn a_rank_saves_its_own_variables() {
    let dir = scratch();
    let path: &Path = &dir.path().join("step");
    let session = Store::found().unwrap().begin(path, 2).unwrap();
    let receipts = [0, 1].map(|rank| {
        let name = ["rank.0", "rank.1"][rank as usize];
        let state = VarMaps::new([(name, &map_of([("weight", var(rank as f32, 10))]))]).state();
        ringstow::Store::found().unwrap().write_rank(&state.unwrap(), rank, path).unwrap().0
    });
    session.commit(receipts.into(), Value::Dict(Vec::new()).to_json().unwrap()).unwrap();
    let weight = var(7.0, 10);
    VarMaps::new([("rank.1", &map_of([("weight", weight.clone())]))]).load(path).unwrap();
    assert_eq!(only_value(&weight), 1.0);
}
