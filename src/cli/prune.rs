//! `ringstow prune`: clears away what killed saves and removals left.

use super::clearing::{self, ClearingFlags};
use super::output::Output;
use super::place::place;
use super::{Exit, text};
use crate::error::Result;
use crate::store::{Swept, prune_plan, prune_with, recycled, remove_recycled};
use clap::Args;
use std::path::PathBuf;

/// Removes what killed saves left behind
///
/// Looks at a directory, at those directly under it, and at the parts of those whose ranks saved each by
/// itself. Uncommitted files go, and so do shards that a later save replaced; a directory that held
/// nothing else goes too. So does what is left of a checkpoint whose removal was killed. Committed
/// checkpoints and files of other programs stay, and so does what is being saved at this moment. Who calls
/// `retain` after each save hardly needs this: it does the same for steps before the newest, and a save does
/// it for the directory that it saves into.
#[derive(Debug, Args)]
pub struct Prune {
    /// A directory of checkpoints, or one checkpoint
    #[arg(value_parser = place())]
    dir: PathBuf,

    /// Remove recycled files, too: those of removed checkpoints that wait for a save to write over them
    #[arg(short, long)]
    recycled: bool,

    #[command(flatten)]
    clearing: ClearingFlags,
}

pub fn run(args: &Prune, out: &mut Output) -> Result<Exit> {
    let config = args.clearing.stripe.config()?;
    let mut swept = match args.clearing.dry_run {
        true => prune_plan(&args.dir, &config),
        false => prune_with(&args.dir, &config),
    }?;
    if args.recycled {
        swept.removed.extend(match args.clearing.dry_run {
            true => recycled(&args.dir, &config)?.paths,
            false => remove_recycled(&args.dir, &config)?,
        });
    }
    out.print(args.clearing.json, &swept, || render(&swept, args))?;
    Ok(Exit::Ok)
}

fn render(swept: &Swept, args: &Prune) -> String {
    let (removed, renamed) = match args.clearing.dry_run {
        true => ("would remove", "would finish"),
        false => ("removed", "finished"),
    };
    clearing::lines(&[(renamed, &swept.renamed), (removed, &swept.removed)], &swept.left)
        .unwrap_or_else(|| format!("nothing to clear away in {}", text::path(&args.dir)))
}
