//! What is on a GPU comes to be in the files, and nothing else is left behind.

use super::*;
use ringstow::internals::store;

/// Every layout that a trainer has, and sizes that fall across blocks.
fn layouts(ordinal: u32) -> Vec<Tensor> {
    let noise = |seed| noise(seed, 400_000);
    let name = |layout: &str| format!("{layout}.{ordinal}");
    let strided = |layout: &str, seed, item, shape: &[usize], strides: &[isize]| {
        Tensor::strided(&name(layout), ordinal, noise(seed), item, shape, Some(strides))
    };
    let mut sliced = strided("sliced", 5, 4, &[50, 25], &[400, 8]);
    sliced.first = 12;
    let mut backwards = strided("backwards", 6, 4, &[100, 7], &[-400, 4]);
    backwards.first = 99 * 400;
    vec![
        Tensor::dense(&name("large"), ordinal, noise(1)),
        Tensor::dense(&name("tiny"), ordinal, vec![7; 3]),
        strided("columns", 2, 2, &[300, 100], &[1024, 2]),
        strided("transposed", 3, 4, &[256, 300], &[4, 1024]),
        strided("channels_last", 4, 4, &[16, 64, 5, 5], &[6400, 4, 1280, 256]),
        sliced,
        backwards,
        strided("expanded", 7, 8, &[40, 30], &[0, 8]),
        strided("scalar", 8, 8, &[], &[]),
    ]
}

#[test]
fn every_layout_of_both_devices_comes_back_as_it_was() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let tensors: Vec<Tensor> = layouts(0).into_iter().chain(layouts(1)).collect();
    let report = saved(dir.path(), &tensors, &config());
    let bytes: u64 = tensors.iter().map(|tensor| tensor.info().nbytes().unwrap()).sum();
    assert_eq!((report.moved.device_bytes, report.moved.pinned), (bytes, Some(true)));
    assert!(report.seconds.device_copy > 0.0);
    assert!(ringstow::verify(dir.path()).unwrap().damage.is_empty());
    assert_eq!(fake.calls("default-stream-copies"), 0);
    assert_eq!(fake.calls("cuCtxSynchronize") + fake.calls("cuStreamSynchronize"), 0);
    // Pinned memory only: nothing was bounced through the device's memory either.
    let held: usize = tensors.iter().map(|tensor| tensor.memory.len()).sum();
    assert_eq!(fake.peak("allocated_bytes"), held as u64);
}

#[test]
fn a_pool_of_two_buffers_streams_all_of_it() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let config = Config { pool_bytes: 2 * (64 << 10), fillers: 4, ..config() };
    saved(dir.path(), &layouts(0), &config);
}

#[test]
fn the_portable_engine_takes_gpu_tensors_as_well() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let config = Config { engine: ringstow::EngineChoice::Portable, ..config() };
    assert_eq!(saved(dir.path(), &layouts(1), &config).moved.engine, "portable");
}

#[test]
fn blocks_of_gpu_and_host_tensors_are_put_together() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let (streams, runtime) = (streams(), runtime());
    let tensors: Vec<Tensor> = (0..200)
        .map(|i| Tensor::dense(&format!("gpu.{i}"), i % 2, noise(i.into(), 1000 + i as usize)))
        .collect();
    let host: Vec<Vec<u8>> = (0..200).map(|i| noise(1000 + i, 1000 + i as usize)).collect();
    let mut state = StateDict::new();
    let mut ready = Ready::default();
    for (i, (tensor, bytes)) in tensors.iter().zip(&host).enumerate() {
        let stream = streams[tensor.ordinal as usize].handle();
        state.source(tensor.info(), tensor.source(stream, &mut ready));
        state.bytes(format!("host.{i}"), Dtype::U8, &[bytes.len() as u64], bytes).unwrap();
    }
    store::save(&runtime, &state, dir.path(), &Arc::default()).unwrap();
    let loaded = ringstow::load(dir.path()).unwrap();
    assert_holds(&loaded, &tensors);
    for (i, bytes) in host.iter().enumerate() {
        assert!(loaded.tensor(&format!("host.{i}")).unwrap().data() == bytes);
    }
}

#[test]
fn block_of_many_tensors_takes_one_event() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let (streams, count) = (streams(), 1500);
    let tensors: Vec<Tensor> =
        (0..count).map(|i| Tensor::dense(&format!("t{i}"), 0, noise(i, 200))).collect();
    let state = state_of(&tensors, &streams);
    let before = fake.calls("cuEventRecord");
    fake.hold();
    let handle = store().save_async(state, dir.path()).unwrap();
    while fake.calls("cuMemcpyDtoHAsync_v2") < count {
        std::thread::yield_now();
    }
    fake.release();
    let report = handle.result().unwrap();
    let blocks = report.file_bytes.div_ceil(64 << 10);
    assert!(blocks > 4);
    // One more where they begin, for the time that they take.
    let recorded = fake.calls("cuEventRecord") - before;
    assert!(recorded <= blocks + 1, "{recorded} events for {blocks} blocks");
    assert_holds(&ringstow::load(dir.path()).unwrap(), &tensors);
}

#[test]
fn nothing_is_left_when_the_runtime_goes() {
    let fake = fake();
    let counted = ["contexts", "streams", "events", "registrations"];
    let counts = || counted.map(|what| fake.live(what));
    let dir = tempfile::tempdir().unwrap();
    let (streams, tensors) = (streams(), layouts(0));
    let before = counts();
    let runtime = runtime();
    for _ in 0..3 {
        let state = state_of(&tensors, &streams);
        store::save(&runtime, &state, dir.path(), &Arc::default()).unwrap();
    }
    assert_eq!(fake.calls("cuMemHostRegister_v2"), 1, "the pool is pinned once");
    assert_eq!(fake.live("registered_bytes"), config().pool_bytes as i64);
    drop(runtime);
    assert_eq!(counts(), before);
}

#[test]
fn the_thread_that_saves_keeps_its_current_context() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let (training, tensors) = (fake_cuda::Context::retain(1), layouts(0));
    training.enter(|| {
        let current = fake_cuda::current_context();
        saved(dir.path(), &tensors, &config());
        assert_eq!(fake_cuda::current_context(), current);
    });
}

#[test]
fn a_slice_of_cudarcs_is_saved_borrowed_or_shared() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let numbers: Vec<f32> = (0..50_000).map(|i| i as f32).collect();
    let weights = stream.clone_htod(&numbers).unwrap();
    let moments = Arc::new(stream.clone_htod(&numbers[..1000]).unwrap());
    let mut state = StateDict::new();
    state.cuda("weights", Dtype::F32, &[500, 100], &weights).unwrap();
    state.cuda("moments", Dtype::F32, &[1000], moments.clone()).unwrap();
    let short = state.cuda("short", Dtype::F32, &[1001], moments).err().unwrap().to_string();
    assert!(short.contains("\"short\"") && short.contains("4004 bytes"), "{short}");
    store().save(&state, dir.path()).unwrap();
    let loaded = ringstow::load(dir.path()).unwrap();
    assert_eq!(loaded.tensor("weights").unwrap().as_slice::<f32>().unwrap(), numbers);
    assert_eq!(loaded.tensor("moments").unwrap().as_slice::<f32>().unwrap(), &numbers[..1000]);
}

#[test]
fn slices_ready_separately_share_one_event() {
    let fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let stream = cudarc::driver::CudaContext::new(0).unwrap().new_stream().unwrap();
    let slices: Vec<_> =
        (0..200u8).map(|i| Arc::new(stream.clone_htod(&[i; 100]).unwrap())).collect();
    let mut state = StateDict::new();
    for (i, slice) in slices.iter().enumerate() {
        state.cuda(format!("t{i}"), Dtype::U8, &[100], slice.clone()).unwrap();
    }
    let before = fake.calls("cuEventRecord");
    let report = store().save(&state, dir.path()).unwrap();
    let recorded = fake.calls("cuEventRecord") - before;
    let blocks = report.file_bytes.div_ceil(64 << 10);
    assert!(recorded <= 2 * blocks, "{recorded} events for {blocks} blocks");
    let loaded = ringstow::load(dir.path()).unwrap();
    for i in 0..200u8 {
        assert_eq!(loaded.tensor(&format!("t{i}")).unwrap().data(), [i; 100]);
    }
}

#[test]
fn memory_of_our_own_is_saved_and_loaded() {
    let _fake = fake();
    let dir = tempfile::tempdir().unwrap();
    let device = ringstow::internals::device::cuda::Device::get(1).unwrap();
    let mut memory =
        ringstow::internals::device::cuda::DeviceMemory::new(&device, 100_000).unwrap();
    let bytes = noise(9, 100_000);
    memory.fill(&bytes).unwrap();
    assert!(memory.fill(&bytes[1..]).is_err());
    let memory = Arc::new(memory);
    let mut state = StateDict::new();
    let source = memory.source(&mut Ready::default()).unwrap();
    assert_eq!(source.nbytes(), 100_000);
    let info = TensorInfo { name: "bytes".into(), dtype: Dtype::U8, shape: vec![100_000] };
    state.source(info, source);
    store().save(&state, dir.path()).unwrap();
    assert!(ringstow::load(dir.path()).unwrap().tensor("bytes").unwrap().data() == bytes);
}

#[test]
fn tensors_that_have_not_changed_on_the_gpu_are_linked() {
    let _fake = fake();
    let root = tempfile::tempdir().unwrap();
    let streams = streams();
    let at = |step: u32| root.path().join(format!("step-{step}"));
    let mut tensors: Vec<Tensor> = layouts(0).into_iter().chain(layouts(1)).collect();
    let save = |step: u32, tensors: &[Tensor], pool_buffers: u64| {
        let base =
            if step == 1 { ringstow::Base::none() } else { ringstow::Base::at(at(step - 1)) };
        let mut state = state_of(tensors, &streams);
        let config = Config { pool_bytes: pool_buffers * (64 << 10), ..config() };
        let store = ringstow::Store::new(config).unwrap();
        let report = store.save(state.base(base), at(step)).unwrap();
        assert_holds(&ringstow::load(at(step)).unwrap(), tensors);
        report
    };
    save(1, &tensors, 16);
    let second = save(2, &tensors, 2);
    assert_eq!((second.linked_bytes, second.moved.device_bytes), (second.file_bytes, 0));
    let last = tensors.iter().position(|tensor| tensor.name == "transposed.1").unwrap();
    tensors[last] =
        Tensor::strided("transposed.1", 1, noise(99, 400_000), 4, &[256, 300], Some(&[4, 1024]));
    let third = save(3, &tensors, 16);
    assert_eq!(third.unchanged_bytes, second.unchanged_bytes - 256 * 300 * 4);
    assert!(save(4, &tensors, 16).linked_bytes > 0);
}
