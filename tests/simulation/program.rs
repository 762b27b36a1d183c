//! What the programs do.

use crate::calls::{Id, Trouble};
use crate::common::{State, load_opened};
use crate::history::{Outcome, Refusal, Seen, Why};
use crate::world::World;
use ringstow::internals::store::{latest, prune, remove_checkpoint, retain, save};
use ringstow::{
    Base, Disposal, Error, OpenOptions, Receipt, RetainOptions, Runtime, Session, Wanted,
};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Several blocks in two files.
const SIZES: [usize; 3] = [5000, 1, 9000];
const RANKS: usize = 2;

/// What a program does. Each save has a number of its own, which identifies its state.
#[derive(Debug, Clone)]
pub enum Job {
    Save(i64),
    /// Saves what never changes, too, and links it from the checkpoint at a path if that has it.
    SaveFrom(i64, PathBuf),
    /// Begins a session, starts the ranks, and commits what they wrote.
    SaveByRanks(i64, Ranks),
    /// Is a rank of that session.
    #[allow(dead_code)] // what it saves, for people
    Rank(i64, usize),
    Load,
    Latest,
    Retain(usize),
    Prune,
    Remove,
}

impl Job {
    /// The state that it saves as a whole.
    pub fn saves(&self) -> Option<i64> {
        match self {
            Self::Save(id) | Self::SaveFrom(id, _) | Self::SaveByRanks(id, _) => Some(*id),
            _ => None,
        }
    }
}

/// How a save by ranks goes.
#[derive(Debug, Clone)]
pub struct Ranks {
    /// What befalls each rank.
    pub troubles: [Option<Trouble>; RANKS],
    /// The rank that is started once more while it runs; its second receipt counts.
    pub twice: Option<usize>,
    /// Whether the coordinator gives up while the ranks write.
    pub gives_up: bool,
}

#[derive(Debug, Clone)]
pub struct Order {
    pub job: Job,
    /// Below the root.
    pub at: PathBuf,
}

/// Where a rank puts its receipt.
type Slot = Arc<Mutex<Option<Receipt>>>;

/// A program's life: it carries out its orders in turn. Between them the observer looks at the disk.
pub fn live(world: &Arc<World>, id: Id, orders: Vec<Order>) {
    let turns = &world.turns;
    let runtime = turns.runtime(id, &world.config);
    for order in orders {
        let event = world.history().begin(id, &order, turns.now(id));
        let outcome = match &order.job {
            Job::SaveByRanks(number, ranks) => {
                save_by_ranks(world, id, *number, ranks, &order).map(|()| Seen::default())
            }
            _ => carry_out(world, &runtime, &order),
        };
        let outcome = outcome_of(outcome);
        finish(world, id, event, outcome);
        turns.pause(id);
        if turns.is_dead(id) {
            return;
        }
    }
}

fn finish(world: &World, id: Id, event: usize, outcome: Outcome) {
    let turns = &world.turns;
    let outcome = if turns.is_dead(id) { Outcome::Killed } else { outcome };
    world.history().end(event, turns.now(id), outcome, turns.has_failed(id));
}

fn outcome_of(done: Result<Seen, Refusal>) -> Outcome {
    match done {
        Ok(seen) => Outcome::Done(seen),
        Err(refusal) => Outcome::Refused(refusal),
    }
}

/// Carries out an order of one program.
pub fn carry_out(world: &World, runtime: &Runtime, order: &Order) -> Result<Seen, Refusal> {
    let (config, path) = (runtime.config(), world.root.join(&order.at));
    let below = |path: PathBuf| path.strip_prefix(&world.root).expect("below").to_path_buf();
    let (disposal, job) = (Disposal::of(config), Arc::default());
    let mut seen = Seen::default();
    match &order.job {
        Job::Save(number) => {
            let state = State::new(*number, &SIZES);
            save(runtime, &state.to_save()?, &path, &job)?;
        }
        Job::SaveFrom(number, base) => {
            let base = Base::at(world.root.join(base)).or_none();
            State::new(*number, &SIZES).save_with_extra_from(Some(base), runtime, &path)?;
        }
        Job::SaveByRanks(..) | Job::Rank(..) => unreachable!("it takes several programs"),
        Job::Load => seen.loaded = Some(load(runtime, &path)?),
        Job::Latest => {
            let newest = latest(&path, &Wanted::default(), config, &job)?;
            seen.newest = newest.map(|found| below(found.path));
        }
        Job::Retain(keep) => {
            let retention = RetainOptions { disposal, ..RetainOptions::new(*keep) };
            let retained = retain(&path, &retention, config)?;
            seen.removed = retained.removed.into_iter().map(below).collect();
            let failed = retained.left.into_iter().filter(|left| left.failed);
            seen.failed = failed.map(|left| below(left.path)).collect();
        }
        Job::Prune => drop(prune(&path, config)?),
        Job::Remove => {
            remove_checkpoint(&path, disposal, config)?;
            seen.removed.push(order.at.clone());
        }
    }
    Ok(seen)
}

fn save_by_ranks(
    world: &Arc<World>,
    id: Id,
    number: i64,
    ranks: &Ranks,
    order: &Order,
) -> Result<(), Refusal> {
    let path = world.root.join(&order.at);
    let session = Session::begin(&path, RANKS as u32, &world.config)?;
    let mut running: Vec<(Option<Id>, Slot)> = (0..RANKS)
        .map(|rank| start_rank(world, id, (number, rank), ranks.troubles[rank], &order.at))
        .collect();
    if let Some(rank) = ranks.twice {
        running[rank] = start_rank(world, id, (number, rank), None, &order.at);
    }
    if ranks.gives_up {
        drop(session);
        return Err(Error::Cancelled { path }.into());
    }
    let mut receipts = Vec::new();
    for (rank, receipt) in running {
        if let Some(rank) = rank {
            world.turns.join(id, rank);
        }
        receipts.extend(receipt.lock().expect("no rank panicked").take());
    }
    session.commit(receipts, State::new(number, &SIZES).tree())?;
    Ok(())
}

/// A coordinator starts a rank.
fn start_rank(
    world: &Arc<World>,
    coordinator: Id,
    (number, rank): (i64, usize),
    trouble: Option<Trouble>,
    at: &Path,
) -> (Option<Id>, Slot) {
    let (slot, order) = (Slot::default(), Order { job: Job::Rank(number, rank), at: at.into() });
    let (receipt, own) = (Arc::clone(&slot), Arc::clone(world));
    let life = move |id: Id| {
        let event = own.history().begin(id, &order, own.turns.now(id));
        let runtime = own.turns.runtime(id, &own.config);
        let (state, path) = (State::new(number, &SIZES), own.root.join(&order.at));
        let written = state.write_share((rank as u32, RANKS as u32), &runtime, &path);
        let outcome = written.map(|written| {
            *receipt.lock().expect("nobody panicked") = Some(written);
            Seen::default()
        });
        finish(&own, id, event, outcome_of(outcome.map_err(Refusal::from)));
    };
    (world.turns.start(Some(coordinator), trouble, life), slot)
}

/// Loads a checkpoint, and returns the number of its state.
///
/// # Errors
/// The load's; [`Why::Damage`] if it is not wholly that state.
pub fn load(runtime: &Runtime, path: &Path) -> Result<i64, Refusal> {
    let checkpoint = OpenOptions::of(runtime.config()).open(path)?;
    let loaded = match load_opened(runtime, &checkpoint) {
        // As a trainer does: it opens the newer one.
        Err(Error::Replaced { .. }) => return load(runtime, path),
        loaded => loaded?,
    };
    let number = checkpoint.value("step")?.as_int().unwrap_or_default();
    match State::new(number, &SIZES).difference(&loaded) {
        None => Ok(number),
        Some(text) => Err(Refusal { why: Why::Damage, text: format!("MIXED: {text}") }),
    }
}
