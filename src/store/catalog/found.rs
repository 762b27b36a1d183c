//! What a directory was found to hold: a checkpoint, complete or not.

use crate::error::Error;
use crate::format::manifest::{Order, numbers};
use crate::format::{Metrics, RankShare, metrics};
use serde::Serialize;
use std::path::PathBuf;

/// A directory that holds a checkpoint or what is left of one.
#[derive(Debug, Serialize)]
pub struct Found {
    /// The directory.
    #[serde(with = "crate::path_text")]
    pub path: PathBuf,
    /// Whether it can be loaded.
    pub status: Status,
    /// Why it cannot be loaded; `None` if it can.
    pub problem: Option<String>,
    /// Which of the run's [`steps`](crate::steps) it is; `None` if it is not a step.
    pub step: Option<u64>,
    /// The step that its manifest notes.
    #[serde(skip)]
    pub(in crate::store) saved_step: Option<u64>,
    /// The metrics that it was saved with. For the shares that ranks saved each by itself, those of the lowest rank.
    #[serde(with = "metrics")]
    pub metrics: Metrics,
    /// Names below which everything was dropped; see [`Store::slim`](crate::Store::slim).
    pub dropped: Vec<String>,
    /// The name under which it was saved, if it has another now: it is a copy, or was renamed.
    pub saved_as: Option<String>,
    /// When it was committed, in milliseconds since 1970-01-01 UTC.
    pub created_unix_ms: Option<u64>,
    /// The greater is the newer: how often the run had gone back, the step, the number of the save in its run, and the time.
    #[serde(serialize_with = "numbers")]
    pub order: Order,
    /// Number of tensors.
    pub tensors: Option<usize>,
    /// Bytes of its shards.
    pub file_bytes: Option<u64>,
    /// Which rank's share it is, if it is one share of what several ranks saved each by itself.
    pub part_of: Option<RankShare>,
    /// The directories of the ranks, if several ranks saved each by itself: each holds that rank's share, as a
    /// checkpoint of its own. Empty otherwise.
    #[serde(with = "crate::path_text::list")]
    pub parts: Vec<PathBuf>,
    /// Why it is [`Status::Unreadable`].
    #[serde(skip)]
    pub(in crate::store) refusal: Option<Error>,
}

impl Found {
    /// Whether it was committed, also if it is damaged now.
    pub(crate) fn was_committed(&self) -> bool {
        self.status != Status::Incomplete || self.created_unix_ms.is_some()
    }

    /// A directory that the system refused to read.
    pub(in crate::store) fn unreadable(path: PathBuf, refusal: Error) -> Self {
        Self {
            path,
            status: Status::Unreadable,
            problem: Some(refusal.to_string()),
            step: None,
            saved_step: None,
            metrics: Metrics::new(),
            dropped: Vec::new(),
            saved_as: None,
            created_unix_ms: None,
            order: Order::default(),
            tensors: None,
            file_bytes: None,
            part_of: None,
            parts: Vec::new(),
            refusal: Some(refusal),
        }
    }
}

/// Whether a checkpoint can be loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Committed, and all files exist with their full length.
    Committed,
    /// Never committed, or a file or a rank's share is missing.
    Incomplete,
    /// Its manifest, or the length of a file, is not what was written.
    Damaged,
    /// The system refused to read it, so it may be any of the others.
    Unreadable,
}
