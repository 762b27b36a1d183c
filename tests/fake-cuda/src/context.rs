//! Primary contexts, and which context is current on a thread.

use crate::abi::{CONTEXT_IS_DESTROYED, Code, Handle, INVALID_CONTEXT};
use std::cell::RefCell;
use std::collections::BTreeMap;

const FIRST: Handle = 0x7ffd_0000_0000_0000;
const STRIDE: Handle = 0x1000;

#[derive(Default)]
pub struct Contexts(BTreeMap<Handle, Context>);

#[derive(Default)]
struct Context {
    retained: usize,
    /// An error of execution: the context answers nothing else from then on.
    lost: Option<Code>,
}

/// The handle of a device's primary context; always the same.
pub fn of_device(ordinal: usize) -> Handle {
    FIRST + ordinal * STRIDE
}

/// The device of a context.
pub fn device_of(context: Handle) -> usize {
    (context - FIRST) / STRIDE
}

impl Contexts {
    pub fn retain(&mut self, context: Handle) {
        self.0.entry(context).or_default().retained += 1;
    }

    /// Gives one retain back. Whether it was the last.
    ///
    /// # Errors
    /// `INVALID_CONTEXT` where none is held.
    pub fn release(&mut self, context: Handle) -> Result<bool, Code> {
        match self.0.get_mut(&context) {
            Some(held) if held.retained > 0 => {
                held.retained -= 1;
                Ok(held.retained == 0)
            }
            _ => Err(INVALID_CONTEXT),
        }
    }

    /// # Errors
    /// `INVALID_CONTEXT` for what never was one, `CONTEXT_IS_DESTROYED` after the last release.
    pub fn check(&self, context: Handle) -> Result<(), Code> {
        match self.0.get(&context) {
            Some(Context { retained: 0, .. }) => Err(CONTEXT_IS_DESTROYED),
            Some(_) => Ok(()),
            None => Err(INVALID_CONTEXT),
        }
    }

    pub fn lost(&self, context: Handle) -> Option<Code> {
        self.0.get(&context).and_then(|context| context.lost)
    }

    pub fn lose(&mut self, context: Handle, code: Code) {
        self.0.entry(context).or_default().lost.get_or_insert(code);
    }

    pub fn heal_all(&mut self) {
        self.0.values_mut().for_each(|context| context.lost = None);
    }

    /// Retains not yet given back, over all devices.
    pub fn live(&self) -> usize {
        self.0.values().map(|context| context.retained).sum()
    }
}

thread_local! {
    static STACK: RefCell<Vec<Handle>> = const { RefCell::new(Vec::new()) };
}

pub fn current() -> Option<Handle> {
    STACK.with_borrow(|stack| stack.last().copied())
}

pub fn push(context: Handle) {
    STACK.with_borrow_mut(|stack| stack.push(context));
}

pub fn pop() -> Option<Handle> {
    STACK.with_borrow_mut(Vec::pop)
}

/// Replaces the top of the stack; `None` takes it away.
pub fn set_current(context: Option<Handle>) {
    pop();
    context.into_iter().for_each(push);
}
