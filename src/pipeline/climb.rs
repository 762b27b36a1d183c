//! Finds the first rung of the ladder that works here, and keeps account of those that do not.

use super::report::Moved;
use super::runtime::Runtime;
use crate::config::Config;
use crate::engine::ladder::{self, Fallback, Refusal, Rung, Stage};
use crate::engine::queue::Queue;
use crate::error::{Error, Result};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// A step on a rung that failed: at which point, what was being done, and to which file.
pub(super) struct Failed {
    pub stage: Stage,
    pub doing: &'static str,
    pub path: PathBuf,
    pub error: io::Error,
}

/// Tries `step` on each rung that `config` allows, best first, until one works. A failure that the
/// rung is not to blame for ends the climb.
pub(super) fn climb<T>(
    runtime: &Runtime,
    config: &Config,
    mut step: impl FnMut(&Arc<Queue>, &Rung) -> std::result::Result<(T, Vec<Fallback>), Failed>,
) -> Result<(T, Arc<Queue>, Moved)> {
    let mut refused: Vec<(Rung, Refusal)> = Vec::new();
    for rung in ladder::rungs(config)? {
        let queue = match runtime.queue(&rung) {
            Ok(queue) => queue,
            Err(error) => {
                let why = ladder::refusal(&rung, Stage::Start, &error);
                refused.push((
                    rung,
                    why.ok_or_else(|| Error::io("starting", rung.to_string(), error))?,
                ));
                continue;
            }
        };
        match step(&queue, &rung) {
            Ok((done, notes)) => {
                let moved = moved(&queue, &rung, refused, notes);
                return Ok((done, queue, moved));
            }
            Err(Failed { stage, doing, path, error }) => {
                let why = ladder::refusal(&rung, stage, &error);
                refused.push((rung, why.ok_or_else(|| Error::io(doing, path, error))?));
            }
        }
    }
    Err(ladder::none_left(&refused))
}

fn moved(queue: &Queue, rung: &Rung, refused: Vec<(Rung, Refusal)>, notes: Vec<Fallback>) -> Moved {
    let steps = refused.into_iter().map(|(tried, why)| why.fallback(&tried, rung));
    let mut fallbacks: Vec<Fallback> = steps.collect();
    fallbacks.extend(queue.fallbacks().iter().cloned());
    fallbacks.extend(notes);
    Moved {
        engine: queue.name().into(),
        direct: rung.direct,
        fixed_buffers: queue.registered(),
        device_bytes: 0,
        pinned: None,
        fallbacks,
    }
}
