//! Finds the first rung of the ladder that works here, and keeps account of those that do not. A
//! checkpoint may lie in several directories, and on each of their file systems another rung may be it.

use super::fallbacks::warn_once;
use super::report::Moved;
use super::runtime::Runtime;
use crate::config::Config;
use crate::engine::fallback::{Fallback, Refusal};
use crate::engine::ladder::{self, Rung, Stage};
use crate::engine::queue::Queue;
use crate::error::{Error, Result, Room};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A step on a rung that failed: at which point, what was being done, and to which file.
pub(super) struct Failed {
    pub stage: Stage,
    pub doing: &'static str,
    pub path: PathBuf,
    pub error: io::Error,
    pub room: Option<Room>,
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
            Err(Failed { stage, doing, path, error, room }) => {
                let why = ladder::refusal(&rung, stage, &error);
                let fatal = || {
                    let hint = String::new();
                    Error::Io { doing, path, offset: None, source: error, room, hint }
                };
                refused.push((rung, why.ok_or_else(fatal)?));
            }
        }
    }
    Err(ladder::none_left(&refused))
}

/// Climbs once for each directory that files lie in: `step` gets the numbers of those in one, and gives
/// something for each of them. What is `None` is left out. All come back in their own order.
pub(super) fn climb_each<T>(
    runtime: &Runtime,
    config: &Config,
    paths: &[Option<&Path>],
    mut step: impl FnMut(
        &[usize],
        &Arc<Queue>,
        &Rung,
    ) -> std::result::Result<(Vec<T>, Vec<Fallback>), Failed>,
) -> Result<(Vec<Option<T>>, Moved)> {
    let mut all: Vec<Option<T>> = paths.iter().map(|_| None).collect();
    let mut ways = Vec::new();
    for (dir, numbers) in by_directory(paths) {
        let (done, _, moved) = climb(runtime, config, |queue, rung| step(&numbers, queue, rung))?;
        warn_once(dir, &moved.fallbacks);
        numbers.into_iter().zip(done).for_each(|(number, one)| all[number] = Some(one));
        ways.push((dir, moved));
    }
    Ok((all, together(ways)))
}

/// Lets go of files, and waits until they are closed: a file that is to be written over later must have
/// nobody else who has it open, and engines close in their own time.
pub(super) fn close<T>(files: &mut Vec<T>, queue_of: impl Fn(&T) -> Option<&Arc<Queue>>) {
    let mut queues: Vec<Arc<Queue>> = Vec::new();
    for queue in files.iter().filter_map(queue_of) {
        if !queues.iter().any(|known| Arc::ptr_eq(known, queue)) {
            queues.push(queue.clone());
        }
    }
    files.clear();
    queues.iter().for_each(|queue| queue.settle());
}

/// Brings an account up to what has become of the engines since: they register buffers when these are first used.
/// `dir` is the checkpoint's.
pub(super) fn update<'a>(
    moved: &mut Moved,
    dir: &Path,
    queues: impl Iterator<Item = &'a Arc<Queue>>,
) {
    for queue in queues {
        moved.fixed_buffers = moved.fixed_buffers.max(queue.registered());
        for step in queue.fallbacks() {
            // The same shortfall may have been told of, with another number of buffers, or for a directory.
            let same = |known: &&mut Fallback| {
                known.wanted == step.wanted && known.reason.ends_with(&step.reason)
            };
            match moved.fallbacks.iter_mut().find(same) {
                Some(known) => known.got = step.got,
                None => {
                    warn_once(dir, [&step]);
                    moved.fallbacks.push(step);
                }
            }
        }
    }
}

/// The directories, as they come first, with the numbers of the paths in each.
pub(super) fn by_directory<'a>(paths: &[Option<&'a Path>]) -> Vec<(&'a Path, Vec<usize>)> {
    let mut dirs: Vec<(&Path, Vec<usize>)> = Vec::new();
    for (number, path) in paths.iter().enumerate() {
        let Some(dir) = path.and_then(Path::parent) else { continue };
        // There are a handful, and mostly one.
        match dirs.iter_mut().find(|(known, _)| *known == dir) {
            Some((_, numbers)) => numbers.push(number),
            None => dirs.push((dir, vec![number])),
        }
    }
    dirs
}

/// One account of all directories. A step down that not all of them had to take names its own.
fn together(ways: Vec<(&Path, Moved)>) -> Moved {
    let several = ways.len() > 1;
    let everywhere = |step: &Fallback| ways.iter().all(|(_, way)| way.fallbacks.contains(step));
    let mut fallbacks: Vec<Fallback> = Vec::new();
    for (dir, step) in
        ways.iter().flat_map(|(dir, way)| way.fallbacks.iter().map(move |s| (dir, s)))
    {
        let mut step = step.clone();
        if several && !everywhere(&step) {
            step.reason = format!("in {}: {}", dir.display(), step.reason);
        }
        if !fallbacks.contains(&step) {
            fallbacks.push(step);
        }
    }
    let mut engines: Vec<&str> = ways.iter().map(|(_, way)| way.engine.as_str()).collect();
    engines.dedup();
    Moved {
        engine: if engines.is_empty() { "none".into() } else { engines.join(" and ") },
        direct: !ways.is_empty() && ways.iter().all(|(_, way)| way.direct),
        fixed_buffers: ways.iter().map(|(_, way)| way.fixed_buffers).max().unwrap_or(0),
        device_bytes: 0,
        pinned: None,
        fallbacks,
    }
}

fn moved(queue: &Queue, rung: &Rung, refused: Vec<(Rung, Refusal)>, notes: Vec<Fallback>) -> Moved {
    let steps = refused.into_iter().map(|(tried, why)| why.fallback(tried, rung));
    let mut fallbacks: Vec<Fallback> = steps.collect();
    fallbacks.extend(queue.fallbacks());
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

#[cfg(test)]
mod tests {
    use super::*;

    fn step(wanted: &str) -> Fallback {
        let (got, reason, remedy) = ("buffered".into(), "no O_DIRECT".into(), "none".into());
        Fallback { wanted: wanted.into(), got, reason, remedy }
    }

    fn way(engine: &str, direct: bool, steps: &[&str]) -> Moved {
        let fallbacks = steps.iter().map(|wanted| step(wanted)).collect();
        let (engine, fixed_buffers) = (engine.into(), if direct { 64 } else { 0 });
        Moved { engine, direct, fixed_buffers, device_bytes: 0, pinned: None, fallbacks }
    }

    #[test]
    fn a_step_down_names_its_directory_unless_all_took_it() {
        let (a, b) = (Path::new("/a"), Path::new("/b"));
        let ways = vec![
            (a, way("uring", true, &["memlock"])),
            (b, way("portable", false, &["memlock", "direct"])),
        ];
        let all = together(ways);
        assert_eq!(
            (&*all.engine, all.direct, all.fixed_buffers),
            ("uring and portable", false, 64)
        );
        let reasons: Vec<&str> = all.fallbacks.iter().map(|step| &*step.reason).collect();
        assert_eq!(reasons, ["no O_DIRECT", "in /b: no O_DIRECT"]);
        let alone = together(vec![(b, way("portable", false, &["direct"]))]);
        assert_eq!(alone, way("portable", false, &["direct"]));
    }

    #[test]
    fn paths_are_gathered_by_directory_and_what_is_not_there_is_left_out() {
        let paths = ["/a/1", "/b/1", "/a/2"].map(Path::new);
        let paths = [Some(paths[0]), None, Some(paths[1]), Some(paths[2])];
        let (a, b) = (Path::new("/a"), Path::new("/b"));
        assert_eq!(by_directory(&paths), [(a, vec![0, 3]), (b, vec![2])]);
    }
}
