//! Standard output and standard error, for people and for programs. A reader that closes the pipe early
//! (`| head`) ends the output, not the program.

use super::text::printable;
use crate::error::{Error, Result};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, BufWriter, Stdout, Write};

/// Standard output.
pub struct Output {
    to: BufWriter<Stdout>,
    /// The reader has closed the pipe: further output is dropped.
    closed: bool,
}

impl Output {
    /// Opens this process's standard output.
    pub fn stdout() -> Self {
        Self { to: BufWriter::new(io::stdout()), closed: false }
    }

    /// Prints one or more lines.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the system fails to write, except to a closed pipe.
    pub fn line(&mut self, text: impl AsRef<str>) -> Result<()> {
        let text = text.as_ref();
        self.attempt(|to| writeln!(to, "{text}"))
    }

    /// Prints a value as JSON. In paths, a byte that is not UTF-8 becomes U+0000 and two hex digits.
    ///
    /// # Errors
    /// As [`Output::line`]; also for a value that JSON cannot express.
    pub fn json(&mut self, value: &impl Serialize) -> Result<()> {
        let text = serde_json::to_string_pretty(value).map_err(not_json)?;
        self.line(escape_controls(&text))
    }

    /// Prints a value as JSON on one line.
    ///
    /// # Errors
    /// As [`Output::json`].
    pub fn compact_json(&mut self, value: &impl Serialize) -> Result<()> {
        self.line(escape_controls(&serde_json::to_string(value).map_err(not_json)?))
    }

    /// Clears a terminal.
    ///
    /// # Errors
    /// As [`Output::line`].
    pub fn clear_terminal(&mut self) -> Result<()> {
        self.attempt(|to| write!(to, "\x1b[H\x1b[2J"))
    }

    /// Whether nobody reads any more.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Prints a value as JSON, or as text.
    ///
    /// # Errors
    /// As [`Output::json`].
    pub fn print(
        &mut self,
        as_json: bool,
        value: &impl Serialize,
        text: impl FnOnce() -> String,
    ) -> Result<()> {
        if as_json { self.json(value) } else { self.line(text()) }
    }

    /// Flushes the output.
    ///
    /// # Errors
    /// As [`Output::line`].
    pub fn finish(&mut self) -> Result<()> {
        self.attempt(Write::flush)
    }

    fn attempt(
        &mut self,
        act: impl FnOnce(&mut BufWriter<Stdout>) -> io::Result<()>,
    ) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        match act(&mut self.to) {
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
                self.closed = true;
                Ok(())
            }
            // Not `Error::Io`, whose remedies are those for a checkpoint's disk.
            result => {
                result.map_err(|e| Error::invalid(format!("writing to standard output: {e}")))
            }
        }
    }
}

fn not_json(error: serde_json::Error) -> Error {
    Error::invalid(format!("cannot write this as JSON: {error}"))
}

/// Prints one line on stderr, escaped.
pub fn note(text: &str) {
    say(&printable(text));
}

/// Prints text on stderr that is already safe to show on a terminal, one or more lines.
pub fn say(safe: &str) {
    let _ = writeln!(io::stderr(), "ringstow: {safe}");
}

/// Escapes DEL and the C1 controls, which JSON allows in strings and terminals act on.
fn escape_controls(json: &str) -> String {
    let mut safe = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            '\u{7f}'..='\u{9f}' => {
                let _ = write!(safe, "\\u{:04x}", c as u32);
            }
            _ => safe.push(c),
        }
    }
    safe
}
