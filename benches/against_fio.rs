//! Ringstow against what fio reaches on the same disk in the same run: a durable save of new files
//! and a cold load of them, in turns with fio writing and reading as much through io_uring (4 MiB,
//! 8 in flight, fixed buffers, registered file, O_DIRECT, fsync at the end).
//!
//! ```text
//! cargo bench --bench against_fio -- [--rounds 7] [--gb 3] [--dir DIR]
//! ```
//!
//! Only the ratios of one round mean anything on a disk that others use as well; the median of all
//! rounds is the result. Also printed: CPU seconds for a GB saved, and memory taken beyond the
//! tensors and the pool.
//!
//! A load into fresh memory can be no faster than the system finds that memory, which fio, with its
//! few buffers, never asks for; on a virtual machine whose host takes free memory back that can be
//! slower than the disk. So the bench also loads into tensors that are there already, and measures
//! how fast memory alone is had.

mod common;

use common::cpu_seconds;
use ringstow::device::Target;
use ringstow::pool::Mapping;
use ringstow::{Checkpoint, Config, Dtype, LoadOptions, Runtime, StateDict};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Options {
    rounds: usize,
    bytes: u64,
    dir: PathBuf,
}

/// What was asked for; `None` for the smoke test, which has no use for a disk's limit.
fn options() -> Result<Option<Options>> {
    let dir = std::env::var_os("RINGSTOW_BENCH_DIR").map(PathBuf::from);
    let dir = dir.unwrap_or_else(|| env!("CARGO_TARGET_TMPDIR").into());
    let mut options = Options { rounds: 7, bytes: 3_000_000_000, dir };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--rounds" => options.rounds = value()?.parse()?,
            "--gb" => options.bytes = (value()?.parse::<f64>()? * 1e9) as u64,
            "--dir" => options.dir = value()?.into(),
            "--test" => return Ok(None),
            _ => {} // cargo's own and criterion's
        }
    }
    Ok(Some(options))
}

/// Bytes a second that fio reaches with a file in `dir`.
fn fio(dir: &Path, write: bool, bytes: u64) -> Result<f64> {
    let file = dir.join("fio.bin");
    let (mode, key) = if write { ("write", "write") } else { ("read", "read") };
    let output = Command::new("fio")
        .args(["--name=limit", "--ioengine=io_uring", "--bs=4M", "--iodepth=8", "--direct=1"])
        .args(["--fixedbufs=1", "--registerfiles=1", "--output-format=json"])
        .args([format!("--rw={mode}"), format!("--size={}", bytes / (4 << 20) * (4 << 20))])
        .args([format!("--end_fsync={}", u8::from(write))])
        .arg(format!("--filename={}", file.display()))
        .output()
        .map_err(|error| format!("fio cannot be run ({error}); install it to compare with it"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let json = text.find('{').map(|at| &text[at..]).ok_or("fio said nothing")?;
    let report: serde_json::Value = serde_json::from_str(json)?;
    Ok(report["jobs"][0][key]["bw_bytes"].as_f64().ok_or("fio reports no bandwidth")?)
}

/// A line of /proc/self/status, in bytes: `VmRSS`, `VmHWM`.
fn memory(line: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let found = status.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(':'));
    let kib = found.and_then(|l| l.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Memory that this process took at most while `work` ran, beyond what it had before.
fn extra_memory<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let _ = fs::write("/proc/self/clear_refs", "5"); // starts the high-water mark anew
    let before = memory("VmRSS");
    let done = work();
    (done, memory("VmHWM").saturating_sub(before))
}

/// Tensors as a transformer has them: a few sizes, repeated, all memory touched.
fn tensors(bytes: u64) -> Vec<(String, Vec<u8>)> {
    let mut left = bytes as usize;
    let mut all = Vec::new();
    for number in 0.. {
        let len = [67_108_864, 16_777_216, 16_777_216, 16_384, 4096][number % 5].min(left);
        if len == 0 {
            return all;
        }
        left -= len;
        // Not zeros: nothing on the way may find them easy.
        let mut data = vec![0u8; len];
        let mut x = number as u64 + 1;
        for word in data.chunks_mut(8) {
            x = x.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
            word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
        }
        all.push((format!("layer.{}.part.{}", number / 5, number % 5), data));
    }
    all
}

/// Bytes a second at which the system gives this process memory, as a load takes it.
fn fresh_memory(bytes: u64) -> Result<f64> {
    let started = Instant::now();
    let mapping = Mapping::new(bytes as usize)?;
    let half = mapping.len() / 2;
    thread::scope(|scope| {
        scope.spawn(|| mapping.prefault(0, half));
        mapping.prefault(half, mapping.len() - half);
    });
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

/// A column of numbers, one a round.
#[derive(Default)]
struct Column(Vec<f64>);

impl Column {
    fn quantile(&self, at: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        sorted[((sorted.len() - 1) as f64 * at).round() as usize]
    }

    fn summary(&self) -> String {
        let (low, middle, high) = (self.quantile(0.0), self.quantile(0.5), self.quantile(1.0));
        format!("median {middle:.3}, from {low:.3} to {high:.3}")
    }
}

/// Removes what the last round left, and waits until the disk has settled.
fn clear(path: &Path) {
    let _ = fs::remove_dir_all(path).or_else(|_| fs::remove_file(path));
    let _ = Command::new("sync").status();
}

fn main() -> Result<()> {
    let Some(Options { rounds, bytes, dir }) = options()? else {
        println!("against_fio: left out of the smoke test");
        return Ok(());
    };
    let dir = dir.join("ringstow-against-fio");
    clear(&dir);
    fs::create_dir_all(&dir)?;
    let (path, config) = (dir.join("ckpt"), Config::default());
    let tensors = tensors(bytes);
    let mut state = StateDict::new();
    for (name, data) in &tensors {
        state.bytes(name, Dtype::U8, &[data.len() as u64], data)?;
    }
    let gb = bytes as f64 / 1e9;

    // The first save takes the pool; the first load has the system find memory for it.
    let (report, first) = extra_memory(|| ringstow::save(&state, &path, &config));
    let pool = report?.pool_bytes;
    drop(ringstow::load(&path)?);
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("first save: {:.0} MiB of memory taken, the pool is {:.0}", mib(first), mib(pool));

    let (mut saves, mut loads, mut cpu, mut extra) =
        (Column::default(), Column::default(), Column::default(), 0);
    let (mut places, mut memories) = (Column::default(), Column::default());
    let mut targets: Vec<Vec<u8>> = tensors.iter().map(|(_, data)| vec![1; data.len()]).collect();
    let runtime = Runtime::shared(&config)?;
    for round in 0..rounds {
        let mut written = 0.0;
        let mut save = || -> Result<f64> {
            clear(&path);
            let before = cpu_seconds();
            let (report, took) = extra_memory(|| ringstow::save(&state, &path, &config));
            cpu.0.push((cpu_seconds() - before) / gb);
            extra = extra.max(took);
            let seconds = report?.seconds;
            println!("    save: {seconds:.3?}");
            Ok(bytes as f64 / seconds.total)
        };
        let mut fio_write = || -> Result<()> {
            clear(&dir.join("fio.bin"));
            written = fio(&dir, true, bytes)?;
            Ok(())
        };
        // Who goes first changes from round to round.
        let saved = if round % 2 == 0 {
            fio_write()?;
            save()?
        } else {
            let saved = save()?;
            fio_write()?;
            saved
        };
        let load = || -> Result<f64> {
            let loaded = ringstow::load(&path)?;
            println!("    load: {:.3?}", loaded.report.seconds);
            Ok(bytes as f64 / loaded.report.seconds.total)
        };
        let into = |targets: &mut [Vec<u8>]| -> Result<f64> {
            let checkpoint = Checkpoint::open(&path)?;
            let targets = tensors.iter().zip(targets);
            let targets: Vec<_> =
                targets.map(|((name, _), to)| (name.as_str(), Target::new(to))).collect();
            let (options, job) = (LoadOptions::default(), Default::default());
            let report = checkpoint.load_into(&targets, options, &runtime, &job)?;
            println!("    load into place: {:.3?}", report.seconds);
            Ok(bytes as f64 / report.seconds.total)
        };
        // Before and after, since memory that was just given back is had faster again.
        let mut found = fresh_memory(bytes)?;
        let (read, loaded, placed) = if round % 2 == 0 {
            (fio(&dir, false, bytes)?, load()?, into(&mut targets)?)
        } else {
            let (loaded, placed) = (load()?, into(&mut targets)?);
            (fio(&dir, false, bytes)?, loaded, placed)
        };
        found = found.min(fresh_memory(bytes)?);
        places.0.push(placed / read);
        memories.0.push(loaded / found.min(read));
        saves.0.push(saved / written);
        loads.0.push(loaded / read);
        println!(
            "round {round}: save {:.2} GB/s, fio {:.2}, ratio {:.3}; load {:.2} GB/s, fio {:.2}, ratio {:.3}, into place {:.2}, memory alone {:.2}; {:.3} CPU s/GB",
            saved / 1e9,
            written / 1e9,
            saved / written,
            loaded / 1e9,
            read / 1e9,
            loaded / read,
            placed / 1e9,
            found / 1e9,
            cpu.0[round],
        );
    }
    println!("save / fio write: {}", saves.summary());
    println!("load / fio read:  {}", loads.summary());
    println!("load into tensors that are there / fio read: {}", places.summary());
    println!("load / the slower of fio read and taking memory: {}", memories.summary());
    println!("CPU s a GB saved: {}", cpu.summary());
    println!("memory beyond tensors and pool: {:.1} MiB at most", mib(extra));
    clear(&dir);
    Ok(())
}
