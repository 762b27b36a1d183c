//! `ringstow promote`: copies a checkpoint to an object store or another directory.

use super::config::ConfigFlags;
use super::output::Output;
use super::place::{place, place_or_url};
use super::{Exit, progress, text};
use crate::config::parse_size;
use crate::error::Result;
use crate::pipeline::runtime::Runtime;
use crate::store::{Promotion, PromotionReport, promote};
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// Copy a checkpoint to an object store or another directory
///
/// Compares each block with its checksum on the way, and creates the manifest last. After a failure or a kill, the same
/// command goes on where it was. A store's credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
/// AWS_ENDPOINT_URL; GOOGLE_APPLICATION_CREDENTIALS; AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY; or the machine's own.
#[derive(Debug, Args)]
pub struct Promote {
    /// The checkpoint
    #[arg(value_name = "DIR", value_parser = place())]
    from: PathBuf,

    /// Where to: /shared/run/step-1000, s3://bucket/run/step-1000, gs://..., az://...
    #[arg(long, value_name = "PLACE", value_parser = place_or_url())]
    to: PathBuf,

    /// Bytes a second at most, such as 200M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    rate: Option<u64>,

    /// Parts that are sent at the same time
    #[arg(long, value_name = "N", default_value_t = Promotion::default().uploads)]
    uploads: usize,

    /// Bytes of a part
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = parse_size)]
    part_bytes: u64,

    /// Seconds to go on while a store does not answer; what was sent stays, and the same command goes on there
    #[arg(long, value_name = "SECONDS", default_value_t = Promotion::default().patience.as_secs())]
    patience: u64,

    /// Replace a checkpoint there that was committed earlier than this one
    #[arg(long)]
    replace_older: bool,

    /// Print a JSON object
    #[arg(long)]
    json: bool,

    /// Print no progress
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

pub fn run(args: &Promote, out: &mut Output) -> Result<Exit> {
    let runtime = Runtime::new(args.config.config()?)?;
    let how = Promotion {
        rate: args.rate.unwrap_or_default(),
        uploads: args.uploads,
        part_bytes: args.part_bytes,
        replace_older: args.replace_older,
        refuse_link: false, // the caller names the place
        replicas: true,
        patience: Duration::from_secs(args.patience),
    };
    let report = progress::watch("sending", args.quiet, runtime.config(), |job| {
        promote(&runtime, &args.from, &args.to, how, job)
    })?;
    match args.json {
        true => out.json(&report)?,
        false => out.line(told(&report))?,
    }
    Ok(Exit::Success)
}

fn told(report: &PromotionReport) -> String {
    let PromotionReport { path, to, file_bytes, sent_bytes, was_there, missing, seconds, .. } =
        report;
    let (path, to) = (text::path(path), text::path(to.as_ref()));
    match (was_there, missing) {
        (true, _) => format!("{path} was at {to} already"),
        (false, 1..) => format!(
            "{} of {path} sent to {to} in {seconds:.1} s; it is not committed there: other nodes have still to send \
             {}, and the last one commits it. Run this on each",
            text::size(*sent_bytes),
            text::count(*missing, "file")
        ),
        (false, 0) => format!(
            "{path} is at {to}: {} sent of {} in {seconds:.1} s",
            text::size(*sent_bytes),
            text::size(*file_bytes)
        ),
    }
}
