//! Flags and output that the commands which remove files share.

use super::config::StripeFlags;
use super::{Exit, text};
use crate::store::Left;
use clap::Args;
use std::path::PathBuf;

/// Flags of a command that removes files.
#[derive(Debug, Args)]
pub struct ClearingFlags {
    /// Print what would be done, and change nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    pub stripe: StripeFlags,
}

/// How a command ends that left these alone.
pub fn exit(left: &[Left]) -> Exit {
    if left.iter().any(|left| left.failed) { Exit::Found } else { Exit::Success }
}

/// Formats one line per path: what was done with it, or why it was left alone. `None` without paths.
pub fn lines(done: &[(&str, &[PathBuf])], left: &[Left]) -> Option<String> {
    let done = done.iter().flat_map(|(what, paths)| {
        paths.iter().map(move |path| format!("{what}  {}", text::path(path)))
    });
    let left = left.iter().map(|Left { path, reason, .. }| {
        format!("left alone  {}: {}", text::path(path), text::printable(reason))
    });
    let lines: Vec<String> = done.chain(left).collect();
    (!lines.is_empty()).then(|| lines.join("\n"))
}
