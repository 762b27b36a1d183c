//! `ringstow retain`: removes old checkpoints.

use super::clearing::{self, ClearingFlags};
use super::output::Output;
use super::place::place;
use super::{Exit, text};
use crate::error::Result;
use crate::store::{Disposal, Retained, retain_plan, retain_with};
use clap::Args;
use std::path::PathBuf;

/// Removes all but the newest checkpoints
///
/// Of those directly under a directory, the newest by the number at the end of their names stay, as many as
/// asked for. What has no number there (`best`, `last`) or cannot be loaded is neither counted nor removed.
/// One whose ranks saved each by itself counts once. A checkpoint is removed whole or not at all, however
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
    /// new files (not those of ranks that saved each by itself); without this, such files of earlier calls
    /// go too
    #[arg(short, long)]
    recycle: bool,

    #[command(flatten)]
    clearing: ClearingFlags,
}

pub fn run(args: &Retain, out: &mut Output) -> Result<Exit> {
    let disposal = if args.recycle { Disposal::Recycle } else { Disposal::Remove };
    let config = args.clearing.stripe.config()?;
    let retained = match args.clearing.dry_run {
        true => retain_plan(&args.dir, args.keep, disposal, &config),
        false => retain_with(&args.dir, args.keep, disposal, &config),
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
    clearing::lines(&done, &retained.left)
        .unwrap_or_else(|| format!("no checkpoints in {}", text::path(&args.dir)))
}
