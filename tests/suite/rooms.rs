//! Which file of `src/` may use which: no two use each other, directly or around, and rooms only use those below them.
//!
//! Reads the sources with `syn`. Tests in the files do not count, nor does what a `mod.rs` re-exports: a path through a
//! re-export counts as one to the file it leads to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use syn::visit::Visit;
use syn::{Attribute, Item, UseTree, Visibility};

/// The rooms from top to bottom, with the files that are rooms of their own. Those of one line know nothing of each
/// other.
const ROOMS: &[&[&str]] = &[
    &["cli"],
    &["manager", "candle", "ranks"],
    &["api", "doctor"],
    &["handle"],
    &["store::cleanup"],
    &["store::catalog"],
    &["store::write", "store::diff", "store::promote"],
    &["store::read"],
    &["store::layout"],
    &["state", "stream"],
    &["pipeline"],
    &["object"],
    &["engine", "device"],
    &["plan"],
    &["pool"],
    &["config"],
    &["sys"],
    &["format"],
    &["path_text", "error"],
    &["limits", "units"],
];

/// A file of `src/` as a module, such as `store::read::load`.
struct File {
    module: String,
    /// What each name that it re-exports leads to.
    exports: BTreeMap<String, String>,
    /// Absolute paths that it uses, without `crate`.
    uses: BTreeSet<String>,
}

/// Collects the paths of one file.
struct Paths {
    module: Vec<String>,
    /// Inline modules that the visitor is in.
    inline: usize,
    exports: BTreeMap<String, String>,
    uses: BTreeSet<String>,
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg")
            && attribute.parse_args::<syn::Path>().is_ok_and(|path| path.is_ident("test"))
    })
}

impl Paths {
    /// The absolute form of a path of this crate's; `None` for one of another crate.
    fn absolute(&self, path: &[String]) -> Option<String> {
        let (base, rest) = match path.first()?.as_str() {
            "crate" => (&[] as &[String], &path[1..]),
            "self" => (self.module.as_slice(), &path[1..]),
            "super" => {
                let above = path.iter().take_while(|segment| *segment == "super").count();
                let up = above.saturating_sub(self.inline);
                (&self.module[..self.module.len().checked_sub(up)?], &path[above..])
            }
            _ => return None,
        };
        Some([base, rest].concat().join("::"))
    }

    fn use_tree(&mut self, tree: &UseTree, above: &[String], exported: bool) {
        let with = |name: &syn::Ident| [above, &[name.to_string()]].concat();
        match tree {
            UseTree::Path(path) => self.use_tree(&path.tree, &with(&path.ident), exported),
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.use_tree(tree, above, exported));
            }
            UseTree::Glob(_) => self.note(above, None, exported),
            UseTree::Name(name) if name.ident == "self" => self.note(above, None, exported),
            UseTree::Name(name) => {
                self.note(&with(&name.ident), Some(name.ident.to_string()), exported);
            }
            UseTree::Rename(name) => {
                self.note(&with(&name.ident), Some(name.rename.to_string()), exported);
            }
        }
    }

    fn note(&mut self, path: &[String], name: Option<String>, exported: bool) {
        let own = [self.module.clone(), path.to_vec()].concat().join("::");
        match (self.absolute(path), name) {
            (to, Some(name)) if exported => {
                self.exports.insert(name, to.unwrap_or(own));
            }
            (Some(to), _) => {
                self.uses.insert(to);
            }
            _ => {}
        }
    }
}

impl<'a> Visit<'a> for Paths {
    fn visit_item(&mut self, item: &'a Item) {
        match item {
            Item::Mod(inline) if inline.content.is_some() && !is_test(&inline.attrs) => {
                self.inline += 1;
                syn::visit::visit_item(self, item);
                self.inline -= 1;
            }
            Item::Mod(_) => {}
            Item::Fn(function) if is_test(&function.attrs) => {}
            Item::Impl(block) if is_test(&block.attrs) => {}
            Item::Use(used) if !is_test(&used.attrs) => {
                let exported = !matches!(used.vis, Visibility::Inherited) && self.inline == 0;
                self.use_tree(&used.tree, &[], exported);
            }
            Item::Use(_) => {}
            _ => syn::visit::visit_item(self, item),
        }
    }

    fn visit_visibility(&mut self, _: &'a Visibility) {} // `pub(in crate::rooms::store)` uses nothing

    fn visit_path(&mut self, path: &'a syn::Path) {
        let segments: Vec<String> = path.segments.iter().map(|s| s.ident.to_string()).collect();
        if segments.len() > 1 {
            self.note(&segments, None, false);
        }
        syn::visit::visit_path(self, path);
    }
}

/// All files below `dir` but those of tests.
fn read(dir: &Path, module: &[String], files: &mut Vec<File>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            read(&path, &[module, &[stem]].concat(), files);
            continue;
        }
        if stem == "main" || stem == "tests" || stem.ends_with("_tests") {
            continue;
        }
        let module = match stem.as_str() {
            "mod" | "lib" => module.to_vec(),
            _ => [module, &[stem]].concat(),
        };
        let parsed = syn::parse_file(&fs::read_to_string(&path).unwrap()).unwrap();
        let mut paths = Paths {
            module: module.clone(),
            inline: 0,
            exports: BTreeMap::new(),
            uses: BTreeSet::new(),
        };
        paths.visit_file(&parsed);
        let Paths { exports, uses, .. } = paths;
        files.push(File { module: module.join("::"), exports, uses });
    }
}

fn files() -> BTreeMap<String, File> {
    let mut files = Vec::new();
    read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &[], &mut files);
    files.into_iter().map(|file| (file.module.clone(), file)).collect()
}

/// The file that a path leads to: its longest beginning that is a file, and on through what that re-exports.
fn leads_to<'a>(files: &'a BTreeMap<String, File>, path: &str) -> &'a str {
    let segments: Vec<&str> = path.split("::").collect();
    let (file, rest) = (0..=segments.len())
        .rev()
        .find_map(|n| Some((files.get(&segments[..n].join("::"))?, &segments[n..])))
        .expect("the crate's root is a file");
    match rest.first().and_then(|name| file.exports.get(*name)) {
        Some(to) if to != path => leads_to(files, to),
        _ => &file.module,
    }
}

/// For each file the files that it uses.
fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let files = files();
    let used = |file: &File| {
        let all = file.uses.iter().map(|path| leads_to(&files, path).to_owned());
        all.filter(|to| *to != file.module).collect()
    };
    files.values().map(|file| (file.module.clone(), used(file))).collect()
}

/// The files that can be reached from one.
fn reached<'a>(arrows: &'a BTreeMap<String, BTreeSet<String>>, from: &'a str) -> BTreeSet<&'a str> {
    let (mut seen, mut left) = (BTreeSet::new(), vec![from]);
    while let Some(at) = left.pop() {
        let new = arrows.get(at).into_iter().flatten().filter(|to| seen.insert(to.as_str()));
        left.extend(new.map(String::as_str));
    }
    seen
}

#[test]
fn no_two_files_use_each_other() {
    let arrows = arrows();
    assert!(arrows.len() > 100, "{} files were found", arrows.len());
    let circles: Vec<BTreeSet<&str>> = arrows
        .keys()
        .filter(|file| reached(&arrows, file).contains(file.as_str()))
        .map(|file| {
            let back = |to: &&str| reached(&arrows, to).contains(file.as_str());
            reached(&arrows, file).into_iter().filter(back).collect()
        })
        .collect();
    let circles: BTreeSet<_> = circles.into_iter().collect();
    assert!(circles.is_empty(), "circles: {circles:#?}");
}

#[test]
fn rooms_use_only_rooms_below_them() {
    let floor = |module: &str| {
        let is_in = |room: &&str| {
            module.strip_prefix(room).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
        };
        let floor = ROOMS.iter().position(|rooms| rooms.iter().any(is_in))?;
        Some((floor, *ROOMS[floor].iter().find(|room| is_in(room)).expect("it is one of them")))
    };
    let mut wrong = Vec::new();
    for (file, used) in &arrows() {
        // `lib.rs` and `store/mod.rs` only re-export.
        let Some((own_floor, own)) = floor(file) else {
            assert!(
                ["", "store"].contains(&file.as_str()),
                "{file} is in no room: add it to ROOMS"
            );
            continue;
        };
        for to in used {
            match floor(to) {
                // `store/mod.rs` has no code.
                None if to == "store" => {}
                Some((below, room)) if room == own || below > own_floor => {}
                _ => wrong.push(format!("{file} -> {to}")),
            }
        }
    }
    assert!(wrong.is_empty(), "arrows that go up or sideways: {wrong:#?}");
}
