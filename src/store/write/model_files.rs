//! The names of a model's files: which of them make it one, what a killed export leaves, and where none may be written.
//!
//! The files' names make them a model, or the index if there are several. So they get their names last.

use crate::error::{Error, Result, some_of};
use crate::format::{Item, header, names};
use crate::plan::save::SavePlan;
use crate::store::write::rollback::Rollback;
use crate::sys::dir::{self, file_names, remove};
use crate::sys::file;
use crate::sys::file_system::Reach;
use crate::sys::inodes;
use serde::Deserialize;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Write};
use std::path::Path;

/// Locks a directory for an export, clears what a killed one left there, and refuses to write beside other tensors.
///
/// # Errors
/// [`Error::Busy`]; [`Error::Invalid`] for other tensors, or what another host may be writing; [`Error::Io`].
pub(super) fn begin(path: &Path) -> Result<Rollback> {
    let mut rollback = Rollback::begin(path)?;
    rollback.leave_no_lock();
    let lock = rollback.held();
    let (clears_up, is_shared) = (lock.reach() == Reach::EveryHost, lock.is_shared());
    make_room(path, clears_up)?;
    if is_shared {
        claim(path, clears_up, &mut rollback)?;
    }
    Ok(rollback)
}

/// Refuses what safetensors cannot hold.
///
/// # Errors
/// [`Error::Unsupported`], naming the first such tensor.
pub(super) fn check_plain(items: &[Item]) -> Result<()> {
    let Some(Item { info, .. }) = items.iter().find(|item| !header::is_plain(item)) else {
        return Ok(());
    };
    Err(Error::Unsupported {
        what: format!(
            "safetensors has no word for {:?}, {} {:?}",
            info.name, info.dtype, info.shape
        ),
        remedy: "leave it out, or save it under another name or as another dtype".into(),
    })
}

/// Removes what a killed export left, or refuses to write beside that if another host may be writing it. Refuses to
/// write beside other tensors.
fn make_room(dir: &Path, clears_up: bool) -> Result<()> {
    let present = file_names(dir)?;
    let unfinished = unfinished(dir, &present)?;
    refuse_beside_others(dir, &present, &unfinished)?;
    // Their list goes last: while it exists, the rest can be distinguished from other programs' files.
    let (list, parts): (Vec<&String>, Vec<&String>) = present
        .iter()
        .filter(|name| names::is_uncommitted_model(name))
        .partition(|name| **name == names::uncommitted(names::MODEL_INDEX));
    let all: Vec<&String> = unfinished.iter().chain(parts).chain(list).collect();
    match all.first() {
        Some(name) if !clears_up => Err(Error::invalid(format!(
            "{} holds {name} of an export that was killed, or that another host is writing now, and no lock would \
             show that: export to another directory, or remove {} file(s) that an export left there: {}",
            dir.display(),
            all.len(),
            some_of(&all.iter().map(|name| name.to_string()).collect::<Vec<_>>())
        ))),
        _ => all.into_iter().try_for_each(|name| remove(&dir.join(name))),
    }
}

/// Creates the file that only one of all hosts can create. It stays with the model: a host whose listing is old, and so
/// does not show the model, cannot create it either, even if it holds the lock. `is_alone` is whether that lock keeps
/// out every other host.
fn claim(dir: &Path, is_alone: bool, rollback: &mut Rollback) -> Result<()> {
    let path = dir.join(names::MODEL_CLAIM);
    match file::create_new(&path, false) {
        Ok(_) => rollback.files.push(path),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            let (running, until) = match is_alone {
                true => ("; none is exporting there now, since the lock shows that", ""),
                false => (
                    ", or is doing so now, and no lock would show that",
                    " and no export is running",
                ),
            };
            return Err(Error::invalid(format!(
                "{} exists: a host has exported a model there, or was killed while it did{running}. Export to another \
                 directory; or wait a minute, until this host sees what others wrote, and remove that file once \
                 there is no model beside it{until}",
                path.display()
            )));
        }
        Err(error) => return Err(inodes::creating(&path, error)),
    }
    Ok(())
}

/// Refuses to write beside tensors that are not an unfinished export's.
fn refuse_beside_others(
    dir: &Path,
    present: &[String],
    unfinished: &BTreeSet<String>,
) -> Result<()> {
    let is_model = |name: &&String| {
        let is_theirs = name.ends_with(".safetensors") && !unfinished.contains(name.as_str());
        is_theirs || *name == names::MODEL_INDEX || *name == names::MANIFEST
    };
    if let Some(name) = present.iter().find(is_model) {
        return Err(Error::invalid(format!(
            "{} holds {name} already: programs would mix its tensors with those to be written; \
             write to another directory, or remove it",
            dir.display()
        )));
    }
    Ok(())
}

/// The files that an export had renamed when it was killed. Its index, still a `.part`, lists them: the export
/// wrote it before the first rename.
fn unfinished(dir: &Path, present: &[String]) -> Result<BTreeSet<String>> {
    let list = names::uncommitted(names::MODEL_INDEX);
    if !present.contains(&list) || present.iter().any(|name| name == names::MODEL_INDEX) {
        return Ok(BTreeSet::new());
    }
    let path = dir.join(list);
    let text = file::read(&path).map_err(|e| Error::io("reading", &path, e))?;
    // If the index is torn, no file was renamed yet.
    let index: Index = serde_json::from_slice(&text).unwrap_or_default();
    let listed = index.weight_map.into_values();
    Ok(listed.filter(|name| names::numbered(name).is_some() && present.contains(name)).collect())
}

#[derive(Default, Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// Renames the written files to their final names, the index last. `uncommitted` makes the names that they have.
pub(super) fn publish(
    plan: &SavePlan,
    items: &[Item],
    (dir, uncommitted): (&Path, impl Fn(&str) -> String),
    rollback: &mut Rollback,
) -> Result<()> {
    let has_index = plan.shards.iter().any(|shard| shard.name != names::MODEL);
    if has_index {
        write_index(plan, items, dir, rollback)?;
        // The list is durable before any file that it lists.
        dir::sync(dir)?;
    }
    let files = plan.shards.iter().map(|shard| shard.name.as_str());
    for name in files {
        rename(dir, &uncommitted(name), name, rollback)?;
    }
    if has_index {
        // A crash may keep any of the renames so far. With the index, but without a file, nobody could tell whose the
        // other files are.
        dir::sync(dir)?;
        let index = names::MODEL_INDEX;
        rename(dir, &names::uncommitted(index), index, rollback)?;
    }
    if let Err(error) = dir::sync(dir).and_then(|()| rollback.sync_parents()) {
        let last = if has_index { names::MODEL_INDEX } else { &plan.shards[0].name };
        return Err(take_back(last, error, dir, rollback));
    }
    rollback.keep();
    Ok(())
}

fn rename(dir: &Path, from: &str, to: &str, rollback: &mut Rollback) -> Result<()> {
    let to = dir.join(to);
    dir::rename_new(&dir.join(from), &to)?;
    rollback.files.push(to);
    Ok(())
}

/// Takes back a model whose names cannot be made durable: the file that makes it one gets its uncommitted name again, and
/// the rollback removes everything. If the disk refuses that, the model stays as it is, and the error says so.
fn take_back(last: &str, error: Error, dir: &Path, rollback: &mut Rollback) -> Error {
    match (dir::rename_new(&dir.join(last), &dir.join(names::uncommitted(last))), error) {
        (Err(_), Error::Io { cause, .. }) => {
            rollback.keep();
            Error::NotDurable { path: dir.into(), cause }
        }
        (_, error) => error,
    }
}

fn write_index(plan: &SavePlan, items: &[Item], dir: &Path, rollback: &mut Rollback) -> Result<()> {
    let weight_map: BTreeMap<&str, &str> = plan
        .shards
        .iter()
        .flat_map(|shard| shard.items.iter().map(|extent| (extent.item, shard.name.as_str())))
        .map(|(item, file)| (items[item].info.name.as_str(), file))
        .collect();
    let index =
        json!({ "metadata": { "total_size": plan.tensor_bytes }, "weight_map": weight_map });
    let path = dir.join(names::uncommitted(names::MODEL_INDEX));
    rollback.files.push(path.clone());
    file::write_durably(&path, |mut file| writeln!(file, "{index:#}"))
}
