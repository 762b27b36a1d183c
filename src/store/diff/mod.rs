//! How two checkpoints differ: tensors by checksums where these decide, otherwise by their bytes; values; names.

mod checksums;
mod contents;
mod elements;
mod objects;
mod shown;
mod values;

use crate::error::{Error, Result};
use crate::format::{Metrics, TensorEntry, Value, metrics, names};
use crate::pipeline::job::Job;
use crate::pipeline::runtime::Runtime;
use crate::store::read::again::while_replaced;
use crate::store::read::checkpoint::{Checkpoint, CheckpointKind, OpenOptions};
use checksums::Verdict;
use contents::Contents;
pub use elements::ElementDiff;
use objects::Objects;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
pub use values::ValueDiff;

/// How two checkpoints differ.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DiffReport {
    /// The one checkpoint's directory.
    #[serde(with = "crate::path_text")]
    pub a: PathBuf,
    /// The other's.
    #[serde(with = "crate::path_text")]
    pub b: PathBuf,
    /// The step that `a` was saved with.
    pub step_a: Option<u64>,
    /// The step that `b` was saved with.
    pub step_b: Option<u64>,
    /// The metrics that `a` was saved with.
    #[serde(with = "metrics")]
    pub metrics_a: Metrics,
    /// The metrics that `b` was saved with.
    #[serde(with = "metrics")]
    pub metrics_b: Metrics,
    /// Names below which [`Store::slim`](crate::Store::slim) has dropped everything from `a`.
    pub dropped_a: Vec<String>,
    /// Likewise from `b`.
    pub dropped_b: Vec<String>,
    /// Tensors that only `a` has.
    pub only_in_a: Vec<String>,
    /// Tensors that only `b` has.
    pub only_in_b: Vec<String>,
    /// Tensors whose dtype or shape differs.
    pub changed: Vec<TensorChange>,
    /// Tensors with other bytes.
    pub differing: Vec<TensorDiff>,
    /// Values that differ, or that only one has; objects too, by their bytes.
    pub values: Vec<ValueDiff>,
    /// Whether values were compared: not with another program's files, which have none.
    pub values_compared: bool,
    /// Number of tensors that are equal.
    pub equal_tensors: usize,
    /// Bytes of tensors that were read, because checksums did not decide, and of objects that differ.
    pub read_bytes: u64,
    /// Seconds in total.
    pub seconds: f64,
}

impl DiffReport {
    /// Whether no tensor and no value differs. Steps and metrics do not count.
    pub fn is_equal(&self) -> bool {
        self.only_in_a.is_empty()
            && self.only_in_b.is_empty()
            && self.changed.is_empty()
            && self.differing.is_empty()
            && self.values.is_empty()
    }
}

/// A tensor of another dtype or shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TensorChange {
    /// Its name.
    pub name: String,
    /// Its dtype in `a`.
    pub dtype_a: String,
    /// Its dtype in `b`.
    pub dtype_b: String,
    /// Its shape in `a`.
    pub shape_a: Vec<u64>,
    /// Its shape in `b`.
    pub shape_b: Vec<u64>,
}

/// A tensor with other bytes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDiff {
    /// Its name.
    pub name: String,
    /// How its elements differ, if that was asked for.
    pub elements: Option<ElementDiff>,
}

/// Compares two checkpoints, ringstow's or other programs' safetensors files. Reads no tensor whose checksums decide:
/// equal ones count as equal. With `values`, reads every tensor that differs, and counts elements.
///
/// # Errors
/// As for [`OpenOptions::open`] with `foreign` and [`Checkpoint::load_part`]; damage is found only in what is read.
pub fn diff(
    runtime: &Runtime,
    (a, b): (&Path, &Path),
    values: bool,
    job: &Arc<Job>,
) -> Result<DiffReport> {
    job.traced(runtime.config(), || while_replaced(|| diff_once(runtime, (a, b), values, job)))
}

fn diff_once(
    runtime: &Runtime,
    (path_a, path_b): (&Path, &Path),
    values: bool,
    job: &Arc<Job>,
) -> Result<DiffReport> {
    let started = Instant::now();
    let open = |path| OpenOptions::new().foreign(true).open_once(path, runtime.config());
    let (a, b) = (open(path_a)?, open(path_b)?);
    let only_in = |one: &Checkpoint, other: &Checkpoint| -> Vec<String> {
        let alone = one.tensors().iter().filter(|tensor| other.tensor(&tensor.name).is_none());
        alone.map(|tensor| tensor.name.clone()).collect()
    };
    let (mut only_in_a, mut only_in_b) = (only_in(&a, &b), only_in(&b, &a));
    let have_values = [&a, &b].iter().all(|one| one.kind() == CheckpointKind::Ringstow);
    let mut changed_values = match have_values {
        true => values::compare((&tree(&a)?, &only_in_a), (&tree(&b)?, &only_in_b))?,
        false => Vec::new(),
    };
    let (mut changed, mut differing, mut equal_tensors) = (Vec::new(), Vec::new(), 0);
    // Objects are values, although they are stored as tensors are.
    let mut objects = Objects::alone((&a, &mut only_in_a), (&b, &mut only_in_b));
    let mut undecided = Vec::new();
    for one in a.tensors() {
        let Some(other) = b.tensor(&one.name) else { continue };
        if (one.object, one.dtype, &one.shape) != (other.object, other.dtype, &other.shape) {
            match one.object || other.object {
                true => objects.differ(one, other),
                false => changed.push(change(one, other)),
            }
            continue;
        }
        match checksums::compare((&a, one), (&b, other)) {
            Verdict::Equal => equal_tensors += usize::from(!one.object),
            Verdict::Different if one.object => objects.differ(one, other),
            Verdict::Different if !values => {
                differing.push(TensorDiff { name: one.name.clone(), elements: None });
            }
            Verdict::Different | Verdict::Unknown => undecided.push(one),
        }
    }
    let mut contents = Contents::new((&a, &b), runtime, job);
    for (entry, difference) in contents.compare(&undecided)? {
        match (difference.differing, entry.object) {
            (0, is_object) => equal_tensors += usize::from(!is_object),
            (_, true) => objects.differ(entry, entry),
            (_, false) => {
                let elements = values.then_some(difference);
                differing.push(TensorDiff { name: entry.name.clone(), elements });
            }
        }
    }
    differing.sort_by_key(|tensor| a.number(&tensor.name));
    if have_values {
        objects.add_to(&mut changed_values);
        objects::describe(&mut changed_values, &mut contents)?;
    }
    Ok(DiffReport {
        a: path_a.into(),
        b: path_b.into(),
        step_a: a.manifest().step,
        step_b: b.manifest().step,
        metrics_a: a.manifest().metrics.clone(),
        metrics_b: b.manifest().metrics.clone(),
        dropped_a: a.manifest().dropped.clone(),
        dropped_b: b.manifest().dropped.clone(),
        only_in_a,
        only_in_b,
        changed,
        differing,
        values: changed_values,
        values_compared: have_values,
        equal_tensors,
        read_bytes: contents.read_bytes,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// The values of a checkpoint.
fn tree(of: &Checkpoint) -> Result<Value> {
    Value::from_json_with_types(&of.manifest().state)
        .map_err(|e| Error::format(of.path().join(names::MANIFEST), e.to_string()))
}

fn change(one: &TensorEntry, other: &TensorEntry) -> TensorChange {
    TensorChange {
        name: one.name.clone(),
        dtype_a: one.dtype.name().into(),
        dtype_b: other.dtype.name().into(),
        shape_a: one.shape.to_vec(),
        shape_b: other.shape.to_vec(),
    }
}
