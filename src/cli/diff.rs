//! `ringstow diff`: how two checkpoints differ.

use super::config::ConfigFlags;
use super::output::Output;
use super::place::place_or_url;
use super::{Exit, progress, text};
use crate::error::Result;
use crate::format::Metrics;
use crate::pipeline::runtime::Runtime;
use crate::store::{DiffReport, ElementDiff, TensorChange, ValueDiff, diff};
use clap::Args;
use std::path::PathBuf;

/// Maximum characters of a name.
const NAME_MAX: usize = 60;

/// Maximum characters of a value.
const VALUE_MAX: usize = 40;

/// Compare two checkpoints
///
/// Prints the step and metrics of each, the tensors and values that differ, that only one has, and tensors of
/// another dtype or shape. Reads only tensors whose checksums do not tell whether they are equal. A is - and B is +.
/// Exits with 0 if the two are equal, with 1 if they differ, and with 2 if they could not be compared; steps and metrics
/// do not count. Either may be a directory of other programs' safetensors files; then only tensors are compared.
#[derive(Debug, Args)]
pub struct Diff {
    /// A checkpoint's directory
    #[arg(value_parser = place_or_url())]
    a: PathBuf,

    /// The other checkpoint's directory
    #[arg(value_parser = place_or_url())]
    b: PathBuf,

    /// Read tensors that differ, and print how many elements do and by how much at most
    #[arg(long)]
    values: bool,

    /// Print a JSON object
    #[arg(long)]
    json: bool,

    /// Print nothing; only exit with 0, 1 or 2
    #[arg(short, long, conflicts_with = "json")]
    quiet: bool,

    /// Print every row
    #[arg(short, long)]
    all: bool,

    #[command(flatten)]
    config: ConfigFlags,
}

pub fn run(args: &Diff, out: &mut Output) -> Result<Exit> {
    compare(args, out).or_else(|error| {
        if args.json {
            out.json(&serde_json::json!({ "error": error.to_string() }))?;
        }
        Err(error)
    })
}

fn compare(args: &Diff, out: &mut Output) -> Result<Exit> {
    let runtime = Runtime::new(args.config.config()?)?;
    let label = format!("{} {}", args.a.display(), args.b.display());
    let report = progress::watch(&label, args.quiet, runtime.config(), |job| {
        diff(&runtime, (&args.a, &args.b), args.values, job)
    })?;
    if !args.quiet {
        let most = if args.all { usize::MAX } else { text::ROWS_MAX };
        out.print(args.json, &report, || render(&report, most))?;
    }
    Ok(if report.is_equal() { Exit::Success } else { Exit::Found })
}

fn render(report: &DiffReport, most: usize) -> String {
    let mut lines: Vec<String> =
        [("A", report.step_a, &report.metrics_a), ("B", report.step_b, &report.metrics_b)]
            .into_iter()
            .filter_map(|(side, step, metrics)| noted(side, step, metrics, most))
            .collect();
    let mut section = |title: &str, rows: Vec<String>| {
        if rows.is_empty() {
            return;
        }
        lines.push(format!("{title} ({}):", rows.len()));
        let more = text::more(rows.len(), most, text::ALL_SHOWS);
        lines.extend(rows.into_iter().take(most).chain(more).map(|row| format!("  {row}")));
    };
    section(
        "tensors only in A",
        report.only_in_a.iter().map(|name| format!("- {}", short(name))).collect(),
    );
    section(
        "tensors only in B",
        report.only_in_b.iter().map(|name| format!("+ {}", short(name))).collect(),
    );
    section("other dtype or shape", report.changed.iter().map(change).collect());
    let differing = report.differing.iter().map(|tensor| match &tensor.elements {
        Some(elements) => format!("{}  {}", short(&tensor.name), counts(elements)),
        None => short(&tensor.name),
    });
    section("tensors that differ", differing.collect());
    section("values", report.values.iter().map(value).collect());
    for (side, dropped) in [("A", &report.dropped_a), ("B", &report.dropped_b)] {
        if !dropped.is_empty() {
            let names = text::printable(&dropped.join(" and "));
            lines.push(format!("`slim` has dropped {names} from {side}"));
        }
    }
    let equal = text::count(report.equal_tensors, "tensor");
    let values = if report.values_compared { "and all values" } else { "values not compared" };
    lines.push(match (report.is_equal(), report.values_compared) {
        (true, _) => format!("equal: {equal}, {values}"),
        (false, true) => format!("{equal} equal"),
        (false, false) => format!("{equal} equal, {values}"),
    });
    lines.join("\n")
}

/// What a checkpoint was saved with: `A: step 900, loss 0.5`.
fn noted(side: &str, step: Option<u64>, metrics: &Metrics, most: usize) -> Option<String> {
    let step = step.map(|step| format!("step {step}"));
    let metrics = (!metrics.is_empty()).then(|| text::few_metrics(metrics, most));
    let noted: Vec<String> = step.into_iter().chain(metrics).collect();
    (!noted.is_empty()).then(|| format!("{side}: {}", noted.join(", ")))
}

fn short(name: &str) -> String {
    text::short(name, NAME_MAX)
}

fn change(change: &TensorChange) -> String {
    let TensorChange { name, dtype_a, dtype_b, shape_a, shape_b } = change;
    format!("{}  {dtype_a} {shape_a:?} -> {dtype_b} {shape_b:?}", short(name))
}

fn counts(elements: &ElementDiff) -> String {
    let ElementDiff { differing, elements: all, max_abs, not_finite, .. } = elements;
    let by = max_abs.map_or_else(String::new, |most| format!(", by at most {most:.3e}"));
    let odd = match not_finite {
        0 => String::new(),
        n => format!(", {n} not finite"),
    };
    format!("{differing} of {}{by}{odd}", text::count(*all as usize, "element"))
}

fn value(value: &ValueDiff) -> String {
    let shown = |text: &str| text::short(text, VALUE_MAX);
    let name = match value.name.is_empty() {
        true => "(the state)".into(),
        false => short(&value.name),
    };
    match (&value.a, &value.b) {
        (Some(a), Some(b)) => format!("{name}: {} -> {}", shown(a), shown(b)),
        (Some(a), None) => format!("- {name}: {}", shown(a)),
        (_, b) => format!("+ {name}: {}", shown(b.as_deref().unwrap_or_default())),
    }
}
