//! `ringstow top`: the saves and copies of a run that are in progress, looked at again and again.

use super::config::StripeFlags;
use super::output::Output;
use super::place::place;
use super::table::list as rows;
use super::{Exit, text};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::store::{InFlight, Unfinished, in_flight, list, unfinished};
use crate::sys::dir::has;
use clap::Args;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::io::{IsTerminal, stdout};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Show the saves and copies in progress in a run's directory, again and again
///
/// For each save, and each copy to here: the bytes in its files so far, of how many, at which rate over the last ten
/// looks, by which process. For each copy from here to a tier: the same of the parts that have arrived whole (16 MiB
/// each). Only looks, and disturbs nobody. A save over recycled files shows all of its bytes from the start, and one
/// where the file system reserves no space those that it has. Ctrl-C ends it.
#[derive(Debug, Args)]
pub struct Top {
    /// A run's directory
    #[arg(default_value = ".", value_parser = place())]
    dir: PathBuf,

    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    interval: f64,

    /// End after so many looks [default: go on]
    #[arg(long, value_name = "N")]
    looks: Option<NonZeroU64>,

    /// Print a line of JSON for each look
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    stripe: StripeFlags,
}

/// What one look finds.
#[derive(Debug, Serialize)]
struct Look {
    unix_ms: u64,
    saves: Vec<Moving<InFlight>>,
    copies: Vec<Moving<Copy>>,
    /// When a checkpoint was last committed here.
    committed_unix_ms: Option<u64>,
}

/// A save or copy with its rate since one of the last looks; none at the first.
#[derive(Debug, Serialize)]
struct Moving<T> {
    #[serde(flatten)]
    what: T,
    bytes_per_s: Option<f64>,
}

#[derive(Debug, Serialize)]
struct Copy {
    checkpoint: PathBuf,
    to: String,
    sent_bytes: u64,
    /// Bytes of the checkpoint's files.
    bytes: Option<u64>,
    process: Option<u32>,
}

/// Bytes at a look, by what they are of.
type Bytes = HashMap<(PathBuf, String), u64>;

/// The looks of the last seconds: a copy counts whole parts, so the rate between two looks jumps.
const REMEMBERED: usize = 10;

pub fn run(args: &Top, out: &mut Output) -> Result<Exit> {
    let pause = Duration::try_from_secs_f64(args.interval).ok().filter(|pause| !pause.is_zero());
    let Some(pause) = pause else {
        let reason = "give seconds, above 0 and fewer than 1e19";
        return Err(Error::invalid(format!("--interval {}: {reason}", args.interval)));
    };
    let config = args.stripe.config()?;
    let mut before: VecDeque<(Instant, Bytes)> = VecDeque::new();
    for number in 1.. {
        let (at, mut now) = (Instant::now(), Bytes::new());
        let look = look(&args.dir, &config, &mut |what, bytes| {
            let earliest = before.iter().find_map(|(when, all)| Some((when, all.get(&what)?)));
            now.insert(what, bytes);
            let (when, earlier) = earliest?;
            Some(bytes.saturating_sub(*earlier) as f64 / (at - *when).as_secs_f64())
        })?;
        show(args, &look, out)?;
        before.push_back((at, now));
        if before.len() > REMEMBERED {
            before.pop_front();
        }
        if args.looks.is_some_and(|looks| number >= looks.get()) || out.is_closed() {
            break;
        }
        sleep(pause);
    }
    Ok(Exit::Success)
}

/// Looks once; `rate` gets what is looked at and its bytes, and returns the rate.
fn look(
    dir: &Path,
    config: &Config,
    rate: &mut dyn FnMut((PathBuf, String), u64) -> Option<f64>,
) -> Result<Look> {
    let (saves, committed) = in_flight(dir, config)?;
    let saves = saves.into_iter().map(|what| {
        let bytes_per_s = rate((what.path.clone(), String::new()), what.written_bytes);
        Moving { what, bytes_per_s }
    });
    let saves = saves.collect();
    let copies = unfinished(dir)?.into_iter().map(|found| {
        let Unfinished { checkpoint, to, sent_bytes, process } = found;
        let bytes_per_s = rate((checkpoint.clone(), to.clone()), sent_bytes);
        let bytes = bytes_of(&checkpoint, config);
        Moving { what: Copy { checkpoint, to, sent_bytes, bytes, process }, bytes_per_s }
    });
    let copies = copies.collect();
    let unix_ms =
        |time: SystemTime| time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let committed_unix_ms = committed.map(|time| unix_ms(time) as u64);
    Ok(Look { unix_ms: unix_ms(SystemTime::now()) as u64, saves, copies, committed_unix_ms })
}

/// The bytes of a checkpoint's files; `None` if it was removed.
fn bytes_of(checkpoint: &Path, config: &Config) -> Option<u64> {
    list(checkpoint, config).ok()?.first()?.file_bytes
}

fn show(args: &Top, look: &Look, out: &mut Output) -> Result<()> {
    match args.json {
        true => out.compact_json(look)?,
        false => {
            if stdout().is_terminal() {
                out.clear_terminal()?;
            }
            out.line(render(&args.dir, look))?;
        }
    }
    out.finish()
}

fn render(dir: &Path, look: &Look) -> String {
    let now = text::utc(look.unix_ms).unwrap_or_default();
    let newest = match look.committed_unix_ms.and_then(text::utc) {
        Some(when) => format!("last commit {when}"),
        None if !has(dir) => "does not exist yet".into(),
        None => "nothing is committed yet".into(),
    };
    let head = format!("{}, {now}: {newest}", text::path(dir));
    let name = |path: &Path| text::path(path.strip_prefix(dir).unwrap_or(path));
    let saves = look.saves.iter().map(|Moving { what, bytes_per_s }| {
        let name = if what.path == dir { text::path(dir) } else { name(&what.path) };
        let so_far = (what.written_bytes, Some(what.bytes));
        let kind = if what.is_copy { "copy to here" } else { "save" };
        row(kind, name, so_far, *bytes_per_s, by(what.process, what.was_killed))
    });
    let copies = look.copies.iter().map(|Moving { what, bytes_per_s }| {
        let name = format!("{} to {}", name(&what.checkpoint), text::printable(&what.to));
        row("copy", name, (what.sent_bytes, what.bytes), *bytes_per_s, by(what.process, false))
    });
    let all: Vec<[String; 6]> = saves.chain(copies).collect();
    match all.is_empty() {
        true => format!("{head}\nnothing is in progress"),
        false => format!("{head}\n{}", rows(all)),
    }
}

/// Who saves or copies.
fn by(process: Option<u32>, was_killed: bool) -> String {
    match process {
        Some(process) => format!("process {process}"),
        None if was_killed => "was killed: `ringstow prune` removes it".into(),
        None => "by a process that is not seen here, or was killed".into(),
    }
}

fn row(
    kind: &str,
    name: String,
    (done, total): (u64, Option<u64>),
    bytes_per_s: Option<f64>,
    who: String,
) -> [String; 6] {
    let of = total.map_or(String::new(), |total| format!(" of {}", text::size(total)));
    let total = total.filter(|&total| total > 0);
    let share = total.map(|total| format!("{:.0} %", done as f64 / total as f64 * 100.0));
    let rate = bytes_per_s.map(|rate| format!("{}/s", text::size(rate as u64)));
    let so_far = format!("{}{of}", text::size(done));
    [kind.into(), name, so_far, share.unwrap_or_default(), rate.unwrap_or_default(), who]
}
