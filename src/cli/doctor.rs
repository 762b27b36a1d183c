//! `ringstow doctor`: what this machine and a directory can do, and how to mend what they cannot.

use super::config::ConfigFlags;
use super::output::Output;
use super::place::place;
use super::{Exit, table, text};
use crate::config::Config;
use crate::doctor::{Check, Diagnosis, Status, diagnose};
use crate::error::Result;
use clap::Args;
use std::path::PathBuf;

/// Checks this machine and a directory, and says how to mend what is short
///
/// Looks at the kernel, io_uring, memory limits and huge pages, and tries O_DIRECT on the directory
/// by writing a file of 4096 bytes, which is removed. Exits with 1 if a save would fail, not
/// if it would only be slower than it could be.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Where checkpoints are to go
    #[arg(default_value = ".", value_parser = place())]
    dir: PathBuf,

    /// Print JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

pub fn run(args: &Doctor, out: &mut Output) -> Result<Exit> {
    let mut diagnosis = diagnose(&args.dir, &args.config.config()?);
    diagnosis.checks.insert(0, configuration());
    out.print(args.json, &diagnosis, || render(&diagnosis))?;
    Ok(if diagnosis.status() == Status::Fail { Exit::Found } else { Exit::Ok })
}

/// Which file says how to save.
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
                "{}, found in the current directory: what it says of stripe and trace is ignored unless \
                 RINGSTOW_CONFIG names it",
                path.display()
            ),
        ),
    }
}

fn render(diagnosis: &Diagnosis) -> String {
    let summary = match diagnosis.status() {
        Status::Ok => "All is well.",
        Status::Warn => "Saves work here; what is marked warn would make them faster or safer.",
        Status::Fail => "Saves fail here until what is marked FAIL is mended.",
    };
    format!("{}\n\n{summary}", table::list(diagnosis.checks.iter().flat_map(rows)))
}

/// What was found, and below it what to do.
fn rows(check: &Check) -> Vec<[String; 3]> {
    let status = match check.status {
        Status::Ok => "ok",
        Status::Warn => "warn",
        Status::Fail => "FAIL",
    };
    let found = [status.to_owned(), text::printable(&check.name), text::printable(&check.found)];
    let remedy = check
        .remedy
        .iter()
        .map(|remedy| [String::new(), String::new(), format!("→ {}", text::printable(remedy))]);
    std::iter::once(found).chain(remedy).collect()
}
