//! Measures what each knob is worth on this machine. Each round runs the default and its variants by turns, and
//! compares speed and CPU seconds with those of the default.
//!
//! ```text
//! cargo bench --bench knobs -- [--dir DIR] [--load | --load-into] [--gb 1] [--files 1]
//!                              [--rounds 15] [--only PART_OF_A_NAME ...]
//! ```
//!
//! Without `--dir`, saves use the engine `fake_engines::AtOnce::null`, which skips the disk.
//! Each variant has its own pool. On a shared disk, CPU seconds are more reliable than speed; the row
//! "default, again" shows the noise of both.
//! To try something new, make it a knob for the trial and add a line to [`variants`]. Results of earlier
//! trials are in `docs/internals/experiments.md`.

#[path = "../tests/common/nowhere.rs"]
mod nowhere;

mod common;

use common::{Args, Result, cpu_seconds, median, spread};
use fastrand::Rng;
use nowhere::Endless;
use ringstow::internals::sys::file;
use ringstow::{
    Checkpoint, Config, Dtype, EngineChoice, LoadOptions, Runtime, StateDict, Switch, Target,
};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// A setting, by name.
struct Variant {
    name: String,
    config: Config,
    options: LoadOptions<'static>,
}

/// The default, and variants that differ in one setting.
fn variants(base: &Config) -> Vec<Variant> {
    let mut all = Vec::new();
    let mut add = |name: &str, change: &dyn Fn(&mut Config)| {
        let mut config = base.clone();
        change(&mut config);
        let options = LoadOptions::default();
        all.push(Variant { name: name.into(), config, options });
    };
    add("default", &|_| {});
    add("default, again", &|_| {});
    for fillers in [1, 2, 4] {
        add(&format!("fillers {fillers}"), &|c| c.fillers = fillers);
    }
    for mib in [1, 2, 8, 16] {
        add(&format!("block_bytes {mib}M"), &|c| c.block_bytes = mib << 20);
    }
    for depth in [2, 4, 16, 32] {
        add(&format!("queue_depth {depth}"), &|c| c.queue_depth = depth);
    }
    for mib in [32, 64, 128, 1024] {
        add(&format!("pool_bytes {mib}M"), &|c| c.pool_bytes = mib << 20);
    }
    add("fixed off", &|c| c.fixed = Switch::Off);
    add("direct off", &|c| c.direct = Switch::Off);
    add("engine portable", &|c| c.engine = EngineChoice::Portable);
    let options = LoadOptions { verify: false, ..LoadOptions::default() };
    all.push(Variant { name: "verify off".into(), config: base.clone(), options });
    all
}

/// What to measure.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    Save,
    /// Into fresh memory.
    Load,
    /// Into existing memory.
    LoadInto,
}

struct Options {
    dir: Option<PathBuf>,
    work: Work,
    bytes: u64,
    files: u64,
    rounds: usize,
    only: Vec<String>,
}

impl Options {
    /// Reads the command line. `None` in the smoke test.
    fn parse() -> Result<Option<Self>> {
        let Some(mut args) = Args::unless_smoke_test("knobs") else { return Ok(None) };
        let options = Self {
            dir: args.value("--dir")?,
            work: match (args.flag("--load"), args.flag("--load-into")) {
                (_, true) => Work::LoadInto,
                (true, false) => Work::Load,
                (false, false) => Work::Save,
            },
            bytes: args.bytes(1.0)?,
            files: args.value("--files")?.unwrap_or(1).max(1),
            rounds: args.value("--rounds")?.unwrap_or(15).max(1),
            only: args.values("--only")?,
        };
        if let Some(other) = args.rest().first() {
            return Err(format!("no option {other:?}; see benches/knobs.rs").into());
        }
        match (&options.dir, options.work) {
            (None, Work::Load | Work::LoadInto) => Err(
                "--load needs --dir: without it, saves skip the disk and there is nothing to load"
                    .into(),
            ),
            _ => Ok(Some(options)),
        }
    }
}

/// The cost of one save or load.
#[derive(Clone, Copy)]
struct Took {
    seconds: f64,
    cpu: f64,
    /// Seconds to prepare files, in a save.
    prepare: f64,
    /// Seconds to sync files, in a save.
    sync: f64,
}

/// Where to save and load.
struct Bench<'a> {
    dir: PathBuf,
    /// Whether saves skip the disk.
    nowhere: bool,
    work: Work,
    state: &'a StateDict<'a>,
    /// Memory to load into, by name.
    targets: Vec<(String, Vec<u8>)>,
}

impl Bench<'_> {
    fn runtime(&self, config: Config) -> Runtime {
        match self.nowhere {
            true => nowhere::runtime(config),
            false => Runtime::new(config).expect("the variants are valid"),
        }
    }

    fn run(&mut self, runtime: &Runtime, options: LoadOptions) -> Result<Took> {
        let path = self.dir.join("ckpt");
        let job = Arc::default();
        if self.work != Work::Save {
            return self.load(&path, runtime, options);
        }
        let _ = fs::remove_dir_all(&path);
        let (cpu, started) = (cpu_seconds(), Instant::now());
        let report = ringstow::internals::store::save(runtime, self.state, &path, &job)?;
        let took = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        Ok(Took {
            seconds: took.0,
            cpu: took.1,
            prepare: report.seconds.prepare,
            sync: report.seconds.sync,
        })
    }

    fn load(&mut self, path: &Path, runtime: &Runtime, options: LoadOptions) -> Result<Took> {
        let checkpoint = Checkpoint::open(path)?;
        for shard in &checkpoint.manifest().files {
            file::drop_page_cache(&fs::File::open(path.join(&shard.name))?)?;
        }
        let job = Arc::default();
        let (cpu, started) = (cpu_seconds(), Instant::now());
        if self.work == Work::LoadInto {
            let targets: Vec<_> = self
                .targets
                .iter_mut()
                .map(|(name, to)| (name.as_str(), Target::new(to)))
                .collect();
            checkpoint.load_into(&targets, options.on(runtime, &job))?;
        } else {
            let names = checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
            drop(checkpoint.load_names(names, options.on(runtime, &job))?);
        }
        let took = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        Ok(Took { seconds: took.0, cpu: took.1, prepare: 0.0, sync: 0.0 })
    }
}

/// Measures every variant in every round, in random order: `measured[variant][round]`.
fn measure(bench: &mut Bench, all: &[Variant], rounds: usize) -> Result<Vec<Vec<Took>>> {
    let runtimes: Vec<Runtime> = all.iter().map(|v| bench.runtime(v.config.clone())).collect();
    let mut measured = vec![Vec::with_capacity(rounds); all.len()];
    let mut random = Rng::with_seed(std::process::id().into());
    // The first round creates pools and threads, and does not count.
    for round in 0..=rounds {
        let mut order: Vec<usize> = (0..all.len()).collect();
        random.shuffle(&mut order);
        for variant in order {
            let took = bench.run(&runtimes[variant], all[variant].options)?;
            if round > 0 {
                measured[variant].push(took);
            }
        }
    }
    Ok(measured)
}

fn print(all: &[Variant], measured: &[Vec<Took>], gb: f64) {
    println!(
        "| variant | GB/s | speed, ratio | CPU s a GB | CPU, ratio | prepare, ms | sync, ms |"
    );
    println!("|---|---|---|---|---|---|---|");
    for (variant, took) in all.iter().zip(measured) {
        let of = |what: fn(&Took) -> f64| median(took.iter().map(what).collect());
        let ratios = |what: fn(&Took) -> f64| -> Vec<f64> {
            took.iter()
                .zip(&measured[0])
                .map(|(took, default)| what(took) / what(default))
                .collect()
        };
        println!(
            "| {} | {:.2} | {} | {:.4} | {} | {:.1} | {:.1} |",
            variant.name,
            gb / of(|t| t.seconds),
            spread(&ratios(|t| 1.0 / t.seconds)),
            of(|t| t.cpu) / gb,
            spread(&ratios(|t| t.cpu)),
            of(|t| t.prepare) * 1e3,
            of(|t| t.sync) * 1e3,
        );
    }
}

/// Equal tensors that divide evenly among the files. All memory is touched.
fn tensors(bytes: u64, files: u64) -> Vec<(String, Vec<u8>)> {
    let count = files.max(16).next_multiple_of(files);
    let len = (bytes / count) as usize / 4096 * 4096;
    let mut pattern = vec![0; len];
    Rng::with_seed(7).fill(&mut pattern);
    (0..count).map(|i| (format!("layer.{i}.weight"), pattern.clone())).collect()
}

fn load_average() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default()
}

/// The requested variants, the default first.
fn chosen(options: &Options, base: &Config) -> Vec<Variant> {
    let asked = |v: &Variant| options.only.iter().any(|part| v.name.contains(part.as_str()));
    let mut all = variants(base);
    all.retain(|v| v.name == "default" || options.only.is_empty() || asked(v));
    all.retain(|v| v.options.verify || options.work != Work::Save); // a save has nothing to verify
    all
}

/// Saves once so that there is something to load, then measures.
fn compare(options: &Options, dir: PathBuf) -> Result<()> {
    let tensors = tensors(options.bytes, options.files);
    let bytes: u64 = tensors.iter().map(|(_, data)| data.len() as u64).sum();
    let mut state = StateDict::new();
    for (name, data) in &tensors {
        state.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
    }
    let targets = match options.work {
        Work::LoadInto => {
            tensors.iter().map(|(n, data)| (n.clone(), vec![1; data.len()])).collect()
        }
        _ => Vec::new(),
    };
    // Space for a header, but not for another tensor.
    let shard_bytes = if options.files > 1 { bytes / options.files + (1 << 19) } else { 0 };
    let base = Config { shard_bytes, ..Config::default() };
    let all = chosen(options, &base);
    let nowhere = options.dir.is_none();
    let mut bench = Bench { dir, nowhere, work: Work::Save, state: &state, targets };
    bench.run(&bench.runtime(base), LoadOptions::default())?;
    bench.work = options.work;
    println!("load average before: {}", load_average().trim());
    let measured = measure(&mut bench, &all, options.rounds)?;
    print(&all, &measured, bytes as f64 / 1e9);
    println!("{} rounds; load average after: {}", options.rounds, load_average().trim());
    Ok(())
}

fn main() -> Result<()> {
    let Some(options) = Options::parse()? else { return Ok(()) };
    // Before any thread starts: the mount is visible to this thread and to those it starts later.
    let endless = if options.dir.is_none() { Endless::new().ok() } else { None };
    let temporary = tempfile::tempdir()?;
    let place = match (&options.dir, &endless) {
        (Some(dir), _) => dir.as_path(),
        (None, Some(endless)) => endless.path(),
        (None, None) => temporary.path(),
    };
    let dir = place.join("ringstow-knobs");
    fs::create_dir_all(&dir)?;
    let done = compare(&options, dir.clone());
    let _ = fs::remove_dir_all(&dir);
    done
}
