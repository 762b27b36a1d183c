//! `ringstow show`: what one checkpoint holds.

use super::config::StripeFlags;
use super::output::Output;
use super::place::place_or_url;
use super::{Exit, table, text, values};
use crate::error::{Result, numbered, some_of};
use crate::format::{Chunk, FileEntry, Manifest, Node, TensorEntry};
use crate::store::{Checkpoint, OpenOptions};
use clap::Args;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use std::path::PathBuf;

/// Characters of a tensor's name.
const NAME_MAX: usize = 120;

/// Show the files, tensors and values of a checkpoint
///
/// Each section ends after 24 rows, unless `--all` is given. Shows a checkpoint with missing files too, by its manifest,
/// and marks what is missing.
#[derive(Debug, Args)]
pub struct Show {
    /// A checkpoint's directory
    #[arg(value_parser = place_or_url())]
    path: PathBuf,

    /// Print everything as JSON
    #[arg(long)]
    json: bool,

    /// Show only the files
    #[arg(long)]
    files: bool,

    /// Show only the tensors
    #[arg(long)]
    tensors: bool,

    /// Show only the values
    #[arg(long)]
    values: bool,

    /// Show every row
    #[arg(short, long)]
    all: bool,

    #[command(flatten)]
    stripe: StripeFlags,
}

pub fn run(args: &Show, out: &mut Output) -> Result<Exit> {
    let config = args.stripe.config()?;
    let checkpoint = OpenOptions::of(&config).damaged(true).open(&args.path)?;
    if args.json {
        out.json(&Shown::of(&checkpoint))?;
        return Ok(Exit::Success);
    }
    let everything = !(args.files || args.tensors || args.values);
    let mut sections = Vec::new();
    if everything {
        sections.push(summary(&checkpoint));
    }
    if everything || args.files {
        sections.push(files(&checkpoint, args.all));
    }
    if everything || args.tensors {
        sections.push(tensors(&checkpoint, args.all));
    }
    if everything || args.values {
        sections.push(tree(&checkpoint, args.all)?);
    }
    out.line(sections.join("\n\n"))?;
    Ok(Exit::Success)
}

/// A checkpoint as JSON, with the names and units of the manifest.
#[derive(Serialize)]
struct Shown<'a> {
    /// The manifest in brief; files and tensors follow in full.
    #[serde(flatten)]
    info: Map<String, Value>,
    created: Option<String>,
    files: Vec<ShownFile<'a>>,
    tensors: Vec<ShownTensor<'a>>,
    /// In the manifest's notation, see `docs/format.md`.
    values: &'a RawValue,
}

#[derive(Serialize)]
struct ShownFile<'a> {
    blocks: usize,
    /// What is wrong with it, if that is known without reading it: `"no such file"`.
    problem: Option<String>,
    /// Its name on the disk, if that still ends in `.part`.
    uncommitted_name: Option<String>,
    #[serde(flatten)]
    entry: &'a FileEntry,
}

#[derive(Serialize)]
struct ShownTensor<'a> {
    bytes: u64,
    /// Bytes stored here, if this rank has only a part of the tensor.
    #[serde(skip_serializing_if = "Option::is_none")]
    held_bytes: Option<u64>,
    /// Whether a file with bytes of it is missing or cut.
    lost: bool,
    /// Name of the file of each chunk.
    files: Vec<&'a str>,
    #[serde(flatten)]
    entry: &'a TensorEntry,
}

impl<'a> Shown<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Self {
        let manifest = checkpoint.manifest();
        let Ok(Value::Object(mut info)) = serde_json::to_value(checkpoint.info()) else {
            unreachable!("a struct of texts and numbers is an object in JSON");
        };
        info.retain(|field, _| !["files", "tensors"].contains(&field.as_str()));
        let file = |(number, entry): (usize, &'a FileEntry)| {
            let problem = checkpoint.file_problem(number);
            let uncommitted_name = checkpoint.uncommitted_name(number);
            ShownFile { blocks: entry.crc32.len(), problem, uncommitted_name, entry }
        };
        let tensor = |entry: &'a TensorEntry| ShownTensor {
            bytes: entry.nbytes(),
            held_bytes: Some(entry.held_bytes()).filter(|&held| held != entry.nbytes()),
            lost: checkpoint.is_lost(entry),
            files: entry.chunks.iter().map(|chunk| file_name(manifest, chunk)).collect(),
            entry,
        };
        Self {
            info,
            created: text::utc(manifest.created_unix_ms),
            files: manifest.files.iter().enumerate().map(file).collect(),
            tensors: manifest.tensors.iter().map(tensor).collect(),
            values: &manifest.state,
        }
    }
}

fn file_name<'a>(manifest: &'a Manifest, chunk: &Chunk) -> &'a str {
    manifest.files.get(chunk.file as usize).map_or("", |file| &file.name)
}

fn summary(checkpoint: &Checkpoint) -> String {
    let (manifest, info) = (checkpoint.manifest(), checkpoint.info());
    let checksums: usize = manifest.files.iter().map(|file| file.crc32.len()).sum();
    let committed = text::utc(manifest.created_unix_ms).unwrap_or_else(|| "-".into());
    let row = |name: &str, value: String| [name.to_owned(), value];
    let part_of = manifest.part_of.as_ref().map(|of| {
        row("part of", format!("what {} ranks saved each by itself: rank {}'s", of.ranks, of.rank))
    });
    let rows = [
        row("committed", committed),
        row("written by", format!("ringstow {}", text::printable(&manifest.writer))),
        row("tensors", format!("{}, {}", info.tensors, text::size(info.tensor_bytes))),
        row("files", format!("{}, {}", info.files.len(), text::size(info.file_bytes))),
        row(
            "checksums",
            format!("{checksums}, one per {}", text::binary_size(manifest.block_bytes)),
        ),
        row(
            "generation",
            format!("{} (rises with each save into this directory)", manifest.generation),
        ),
    ];
    let shared = (info.shared_bytes > 0).then(|| {
        let bytes = text::size(info.shared_bytes);
        row(
            "shared",
            format!(
                "{bytes} of the files, by hard links: removing this checkpoint does not free them"
            ),
        )
    });
    let step = info.step.map(|step| row("step", step.to_string()));
    let metrics = (!info.metrics.is_empty()).then(|| row("metrics", text::metrics(&info.metrics)));
    let problem = checkpoint.check_files().err();
    let problem = problem.map(|error| row("problem", text::printable(&error.to_string())));
    let files = 0..manifest.files.len();
    let uncommitted = files.filter(|&file| checkpoint.uncommitted_name(file).is_some()).count();
    let renames = (uncommitted > 0).then(|| {
        let left = format!(
            "of {} files, {uncommitted} still end in .part: the save committed and has not renamed them yet, or was \
             killed before. Loads find them; the next save here or `ringstow prune` renames them",
            manifest.files.len()
        );
        row("renames", left)
    });
    let nodes = (!manifest.nodes.is_empty()).then(|| row("nodes", nodes(checkpoint)));
    let dropped = (!manifest.dropped.is_empty())
        .then(|| row("dropped", text::printable(&manifest.dropped.join(", "))));
    let rows = rows
        .into_iter()
        .chain(shared)
        .chain(step)
        .chain(metrics)
        .chain(part_of)
        .chain(nodes)
        .chain(dropped);
    let rows = rows.chain(renames).chain(problem);
    format!("{}\n{}", text::path(checkpoint.path()), table::list(rows))
}

/// The nodes that wrote a checkpoint, and how much of it is here.
fn nodes(checkpoint: &Checkpoint) -> String {
    let manifest = checkpoint.manifest();
    let told = |node: &Node| {
        let (host, id) = (text::printable(&node.host), text::printable(&node.id));
        format!("{host} ({id}) with {}", numbered("rank", &node.ranks))
    };
    let all: Vec<String> = manifest.nodes.iter().map(told).collect();
    let here = checkpoint.files_here().count();
    format!("{}; {here} of {} files are here", some_of(&all), manifest.files.len())
}

fn files(checkpoint: &Checkpoint, all: bool) -> String {
    let titles = ["<FILE", ">CHECKSUMS", ">SIZE", ">BYTES"];
    let files = &checkpoint.manifest().files;
    let rows = files.iter().enumerate().take(limit(all)).map(|(number, file)| {
        let checksums = file.crc32.len().to_string();
        let name = checkpoint.uncommitted_name(number).unwrap_or_else(|| file.name.clone());
        let name = match checkpoint.file_problem(number) {
            None => text::printable(&name),
            Some(problem) => text::printable(&format!("{name} ({problem})")),
        };
        [name, checksums, text::size(file.bytes), file.bytes.to_string()]
    });
    table::table(titles, rows) + &more(files.len(), all)
}

fn tensors(checkpoint: &Checkpoint, all: bool) -> String {
    let manifest = checkpoint.manifest();
    let titles = ["<TENSOR", "<DTYPE", "<SHAPE", ">SIZE", "<FILE", ">OFFSET"];
    let rows = manifest.tensors.iter().take(limit(all)).map(|tensor| {
        let mut row = tensor_row(manifest, tensor);
        if checkpoint.is_lost(tensor) {
            row[4] += " (missing)";
        }
        row
    });
    table::table(titles, rows) + &more(manifest.tensors.len(), all)
}

fn tensor_row(manifest: &Manifest, tensor: &TensorEntry) -> [String; 6] {
    let (file, offset) = match tensor.chunks.as_slice() {
        [chunk] => {
            let name = file_name(manifest, chunk);
            let stem = name.strip_suffix(".safetensors").unwrap_or(name);
            (text::printable(stem), chunk.begin.to_string())
        }
        chunks => (format!("{} chunks", chunks.len()), "-".into()),
    };
    let name = text::short(&tensor.name, NAME_MAX);
    let (held, whole) = (text::size(tensor.held_bytes()), text::size(tensor.nbytes()));
    let is_whole = tensor.held_bytes() == tensor.nbytes();
    let size = if is_whole { whole } else { format!("{held} of {whole}") };
    let shape = text::shape(&tensor.shape);
    let kind = if tensor.object { "object".into() } else { tensor.dtype.to_string() };
    [name, kind, shape, size, file, offset]
}

fn tree(checkpoint: &Checkpoint, all: bool) -> Result<String> {
    let lines = values::lines(&checkpoint.state()?);
    if lines.is_empty() {
        return Ok("VALUES\n(only tensors)".into());
    }
    let shown = lines.len().min(limit(all));
    Ok(format!("VALUES\n{}{}", lines[..shown].join("\n"), more(lines.len(), all)))
}

fn limit(all: bool) -> usize {
    if all { usize::MAX } else { text::ROWS_MAX }
}

/// Reports how many rows were left out.
fn more(count: usize, all: bool) -> String {
    let more = text::more(count, limit(all), text::ALL_SHOWS);
    more.map_or_else(String::new, |more| format!("\n{more}"))
}
