//! An engine over another that does one thing differently.

use ringstow::internals::engine::fallback::Fallback;
use ringstow::internals::engine::{Completion, Engine, FileId, Op, Waker};
use std::fs::File;
use std::io;
use std::sync::Arc;

/// What is done differently. The default is to leave everything to the engine underneath.
pub trait Twist {
    /// As [`Engine::submit`].
    fn submit(&mut self, inner: &mut dyn Engine, op: Op) {
        inner.submit(op);
    }

    /// As [`Engine::wait`].
    ///
    /// # Errors
    /// As [`Engine::wait`].
    fn wait(&mut self, inner: &mut dyn Engine, done: &mut Vec<Completion>) -> io::Result<()> {
        inner.wait(done)
    }
}
/// An engine with a twist.
pub struct Twisted<T> {
    inner: Box<dyn Engine>,
    twist: T,
}

impl<T: Twist + 'static> Twisted<T> {
    /// Over `inner`.
    pub fn engine(inner: Box<dyn Engine>, twist: T) -> Box<dyn Engine> {
        Box::new(Self { inner, twist })
    }
}

impl<T: Twist> Engine for Twisted<T> {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn registered(&self) -> usize {
        self.inner.registered()
    }

    fn fallbacks(&self) -> &[Fallback] {
        self.inner.fallbacks()
    }

    fn attach(&mut self, file: Arc<File>) -> io::Result<FileId> {
        self.inner.attach(file)
    }

    fn detach(&mut self, file: FileId) {
        self.inner.detach(file);
    }

    fn submit(&mut self, op: Op) {
        self.twist.submit(&mut *self.inner, op);
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> io::Result<()> {
        self.twist.wait(&mut *self.inner, done)
    }

    fn waker(&self) -> Waker {
        self.inner.waker()
    }
}
