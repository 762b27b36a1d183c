//! `ringstow ls`: which checkpoints are in a directory, and which of them can be loaded.

use super::config::StripeFlags;
use super::output::Output;
use super::place::place_or_url;
use super::places::{self, copying, problems, runs_in, status};
use super::table::{self, table};
use super::text::or_dash;
use super::{Exit, output, text};
use crate::error::Result;
use crate::format::names;
use crate::object::is_url;
use crate::store::{Found, KINDS, Recycled, Status, kind_of, list, recycled, removals, unfinished};
use clap::Args;
use std::path::{Path, PathBuf};

/// Maximum removals that are shown.
const REMOVALS_MAX: usize = 5;

/// Maximum metrics of a checkpoint that a row shows.
const METRICS_MAX: usize = 3;

/// List the checkpoints in a directory; those of a run come last, ordered by step
///
/// A checkpoint is committed (it can be loaded), incomplete (its save was killed or still runs, or a file
/// is missing) or damaged (its manifest or the length of a file is wrong). To check all bytes, run
/// `ringstow verify`. Of several directories and URLs, such as a run's and those of its tiers, it shows which has
/// which checkpoint. Of a directory of runs it names these. `ringstow show` has all metrics of a checkpoint.
#[derive(Debug, Args)]
pub struct Ls {
    /// A directory of checkpoints, or one checkpoint; several: where each checkpoint is
    #[arg(default_value = ".", value_parser = place_or_url())]
    dirs: Vec<PathBuf>,

    /// Print a JSON array; of several directories, an object of arrays
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    stripe: StripeFlags,
}

pub fn run(args: &Ls, out: &mut Output) -> Result<Exit> {
    let config = args.stripe.config()?;
    let [dir] = &args.dirs[..] else {
        return places::compare(&args.dirs, &config, args.json, out);
    };
    let found = list(dir, &config)?;
    let (recycled, unfinished) = match is_url(dir) {
        true => Default::default(),
        false => (recycled(dir, &config)?, unfinished(dir)?),
    };
    let runs = runs_in(dir, &found, &config)?;
    if let (true, Some(runs)) = (args.json && found.is_empty(), &runs) {
        output::say(runs);
    }
    out.print(args.json, &found, || {
        let mut text = render(dir, &found);
        text.extend(runs.map(|runs| format!("\n\n{runs}")));
        text.extend(copying(&unfinished));
        text.extend(waiting(dir, &recycled));
        text.extend(removed(dir));
        text
    })?;
    Ok(Exit::Success)
}

/// Reports the disk space of recycled files.
fn waiting(dir: &Path, recycled: &Recycled) -> Option<String> {
    (recycled.bytes > 0).then(|| {
        format!(
            "\n\n{} in {} are files of removed checkpoints, which the next save writes over; `ringstow prune \
             --recycled {}` removes them",
            text::size(recycled.bytes),
            names::RECYCLED_DIR,
            text::path(dir)
        )
    })
}

/// Reports the last steps that managers and `retain` have removed, and why.
fn removed(dir: &Path) -> Option<String> {
    let all = if is_url(dir) { Vec::new() } else { removals(dir) };
    let last = &all[all.len().saturating_sub(REMOVALS_MAX)..];
    let lines = last.iter().map(|one| {
        let at = or_dash(text::utc(one.at_unix_ms));
        [format!(
            "removed: {} at {at}: {}",
            text::printable(&one.name),
            text::printable(&one.reason)
        )]
    });
    (!last.is_empty()).then(|| format!("\n\n{}", table::list(lines)))
}

/// Says what does not count as a step although it was saved as one.
fn copied(dir: &Path, found: &[Found]) -> Option<String> {
    let is_other = |found: &&Found| found.step.is_none() && found.status == Status::Committed;
    let copies = found.iter().filter(is_other).filter_map(|found| {
        let as_name = text::printable(found.saved_as.as_deref()?);
        Some([format!(
            "{} was saved as {as_name}, and copied or renamed: it is no step, and no rule removes it",
            name(dir, &found.path)
        )])
    });
    let lines: Vec<[String; 1]> = copies.collect();
    (!lines.is_empty()).then(|| format!("\n\n{}", table::list(lines)))
}

fn render(dir: &Path, found: &[Found]) -> String {
    if found.is_empty() {
        let what = kind_of(dir)
            .ok()
            .flatten()
            .and_then(|kind| KINDS.iter().find(|(known, _)| *known == kind));
        return match what {
            Some((_, what)) => format!(
                "no checkpoints of ringstow's in {}: it is {what}. `ringstow show` lists its tensors",
                text::path(dir)
            ),
            None => format!("no checkpoints in {}", text::path(dir)),
        };
    }
    let titles = ["<NAME", ">STEP", "<STATUS", ">TENSORS", ">SIZE", "<COMMITTED"];
    let rows = found.iter().map(|found| row(dir, found));
    let mut text = match found.iter().any(|found| !found.metrics.is_empty()) {
        false => table(titles, rows),
        true => {
            let [a, b, c, d, e, f] = titles;
            let metrics = found.iter().map(|one| text::few_metrics(&one.metrics, METRICS_MAX));
            let rows = rows.zip(metrics).map(|([a, b, c, d, e, f], m)| [a, b, c, d, e, f, m]);
            table([a, b, c, d, e, f, "<METRICS"], rows)
        }
    };
    text.extend(problems(found));
    text.extend(copied(dir, found));
    text
}

fn row(dir: &Path, found: &Found) -> [String; 6] {
    [
        name(dir, &found.path),
        or_dash(found.step.map(|step| step.to_string())),
        status(found.status).into(),
        or_dash(found.tensors.map(|n| n.to_string())),
        or_dash(found.file_bytes.map(text::size)),
        or_dash(found.created_unix_ms.and_then(text::utc)),
    ]
}

/// Returns a checkpoint's path relative to the listed directory.
fn name(dir: &Path, path: &Path) -> String {
    match path.strip_prefix(dir) {
        Ok(name) if !name.as_os_str().is_empty() => text::path(name),
        _ => text::path(path),
    }
}
