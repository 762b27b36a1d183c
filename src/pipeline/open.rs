//! Opens files with the first I/O mode that works, and reports the modes that do not. A checkpoint may
//! lie in several directories, and each of their file systems may end up on a different mode.

use super::fallbacks::warn_once;
use super::report::Moved;
use super::runtime::Runtime;
use super::transfers::OpenFile;
use crate::config::{Config, Priority};
use crate::engine::fallback::{Fallback, FallbackKind, Refusal};
use crate::engine::io_mode::{self, IoMode, Stage, Trial};
use crate::engine::queue::Queue;
use crate::error::{Error, Result, Shortage};
use crate::limits::ALIGN;
use crate::pool::Buffer;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// What failed while files were opened: at which stage, what was being done, and to which file.
pub(super) struct OpenFailure {
    pub stage: Stage,
    pub doing: &'static str,
    pub path: PathBuf,
    pub error: io::Error,
    pub shortage: Option<Shortage>,
}

impl OpenFailure {
    /// Makes failures of one step with one file, for `map_err`.
    pub fn of(stage: Stage, doing: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |error| Self { stage, doing, path: path.into(), error, shortage: None }
    }
}

/// What comes of an attempt to open files with one I/O mode.
pub(super) type Attempt<T> = std::result::Result<T, OpenFailure>;

/// A directory's files, and what was unavailable for them.
pub(super) type Opened = (Vec<OpenFile>, Vec<Fallback>);

/// Attaches a file that was just opened.
pub(super) fn attach(queue: &Arc<Queue>, path: &Path, file: File) -> Attempt<OpenFile> {
    let file = Arc::new(file);
    let failed = OpenFailure::of(Stage::Open, "attaching to the engine", path);
    let attached = queue.attach(file.clone()).map_err(failed)?;
    Ok(OpenFile { path: path.into(), file, attached, queue: queue.clone(), cached: None })
}

/// Reads a trial block of a file, into a page of its own: a load may never need the pool.
pub(super) fn try_read(open: &OpenFile) -> io::Result<()> {
    let trial = |buffer| io_mode::trial(&open.queue, &open.attached, Trial::Read, buffer).result;
    Buffer::alone(ALIGN).and_then(trial)
}

/// Opens files, those of each directory with the first I/O mode that works there: `open` gets the
/// numbers of a directory's paths, and returns a file for each. All files come back in the order of
/// `paths`, `None` where the path is `None`.
pub(super) fn open_each(
    runtime: &Runtime,
    config: &Config,
    paths: &[Option<&Path>],
    mut open: impl FnMut(&[usize], &Arc<Queue>, &IoMode) -> Attempt<Opened>,
) -> Result<(Vec<Option<OpenFile>>, Moved)> {
    let mut files: Vec<Option<OpenFile>> = paths.iter().map(|_| None).collect();
    let mut ways = Vec::new();
    for (dir, numbers) in by_directory(paths) {
        let (opened, moved) =
            first_working(runtime, config, |queue, mode| open(&numbers, queue, mode))?;
        debug_assert_eq!(opened.len(), numbers.len());
        warn_once(dir, &moved.fallbacks);
        numbers.into_iter().zip(opened).for_each(|(number, file)| files[number] = Some(file));
        ways.push((dir, moved));
    }
    let mut moved = merge(ways);
    moved.fallbacks.extend(lowered(config.priority(), paths));
    Ok((files, moved))
}

/// The fallback if the system refuses to lower a thread's priority.
fn lowered(priority: Priority, paths: &[Option<&Path>]) -> Option<Fallback> {
    if priority == Priority::default() {
        return None;
    }
    // On a thread of its own: the caller's keeps its priority. The kernel answers all threads alike.
    let thread = thread::Builder::new().spawn(move || priority.apply()).ok()?;
    let error = thread.join().ok()?.err()?;
    let fallback = Fallback {
        kind: FallbackKind::Priority,
        wanted: "Config.nice and Config.io_priority".into(),
        got: "the priority of the process".into(),
        reason: format!("the system refused to lower a thread's priority: {error}"),
        remedy:
            "allow setpriority and ioprio_set in the container's seccomp profile, or leave both \
                 settings out"
                .into(),
    };
    let dir = paths.iter().flatten().find_map(|path| path.parent());
    warn_once(dir.unwrap_or(Path::new("/")), [&fallback]);
    Some(fallback)
}

/// Tries `open` with each I/O mode that `config` allows, best first, until one works. A failure that
/// is not the mode's fault is returned at once.
fn first_working(
    runtime: &Runtime,
    config: &Config,
    mut open: impl FnMut(&Arc<Queue>, &IoMode) -> Attempt<Opened>,
) -> Result<(Vec<OpenFile>, Moved)> {
    let mut refused: Vec<(IoMode, Refusal)> = Vec::new();
    for mode in io_mode::modes(config)? {
        let name = mode.to_string();
        let failed = OpenFailure::of(Stage::Start, "starting", Path::new(&name));
        let opened = runtime.queue(&mode).map_err(failed);
        match opened.and_then(|queue| Ok((open(&queue, &mode)?, queue))) {
            Ok(((files, notes), queue)) => {
                return Ok((files, moved(&queue, &mode, refused, notes)));
            }
            Err(OpenFailure { stage, doing, path, error, shortage }) => {
                match io_mode::refusal(&mode, stage, &error) {
                    Some(why) => refused.push((mode, why)),
                    None => {
                        let hint = String::new();
                        return Err(Error::Io {
                            doing,
                            path,
                            offset: None,
                            cause: error,
                            shortage,
                            hint,
                        });
                    }
                }
            }
        }
    }
    Err(io_mode::none_left(&refused))
}

/// Adds to `moved` what the engines could not get, and how many buffers they registered. Call this at the end: they
/// register buffers when these are first used. `dir` is the checkpoint's.
pub(super) fn update(moved: &mut Moved, dir: &Path, queues: &[Arc<Queue>]) {
    for queue in queues {
        moved.fixed_buffers = moved.fixed_buffers.max(queue.registered());
        for step in queue.fallbacks() {
            if !moved.fallbacks.contains(&step) {
                warn_once(dir, [&step]);
                moved.fallbacks.push(step);
            }
        }
    }
}

/// The directories in the order of their first path, each with the numbers of its paths.
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

/// One account of all directories. A fallback that not all directories share names its directory.
fn merge(ways: Vec<(&Path, Moved)>) -> Moved {
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
        fallbacks,
        ..Moved::default()
    }
}

fn moved(
    queue: &Queue,
    mode: &IoMode,
    refused: Vec<(IoMode, Refusal)>,
    notes: Vec<Fallback>,
) -> Moved {
    let steps = refused.into_iter().map(|(tried, why)| why.fallback(tried, mode));
    let mut fallbacks: Vec<Fallback> = steps.collect();
    fallbacks.extend(notes);
    Moved { engine: queue.name().into(), direct: mode.direct, fallbacks, ..Moved::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(wanted: &str) -> Fallback {
        let (got, reason, remedy) = ("buffered".into(), "no O_DIRECT".into(), "none".into());
        Fallback { kind: FallbackKind::IoMode, wanted: wanted.into(), got, reason, remedy }
    }

    fn way(engine: &str, direct: bool, steps: &[&str]) -> Moved {
        let fallbacks = steps.iter().map(|wanted| step(wanted)).collect();
        Moved { engine: engine.into(), direct, fallbacks, ..Moved::default() }
    }

    #[test]
    fn a_fallback_names_its_directory_unless_all_share_it() {
        let (a, b) = (Path::new("/a"), Path::new("/b"));
        let ways = vec![
            (a, way("uring", true, &["memlock"])),
            (b, way("portable", false, &["memlock", "direct"])),
        ];
        let all = merge(ways);
        assert_eq!((&*all.engine, all.direct), ("uring and portable", false));
        let reasons: Vec<&str> = all.fallbacks.iter().map(|step| &*step.reason).collect();
        assert_eq!(reasons, ["no O_DIRECT", "in /b: no O_DIRECT"]);
        let alone = merge(vec![(b, way("portable", false, &["direct"]))]);
        assert_eq!(alone, way("portable", false, &["direct"]));
    }

    #[test]
    fn paths_are_grouped_by_directory_without_the_missing() {
        let paths = ["/a/1", "/b/1", "/a/2"].map(Path::new);
        let paths = [Some(paths[0]), None, Some(paths[1]), Some(paths[2])];
        let (a, b) = (Path::new("/a"), Path::new("/b"));
        assert_eq!(by_directory(&paths), [(a, vec![0, 3]), (b, vec![2])]);
    }
}
