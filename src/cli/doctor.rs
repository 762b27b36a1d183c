//! `ringstow doctor`: what this machine and a directory can do, and how to fix what they cannot.

use super::config::ConfigFlags;
use super::output::Output;
use super::place::{place, place_or_url};
use super::{Exit, table, text};
use crate::config::Config;
use crate::doctor::{Check, Diagnosis, Status, diagnose};
use crate::error::{Error, Result};
use clap::Args;
use std::path::PathBuf;

/// Check this machine and a directory, and print how to fix each problem
///
/// Checks the kernel, io_uring, memory limits, huge pages and GPUs. Tries O_DIRECT in the directory with a
/// file of 4096 bytes. Creates an empty file or a small object in each tier. Removes all of these. Exits with 1
/// if a save or a copy would fail, and with 0 if it would only be slower than possible.
#[derive(Debug, Args)]
pub struct Doctor {
    /// The directory for checkpoints
    #[arg(default_value = ".", value_parser = place())]
    dir: PathBuf,

    /// A directory or URL that checkpoints are to be copied to; repeat for each [default: those of the
    /// configuration]
    #[arg(long, value_name = "PLACE", value_parser = place_or_url())]
    tier: Vec<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

pub fn run(args: &Doctor, out: &mut Output) -> Result<Exit> {
    // A broken configuration is a finding, too.
    let (found, check) = match Config::found() {
        Ok(found) => (found, configuration()),
        Err(error) => (Config::default(), broken(&error)),
    };
    let tiers = if args.tier.is_empty() { found.tiers.clone() } else { args.tier.clone() };
    let config = Config { tiers, ..args.config.over(found)? };
    config.validate()?;
    let mut diagnosis = diagnose(&args.dir, &config);
    diagnosis.checks.insert(0, check);
    out.print(args.json, &diagnosis, || render(&diagnosis))?;
    Ok(if diagnosis.status() == Status::Fail { Exit::Found } else { Exit::Success })
}

/// Reports which configuration file is in force.
fn configuration() -> Check {
    let name = "configuration";
    match Config::found_file() {
        None => Check::ok(name, "no file; RINGSTOW_* in the environment and the defaults"),
        Some((path, true)) => {
            Check::ok(name, format!("{}, named by RINGSTOW_CONFIG", path.display()))
        }
        Some((path, false)) => Check::ok(
            name,
            format!(
                "{}, found in the current directory: its stripe, tiers and trace are ignored unless \
                 RINGSTOW_CONFIG names the file",
                path.display()
            ),
        ),
    }
}

/// Reports a configuration that cannot be read: every save fails then.
fn broken(error: &Error) -> Check {
    let remedy = match (error, Config::found_file()) {
        (Error::Format { .. } | Error::Io { .. }, Some((path, _))) => {
            format!("correct {}, or set RINGSTOW_CONFIG=/dev/null to read no file", path.display())
        }
        (_, Some((path, _))) => {
            format!("correct the setting in the environment or in {}", path.display())
        }
        (_, None) => "correct the variable, or unset it".into(),
    };
    Check::fail("configuration", format!("{error}\nthe defaults are checked instead"), remedy)
}

fn render(diagnosis: &Diagnosis) -> String {
    let summary = match diagnosis.status() {
        Status::Ok => "All is well.",
        Status::Warn => "Saves work here. Fix each warn to make them faster or safer.",
        Status::Fail => "Saves, or the copies to a tier, fail here. Fix each FAIL first.",
    };
    format!("{}\n\n{summary}", table::list(diagnosis.checks.iter().flat_map(rows)))
}

/// Formats a finding, each line in a row, and below it the remedy.
fn rows(check: &Check) -> Vec<[String; 3]> {
    let status = match check.status {
        Status::Ok => "ok",
        Status::Warn => "warn",
        Status::Fail => "FAIL",
    };
    let remedy = check.remedy.iter().map(|remedy| format!("→ {}", text::printable(remedy)));
    let lines = check.found.split('\n').map(text::printable).chain(remedy);
    let mut rows: Vec<_> = lines.map(|line| [String::new(), String::new(), line]).collect();
    [rows[0][0], rows[0][1]] = [status.to_owned(), text::printable(&check.name)];
    rows
}
