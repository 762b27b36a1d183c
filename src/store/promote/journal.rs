//! What a promotion has begun and not ended, so that the next one goes on there. It is on this host's disk, beside the
//! checkpoint: a line of JSON for each upload and each part.

use super::target::{Target, Upload};
use crate::error::{Error, Result};
use crate::format::names;
use crate::sys::lock::DirLock;
use crate::sys::{dir, file};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
enum Line {
    /// The first one: where to, and which checkpoint.
    Promotion {
        url: String,
        id: u64,
    },
    Begun {
        name: String,
        upload: String,
        parts: Cut,
    },
    Sent {
        name: String,
        part: usize,
        answer: String,
    },
    /// The store does not know the upload.
    Forgotten {
        name: String,
    },
    /// The upload is a file now: there is nothing to go on with, or to abort.
    Finished {
        name: String,
    },
    /// The shards of a checkpoint that this one replaces.
    Replaces {
        names: Vec<String>,
    },
    /// A checkpoint that was to get this place before.
    Earlier {
        id: u64,
    },
}

/// What may be there of checkpoints that had this place, or were to get it, before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Stale {
    /// Shards of checkpoints that were replaced.
    pub names: BTreeSet<String>,
    /// Ids of checkpoints whose promotion has not ended.
    pub ids: BTreeSet<u64>,
}

/// How a file is cut into parts: those of another cut do not fit together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Cut {
    /// Bytes of the file.
    pub bytes: u64,
    /// Bytes of each part but the last.
    pub part_bytes: u64,
}

impl Cut {
    /// How many parts these are; an empty file has one.
    pub fn parts(self) -> usize {
        self.bytes.div_ceil(self.part_bytes).max(1) as usize
    }

    /// Bytes of a part; 0 if there is none of this number.
    fn len_of(self, part: usize) -> u64 {
        self.bytes.saturating_sub(part as u64 * self.part_bytes).min(self.part_bytes)
    }
}

/// An upload that was begun.
#[derive(Debug)]
struct Open {
    id: String,
    cut: Cut,
    parts: BTreeMap<usize, String>,
}

/// The journal of one promotion.
pub(super) struct Journal {
    path: PathBuf,
    file: Mutex<File>,
    /// What earlier promotions have left, by name.
    left: Mutex<HashMap<String, Open>>,
    /// Names whose upload was gone on with.
    resumed: Mutex<HashSet<String>>,
    /// The uploads that this promotion has begun or gone on with.
    open: Mutex<HashMap<String, Upload>>,
    /// Whether the store has refused one of these.
    is_refused: AtomicBool,
    stale: Mutex<Stale>,
    lock: DirLock,
}

impl Journal {
    /// Opens the journal of promoting the checkpoint `id` of a directory to a place.
    ///
    /// # Errors
    /// [`Error::Busy`] if another promotion has it; [`Error::Io`].
    pub fn open(checkpoint: &Path, target: &dyn Target, id: u64) -> Result<Self> {
        let url = target.place().to_string_lossy().into_owned();
        let place = place_of(checkpoint, &url)?;
        dir::make(place.parent().unwrap_or(Path::new("/")))?;
        dir::make(&place)?;
        let lock = DirLock::take(&place)?;
        let path = place.join(names::JOURNAL);
        let lines = read(&path)?;
        let Opened { is_same, left, .. } = opened(&lines, &url, id);
        if !is_same {
            // Of another checkpoint that was here: nobody will go on with its uploads.
            abort(target, left.iter());
        }
        let left = if is_same { left } else { HashMap::new() };
        let stale = stale_of(&lines, &url, id);
        let file = begin(&path, &Line::Promotion { url, id }, &stale, &left)?;
        let (file, left, stale) = (Mutex::new(file), Mutex::new(left), Mutex::new(stale));
        let (resumed, open, is_refused) = Default::default();
        Ok(Self { path, file, left, resumed, open, is_refused, stale, lock })
    }

    /// Notes the shards of a checkpoint that is to be replaced, durably: after the commit nothing else names them.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn replaces(&self, shards: Vec<String>) -> Result<()> {
        let names: Vec<String> = {
            let mut stale = self.stale.lock().expect("no panic while it is held");
            shards.into_iter().filter(|name| stale.names.insert(name.clone())).collect()
        };
        match names.is_empty() {
            true => Ok(()),
            false => self.write_durably(&Line::Replaces { names }),
        }
    }

    /// What may be there of other checkpoints.
    pub fn stale(&self) -> Stale {
        self.stale.lock().expect("no panic while it is held").clone()
    }

    /// The upload of a file: this promotion's, or one that it may go on with.
    pub fn upload_of(&self, name: &str) -> Option<Upload> {
        let open = self.open.lock().expect("no panic while it is held").get(name).cloned();
        let left = self.left.lock().expect("no panic while it is held");
        open.or_else(|| Some(Upload { name: name.into(), id: left.get(name)?.id.clone() }))
    }

    fn note_open(&self, upload: &Upload) {
        let mut open = self.open.lock().expect("no panic while it is held");
        open.insert(upload.name.clone(), upload.clone());
    }

    /// An upload that was begun earlier and is cut in the same way, with the parts that the store has.
    pub fn resumed(&self, name: &str, cut: Cut) -> Option<(Upload, BTreeMap<usize, String>)> {
        let mut left = self.left.lock().expect("no panic while it is held");
        if left.get(name)?.cut != cut {
            return None; // what stays in `left` is aborted at the end
        }
        let open = left.remove(name)?;
        self.resumed.lock().expect("no panic while it is held").insert(name.into());
        let upload = Upload { name: name.into(), id: open.id };
        self.note_open(&upload);
        Some((upload, open.parts))
    }

    /// Notes an upload, durably: the store keeps it until it is finished or aborted.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn begun(&self, upload: &Upload, parts: Cut) -> Result<()> {
        self.note_open(upload);
        let (name, upload) = (upload.name.clone(), upload.id.clone());
        self.write_durably(&Line::Begun { name, upload, parts })
    }

    fn write_durably(&self, line: &Line) -> Result<()> {
        let file = self.file.lock().expect("no panic while it is held");
        let written = write(&file, line).and_then(|()| file::sync(&file));
        written.map_err(|error| Error::io("writing", &self.path, error))
    }

    /// Notes a part. If the line is lost, the part is sent again.
    pub fn sent(&self, upload: &Upload, part: usize, answer: &str) {
        let name = upload.name.clone();
        self.try_write(&Line::Sent { name, part, answer: answer.into() });
    }

    /// Notes that an upload is complete. If this line is lost, the next promotion tries to abort the upload, which does no harm.
    pub fn finished(&self, upload: &Upload) {
        self.try_write(&Line::Finished { name: upload.name.clone() });
    }

    /// Notes that the store refuses an upload. One that was gone on with is forgotten: perhaps the store has dropped it.
    pub fn refused(&self, name: &str) {
        if self.resumed.lock().expect("no panic while it is held").contains(name) {
            self.is_refused.store(true, Relaxed);
            self.try_write(&Line::Forgotten { name: name.into() });
        }
    }

    /// Whether the store has refused an upload of an earlier promotion, so that another attempt begins a new one.
    pub fn is_worth_another(&self) -> bool {
        self.is_refused.load(Relaxed)
    }

    fn try_write(&self, line: &Line) {
        let file = self.file.lock().expect("no panic while it is held");
        if let Err(error) = write(&file, line) {
            tracing::warn!(path = %self.path.display(), %error, "a promotion's journal cannot be written");
        }
    }

    /// Aborts what was not gone on with, and removes the journal.
    pub fn end(self, target: &dyn Target) {
        let Self { path, left, lock, .. } = self;
        abort(target, left.into_inner().expect("no panic while it was held").iter());
        let _ = dir::try_remove(&path);
        let _ = lock.remove_dir();
        let _ = path.parent().and_then(Path::parent).map(dir::remove_if_empty);
    }

    /// Whether there is one of a promotion that was not ended.
    pub fn is_left(checkpoint: &Path, target: &dyn Target) -> bool {
        let place = place_of(checkpoint, &target.place().to_string_lossy());
        place.is_ok_and(|place| dir::has(&place.join(names::JOURNAL)))
    }
}

/// The directory of a journal: hidden, beside the checkpoint's directory, so that it outlives that.
fn place_of(checkpoint: &Path, url: &str) -> Result<PathBuf> {
    let nowhere = || Error::invalid(format!("{} has no name", checkpoint.display()));
    let name = checkpoint.file_name().ok_or_else(nowhere)?.to_string_lossy();
    let parent = checkpoint.parent().ok_or_else(nowhere)?;
    let hash = twox_hash::XxHash3_128::oneshot(url.as_bytes()) as u64;
    Ok(parent.join(names::JOURNALS).join(format!("{name}-{hash:016x}")))
}

/// The whole lines of a journal; none if there is no journal. A line that a kill or a full disk has cut does not count.
fn read(path: &Path) -> Result<Vec<Line>> {
    let text = match file::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        text => text.map_err(|error| Error::io("reading", path, error))?,
    };
    let lines = text.split(|&byte| byte == b'\n');
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

/// What a promotion that has not ended leaves behind.
pub(super) struct Left {
    /// Where to.
    pub url: String,
    /// Which checkpoint.
    pub id: u64,
    /// Names, and the uploads that were begun.
    pub uploads: Vec<(String, String)>,
    /// Bytes that are there: of files that are whole, and of parts.
    pub sent_bytes: u64,
    /// What may be there of checkpoints that had this place before.
    pub stale: Stale,
}

/// What a journal says; `None` if nothing was begun.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn read_left(path: &Path) -> Result<Option<Left>> {
    let lines = read(path)?;
    let first = lines.iter().find_map(|line| match line {
        Line::Promotion { url, id } => Some((url.clone(), *id)),
        _ => None,
    });
    let Some((url, id)) = first else { return Ok(None) };
    let opened = opened(&lines, &url, id);
    let sent_bytes = opened.sent_bytes();
    let uploads = opened.left.into_iter().map(|(name, open)| (name, open.id)).collect();
    let stale = stale_of(&lines, &url, id);
    Ok(Some(Left { url, id, uploads, sent_bytes, stale }))
}

/// What lines say of other checkpoints than this one at this URL.
fn stale_of(lines: &[Line], to: &str, of: u64) -> Stale {
    let mut stale = Stale::default();
    for line in lines {
        match line {
            Line::Promotion { url, id } if url != to => return Stale::default(),
            Line::Promotion { id, .. } | Line::Earlier { id } if *id != of => {
                stale.ids.insert(*id);
            }
            Line::Replaces { names } => stale.names.extend(names.iter().cloned()),
            _ => {}
        }
    }
    stale
}

/// Removes a journal, and what a kill has left of writing it anew.
///
/// # Errors
/// [`Error::Io`].
pub(super) fn remove_journal(path: &Path) -> Result<()> {
    dir::remove(&next_of(path))?;
    dir::remove(path)
}

/// Where a journal is written anew.
fn next_of(path: &Path) -> PathBuf {
    path.with_extension("part")
}

/// What lines say of uploads.
#[derive(Debug, Default)]
struct Opened {
    /// Whether the journal is of this checkpoint at this URL.
    is_same: bool,
    /// The uploads that were begun and not finished, by name.
    left: HashMap<String, Open>,
    /// Bytes of the files that were finished. What an earlier attempt has finished is in no line any more.
    whole_bytes: u64,
}

impl Opened {
    /// Bytes that have arrived.
    fn sent_bytes(&self) -> u64 {
        let parts = self
            .left
            .values()
            .flat_map(|open| open.parts.keys().map(|&part| open.cut.len_of(part)));
        self.whole_bytes + parts.sum::<u64>()
    }
}

/// Whether lines are of this checkpoint and URL, and which uploads they leave open.
fn opened(lines: &[Line], to: &str, of: u64) -> Opened {
    let mut opened = Opened::default();
    for line in lines {
        match line {
            Line::Promotion { url, id } => opened.is_same = url == to && *id == of,
            Line::Begun { name, upload, parts } => {
                let open = Open { id: upload.clone(), cut: *parts, parts: BTreeMap::new() };
                opened.left.insert(name.clone(), open);
            }
            Line::Sent { name, part, answer } => {
                if let Some(open) = opened.left.get_mut(name) {
                    open.parts.insert(*part, answer.clone());
                }
            }
            Line::Forgotten { name } => drop(opened.left.remove(name)),
            Line::Finished { name } => {
                let whole = opened.left.remove(name);
                opened.whole_bytes += whole.map_or(0, |open| open.cut.bytes);
            }
            Line::Replaces { .. } | Line::Earlier { .. } => {}
        }
    }
    opened
}

/// Writes a journal anew, with what is left of the earlier one, and leaves it open.
fn begin(path: &Path, first: &Line, stale: &Stale, left: &HashMap<String, Open>) -> Result<File> {
    let part = next_of(path);
    let file = file::create(&part, false).map_err(|error| Error::io("creating", &part, error))?;
    let all = || -> std::io::Result<()> {
        write(&file, first)?;
        for &id in &stale.ids {
            write(&file, &Line::Earlier { id })?;
        }
        if !stale.names.is_empty() {
            write(&file, &Line::Replaces { names: stale.names.iter().cloned().collect() })?;
        }
        for (name, open) in left {
            let begun =
                Line::Begun { name: name.clone(), upload: open.id.clone(), parts: open.cut };
            write(&file, &begun)?;
            for (&part, answer) in &open.parts {
                write(&file, &Line::Sent { name: name.clone(), part, answer: answer.clone() })?;
            }
        }
        file::sync(&file)
    };
    all().map_err(|error| Error::io("writing", &part, error))?;
    dir::rename(&part, path)?;
    Ok(file)
}

fn write(mut file: &File, line: &Line) -> std::io::Result<()> {
    // What a full disk has left of the line before ends here.
    let mut text = vec![b'\n'];
    serde_json::to_writer(&mut text, line)?;
    text.push(b'\n');
    file.write_all(&text)
}

fn abort<'a>(target: &dyn Target, left: impl Iterator<Item = (&'a String, &'a Open)>) {
    for (name, open) in left {
        let upload = Upload { name: name.clone(), id: open.id.clone() };
        if let Err(error) = target.abort(&upload) {
            tracing::warn!(to = %target.place().display(), name, %error, "an upload cannot be aborted");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<Line> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        std::fs::write(&path, text).unwrap();
        read(&path).unwrap()
    }

    const TEXT: &str = r#"{"what":"promotion","url":"s3://b/x","id":7}
{"what":"begun","name":"a","upload":"1","parts":{"bytes":9,"part_bytes":4}}
{"what":"sent","name":"a","part":2,"answer":"e2"}
{"what":"begun","name":"b","upload":"2","parts":{"bytes":9,"part_bytes":4}}
{"what":"forgotten","name":"b"}
"#;

    #[test]
    fn what_is_left_open_is_found_again() {
        let Opened { is_same, left, .. } = opened(&lines(TEXT), "s3://b/x", 7);
        assert!(is_same);
        assert_eq!(left.keys().collect::<Vec<_>>(), ["a"]);
        let open = &left["a"];
        assert_eq!((&*open.id, open.cut), ("1", Cut { bytes: 9, part_bytes: 4 }));
        assert_eq!(open.parts, BTreeMap::from([(2, "e2".into())]));
    }

    #[test]
    fn finished_upload_is_not_left_open() {
        let text = format!("{TEXT}{}\n", r#"{"what":"finished","name":"a"}"#);
        assert!(opened(&lines(&text), "s3://b/x", 7).left.is_empty());
    }

    #[test]
    fn bytes_that_arrived_are_those_of_whole_files_and_of_parts() {
        let sent = |text: &str| opened(&lines(text), "s3://b/x", 7).sent_bytes();
        assert_eq!(sent(TEXT), 1, "the last of three parts");
        assert_eq!(sent(&format!("{TEXT}{}\n", r#"{"what":"finished","name":"a"}"#)), 9);
    }

    #[test]
    fn journal_of_another_checkpoint_or_url_is_told_apart() {
        for (url, id) in [("s3://b/y", 7), ("s3://b/x", 8)] {
            assert!(!opened(&lines(TEXT), url, id).is_same);
        }
    }

    #[test]
    fn checkpoints_that_had_the_place_before_are_known() {
        let more = r#"{"what":"earlier","id":5}
{"what":"replaces","names":["old"]}
"#;
        let lines = lines(&format!("{TEXT}{more}"));
        let names = BTreeSet::from(["old".into()]);
        let (same, other) = (Stale { ids: [5].into(), names: names.clone() }, [5, 7].into());
        assert_eq!(stale_of(&lines, "s3://b/x", 7), same);
        assert_eq!(stale_of(&lines, "s3://b/x", 8), Stale { ids: other, names });
        assert_eq!(stale_of(&lines, "s3://b/y", 7), Stale::default());
    }

    #[test]
    fn line_that_a_kill_cut_is_ignored() {
        for cut in 0..TEXT.len() {
            let left = opened(&lines(&TEXT[..cut]), "s3://b/x", 7).left;
            let parts = left.get("a").map_or(0, |open| open.parts.len());
            assert_eq!(parts, usize::from(cut + 1 >= TEXT.find("e2\"}").unwrap() + 5), "{cut}");
        }
    }
}
