//! A save by several ranks that talk through a channel of the trainer's: MPI, sockets. Every rank learns what becomes of the save.

use crate::api::Store;
use crate::error::{Error, Result, some_of};
use crate::format::receipt::merge_packed;
use crate::format::{Receipt, TensorEntry, Value};
use crate::handle::SaveHandle;
use crate::pipeline::report::SaveReport;
use crate::state::StateDict;
use crate::store::{Committed, Session, await_all_written, give_up, given_up};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How the ranks of a training talk: over MPI, sockets, whatever the trainer has. All ranks make the same calls in the same order.
///
/// If a rank dies, calls of the others must fail in the end: a closed socket does that, and so does MPI, which ends all ranks.
pub trait Exchange {
    /// This rank's number, from 0 on.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn ranks(&self) -> u32;

    /// Sends bytes to rank 0. Returns those of all ranks in their order on rank 0, and nothing on the others.
    ///
    /// # Errors
    /// Why rank 0, or on rank 0 a rank, cannot be reached.
    fn gather(&mut self, own: &[u8]) -> io::Result<Vec<Vec<u8>>>;

    /// Sends bytes of rank 0 to all. The others pass none. Returns rank 0's on every rank.
    ///
    /// # Errors
    /// As for [`Exchange::gather`].
    fn broadcast(&mut self, own: &[u8]) -> io::Result<Vec<u8>>;
}

/// What rank 0 says once it has begun, or could not.
#[derive(Serialize, Deserialize)]
struct Begun {
    step: Option<u64>,
    refused: Option<String>,
}

/// What a rank says once it has written, or could not: a byte that says which, and the receipt or the reason.
enum Wrote<'a> {
    Receipt(&'a [u8]),
    Failed(&'a str),
    /// It has stopped, since another rank had given up.
    Stopped,
}

/// How often a rank that writes looks whether another one has given up.
const LOOK: Duration = Duration::from_millis(500);

impl<'a> Wrote<'a> {
    fn encode(&self) -> Vec<u8> {
        match self {
            Self::Receipt(receipt) => [b"+", *receipt].concat(),
            Self::Failed(why) => [b"-", why.as_bytes()].concat(),
            Self::Stopped => b"~".to_vec(),
        }
    }

    fn decode(heard: &'a [u8]) -> Result<Self> {
        match heard.split_first() {
            Some((b'+', receipt)) => Ok(Self::Receipt(receipt)),
            Some((b'-', why)) => {
                std::str::from_utf8(why).map(Self::Failed).map_err(|e| not_an_answer(heard, &e))
            }
            Some((b'~', [])) => Ok(Self::Stopped),
            _ => Err(not_an_answer(heard, &"it is of another kind")),
        }
    }
}

/// A save by several ranks whose shares are being written. [`RanksSave::commit`] ends it. Dropping it cancels this rank's share, and
/// waits for the blocks in flight, and the other ranks stop writing; on rank 0 it gives the save up, and removes what was written.
#[must_use = "without `commit` nothing is saved"]
#[derive(Debug)]
pub struct RanksSave {
    path: PathBuf,
    rank: u32,
    /// `None` once it is committed.
    writing: Option<Result<SaveHandle<(Receipt, SaveReport)>>>,
    coordinated: Option<Coordinated>,
}

/// What only rank 0 has.
#[derive(Debug)]
struct Coordinated {
    session: Session,
    values: Values,
}

/// Rank 0's values.
#[derive(Debug)]
enum Values {
    Named(Vec<(String, Value)>),
    /// Set by [`StateDict::set_tree`].
    Tree(Box<RawValue>),
}

impl RanksSave {
    /// Begins a save of all ranks to one path, and returns while this rank's share is being written. Step, metrics and values are those
    /// of rank 0's state; the tensors are those of all ranks.
    ///
    /// The tensors must stay as they are until [`RanksSave::wait_staged`] returns; see [`save_async`](crate::save_async()).
    ///
    /// # Errors
    /// On all ranks if rank 0 cannot begin: as for [`Session::begin`] and [`StateDict::metrics`], and [`Error::Unsupported`] for
    /// [`StateDict::only_new`]. [`Error::Io`] if the exchange fails.
    pub fn begin(
        store: &Store,
        state: StateDict<'static>,
        path: impl AsRef<Path>,
        exchange: &mut impl Exchange,
    ) -> Result<Self> {
        let (path, rank) = (path.as_ref().to_path_buf(), exchange.rank());
        let own_step = state.saved_step();
        let begun = match rank {
            0 => Some(Coordinated::begin(store, &state, &path, exchange.ranks())),
            _ => None,
        };
        let said = begun.as_ref().map_or_else(Vec::new, |begun| {
            let refused = begun.as_ref().err().map(ToString::to_string);
            encode(&Begun { step: own_step, refused })
        });
        let heard = exchange.broadcast(&said).map_err(|error| talking(&path, error))?;
        let coordinated = begun.transpose()?;
        let Begun { step, refused } = decode(&heard)?;
        if let Some(why) = refused {
            return Err(Error::invalid(format!("rank 0 cannot begin the save: {why}")));
        }
        // From here on, this rank's failure reaches the others at the commit.
        let writing = match step == own_step {
            true => store.write_rank_async(state, rank, &path),
            false => Err(Error::invalid(format!(
                "rank {rank} saves step {own_step:?} where rank 0 saves step {step:?}"
            ))),
        };
        Ok(Self { path, rank, writing: Some(writing), coordinated })
    }

    /// Waits until every byte of this rank is copied: from then on its tensors may change.
    pub fn wait_staged(&self) {
        if let Some(Ok(writing)) = &self.writing {
            writing.wait_staged(None);
        }
    }

    /// Waits until all ranks have written, and commits. All ranks call it. `None` on the others than rank 0.
    ///
    /// # Errors
    /// On all ranks, naming those that could not write; as for [`Session::commit`]. Then nothing is committed, the other ranks do not
    /// write to their end, and what the ranks wrote is removed. [`Error::Io`] if the exchange fails: on another rank than 0, the save may be committed all the same.
    pub fn commit(mut self, exchange: &mut impl Exchange) -> Result<Option<Committed>> {
        let (wrote, stopped_by) = self.written();
        let wrote = wrote.map(|receipt| receipt.encode());
        let said = match &wrote {
            Ok(receipt) => Wrote::Receipt(receipt).encode(),
            Err(_) if stopped_by.is_some() => Wrote::Stopped.encode(),
            Err(error) => Wrote::Failed(&error.to_string()).encode(),
        };
        let (path, coordinated) = (std::mem::take(&mut self.path), self.coordinated.take());
        let heard = exchange.gather(&said).map_err(|error| talking(&path, error))?;
        let committed = coordinated.map(|coordinated| coordinated.commit(&heard));
        let said = committed.as_ref().map_or_else(Vec::new, |committed| {
            encode(&committed.as_ref().err().map(ToString::to_string))
        });
        let heard = exchange.broadcast(&said).map_err(|error| talking(&path, error))?;
        let failed: Option<String> = decode(&heard)?;
        if stopped_by.is_none() {
            wrote?; // this rank's own error says more
        }
        match (committed.transpose()?, failed) {
            (None, Some(why)) => Err(Error::invalid(why)),
            (committed, _) => Ok(committed),
        }
    }
}

impl RanksSave {
    /// Waits for this rank's share. If it fails, the others stop writing; if another rank has given up, this one stops, and
    /// why comes back, too.
    fn written(&mut self) -> (Result<Receipt>, Option<String>) {
        let mut stopped_by = None;
        let writing = self.writing.take().expect("only this takes it");
        let wrote = writing.and_then(|writing| {
            while !writing.wait(Some(LOOK)) && stopped_by.is_none() {
                stopped_by = given_up(&self.path).inspect(|_| writing.cancel());
            }
            writing.result()
        });
        if let (Err(error), None) = (&wrote, &stopped_by) {
            give_up(&self.path, self.rank, &error.to_string());
        }
        (wrote.map(|(receipt, _)| receipt), stopped_by)
    }
}

impl Drop for RanksSave {
    fn drop(&mut self) {
        let Some(writing) = &self.writing else { return };
        give_up(&self.path, self.rank, "it does not commit");
        if let Ok(writing) = writing {
            writing.cancel();
            writing.wait(None);
        }
    }
}

impl Coordinated {
    fn begin(store: &Store, state: &StateDict<'_>, path: &Path, ranks: u32) -> Result<Self> {
        if state.is_only_new() {
            return Err(Error::Unsupported {
                what: "a save by several ranks cannot refuse to replace a checkpoint (`only_new`)"
                    .into(),
                remedy: "save to a path of its own, such as one with the step's number".into(),
            });
        }
        state.tree()?; // refuses two values of one name before anything is written
        let mut session = store.begin(path, ranks)?.metrics(state.saved_metrics().clone())?;
        if let Some(step) = state.saved_step() {
            session = session.step(step);
        }
        let values = match state.saved_tree() {
            Some(tree) => Values::Tree(tree.to_owned()),
            None => Values::Named(state.saved_values().to_vec()),
        };
        Ok(Self { session, values })
    }

    fn commit(self, heard: &[Vec<u8>]) -> Result<Committed> {
        let (mut receipts, mut failed, mut stopped) = (Vec::new(), Vec::new(), false);
        for (rank, said) in heard.iter().enumerate() {
            match Wrote::decode(said)? {
                Wrote::Receipt(receipt) => receipts.push(receipt),
                Wrote::Failed(why) => failed.push(format!("rank {rank}: {why}")),
                Wrote::Stopped => stopped = true,
            }
        }
        if stopped && failed.is_empty() {
            failed.extend(given_up(self.session.path())); // by a process that is no rank any more
        }
        if stopped || !failed.is_empty() {
            let path = self.session.path().display();
            return Err(Error::invalid(format!(
                "nothing is committed to {path}, because ranks could not write: {}",
                some_of(&failed)
            )));
        }
        let merged = merge_packed(&receipts)?;
        let tree = self.values.tree(&merged.tensors)?;
        let session = &self.session;
        await_all_written(session.path(), || true, || session.sees(&merged));
        self.session.commit_merged(merged, tree, &[])
    }
}

impl Values {
    /// One dictionary of all ranks' tensors and rank 0's values.
    fn tree(self, tensors: &[TensorEntry]) -> Result<Box<RawValue>> {
        let named = match self {
            Self::Tree(tree) => return Ok(tree),
            Self::Named(named) => named,
        };
        let tensors: BTreeSet<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        if let Some((name, _)) = named.iter().find(|(name, _)| tensors.contains(name.as_str())) {
            return Err(Error::invalid(format!("two entries of the state are named {name:?}")));
        }
        let tensors = tensors.into_iter().map(|name| (name.into(), Value::Tensor(name.into())));
        let named = named.into_iter().map(|(name, value)| (name.into(), value));
        Value::Dict(tensors.chain(named).collect()).to_json()
    }
}

fn talking(path: &Path, error: io::Error) -> Error {
    Error::io("talking to the other ranks about", path, error)
}

fn encode(said: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(said).expect("texts and numbers can be written")
}

fn decode<'a, T: Deserialize<'a>>(heard: &'a [u8]) -> Result<T> {
    serde_json::from_slice(heard).map_err(|error| not_an_answer(heard, &error))
}

fn not_an_answer(heard: &[u8], why: &dyn std::fmt::Display) -> Error {
    Error::invalid(format!(
        "{} bytes of another rank are not an answer ({why}): do all ranks make the same calls, in the same order?",
        heard.len()
    ))
}
