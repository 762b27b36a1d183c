//! `ringstow verify`: compares every byte with its checksum.

use super::config::ConfigFlags;
use super::output::{self, Output};
use super::place::place_or_url;
use super::{Exit, progress, table, text};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::format::names;
use crate::object::is_url;
use crate::pipeline::report::{Damage, VerifyReport};
use crate::pipeline::runtime::Runtime;
use crate::store::{list, verify};
use crate::sys::dir::{has, is_dir};
use clap::Args;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Maximum damaged checksum chunks to describe; the rest is counted.
const DAMAGE_SHOWN_MAX: usize = 10;

/// Maximum damaged tensors to name; the rest is counted.
const TENSORS_SHOWN_MAX: usize = 8;

/// Maximum tensors to name beside each damaged range.
const TENSORS_BESIDE_MAX: usize = 3;

/// Maximum characters of a tensor's name.
const TENSOR_NAME_MAX: usize = 90;

/// Read every byte of checkpoints and compare it with its checksum
///
/// Exits with 1 if anything is damaged, and prints the file, the offset and the tensors concerned; exits
/// with 2 if something could not be checked. In a directory of checkpoints, skips those that were never
/// committed.
#[derive(Debug, Args)]
pub struct Verify {
    /// Checkpoints, or directories of checkpoints
    #[arg(required = true, value_name = "PATH", value_parser = place_or_url())]
    paths: Vec<PathBuf>,

    /// Print a JSON array with an object per checkpoint
    #[arg(long)]
    json: bool,

    /// Print only problems, and no progress
    #[arg(short, long)]
    quiet: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

/// Result for one checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// Every byte is as written.
    Ok,
    /// Some bytes differ or are missing.
    Damaged,
    /// Never committed, so there is nothing to check.
    Incomplete,
    /// Could not be read.
    Unchecked,
}

#[derive(Debug, Serialize)]
struct Checked {
    #[serde(with = "crate::path_text")]
    path: PathBuf,
    verdict: Verdict,
    /// Why the whole checkpoint is damaged or could not be checked, or which files are missing.
    problem: Option<String>,
    /// Names of the tensors that cannot be loaded.
    damaged_tensors: Vec<String>,
    /// Bytes read, and each damaged checksum chunk.
    report: Option<VerifyReport>,
}

pub fn run(args: &Verify, out: &mut Output) -> Result<Exit> {
    let runtime = Runtime::new(args.config.config()?)?;
    let mut all = Vec::new();
    let mut failed = false;
    for path in &args.paths {
        let targets = targets(path, runtime.config());
        let many = targets.len() > 1;
        let from = all.len();
        for target in targets {
            let checked = check(&runtime, &target, args.quiet)?;
            if !args.json {
                print(&checked, args.quiet, out)?;
            }
            failed |= checked.verdict == Verdict::Unchecked
                || (checked.verdict == Verdict::Incomplete && !many);
            all.push(checked);
        }
        // A directory without a single committed checkpoint is a failure.
        failed |= all[from..].iter().all(|checked| checked.verdict == Verdict::Incomplete);
    }
    if args.json {
        out.json(&all)?;
    }
    Ok(if all.iter().any(|checked| checked.verdict == Verdict::Damaged) {
        Exit::Found
    } else if failed {
        Exit::Failed
    } else {
        Exit::Success
    })
}

/// Finds the checkpoints at or under a path, including each rank's share if ranks saved independently. Returns
/// the path itself if there are none, so that it is the one that fails.
fn targets(path: &Path, config: &Config) -> Vec<PathBuf> {
    let found = match is_url(path) || is_dir(path) {
        true => list(path, config).unwrap_or_default(),
        false => Vec::new(),
    };
    match found.is_empty() {
        true => vec![path.to_path_buf()],
        false => found
            .into_iter()
            .flat_map(|found| match found.parts.is_empty() {
                true => vec![found.path],
                false => found.parts,
            })
            .collect(),
    }
}

/// Checks one checkpoint.
///
/// # Errors
/// [`Error::Cancelled`]; everything else becomes a verdict.
fn check(runtime: &Runtime, path: &Path, quiet: bool) -> Result<Checked> {
    let label = path.to_string_lossy();
    let outcome =
        progress::watch(&label, quiet, runtime.config(), |job| verify(runtime, path, job));
    let mut checked = Checked {
        path: path.into(),
        verdict: Verdict::Ok,
        problem: None,
        damaged_tensors: Vec::new(),
        report: None,
    };
    match outcome {
        Ok(report) => {
            if !report.damage.is_empty() {
                checked.verdict = Verdict::Damaged;
                let names = report.damaged_tensors().into_iter().map(str::to_owned);
                checked.damaged_tensors = names.collect();
                checked.problem = report.problem.clone();
            }
            checked.report = Some(report);
        }
        Err(error @ Error::Cancelled { .. }) => return Err(error),
        Err(error) => {
            checked.verdict = verdict(path, &error);
            checked.problem = Some(error.to_string());
        }
    }
    Ok(checked)
}

/// Maps an error to a verdict.
fn verdict(path: &Path, error: &Error) -> Verdict {
    let committed = || has(&path.join(names::MANIFEST));
    match error {
        Error::Corrupt { .. } | Error::Format { .. } => Verdict::Damaged,
        // A file disappeared after the commit.
        error if error.is_incomplete() && committed() => Verdict::Damaged,
        error if error.is_incomplete() => Verdict::Incomplete,
        _ => Verdict::Unchecked,
    }
}

/// Prints one result immediately, since the next may take minutes.
fn print(checked: &Checked, quiet: bool, out: &mut Output) -> Result<()> {
    match checked.verdict {
        Verdict::Ok | Verdict::Incomplete if quiet => {}
        Verdict::Unchecked => output::note(checked.problem.as_deref().unwrap_or_default()),
        _ => out.line(render(checked))?,
    }
    out.finish()
}

fn render(checked: &Checked) -> String {
    let path = text::path(&checked.path);
    let problem = text::printable(checked.problem.as_deref().unwrap_or_default());
    match (checked.verdict, &checked.report) {
        (Verdict::Ok, Some(report)) => format!("ok       {path}  {}", read(report)),
        (Verdict::Damaged, Some(report)) => {
            let damage = render_damage(&path, report, &checked.damaged_tensors);
            match &checked.problem {
                Some(_) => format!("{damage}\n{}", indented(problem)),
                None => damage,
            }
        }
        (Verdict::Damaged, None) => format!("DAMAGED  {path}\n{}", indented(problem)),
        _ => format!("skipped  {path}\n{}", indented(problem)),
    }
}

/// Wraps and indents a sentence.
fn indented(text: String) -> String {
    table::list([[String::new(), text]])
}

fn read(report: &VerifyReport) -> String {
    let rate = report.read_bytes as f64 / report.seconds.max(1e-9);
    let elsewhere = match report.elsewhere {
        0 => String::new(),
        files => format!("; {} on other nodes, not checked", text::count(files, "file")),
    };
    format!(
        "{} in {}, {}, {}/s{elsewhere}",
        text::size(report.read_bytes),
        text::count(report.files, "file"),
        text::count(report.blocks, "checksum chunk"),
        text::size(rate as u64)
    )
}

fn render_damage(path: &str, report: &VerifyReport, tensors: &[String]) -> String {
    let damaged = report.damage.len();
    let places = text::count(damaged, "damaged place");
    let chunks = text::count(report.blocks, "checksum chunk");
    let mut lines = vec![format!("DAMAGED  {path}  {places}, {chunks}")];
    for damage in report.damage.iter().take(DAMAGE_SHOWN_MAX) {
        lines.extend(render_place(damage));
    }
    let more = text::more(damaged, DAMAGE_SHOWN_MAX, "; --json shows them");
    lines.extend(more.map(|more| format!("  {more}")));
    if !tensors.is_empty() {
        lines.push(format!("  {} cannot be loaded:", text::count(tensors.len(), "tensor")));
        let shown = tensors.iter().take(TENSORS_SHOWN_MAX);
        let shown = shown.map(|name| text::short(name, TENSOR_NAME_MAX));
        let more = text::more(tensors.len(), TENSORS_SHOWN_MAX, "; --json shows them");
        lines.extend(shown.chain(more).map(|line| format!("    {line}")));
    }
    lines.push("  Restore the files from a copy, or go back to an earlier checkpoint: `latest(dir, verify=True)`.".into());
    if report.damage.iter().any(|damage| damage.is_refusal) {
        lines.push("  What this process may not read may be intact: check the owner and mode of the files.".into());
    }
    lines.push(format!("  {}", what_loads(report.tensors, tensors.len())));
    lines.join("\n")
}

/// What `on_corrupt="skip"` would load.
fn what_loads(tensors: usize, damaged: usize) -> String {
    let skip = "`load(path, on_corrupt=\"skip\")`";
    match tensors - damaged {
        0 if tensors > 0 => format!("No tensor is intact: {skip} loads nothing but the values."),
        intact if damaged == 0 => {
            format!("All {intact} tensors are intact, and {skip} loads them.")
        }
        1 => format!("The 1 intact tensor loads with {skip}."),
        intact => format!("The {intact} intact tensors load with {skip}."),
    }
}

/// The file and byte range of one damage, what is wrong, and the first tensors in it.
fn render_place(damage: &Damage) -> [String; 2] {
    let Damage { file, offset, bytes, what, expected, got, tensors, is_refusal: _ } = damage;
    let file = text::printable(&file.file_name().unwrap_or_default().to_string_lossy());
    let mut names: Vec<String> = tensors
        .iter()
        .take(TENSORS_BESIDE_MAX)
        .map(|name| text::short(name, TENSOR_NAME_MAX))
        .collect();
    if tensors.len() > names.len() {
        names.push(format!("{} more", tensors.len() - names.len()));
    }
    let inside = match names.is_empty() {
        true => "no tensor".into(),
        false => names.join(", "),
    };
    [
        format!("  {file} at offset {offset}, {bytes} bytes: {inside}"),
        format!("    {what} should be {expected}, is {}", text::printable(got)),
    ]
}
