//! `ringstow prune`: clears away what killed saves left.

use super::config::StripeFlags;
use super::output::Output;
use super::{Exit, text};
use crate::error::Result;
use crate::store::{Swept, prune_plan, prune_with};
use clap::Args;
use std::path::{Path, PathBuf};

/// Removes what killed saves left behind
///
/// Looks at a directory and at those directly under it. Uncommitted files go, and so do shards that
/// a later save replaced; a directory that held nothing else goes too. Committed checkpoints and
/// files of other programs stay, and so does what is being saved at this moment. Nobody needs
/// to run this: the next save into the same directory does the same.
#[derive(Debug, Args)]
pub struct Prune {
    /// A directory of checkpoints, or one checkpoint
    dir: PathBuf,

    /// Say what would be done, and change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    stripe: StripeFlags,
}

pub fn run(args: &Prune, out: &mut Output) -> Result<Exit> {
    let config = args.stripe.config()?;
    let swept = match args.dry_run {
        true => prune_plan(&args.dir, &config),
        false => prune_with(&args.dir, &config),
    }?;
    if args.json {
        out.json(&swept)?;
    } else {
        out.line(render(&args.dir, &swept, args.dry_run))?;
    }
    Ok(Exit::Ok)
}

fn render(dir: &Path, swept: &Swept, dry_run: bool) -> String {
    let (removed, renamed) = match dry_run {
        true => ("would remove", "would finish"),
        false => ("removed", "finished"),
    };
    let left = swept.left.iter().map(|left| {
        format!("left alone  {}: {}", text::path(&left.path), text::printable(&left.reason))
    });
    let lines: Vec<String> = swept
        .renamed
        .iter()
        .map(|path| format!("{renamed}  {}", text::path(path)))
        .chain(swept.removed.iter().map(|path| format!("{removed}  {}", text::path(path))))
        .chain(left)
        .collect();
    match lines.is_empty() {
        true => format!("nothing to clear away in {}", text::path(dir)),
        false => lines.join("\n"),
    }
}
