//! How fast tensors leave a GPU and come back, in bytes a second: to nowhere, which is the GPU's
//! copies, checksums and staging without a disk; saved to a disk; loaded from it, cold.
//!
//! Skips, with a message, where there is no GPU. Knobs, from the environment: `RINGSTOW_BENCH_DIR`
//! and `RINGSTOW_BENCH_MB` as for the bench `throughput`; `RINGSTOW_BENCH_GPU`, the GPU's number (0).

mod common;

#[cfg(feature = "cuda")]
mod gpu {
    use super::common::{bench_dir, is_smoke_test};
    use criterion::{Criterion, Throughput};
    use ringstow::device::Target;
    use ringstow::device::cuda::{Device, DeviceMemory, LargeCopy, Ready};
    use ringstow::engine::null::Null;
    use ringstow::store::save;
    use ringstow::sys::file;
    use ringstow::{
        Checkpoint, Config, Dtype, LoadOptions, Result, Runtime, SaveReport, StateDict, TensorInfo,
    };
    use std::env;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    /// Bytes of a tensor: a large layer's.
    const TENSOR_BYTES: usize = 64 << 20;

    fn bench_bytes() -> usize {
        let asked = env::var("RINGSTOW_BENCH_MB").ok().and_then(|mb| mb.parse::<usize>().ok());
        asked.unwrap_or(if is_smoke_test() { 8 } else { 1024 }) << 20
    }

    fn device() -> Result<Arc<Device>> {
        let asked = env::var("RINGSTOW_BENCH_GPU").ok().and_then(|gpu| gpu.parse().ok());
        Device::get(asked.unwrap_or(0))
    }

    /// Tensors on a GPU; more than one, so that a save goes from one to the next.
    struct Tensors(Vec<Arc<DeviceMemory>>);

    impl Tensors {
        fn new(device: &Arc<Device>, bytes: usize) -> Result<Self> {
            let tensor = |at: usize| {
                let mut memory = DeviceMemory::new(device, TENSOR_BYTES.min(bytes - at))?;
                let bytes: Vec<u8> =
                    (0..memory.nbytes()).map(|i| ((i * 2_654_435_761) >> 16) as u8).collect();
                memory.fill(&bytes)?;
                Ok(Arc::new(memory))
            };
            (0..bytes).step_by(TENSOR_BYTES).map(tensor).collect::<Result<_>>().map(Self)
        }

        /// Into a directory, in place of what is there.
        fn save(&self, runtime: &Runtime, dir: &Path) -> Result<SaveReport> {
            let (mut state, mut ready) = (StateDict::new(), Ready::default());
            for (number, memory) in self.0.iter().enumerate() {
                let shape = vec![memory.nbytes() as u64];
                let info = TensorInfo { name: number.to_string(), dtype: Dtype::U8, shape };
                state.source(info, Box::new(memory.source(&mut ready)?));
            }
            let _ = std::fs::remove_dir_all(dir);
            save(runtime, &state, dir, &Arc::default())
        }

        fn load(&mut self, runtime: &Runtime, dir: &Path) -> Result<()> {
            let mut ready = Ready::default();
            let targets = self.0.iter_mut().enumerate().map(|(number, memory)| {
                let memory = Arc::get_mut(memory).expect("no save is under way");
                Ok((number.to_string(), memory.target(&mut ready)?))
            });
            let targets = targets.collect::<Result<Vec<(String, Target)>>>()?;
            let checkpoint = Checkpoint::open(dir)?;
            checkpoint.load_into(&targets, LoadOptions::default(), runtime, &Arc::default())?;
            Ok(())
        }
    }

    fn drop_page_cache(dir: &Path) {
        let checkpoint = Checkpoint::open(dir).expect("it was just saved");
        for shard in &checkpoint.manifest().files {
            let shard = std::fs::File::open(dir.join(&shard.name)).expect("it is there");
            file::drop_page_cache(&shard).expect("the cache can be dropped");
        }
    }

    pub fn all(criterion: &mut Criterion) {
        let device = match device() {
            Ok(device) => device,
            Err(why) => return println!("skipped: {why}"),
        };
        let bytes = bench_bytes();
        let mut tensors = Tensors::new(&device, bytes).expect("the GPU has so much memory");
        let dir = bench_dir().join("ringstow-bench-gpu");
        let depth = Config::default().queue_depth as usize;
        let nowhere = Arc::new(move || Ok(Box::new(Null::new(depth)) as _));
        let nowhere = Runtime::with_engine(Config::default(), nowhere).expect("it is valid");
        let runtime = Runtime::new(Config::default()).expect("it is valid");

        let mut group = criterion.benchmark_group("gpu");
        group.throughput(Throughput::BytesDecimal(bytes as u64));
        group.sample_size(10).warm_up_time(Duration::from_secs(1));
        let mut large = LargeCopy::new(&device, bytes).expect("there is so much memory");
        match large.pin() {
            Ok(()) => {
                group.bench_function("one large pinned copy to the host", |bencher| {
                    bencher.iter_custom(|iterations| {
                        seconds(iterations, || {
                            bytes as f64 / 1e9 / large.to_host().expect("the GPU works")
                        })
                    });
                });
            }
            Err(why) => println!("left out pinned copies: {why}"),
        }
        drop(large);
        group.bench_function("save to nowhere", |bencher| {
            bencher.iter_custom(|iterations| {
                seconds(iterations, || {
                    tensors.save(&nowhere, &dir).expect("the save works").seconds.write
                })
            });
        });
        group.bench_function("save", |bencher| {
            bencher.iter_custom(|iterations| {
                seconds(iterations, || {
                    tensors.save(&runtime, &dir).expect("the save works").seconds.total
                })
            });
        });
        tensors.save(&runtime, &dir).expect("it worked before");
        group.bench_function("load", |bencher| {
            bencher.iter_custom(|iterations| {
                seconds(iterations, || {
                    drop_page_cache(&dir);
                    let started = Instant::now();
                    tensors.load(&runtime, &dir).expect("the load works");
                    started.elapsed().as_secs_f64()
                })
            });
        });
        group.finish();
        let _ = std::fs::remove_dir_all(&dir);
    }

    fn seconds(iterations: u64, mut once: impl FnMut() -> f64) -> Duration {
        Duration::from_secs_f64((0..iterations).map(|_| once()).sum())
    }
}

#[cfg(not(feature = "cuda"))]
mod gpu {
    pub fn all(_: &mut criterion::Criterion) {
        println!("skipped: tensors on GPUs are not part of this build (cargo feature `cuda`)");
    }
}

criterion::criterion_group!(benches, gpu::all);
criterion::criterion_main!(benches);
