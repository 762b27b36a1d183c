//! `ringstow ls` of several directories and URLs: which of them has which checkpoint; and what `ls` of one says in the same words.

use super::output::{self, Output};
use super::{Exit, table, text};
use crate::config::Config;
use crate::error::Result;
use crate::object::is_url;
use crate::store::{Found, Status, Unfinished, list, runs, unfinished};
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a place has, or why it could not be asked.
struct Place<'a> {
    at: &'a Path,
    found: Result<Vec<Found>>,
}

/// The places that could be asked, in the order in which they were named.
struct InOrder<'a>(&'a [Place<'a>]);

impl Serialize for InOrder<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        let asked = self.0.iter().filter_map(|place| Some((place.at, place.found.as_ref().ok()?)));
        to.collect_map(asked.map(|(at, found)| (at.to_string_lossy(), found)))
    }
}

/// Shows for each checkpoint what each place has of it.
///
/// # Errors
/// No place could be asked: why the first could not.
pub fn compare(dirs: &[PathBuf], config: &Config, as_json: bool, out: &mut Output) -> Result<Exit> {
    let mut places: Vec<Place<'_>> =
        dirs.iter().map(|at| Place { at, found: list(at, config) }).collect();
    if places.iter().all(|place| place.found.is_err()) {
        return places.swap_remove(0).found.map(|_| Exit::Success);
    }
    let mut exit = Exit::Success;
    for error in places.iter().filter_map(|place| place.found.as_ref().err()) {
        output::note(&error.to_string());
        exit = Exit::Failed;
    }
    if as_json {
        out.json(&InOrder(&places))?;
    } else {
        out.line(render(&places, config))?;
    }
    Ok(exit)
}

fn render(places: &[Place<'_>], config: &Config) -> String {
    // By name: whether a name counts as a step depends on the others in its directory.
    let mut rows: BTreeMap<String, Vec<Option<&Found>>> = BTreeMap::new();
    for (column, place) in places.iter().enumerate() {
        for found in place.found.iter().flatten() {
            let name = found.path.file_name().unwrap_or(place.at.as_os_str());
            let name = name.to_string_lossy().into_owned();
            rows.entry(name).or_insert_with(|| vec![None; places.len()])[column] = Some(found);
        }
    }
    if rows.is_empty() {
        let runs = places.iter().filter_map(|place| runs_in(place.at, &[], config).ok()?);
        let none = "no checkpoints there".into();
        return [none].into_iter().chain(runs).collect::<Vec<_>>().join("\n\n");
    }
    let step_of = |cells: &[Option<&Found>]| cells.iter().flatten().find_map(|found| found.step);
    let mut rows: Vec<_> =
        rows.into_iter().map(|(name, cells)| (step_of(&cells), name, cells)).collect();
    rows.sort_by_key(|(step, ..)| *step); // stable: those of no step first, by name
    let titles = places.iter().map(|place| text::path(place.at));
    let titles = ["NAME".into(), "STEP".into()].into_iter().chain(titles).collect();
    let lines = rows.iter().map(|(step, name, cells)| line(places, *step, name, cells));
    let mut text = table::of_any_width(titles, lines);
    text.extend(problems(places.iter().flat_map(|place| place.found.iter().flatten())));
    for place in places.iter().filter(|place| place.found.is_ok() && !is_url(place.at)) {
        match unfinished(place.at) {
            Ok(unfinished) => text.extend(copying(&unfinished)),
            Err(error) => output::note(&error.to_string()),
        }
    }
    text
}

/// Why checkpoints cannot be loaded.
pub fn problems<'a>(found: impl IntoIterator<Item = &'a Found>) -> Option<String> {
    let problems: Vec<[String; 1]> = found
        .into_iter()
        .filter_map(|found| found.problem.as_deref())
        .map(|problem| [text::printable(problem)])
        .collect();
    (!problems.is_empty()).then(|| format!("\n\n{}", table::list(problems)))
}

fn line(
    places: &[Place<'_>],
    step: Option<u64>,
    name: &str,
    cells: &[Option<&Found>],
) -> Vec<String> {
    let newest = cells.iter().flatten().map(|found| found.order.age).max();
    let step = step.map_or_else(|| "-".into(), |step| step.to_string());
    let states = places.iter().zip(cells).map(|(place, cell)| match cell {
        None if place.found.is_err() => "?".into(),
        None => "-".into(),
        // The same name does not make it a copy: the step was saved again since.
        Some(found) if found.status == Status::Committed && Some(found.order.age) < newest => {
            "an older save".into()
        }
        Some(found) => status(found.status).into(),
    });
    [text::printable(name), step].into_iter().chain(states).collect()
}

/// Reports the copies to other places that have not ended.
pub fn copying(unfinished: &[Unfinished]) -> Option<String> {
    let (left, gone): (Vec<_>, Vec<_>) =
        unfinished.iter().partition(|one| crate::sys::dir::has(&one.checkpoint));
    let each = left.iter().map(|Unfinished { checkpoint, to, .. }| {
        let (from, to) = (text::path(checkpoint), text::path(to.as_ref()));
        [format!(
            "not copied yet: {from} to {to}; if nothing is copying it, `ringstow promote {from} --to {to}` goes on"
        )]
    });
    let more = gone.first().and_then(|one| one.checkpoint.parent()).map(|dir| {
        let begun = match gone.len() {
            1 => "a copy of a removed checkpoint was begun".into(),
            n => format!("{n} copies of removed checkpoints were begun"),
        };
        [format!("{begun}: `ringstow prune {}` clears up", text::path(dir))]
    });
    let lines: Vec<[String; 1]> = each.chain(more).collect();
    (!lines.is_empty()).then(|| format!("\n\n{}", table::list(lines)))
}

/// A status in one word; what cannot be loaded stands out.
pub fn status(status: Status) -> &'static str {
    match status {
        Status::Committed => "committed",
        Status::Incomplete => "INCOMPLETE",
        Status::Damaged => "DAMAGED",
        Status::Unreadable => "UNREADABLE",
    }
}

/// The runs in a directory as a table; `None` if there are none. `found` are the checkpoints of the directory itself.
///
/// # Errors
/// The directory cannot be listed.
pub fn runs_in(dir: &Path, found: &[Found], config: &Config) -> Result<Option<String>> {
    let runs = runs(dir, found, config)?;
    let Some((first, _)) = runs.first() else { return Ok(None) };
    let rows = runs.iter().map(|(path, found)| {
        let newest = found.iter().rev().find(|found| found.status == Status::Committed);
        [
            text::path(path.strip_prefix(dir).unwrap_or(path)),
            found.len().to_string(),
            text::or_dash(newest.and_then(|found| Some(found.step?.to_string()))),
            text::or_dash(newest.and_then(|found| text::utc(found.created_unix_ms?))),
        ]
    });
    let titles = ["<RUN", ">CHECKPOINTS", ">NEWEST STEP", "<COMMITTED"];
    let (count, rows) = (text::count(runs.len(), "run"), table::table(titles, rows));
    let (dir, first) = (text::path(dir), text::path(first));
    Ok(Some(format!(
        "{count} in {dir}:\n\n{rows}\n\n`ringstow ls {first}` lists the checkpoints of one"
    )))
}
