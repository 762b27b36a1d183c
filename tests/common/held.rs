//! Tensors whose bytes a test makes, also ones that wait for a word, and saves that stand still because of them.

use super::small_config;
use ringstow::{Dtype, Error, SaveHandle, SaveReport, Source, StateDict, Store, TensorInfo};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};

/// Adds a tensor of bytes to a state.
pub fn add(state: &mut StateDict<'static>, name: &str, source: impl Source + 'static) {
    let shape = vec![source.nbytes()];
    state.source(TensorInfo { name: name.into(), dtype: Dtype::U8, shape }, Box::new(source));
}

/// A state of this tensor alone, `t`.
pub fn only(source: impl Source + 'static) -> StateDict<'static> {
    let mut state = StateDict::new();
    add(&mut state, "t", source);
    state
}

struct Made<F>(usize, F);

/// A tensor of so many bytes, which a function gives from an offset on.
pub fn made<F>(bytes: usize, read: F) -> impl Source
where
    F: Fn(usize, &mut [u8]) -> ringstow::Result<()> + Send + Sync,
{
    Made(bytes, read)
}

impl<F: Fn(usize, &mut [u8]) -> ringstow::Result<()> + Send + Sync> Source for Made<F> {
    fn nbytes(&self) -> u64 {
        self.0 as u64
    }

    fn read(&self, at: usize, to: &mut [u8]) -> ringstow::Result<()> {
        (self.1)(at, to)
    }
}

/// A tensor of one byte.
pub struct Filled {
    pub byte: u8,
    pub bytes: usize,
}

impl Source for Filled {
    fn nbytes(&self) -> u64 {
        self.bytes as u64
    }

    fn read(&self, _: usize, to: &mut [u8]) -> ringstow::Result<()> {
        to.fill(self.byte);
        Ok(())
    }
}

/// A tensor whose bytes wait until the word is dropped.
pub struct Held {
    filled: Filled,
    /// Called when the save begins to read the bytes.
    asked: Box<dyn Fn() + Send + Sync>,
    word: Mutex<Receiver<()>>,
    fails: bool,
}

impl Held {
    /// The tensor, and its word.
    pub fn new(filled: Filled, asked: impl Fn() + Send + Sync + 'static) -> (Self, Sender<()>) {
        let (word, heard) = channel();
        let (asked, word_heard) = (Box::new(asked), Mutex::new(heard));
        (Self { filled, asked, word: word_heard, fails: false }, word)
    }

    /// Fails instead of giving its bytes.
    pub fn failing(self, fails: bool) -> Self {
        Self { fails, ..self }
    }
}

impl Source for Held {
    fn nbytes(&self) -> u64 {
        self.filled.nbytes()
    }

    fn read(&self, at: usize, to: &mut [u8]) -> ringstow::Result<()> {
        (self.asked)();
        let _ = self.word.lock().unwrap().recv();
        match self.fails {
            true => Err(Error::Invalid { reason: "the tensor cannot be read".into() }),
            false => self.filled.read(at, to),
        }
    }
}

/// A save that stands still after it has created its files.
pub struct HeldUp<T = SaveReport> {
    // Dropped first: a test that fails must not wait for the save for ever.
    word: Sender<()>,
    handle: SaveHandle<T>,
}

impl<T: Send + 'static> HeldUp<T> {
    /// Bytes of its tensor `t`: some blocks of [`small_config`].
    pub const BYTES: usize = 20_000;

    /// Starts saving a state of a tensor of this byte, and the value `step`; returns once it stands still.
    pub fn start(
        byte: u8,
        fails: bool,
        start: impl FnOnce(StateDict<'static>) -> SaveHandle<T>,
    ) -> Self {
        let (started, has_started) = channel();
        let asked = move || {
            let _ = started.send(());
        };
        let (held, word) = Held::new(Filled { byte, bytes: Self::BYTES }, asked);
        let mut state = only(held.failing(fails));
        state.value("step", i64::from(byte));
        let handle = start(state);
        has_started.recv().unwrap();
        Self { word, handle }
    }

    /// Lets it go on to its end.
    pub fn end(self) -> ringstow::Result<T> {
        drop(self.word);
        self.handle.result()
    }
}

impl HeldUp {
    pub fn save(byte: u8, dir: &Path) -> Self {
        let store = Store::new(small_config()).unwrap();
        Self::start(byte, false, |state| store.save_async(state, dir).unwrap())
    }
}
