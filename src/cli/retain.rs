//! `ringstow retain`: removes old checkpoints.

use super::clearing::{self, ClearingFlags};
use super::output::Output;
use super::place::place;
use super::{Exit, text};
use crate::error::Result;
use crate::format::StepPattern;
use crate::store::{Disposal, Retained, Retention, retain_plan, retain_with};
use clap::Args;
use std::path::PathBuf;

/// Removes all but the newest checkpoints
///
/// Of the steps directly under a directory, the newest stay, as many as asked for. A step is what was saved as one
/// (step=1000) or, where nothing was, what has a name like the newest save's, but for the number at its end. All
/// else (`best-7` beside `step-100` and `step-200`) is left alone, and so is what cannot be loaded, a link, and what a
/// link leads to. One whose ranks saved each by itself counts once. A checkpoint is removed whole or not at all, however
/// this ends, and a load that has begun ends well. What killed saves left in directories of steps before the
/// newest is cleared away; what is being saved at this moment is not.
#[derive(Debug, Args)]
pub struct Retain {
    /// A directory of checkpoints
    #[arg(value_parser = place())]
    dir: PathBuf,

    /// How many stay
    #[arg(short, long, value_name = "N")]
    keep: usize,

    /// Keep the files of the last one removed for the next save there to write over, which is faster than
    /// new files (not those of ranks that saved each by itself); without this (or `recycle` in the
    /// configuration), such files of earlier calls go too
    #[arg(short, long)]
    recycle: bool,

    /// Which names are steps: `step-*`, `ckpt_*.pt`, `epoch={step}-loss=*`
    #[arg(short, long)]
    pattern: Option<StepPattern>,

    #[command(flatten)]
    clearing: ClearingFlags,
}

pub fn run(args: &Retain, out: &mut Output) -> Result<Exit> {
    let config = args.clearing.stripe.config()?;
    let disposal = if args.recycle { Disposal::Recycle } else { Disposal::of(&config) };
    let retention = Retention { keep: args.keep, disposal, pattern: args.pattern.clone() };
    let retained = match args.clearing.dry_run {
        true => retain_plan(&args.dir, &retention, &config),
        false => retain_with(&args.dir, &retention, &config),
    }?;
    out.print(args.clearing.json, &retained, || render(&retained, args))?;
    Ok(Exit::Ok)
}

fn render(retained: &Retained, args: &Retain) -> String {
    let (retired, cleared) = match args.clearing.dry_run {
        true => ("would remove", "would clear"),
        false => ("removed", "cleared"),
    };
    let done = [
        (retired, &*retained.retired),
        (cleared, &*retained.cleared),
        (retired, &*retained.spares),
        ("kept", &*retained.kept),
    ];
    let Some(lines) = clearing::lines(&done, &retained.left) else {
        return format!("no checkpoints in {}", text::path(&args.dir));
    };
    match &retained.counted {
        Some(counted) => format!("steps  {}\n{lines}", text::printable(counted)),
        None => lines,
    }
}
