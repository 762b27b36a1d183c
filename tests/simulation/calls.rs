//! The calls of programs: what befalls them, and what was made of them.

use ringstow::internals::sys::seam::{Call, Outcome};
use std::fmt;
use std::path::PathBuf;

/// The number of a program.
pub type Id = usize;

/// A program meets this at one of its calls.
#[derive(Debug, Clone, Copy)]
pub struct Trouble {
    /// The number of the call, from 1 on.
    pub at: u64,
    pub what: What,
}

#[derive(Debug, Clone, Copy)]
pub enum What {
    /// It is killed before the call.
    Dies,
    /// So many calls fail.
    Fails { errno: i32, calls: u64 },
}

/// A call that was made or failed.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub program: Id,
    pub call: Call,
    /// Below the root.
    pub path: PathBuf,
    pub outcome: Outcome,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { program, call, path, outcome } = self;
        write!(f, "program {program}: {call:?} {}", path.display())?;
        if *outcome != Outcome::Pass { write!(f, ": {outcome:?}") } else { Ok(()) }
    }
}

/// What a seed breaks on purpose, to see that it is found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Broken {
    Nothing,
    /// A sync of a directory makes nothing durable.
    Syncs,
}
