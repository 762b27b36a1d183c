//! Ranks that save through an exchange: every rank learns what becomes of the save.
#![cfg(unix)]

use crate::common::{names_in, scratch, small_config, store};
use ringstow::{
    Base, Committed, Config, Dtype, Error, Exchange, RanksSave, Region, StateDict, Store,
    TensorInfo,
};
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
#[cfg(debug_assertions)]
use {
    crate::common::warnings::Warnings,
    ringstow::internals::sys::file_system::{Played, play},
    ringstow::internals::sys::late,
    ringstow::internals::sys::seam::{Call, Outcome, on_thread},
    std::path::PathBuf,
};

/// A rank that is a thread. If it ends, the calls of the others fail.
struct Thread {
    rank: u32,
    /// To rank 0, on rank 0 to all ranks but itself.
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
}

impl Thread {
    fn hang_up(&mut self) {
        self.to.clear();
        self.from.clear();
    }
}

fn gone<E>(_: E) -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

impl Exchange for Thread {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn ranks(&self) -> u32 {
        RANKS
    }

    fn gather(&mut self, own: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        if self.rank != 0 {
            return self.to[0].send(own.into()).map(|()| Vec::new()).map_err(gone);
        }
        let others = self.from.iter().map(|from| from.recv().map_err(gone));
        std::iter::once(Ok(own.into())).chain(others).collect()
    }

    fn broadcast(&mut self, own: &[u8]) -> io::Result<Vec<u8>> {
        match self.rank {
            0 => self.to.iter().try_for_each(|to| to.send(own.into()).map_err(gone))?,
            _ => return self.from[0].recv().map_err(gone),
        }
        Ok(own.into())
    }
}

const RANKS: u32 = 3;

/// Runs a function as each rank.
fn ranks<T: Send>(run: impl Fn(&mut Thread) -> T + Sync) -> Vec<T> {
    let mut zero = Thread { rank: 0, to: Vec::new(), from: Vec::new() };
    let mut all = Vec::new();
    for rank in 1..RANKS {
        let ((to, from_zero), (to_zero, from)) = (channel(), channel());
        zero.to.push(to);
        zero.from.push(from);
        all.push(Thread { rank, to: vec![to_zero], from: vec![from_zero] });
    }
    all.insert(0, zero);
    let run = &run;
    thread::scope(|scope| {
        let started: Vec<_> =
            all.into_iter().map(|mut one| scope.spawn(move || run(&mut one))).collect();
        started.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Two rows of six, and rank 0's value.
fn state(rank: u32, step: u64) -> StateDict<'static> {
    let mut state = StateDict::new();
    let info = TensorInfo { name: "w".into(), dtype: Dtype::U8, shape: vec![2, 100] };
    let region = Region { shape: vec![6, 100], offsets: vec![u64::from(rank) * 2, 0] };
    state.region(info, region, Box::new(vec![rank as u8; 200]));
    state.step(step).metrics([("loss", 0.5)]).unwrap();
    state.value("seen", 7).value("rank", u64::from(rank));
    state
}

type Ended = ringstow::Result<Option<Committed>>;

fn save(path: &Path, state: impl Fn(u32) -> StateDict<'static> + Sync) -> Vec<Ended> {
    let store = store();
    ranks(|exchange| {
        let state = state(exchange.rank);
        let saving = RanksSave::begin(&store, state, path, exchange)?;
        saving.wait_staged();
        saving.commit(exchange)
    })
}

fn messages(outcomes: Vec<Ended>) -> Vec<String> {
    outcomes.into_iter().map(|outcome| outcome.unwrap_err().to_string()).collect()
}

#[test]
fn ranks_save_one_checkpoint_with_rank_zeros_values() {
    let dir = scratch();
    let path = dir.path().join("step-5");
    let outcomes = save(&path, |rank| state(rank, 5));
    let committed: Vec<bool> = outcomes.into_iter().map(|it| it.unwrap().is_some()).collect();
    assert_eq!(committed, [true, false, false]);
    let loaded = ringstow::load(&path).unwrap();
    let expected: Vec<u8> = (0..600).map(|at| (at / 200) as u8).collect();
    assert_eq!(loaded.tensor("w").unwrap().data(), expected);
    assert_eq!(loaded.value("seen").unwrap().as_int(), Some(7));
    assert_eq!(loaded.value("rank").unwrap().as_int(), Some(0));
    // The tree of values refers to the tensor, so Python's loads return it, too.
    let tree = format!("{:?}", loaded.state().unwrap());
    assert!(tree.contains("Tensor(\"w\")"), "{tree}");
    let steps = ringstow::steps(dir.path()).unwrap();
    assert_eq!((steps[0].step, steps[0].metrics["loss"]), (Some(5), 0.5));
}

#[test]
fn each_rank_links_what_has_not_changed_since_the_base() {
    let dir = scratch();
    let at = |step: u64| dir.path().join(format!("step-{step}"));
    for step in [5, 6] {
        let outcomes = save(&at(step), |rank| {
            let mut state = state(rank, step);
            state.base(if step == 5 { Base::none() } else { Base::at(at(5)) });
            state
        });
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    }
    let shared = ringstow::Checkpoint::open(at(6)).unwrap().info();
    assert_eq!((shared.files.len(), shared.shared_bytes), (RANKS as usize, shared.file_bytes));
    ringstow::remove(at(5), ringstow::Disposal::Remove).unwrap();
    let expected: Vec<u8> = (0..600).map(|at| (at / 200) as u8).collect();
    assert_eq!(ringstow::load(at(6)).unwrap().tensor("w").unwrap().data(), expected);
    // A base that one rank cannot open fails the save of all.
    for said in messages(save(&at(7), |rank| {
        let mut state = state(rank, 7);
        state.base(Base::at(at(if rank == 1 { 5 } else { 6 })));
        state
    })) {
        assert!(said.contains("step-5") || said.contains("rank 1"), "{said}");
    }
    assert!(!at(7).exists());
}

#[test]
fn a_rank_that_cannot_write_fails_the_save_of_all_and_leaves_nothing() {
    let dir = scratch();
    let path = dir.path().join("step-5");
    let broken = |rank| {
        let mut state = state(rank, 5);
        if rank == 1 {
            state.check_staged(|| Err(Error::invalid("the trainer of this rank changed w")));
        }
        state
    };
    let [zero, one, two] = messages(save(&path, broken)).try_into().unwrap();
    assert_eq!(one, "the trainer of this rank changed w");
    for other in [zero, two] {
        assert!(other.contains("rank 1: the trainer of this rank"), "{other}");
    }
    assert!(!path.exists() || names_in(&path).is_empty());

    let other_step = |rank: u32| state(rank, 5 + u64::from(rank / 2));
    let [zero, one, two] = messages(save(&path, other_step)).try_into().unwrap();
    for text in [zero, one, two] {
        assert!(
            text.contains("rank 2 saves step Some(6) where rank 0 saves step Some(5)"),
            "{text}"
        );
    }
    let without_a_row = |rank| if rank == 1 { StateDict::new() } else { state(rank, 5) };
    for text in messages(save(&path, |rank| {
        let mut state = without_a_row(rank);
        state.step(5);
        state
    })) {
        assert!(text.contains("\"w\"") && text.contains("400 of 600"), "{text}");
    }
    assert!(!path.exists() || names_in(&path).is_empty());
}

/// At this rate the shares of the other ranks would take days: the test ends because they stop.
#[test]
fn other_ranks_stop_writing_once_one_has_given_up() {
    let dir = scratch();
    // A buffer for every block: the rank that gives up must not wait for one of those that the others hold.
    let pool_bytes = 600 * 4096;
    let store = Store::new(Config { write_rate: 10, pool_bytes, ..small_config() }).unwrap();
    for is_dropped in [false, true] {
        let path = dir.path().join("step-5");
        let outcomes = ranks(|exchange| {
            let mut state = state(exchange.rank, 5);
            match exchange.rank {
                1 if is_dropped => {}
                1 => drop(state.check_staged(|| Err(Error::invalid("w was changed")))),
                rank => {
                    let shape = vec![1 << 20];
                    let info = TensorInfo {
                        name: rank.to_string(),
                        dtype: Dtype::U8,
                        shape: shape.clone(),
                    };
                    let whole = Region { shape, offsets: vec![0] };
                    state.region(info, whole, Box::new(vec![1u8; 1 << 20]));
                }
            }
            let saving = RanksSave::begin(&store, state, &path, exchange)?;
            if exchange.rank == 1 && is_dropped {
                drop(saving);
                exchange.hang_up();
                return Err(Error::invalid("dropped"));
            }
            saving.commit(exchange)
        });
        let [zero, one, two] = messages(outcomes).try_into().unwrap();
        if !is_dropped {
            assert_eq!(one, "w was changed");
            assert!(zero.ends_with("could not write: rank 1: w was changed"), "{zero}");
            assert_eq!(two, zero);
        }
        assert!(!path.exists() || names_in(&path).is_empty());
    }
}

/// Rank 0 of [`Thread`], on a host that does not see some files of the others: those are in `hidden`.
#[cfg(debug_assertions)]
struct Late<'a> {
    of: &'a mut Thread,
    path: &'a Path,
    hidden: &'a Path,
}

#[cfg(debug_assertions)]
impl Exchange for Late<'_> {
    fn rank(&self) -> u32 {
        self.of.rank
    }

    fn ranks(&self) -> u32 {
        RANKS
    }

    fn gather(&mut self, own: &[u8]) -> io::Result<Vec<Vec<u8>>> {
        let all = self.of.gather(own)?;
        move_all(self.path, self.hidden, |name| name.starts_with("rank00001"));
        Ok(all)
    }

    fn broadcast(&mut self, own: &[u8]) -> io::Result<Vec<u8>> {
        self.of.broadcast(own)
    }
}

#[cfg(debug_assertions)]
fn move_all(from: &Path, to: &Path, which: impl Fn(&str) -> bool) {
    for name in names_in(from).into_iter().filter(|name| which(name)) {
        std::fs::rename(from.join(&name), to.join(&name)).unwrap();
    }
}

/// Saves where rank 0 sees the files of rank 1 after so many listings of the directory; returns the outcomes, and what
/// rank 0 was warned of.
#[cfg(debug_assertions)]
fn save_late(path: &Path, hidden: &Path, listings: usize) -> (Vec<Ended>, Vec<String>) {
    let store = store();
    let (tell, told) = channel();
    let outcomes = ranks(|exchange| {
        let rank = exchange.rank;
        let saving = RanksSave::begin(&store, state(rank, 5), path, exchange)?;
        if rank != 0 {
            return saving.commit(exchange);
        }
        let (mut count, here, there) = (0, path.to_owned(), hidden.to_owned());
        let _watch = on_thread(move |_, call, on| {
            count += usize::from(call == Call::List && on == here);
            if count == listings {
                move_all(&there, &here, |_| true);
            }
            Outcome::Pass
        });
        let warnings = Warnings(tell.clone());
        tracing::subscriber::with_default(warnings, || {
            saving.commit(&mut Late { of: exchange, path, hidden })
        })
    });
    drop(tell);
    (outcomes, told.into_iter().collect())
}

/// The directory of a run on a network file system, and one for what hosts do not see.
#[cfg(debug_assertions)]
fn network() -> (tempfile::TempDir, Played, PathBuf, PathBuf) {
    late::look_at_once();
    let dir = scratch();
    let played = play(dir.path(), "nfs4", "");
    let (path, hidden) = (dir.path().join("run/step-5"), dir.path().join("hidden"));
    std::fs::create_dir(&hidden).unwrap();
    (dir, played, path, hidden)
}

#[test]
#[cfg(debug_assertions)] // the seam exists in these builds only
fn rank_zero_waits_for_what_it_sees_late_of_the_other_ranks() {
    let (_dir, _played, path, hidden) = network();
    let (outcomes, warned) = save_late(&path, &hidden, 20);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(ringstow::load(&path).unwrap().tensor("w").unwrap().data().len(), 600);
    assert!(warned[0].contains("up to 90 s") && warned[0].contains("on nfs4"), "{warned:?}");
}

#[test]
#[cfg(debug_assertions)]
fn rank_zero_gives_up_what_it_does_not_see_in_time() {
    let (_dir, _played, path, hidden) = network();
    let (outcomes, _) = save_late(&path, &hidden, usize::MAX);
    for text in messages(outcomes) {
        assert!(text.contains("rank 1"), "{text}");
    }
    assert!(!path.exists() || names_in(&path).is_empty());
}

#[test]
#[cfg(debug_assertions)]
fn rank_waits_for_the_session_that_it_sees_late() {
    let (_dir, _played, path, hidden) = network();
    let session = Store::found().unwrap().begin(&path, 1).unwrap();
    let is_note = |name: &str| name.starts_with("manifest");
    move_all(&path, &hidden, is_note);
    let (mut count, here, there) = (0, path.clone(), hidden.clone());
    let _watch = on_thread(move |_, call, on| {
        count += usize::from(call == Call::List && on == here);
        if count == 5 {
            move_all(&there, &here, |_| true);
        }
        Outcome::Pass
    });
    ringstow::Store::found().unwrap().write_rank(&state(0, 5), 0, &path).unwrap();
    drop(session);
}

#[test]
fn no_rank_begins_what_rank_zero_cannot_begin() {
    let dir = scratch();
    let path = dir.path().join("step-5");
    let busy = Store::found().unwrap().begin(&path, 1).unwrap();
    for text in messages(save(&path, |rank| state(rank, 5))) {
        assert!(text.contains("another save into"), "{text}");
    }
    drop(busy);
    let only_new = |rank| {
        let mut state = state(rank, 5);
        state.only_new();
        state
    };
    for text in messages(save(&path, only_new)) {
        assert!(text.contains("only_new"), "{text}");
    }
    assert!(save(&path, |rank| state(rank, 5)).into_iter().all(|it| it.is_ok()));
}

#[test]
fn a_rank_that_goes_away_ends_the_save_of_the_others() {
    let dir = scratch();
    let path = dir.path().join("step-5");
    assert!(save(&path, |rank| state(rank, 4)).into_iter().all(|it| it.is_ok()));
    let store = store();
    let ended = ranks(|exchange| {
        let saving = RanksSave::begin(&store, state(exchange.rank, 5), &path, exchange)?;
        if exchange.rank == 2 {
            exchange.hang_up();
            return Ok(None);
        }
        let outcome = saving.commit(exchange);
        if exchange.rank == 0 {
            exchange.hang_up(); // as when its process ends
        }
        outcome
    });
    let [zero, one, _]: [Ended; 3] = ended.try_into().unwrap();
    for outcome in [zero, one] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Io { .. }), "{error}");
        assert!(error.to_string().contains("talking to the other ranks"), "{error}");
    }
    assert_eq!(ringstow::steps(dir.path()).unwrap()[0].step, Some(4));
}
