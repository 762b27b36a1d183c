//! `ringstow retain`: removes old checkpoints.

use super::clearing::{self, ClearingFlags};
use super::output::Output;
use super::place::place_or_url;
use super::{Exit, text};
use crate::error::Result;
use crate::format::StepPattern;
use crate::store::{Best, Disposal, RetainOptions, Retained, retain, retain_plan};
use crate::units::parse_span;
use clap::Args;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Remove all but the newest checkpoints, and others that flags keep
///
/// Counts the steps directly under a directory: the checkpoints that were saved as a step (step=1000) or, if
/// there are none, those named like the newest except for the number at the end. Leaves everything else
/// alone: `best-7` beside `step-100` and `step-200`, what cannot be loaded, links and what they point to.
/// Ranks that saved one step independently count as one checkpoint. Removes each checkpoint whole or not at
/// all, even when killed; a load that has begun still succeeds. Also removes files that killed saves left
/// in directories of steps before the newest.
#[derive(Debug, Args)]
pub struct Retain {
    /// A directory of checkpoints
    #[arg(value_parser = place_or_url())]
    dir: PathBuf,

    /// Number of newest checkpoints to keep; 1 if another flag says what to keep
    #[arg(short, long, value_name = "N", value_parser = whole_number::<usize>)]
    #[arg(required_unless_present_any = ["keep_every", "keep_every_time", "keep_within", "keep_best"])]
    keep: Option<usize>,

    /// Also keep the steps that this number divides
    #[arg(long, value_name = "N", value_parser = whole_number::<u64>)]
    keep_every: Option<u64>,

    /// Also keep the first checkpoint in each interval of this length, such as 1h, by the time of its commit.
    /// Intervals begin at 1970-01-01 UTC: those of an hour on the hour
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    keep_every_time: Option<Duration>,

    /// Also keep the checkpoints that are no older than the last one by more than this, such as 2d
    #[arg(long, value_name = "TIME", value_parser = parse_span)]
    keep_within: Option<Duration>,

    /// Also keep the best steps by a metric: `loss:min:2` keeps the 2 with the lowest loss. NaN is never
    /// best; of equals, the newer is. If no step has the metric, none is removed
    #[arg(long, value_name = "METRIC:min|max:N")]
    keep_best: Option<Best>,

    /// Keep the files of the last checkpoint removed, so that the next save writes over them, which is
    /// faster than new files (not for ranks that save independently). Without this flag or `recycle` in the
    /// configuration, files kept earlier are removed as well
    #[arg(short, long)]
    recycle: bool,

    /// Names that count as steps: `step-*`, `ckpt_*.pt`, `epoch={step}-loss=*`
    #[arg(short, long)]
    pattern: Option<StepPattern>,

    #[command(flatten)]
    clearing: ClearingFlags,
}

fn whole_number<T: FromStr>(text: &str) -> std::result::Result<T, &'static str> {
    text.parse().map_err(|_| "it must be a whole number")
}

pub fn run(args: &Retain, out: &mut Output) -> Result<Exit> {
    let config = args.clearing.stripe.config()?;
    let disposal = if args.recycle { Disposal::Recycle } else { Disposal::of(&config) };
    let retention = RetainOptions {
        last: args.keep.unwrap_or(1),
        every: args.keep_every,
        every_time: args.keep_every_time,
        within: args.keep_within,
        best: args.keep_best.clone(),
        disposal,
        pattern: args.pattern.clone(),
        pinned: Vec::new(),
    };
    let retained = match args.clearing.dry_run {
        true => retain_plan(&args.dir, &retention, &config),
        false => retain(&args.dir, &retention, &config),
    }?;
    out.print(args.clearing.json, &retained, || render(&retained, args))?;
    Ok(clearing::exit(&retained.left))
}

fn render(retained: &Retained, args: &Retain) -> String {
    let (removed, cleared) = match args.clearing.dry_run {
        true => ("would remove", "would clear"),
        false => ("removed", "cleared"),
    };
    let done = [
        (removed, &*retained.removed),
        (cleared, &*retained.cleared),
        (removed, &*retained.removed_recycled),
    ];
    let kept = retained.kept.iter().zip(&retained.reasons);
    let kept =
        kept.map(|(path, why)| format!("kept  {}: {}", text::path(path), text::printable(why)));
    let (done, left) = (clearing::lines(&done, &[]), clearing::lines(&[], &retained.left));
    let lines: Vec<String> = done.into_iter().chain(kept).chain(left).collect();
    if lines.is_empty() {
        return format!("no checkpoints in {}", text::path(&args.dir));
    }
    let lines = lines.join("\n");
    match &retained.counted {
        Some(counted) => format!("steps  {}\n{lines}", text::printable(counted)),
        None => lines,
    }
}
