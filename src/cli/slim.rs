//! `ringstow slim`: drops a part of a checkpoint.

use super::clearing;
use super::config::StripeFlags;
use super::output::Output;
use super::place::place;
use super::{Exit, text};
use crate::error::Result;
use crate::store::{Slimmed, slim};
use clap::Args;
use std::path::PathBuf;

/// Drop a part of a checkpoint, such as the optimizer's state, and free its disk space
///
/// Drops what has these names and what is below them: `--drop optimizer` drops `optimizer.state.0.exp_avg`. The save must
/// have set these names apart, so that their tensors lie in files of their own. Everything else still loads. Changes the
/// checkpoint whole or not at all, even when killed; a load that has begun still succeeds.
#[derive(Debug, Args)]
pub struct Slim {
    /// A checkpoint
    #[arg(value_parser = place())]
    path: PathBuf,

    /// A name to drop, with all below it; once for each
    #[arg(short, long, value_name = "NAME", required = true)]
    drop: Vec<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    stripe: StripeFlags,
}

pub fn run(args: &Slim, out: &mut Output) -> Result<Exit> {
    let slimmed = slim(&args.path, &args.drop, &args.stripe.config()?)?;
    out.print(args.json, &slimmed, || render(&slimmed))?;
    Ok(clearing::exit(&slimmed.left))
}

fn render(slimmed: &Slimmed) -> String {
    let Slimmed { path, names, tensors, file_bytes, removed, left } = slimmed;
    if names.is_empty() {
        return format!("{}: dropped already", text::path(path));
    }
    let names = names.iter().map(|name| text::printable(name)).collect::<Vec<_>>().join(", ");
    let bytes = text::size(*file_bytes);
    let done = format!("{}: dropped {names}: {tensors} tensors, {bytes}", text::path(path));
    let lines = clearing::lines(&[("removed", removed)], left);
    [done].into_iter().chain(lines).collect::<Vec<_>>().join("\n")
}
