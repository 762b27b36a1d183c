//! `ringstow prune`: removes files that killed saves and removals left behind.

use super::clearing::{self, ClearingFlags};
use super::output::Output;
use super::place::place;
use super::{Exit, text};
use crate::error::Result;
use crate::store::{Pruning, Swept, prune_with};
use clap::Args;
use std::path::PathBuf;

/// Remove files that killed saves left behind
///
/// Searches a directory, the directories in it, and in these the directories of ranks that save
/// independently. Removes uncommitted files, shards that a later save replaced, what a killed removal left,
/// and directories that are empty then. Keeps committed checkpoints, other programs' files and saves in
/// progress. A save does the same for its own directory, and `retain` for steps before the newest.
#[derive(Debug, Args)]
pub struct Prune {
    /// A directory of checkpoints, or one checkpoint
    #[arg(value_parser = place())]
    dir: PathBuf,

    /// Also remove recycled files: files of removed checkpoints that the next save would write over
    #[arg(short, long)]
    recycled: bool,

    /// Promise that no other process or host saves there. Without it, directories whose lock does not keep
    /// out other hosts stay as they are
    #[arg(long)]
    no_other_writers: bool,

    #[command(flatten)]
    clearing: ClearingFlags,
}

pub fn run(args: &Prune, out: &mut Output) -> Result<Exit> {
    let config = args.clearing.stripe.config()?;
    let pruning = Pruning {
        no_other_writers: args.no_other_writers,
        dry_run: args.clearing.dry_run,
        recycled: args.recycled,
    };
    let swept = prune_with(&args.dir, pruning, &config)?;
    out.print(args.clearing.json, &swept, || render(&swept, args))?;
    Ok(clearing::exit(&swept.left))
}

fn render(swept: &Swept, args: &Prune) -> String {
    let (removed, renamed) = match args.clearing.dry_run {
        true => ("would remove", "would finish"),
        false => ("removed", "finished"),
    };
    clearing::lines(&[(renamed, &swept.renamed), (removed, &swept.removed)], &swept.left)
        .unwrap_or_else(|| format!("nothing to clear away in {}", text::path(&args.dir)))
}
