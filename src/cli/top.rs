//! `ringstow top`: the saves and copies of a run that are in progress, looked at again and again.

use super::config::StripeFlags;
use super::output::Output;
use super::place::place;
use super::table::list as rows;
use super::{Exit, text};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::object::is_url;
use crate::store::{InFlight, Unfinished, in_flight, list, unfinished};
use crate::sys::chance::{now_unix_ms, unix_ms};
use crate::sys::dir::has;
use clap::Args;
use serde::Serialize;
use std::collections::{HashMap, VecDeque};
use std::io::{IsTerminal, stdout};
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Show the saves and copies in progress in a run's directory, again and again
///
/// For each save, and each copy to this directory: bytes written, bytes in all, rate over the last ten looks, process.
/// For each copy to a tier: the same; to a store, counted in whole parts of 16 MiB. Takes no lock. A save over recycled files
/// shows all of its bytes from the start. Where the file system reserves no space, the total is what is written so
/// far. Ctrl-C ends it.
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

/// What is looked at, as its place and, of a copy, where to.
type Key = (PathBuf, String);

/// The looks of the last seconds: a copy counts whole parts, so the rate between two looks jumps.
const REMEMBERED: usize = 10;

pub fn run(args: &Top, out: &mut Output) -> Result<Exit> {
    let pause = Duration::try_from_secs_f64(args.interval).ok().filter(|pause| !pause.is_zero());
    let Some(pause) = pause else {
        let reason = "give seconds, above 0 and fewer than 1e19";
        return Err(Error::invalid(format!("--interval {}: {reason}", args.interval)));
    };
    let config = args.stripe.config()?;
    let mut watch = Watch { dir: &args.dir, config, past: VecDeque::new(), sizes: HashMap::new() };
    for number in 1.. {
        show(args, &watch.look()?, out)?;
        if args.looks.is_some_and(|looks| number >= looks.get()) || out.is_closed() {
            break;
        }
        sleep(pause);
    }
    Ok(Exit::Success)
}

/// Looks again and again, and remembers what it saw.
struct Watch<'a> {
    dir: &'a Path,
    config: Config,
    /// The bytes of the last looks, earliest first.
    past: VecDeque<(Instant, HashMap<Key, u64>)>,
    /// The bytes of checkpoints that are being copied. Large manifests take too long to read at each look.
    sizes: HashMap<PathBuf, Option<u64>>,
}

impl Watch<'_> {
    fn look(&mut self) -> Result<Look> {
        let (at, mut bytes) = (Instant::now(), HashMap::new());
        let (saves, committed) = in_flight(self.dir, &self.config)?;
        let saves = saves.into_iter().map(|what| {
            let key = (what.path.clone(), String::new());
            let bytes_per_s = self.rate(at, &key, what.written_bytes);
            bytes.insert(key, what.written_bytes);
            Moving { what, bytes_per_s }
        });
        let saves = saves.collect();
        let copies = unfinished(self.dir)?.into_iter().map(|mut found| {
            found.sent_bytes = found.sent_bytes.max(self.written(&found.to));
            let key = (found.checkpoint.clone(), found.to.clone());
            let bytes_per_s = self.rate(at, &key, found.sent_bytes);
            bytes.insert(key, found.sent_bytes);
            Moving { what: self.copy(found), bytes_per_s }
        });
        let copies = copies.collect();
        self.past.push_back((at, bytes));
        if self.past.len() > REMEMBERED {
            self.past.pop_front();
        }
        let committed_unix_ms = committed.map(unix_ms);
        Ok(Look { unix_ms: now_unix_ms(), saves, copies, committed_unix_ms })
    }

    /// The bytes of a copy to a directory, whose journal says nothing before the end of a file.
    fn written(&self, to: &str) -> u64 {
        let to = Path::new(to);
        if is_url(to) {
            return 0;
        }
        let (found, _) = in_flight(to, &self.config).unwrap_or_default();
        found.iter().filter(|found| found.path == to).map(|found| found.written_bytes).sum()
    }

    /// Bytes a second since the earliest look that saw it.
    fn rate(&self, at: Instant, key: &Key, bytes: u64) -> Option<f64> {
        let earliest = |(when, seen): &(Instant, HashMap<Key, u64>)| Some((*when, *seen.get(key)?));
        let (when, earlier) = self.past.iter().find_map(earliest)?;
        Some(bytes.saturating_sub(earlier) as f64 / (at - when).as_secs_f64())
    }

    fn copy(&mut self, found: Unfinished) -> Copy {
        let Unfinished { checkpoint, to, sent_bytes, process } = found;
        let size = self.sizes.entry(checkpoint.clone());
        let bytes =
            *size.or_insert_with(|| list(&checkpoint, &self.config).ok()?.first()?.file_bytes);
        Copy { checkpoint, to, sent_bytes, bytes, process }
    }
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
        None => "process unknown: it may run on another host, or was killed".into(),
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
