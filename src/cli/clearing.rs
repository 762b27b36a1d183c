//! What the commands that clear up share: their flags, and how they say what became of what.

use super::config::StripeFlags;
use super::text;
use crate::store::Left;
use clap::Args;
use std::path::PathBuf;

/// How a command clears up.
#[derive(Debug, Args)]
pub struct ClearingFlags {
    /// Say what would be done, and change nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub stripe: StripeFlags,
}

/// A line for each path, behind what became of it, and for what was left alone; `None` if there is
/// nothing to say.
pub fn lines(done: &[(&str, &[PathBuf])], left: &[Left]) -> Option<String> {
    let done = done.iter().flat_map(|(what, paths)| {
        paths.iter().map(move |path| format!("{what}  {}", text::path(path)))
    });
    let left = left.iter().map(|Left { path, reason }| {
        format!("left alone  {}: {}", text::path(path), text::printable(reason))
    });
    let lines: Vec<String> = done.chain(left).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}
