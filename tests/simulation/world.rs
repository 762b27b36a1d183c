//! One seed: the programs that it chooses, what the observer sees meanwhile, and what must hold at the end.

use crate::calls::{Broken, Step, Trouble, What};
use crate::common::{names_in, scratch, small_config};
use crate::history::{History, Refusal, Why, step};
use crate::program::{Job, Order, Ranks, carry_out, live, load};
use crate::turns::Turns;
use durable_image::{MODES, Recorder};
use fake_engines::AtOnce;
use fastrand::Rng;
use nix::libc::{EIO, ENOSPC, ESTALE};
use ringstow::internals::{
    store::{latest, prune},
    sys::file_system::play,
};
use ringstow::{Config, EngineChoice, Left, Runtime, Switch, Wanted};
use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The steps of the run, and a checkpoint that is saved over.
const RUN: &str = "run";
const LAST: &str = "last";
const STEPS: u64 = 5;
/// The directory on another disk.
const DISK: &str = "disk";
const RECYCLED: &str = ".ringstow-spares";

/// What all programs of a seed share.
pub struct World {
    pub root: PathBuf,
    pub config: Config,
    pub turns: Arc<Turns>,
    history: Mutex<History>,
}

/// How a seed ended.
pub struct Ended {
    /// How many saves returned, and how many did not.
    pub saves: [usize; 2],
    /// How many cuts of the power there were.
    pub cuts: usize,
    /// All calls.
    pub steps: Vec<Step>,
    /// The promise that was broken, and what happened.
    pub broken: Option<String>,
}

impl Ended {
    pub fn panicked() -> Self {
        Self {
            saves: [0; 2],
            cuts: 0,
            steps: Vec::new(),
            broken: Some("a panic, see above".into()),
        }
    }
}

impl World {
    pub fn history(&self) -> MutexGuard<'_, History> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs one seed.
pub fn run(seed: u64, broken: Broken) -> Ended {
    let mut random = Rng::with_seed(seed);
    let scratch = scratch();
    // The same name in each run: a stripe directory may have it.
    let root = scratch.path().canonicalize().expect("it is there").join("root");
    for dir in ["", RUN, DISK] {
        std::fs::create_dir(root.join(dir)).expect("it is new");
    }
    // A file system that other hosts may use, and that passes locks on.
    ringstow::internals::sys::late::look_at_once();
    let _played = (random.u32(..5) == 0).then(|| play(&root, "nfs4", ""));
    let config = config(&root, &mut random);
    let turns = Turns::new(seed, &root, broken);
    let world = World { root, config, turns, history: Mutex::default() };
    let mut observer = Observer::new(Arc::new(world), random);
    let broken = observer.watch_waves().and_then(|()| observer.check_end()).err();
    let (world, cuts) = (Arc::clone(&observer.world), std::mem::take(&mut observer.cuts));
    drop(observer);
    let (history, steps) = (world.history(), world.turns.steps());
    let broken = broken.map(|why| {
        let events = history.events().iter().map(ToString::to_string);
        let events: Vec<String> = events.chain(cuts.iter().cloned()).collect();
        format!("{why}\n{:?}\n  {}", world.config, events.join("\n  "))
    });
    Ended { saves: history.counts(), cuts: cuts.len(), steps, broken }
}

fn config(root: &Path, random: &mut Rng) -> Config {
    Config {
        fillers: 1,
        engine: EngineChoice::Portable,
        direct: Switch::Off,
        fixed: Switch::Off,
        files: random.u32(1..3),
        recycle: random.u32(..3) == 0,
        stripe: if random.u32(..3) == 0 { vec![root.join(DISK)] } else { Vec::new() },
        ..small_config()
    }
}

/// Chooses the programs, and looks at the disk between their turns.
struct Observer {
    world: Arc<World>,
    random: Rng,
    runtime: Runtime,
    last_number: i64,
    last_step: u64,
    /// What was found at each path, and when.
    found: Vec<(PathBuf, Option<i64>, u64)>,
    /// How much of that was found before the last cut of the power.
    since_cut: usize,
    /// What the cuts of the power left, for people.
    cuts: Vec<String>,
    /// The files at each path, and what they were.
    known: HashMap<PathBuf, (Files, Option<i64>)>,
}

/// Path, number on the disk, length and time of each.
type Files = Vec<(PathBuf, u64, u64, SystemTime)>;

impl Drop for Observer {
    fn drop(&mut self) {
        self.world.turns.kill_all();
    }
}

impl Observer {
    fn new(world: Arc<World>, random: Rng) -> Self {
        let build = || Ok(Box::new(AtOnce::in_order()) as _);
        let runtime = Runtime::with_engine(world.config.clone(), Arc::new(build));
        let runtime = runtime.expect("the configuration is valid");
        let (found, since_cut, known) = (Vec::new(), 0, HashMap::new());
        let (last_number, last_step, cuts) = (0, 0, Vec::new());
        Self { world, random, runtime, last_number, last_step, found, since_cut, cuts, known }
    }

    /// Runs some programs at a time.
    fn watch_waves(&mut self) -> Result<(), String> {
        let is_cut = self.random.u32(..16) == 0;
        for _ in 0..self.random.u32(1..4) {
            for _ in 0..self.random.u32(1..5) {
                let (trouble, orders) = self.choose();
                let world = Arc::clone(&self.world);
                self.world.turns.start(None, trouble, move |id| live(&world, id, orders));
            }
            let recorder = is_cut.then(|| Recorder::new(std::slice::from_ref(&self.world.root)));
            self.world.turns.record(recorder.clone());
            while self.world.turns.go_on()? {
                self.look()?;
                if let Some(recorder) = recorder.as_ref().filter(|_| self.random.u32(..6) == 0) {
                    self.cut(recorder);
                    break;
                }
            }
            self.world.turns.record(None);
            self.look()?;
        }
        Ok(())
    }

    /// The power goes: all programs are dead, and the disk holds one of the contents that it may have.
    fn cut(&mut self, recorder: &Recorder) {
        let mode = MODES[self.random.usize(..MODES.len())];
        let disk = recorder.crash(mode, &mut self.random);
        let told = recorder.journal().tell(&disk);
        self.world.turns.kill_all();
        disk.write_to(std::slice::from_ref(&self.world.root)).expect("there is room");
        let now = self.world.turns.now_of_observer();
        self.cuts.push(format!("{now}: a cut of the power ({mode:?}): {told}"));
        self.since_cut = self.found.len();
        self.known.clear();
    }

    /// A program's orders, and what befalls it.
    fn choose(&mut self) -> (Option<Trouble>, Vec<Order>) {
        let orders = (0..self.random.u32(1..4)).map(|_| self.order()).collect();
        (self.trouble(300), orders)
    }

    fn order(&mut self) -> Order {
        let random = &mut self.random;
        let step = match random.u32(..3) {
            0 => 1 + random.u64(..STEPS),
            _ => (self.last_step + 1).min(STEPS),
        };
        let at = if random.u32(..3) == 0 { LAST.into() } else { format!("{RUN}/step-{step}") };
        let job = match random.u32(..20) {
            0..4 => Job::Save(self.number()),
            4..8 => {
                let base = format!("{RUN}/step-{}", 1 + random.u64(..step));
                Job::SaveFrom(self.number(), base.into())
            }
            8..11 => Job::SaveByRanks(self.number(), self.ranks()),
            11..14 => Job::Load,
            14 => Job::Latest,
            15..17 => Job::Retain(1 + random.usize(..2)),
            17..19 => Job::Prune,
            _ => Job::Remove,
        };
        if job.saves().is_some() && at != LAST {
            self.last_step = self.last_step.max(step);
        }
        let at = match job {
            Job::Latest | Job::Retain(_) => RUN.into(),
            Job::Prune if self.random.bool() => [RUN, ""][self.random.usize(..2)].into(),
            _ => PathBuf::from(at),
        };
        Order { job, at }
    }

    fn number(&mut self) -> i64 {
        self.last_number += 1;
        self.last_number
    }

    fn ranks(&mut self) -> Ranks {
        let troubles = [self.trouble(60), self.trouble(60)];
        let twice = (self.random.u32(..4) == 0).then(|| self.random.usize(..2));
        Ranks { troubles, twice, gives_up: self.random.u32(..8) == 0 }
    }

    /// Often none.
    fn trouble(&mut self, last_call: u64) -> Option<Trouble> {
        let random = &mut self.random;
        let at = random.u64(1..=last_call);
        let errno = [EIO, ENOSPC, ESTALE][random.usize(..3)];
        let calls = [1, 1, 5, 1000][random.usize(..4)];
        match random.u32(..8) {
            0..2 => Some(Trouble { at, what: What::Dies }),
            2 => Some(Trouble { at, what: What::Fails { errno, calls } }),
            _ => None,
        }
    }

    /// Loads each checkpoint while all programs wait, and checks what they did so far.
    fn look(&mut self) -> Result<(), String> {
        let world = Arc::clone(&self.world);
        let since = self.found.last().map_or(0, |(_, _, time)| *time);
        let now = world.turns.now_of_observer();
        let paths = world.history().paths();
        let (mut newest, mut has_changed) = (None, false);
        for path in paths {
            let files = self.files_of(&path);
            let found = match self.known.get(&path) {
                Some((known, found)) if *known == files => *found,
                _ => {
                    has_changed = true;
                    let found = self.find(&path)?;
                    self.note(&path, found)?;
                    self.known.insert(path.clone(), (files, found));
                    found
                }
            };
            world.history().check_at(&path, found, now)?;
            if found.is_some() && step(&path) > newest.as_deref().map_or(0, step) {
                newest = Some(path.clone());
            }
            self.found.push((path, found, now));
        }
        world.history().check_since(since)?;
        if !has_changed {
            return Ok(());
        }
        let run = world.root.join(RUN);
        let said = latest(&run, &Wanted::default(), &world.config, &Arc::default());
        let said =
            said.map_err(|error| format!("UNEXPECTED: latest: {error}"))?.map(|found| found.path);
        let newest = newest.map(|path| world.root.join(path));
        match said == newest {
            true => Ok(()),
            false => Err(format!("BACK: the newest is {newest:?}, and latest says {said:?}")),
        }
    }

    /// The number of the state at a path; `None` if there is no checkpoint.
    fn find(&self, path: &Path) -> Result<Option<i64>, String> {
        match load(&self.runtime, &self.world.root.join(path)) {
            Ok(number) => Ok(Some(number)),
            Err(Refusal { why: Why::Nothing, .. }) => Ok(None),
            Err(refusal) => Err(format!("HALF: {}: {}", path.display(), refusal.text)),
        }
    }

    /// The files of a checkpoint, as far as it takes to see that they have changed.
    fn files_of(&self, path: &Path) -> Files {
        let name = path.file_name().expect("a checkpoint has a name");
        let dirs = [self.world.root.join(path), self.world.root.join(DISK).join(name)];
        let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten();
        let file = |entry: std::io::Result<std::fs::DirEntry>| {
            let entry = entry.expect("nobody else changes it");
            let found = entry.metadata().expect("nobody else changes it");
            (entry.path(), found.ino(), found.len(), found.modified().expect("it has a time"))
        };
        entries.map(file).collect()
    }

    /// What was replaced or removed never comes back.
    fn note(&self, path: &Path, found: Option<i64>) -> Result<(), String> {
        let here = self.found[self.since_cut..].iter().rev();
        let mut before = here.filter(|(other, ..)| other == path);
        let last = before.next().map(|(_, found, _)| *found);
        if found.is_some() && last != Some(found) && before.any(|(_, other, _)| *other == found) {
            return Err(format!("BACK: {found:?} is at {} again", path.display()));
        }
        Ok(())
    }

    /// All programs have ended.
    fn check_end(&mut self) -> Result<(), String> {
        for (path, found, time) in &self.found {
            self.world.history().check_at(path, *found, *time)?;
        }
        if self.random.bool() {
            self.check_prune(Self::unclaimed)?;
        }
        self.check_saves()?;
        self.check_prune(|_, _| false)
    }

    /// A rank that outlives its cancelled session and is then killed leaves shards of a checkpoint that is gone. A
    /// clean-up names their directory.
    fn unclaimed(&self, left: &Left) -> bool {
        let name = left.path.file_name().expect("a stripe directory has a name");
        let root = &self.world.root;
        let is_gone =
            [root.to_path_buf(), root.join(RUN)].iter().all(|dir| !dir.join(name).exists());
        left.path.parent() == Some(&root.join(DISK)) && !left.failed && is_gone
    }

    /// The next saves work.
    fn check_saves(&mut self) -> Result<(), String> {
        let paths = self.world.history().paths();
        for path in paths {
            let order = Order { job: Job::Save(self.number()), at: path.clone() };
            let saved = carry_out(&self.world, &self.runtime, &order);
            saved.map_err(|refusal| format!("STUCK: {}: {}", path.display(), refusal.text))?;
            if self.find(&path)? != order.job.saves() {
                return Err(format!("LOST: {}", path.display()));
            }
        }
        Ok(())
    }

    /// A clean-up leaves the checkpoints, what it names and `may_stay`, and nothing else.
    fn check_prune(&mut self, may_stay: fn(&Self, &Left) -> bool) -> Result<(), String> {
        let paths = self.world.history().paths();
        let there: Vec<Option<i64>> =
            paths.iter().map(|path| self.find(path)).collect::<Result<_, _>>()?;
        let mut named = Vec::new();
        for dir in [RUN, ""] {
            let swept = prune(&self.world.root.join(dir), &self.world.config);
            let swept = swept.map_err(|error| format!("UNEXPECTED: prune: {error}"))?;
            if let Some(left) = swept.left.iter().find(|left| !may_stay(self, left)) {
                return Err(format!("LEFT: {left:?}"));
            }
            named.extend(swept.left.into_iter().map(|left| left.path));
        }
        for (path, there) in paths.iter().zip(there) {
            if self.find(path)? != there {
                return Err(format!("LOST: {} by prune", path.display()));
            }
            self.check_litter(path, &named)?;
        }
        Ok(())
    }

    /// The directories of a checkpoint hold its files and nothing else, except those that a clean-up named.
    fn check_litter(&self, path: &Path, named: &[PathBuf]) -> Result<(), String> {
        let root = &self.world.root;
        let mut known = vec![".ringstow-lock".to_owned()];
        if let Ok(manifest) = std::fs::read(root.join(path).join("manifest.json")) {
            let manifest: serde_json::Value =
                serde_json::from_slice(&manifest).expect("it was loaded");
            let files = manifest["files"].as_array().expect("it was loaded").iter();
            known.extend(files.filter_map(|file| file["name"].as_str().map(Into::into)));
            known.push("manifest.json".into());
        }
        let name = path.file_name().expect("a checkpoint has a name");
        let dirs = [root.join(path), root.join(DISK).join(name)];
        for dir in dirs.iter().filter(|dir| !named.contains(dir)) {
            let all = if dir.exists() { names_in(dir) } else { Vec::new() };
            // A killed save may leave a marker without a shard.
            let is_marker = |name: &String| name.starts_with("companion.json");
            let is_litter = |name: &&String| !known.contains(name) && !is_marker(name);
            let litter: Vec<_> = all.iter().filter(is_litter).collect();
            if !litter.is_empty() {
                return Err(format!("LITTER: {litter:?} in {}", dir.display()));
            }
        }
        let recycles = self.world.config.recycle;
        let spares = [root.join(RECYCLED), root.join(RUN).join(RECYCLED)];
        match spares.iter().find(|dir| !recycles && dir.exists()) {
            Some(dir) => Err(format!("LITTER: {}", dir.display())),
            None => Ok(()),
        }
    }
}
